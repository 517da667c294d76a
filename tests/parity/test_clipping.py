"""Gradient clipping by torch's function and by ours: the norm is that of the unsharded model."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp2 import ParamPlacement, clip_grad_norm_
from fsdp2.extras import torch_names
from fsdp2.optim.clip import joined_neighbours
from tests.distributed.support import same_on_all_ranks
from tests.harness.compare import SUMMATION_ORDER, compare_values, hsdp
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of
from tests.harness.models import MLP, Uneven
from tests.harness.runtimes import Runtime, oracle, subject
from tests.harness.training import EXACT, Step, Tolerance, one_backward, shard_units_and_root
from tests.parity.setups import SETUPS, Setup, cut_like, recorded, setups, whole

FINITE = (1.0, 2.0, 3.5, 0.0)
INFINITE = (float("inf"), float("-inf"))  # torch has none of an empty tensor: every rank needs a row of each parameter
MAX_NORM = 0.05


def _model_with_gradients(setup: Setup, runtime: Runtime, ctx: RankContext) -> Any:
    model = setup.sharded(runtime, ctx)
    one_backward(Step(0, ctx.rank, runtime), model)
    return model


def _clip(parameters: list[nn.Parameter], **options: Any) -> list[Any]:
    """The norm and the clipped gradients; the gradients are put back."""
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None if parameter.grad is None else parameter.grad.clone()
    norm = nn.utils.clip_grad_norm_(parameters, MAX_NORM, **options)
    clipped = [parameter.grad for parameter in parameters]
    for parameter, grad in zip(parameters, kept, strict=True):
        parameter.grad = grad
    return [norm, clipped]


def _tolerance(setup: Setup, ctx: RankContext) -> Tolerance:
    return EXACT if max(setup.mesh(ctx).shape) <= 2 else SUMMATION_ORDER[torch.float32]


def _assert_close(actual: Any, expected: Any, tolerance: Tolerance) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance.rtol, atol=tolerance.atol)


def _unsharded(setup: Setup, ctx: RankContext) -> list[nn.Parameter]:
    """The parameters of the unsharded model, with gradients that are averaged over what all ranks compute with."""
    torch.manual_seed(0)
    model = setup.build()
    for rank in range(ctx.world_size):
        one_backward(Step(0, rank, None), model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= ctx.world_size
    return list(model.parameters())


@setups("uneven", "hsdp", long=("fsdp", "resting"))
@distributed(2, 4)
def test_gradients_are_clipped_as_torch_clips_them(ctx: RankContext, setup: str) -> None:
    where = SETUPS[setup]
    theirs, ours = (list(_model_with_gradients(where, r, ctx).parameters()) for r in (oracle(), subject()))
    reference = _unsharded(where, ctx)
    norms = FINITE if where.build is Uneven else FINITE + INFINITE
    for norm_type, foreach in itertools.product(norms, (True, False)):
        options = {"norm_type": norm_type, "foreach": foreach}
        found, expected = (_clip(parameters, **options) for parameters in (ours, theirs))
        _assert_close(whole(found), whole(expected), _tolerance(where, ctx))
        if ctx.world_size == 2:
            compare_values("layout", recorded(found), recorded(expected))
        _assert_close(whole(found), _clip(reference, **options), Tolerance(rtol=1e-4, atol=1e-6))


ORDERS = [1.0, 2, 3.5, float("inf")]
TEXTS = texts_beside(__file__)


def _with_experts(runtime: Runtime, model: Any, mesh: Any) -> None:
    experts = {block.down.weight: ParamPlacement(None, mesh) for block in model.blocks}
    everybody = mesh._flatten("everybody")
    shard_units_and_root(runtime, model, everybody, shard_placement_fn=experts.get)


def _ignoring(runtime: Runtime, model: Any, mesh: Any) -> None:
    shard_units_and_root(runtime, model, mesh, ignored_params={model.exit.weight, model.exit.bias})


WAYS: dict[str, Setup] = {
    "plain": Setup(MLP),
    "hsdp": Setup(MLP, hsdp),
    "tp": SETUPS["tp"],
    "experts": Setup(MLP, hsdp, _with_experts),
    "ignored": Setup(MLP, shard=_ignoring),
    "uneven": Setup(Uneven),
}


def _sharded(ctx: RankContext, way: str = "plain") -> Any:
    return WAYS[way].sharded(subject(), ctx)


def _gradients(model: nn.Module, without: str = "") -> None:
    """The same gradients as the unsharded model has, cut like the parameters."""
    for index, (name, param) in enumerate(model.named_parameters()):
        grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(index))
        param.grad = cut_like(grad, param) if name != without else None


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
@distributed(4)
def test_norm_is_that_of_the_unsharded_model(ctx: RankContext, way: str, order: float) -> None:
    """Empty shards and missing gradients count nothing."""
    reference, model = WAYS[way].build(), _sharded(ctx, way)
    for max_norm, without in ((0.5, ""), (1e6, ""), (0.5, "blocks.1.down.weight")):
        _gradients(reference, without)
        _gradients(model, without)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type=order)
        found = clip_grad_norm_(model.parameters(), max_norm, norm_type=order)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        ours, theirs = (whole([p.grad for p in each.parameters() if p.grad is not None]) for each in (model, reference))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("order", ORDERS)
@distributed(2)
def test_gradients_may_be_complex_and_lie_otherwise_than_their_parameters(ctx: RankContext, order: float) -> None:
    """As DTensor leaves the gradient of a whole scale that has met a shard."""
    mesh, uncut, cut = ctx.mesh_1d(), Replicate(), Shard(0)
    place = partial(distribute_tensor, device_mesh=mesh, src_data_rank=None)
    torch.manual_seed(0)
    values = [torch.randn(6, 4), torch.randn(5), torch.randn(3, 4, dtype=torch.complex64)]
    plain, placed = [], []
    for value, (of_param, of_grad) in zip(values, ((uncut, cut), (cut, uncut), (cut, cut)), strict=True):
        plain.append(nn.Parameter(torch.zeros_like(value)))
        placed.append(nn.Parameter(place(torch.zeros_like(value), placements=[of_param])))
        plain[-1].grad, placed[-1].grad = value.clone(), place(value.clone(), placements=[of_grad])
    expected = nn.utils.clip_grad_norm_(plain, 0.5, norm_type=order)
    torch.testing.assert_close(clip_grad_norm_(placed, 0.5, norm_type=order), expected, rtol=1e-5, atol=0)
    for found, full in zip(placed, plain, strict=True):
        mine = place(full.grad, placements=found.grad.placements).to_local()
        torch.testing.assert_close(found.grad.to_local(), mine, rtol=1e-5, atol=1e-8)


@distributed(2)
def test_parameters_that_stay_unsharded_count_with_the_gradients_of_their_shards(ctx: RankContext) -> None:
    model = _sharded(ctx)
    shards = list(model.parameters())
    model.set_reshard_after_backward(False)
    one_backward(Step(0, ctx.rank, subject()), model)
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    reference = _unsharded(WAYS["plain"], ctx)
    expected = nn.utils.clip_grad_norm_(reference, MAX_NORM)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), MAX_NORM), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(*(whole([p.grad for p in each]) for each in (shards, reference)), rtol=1e-4, atol=1e-7)


@distributed(2)
def test_ranks_may_have_different_gradients(ctx: RankContext) -> None:
    """A rank without any gradient takes part all the same."""
    model = _sharded(ctx)
    if ctx.rank == 0:
        _gradients(model)
    mine = [param.grad.to_local() for param in model.parameters() if param.grad is not None]
    expected = torch.tensor(0.0) if ctx.rank else nn.utils.get_total_norm(mine)
    torch.distributed.all_reduce(expected)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1.0), expected, rtol=1e-6, atol=0)


@distributed(2)
def test_gradients_may_come_and_go_and_be_large_in_half_precision(ctx: RankContext) -> None:
    for make, value in ((MLP, 1.0), (lambda: MLP().half(), 3000.0)):
        model = Setup(make).sharded(subject(), ctx)
        for present in (("blocks", "exit"), (), ("exit",), ("blocks", "exit"), ("",)):
            for name, parameter in model.named_parameters():
                parameter.grad = torch.full_like(parameter, value) if name.startswith(present) else None
            numel = sum(parameter.numel() for parameter in model.parameters() if parameter.grad is not None)
            found = clip_grad_norm_(model.parameters(), 1e6)
            torch.testing.assert_close(found, torch.tensor(value * numel**0.5), rtol=1e-3, atol=0)
    assert clip_grad_norm_([], 1.0).item() == 0.0


def _nonfinite(ctx: RankContext) -> str:
    model = _sharded(ctx)
    _gradients(model)
    if ctx.rank == 1:
        model.exit.bias.grad.to_local().fill_(float("inf"))
    before = [param.grad.to_local().clone() for param in model.parameters()]
    error = error_of(lambda: clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True))
    assert all(map(torch.equal, before, [param.grad.to_local() for param in model.parameters()]))
    return error


def test_nonfinite_norm_is_refused_on_all_ranks() -> None:
    TEXTS.check("not finite", same_on_all_ranks(_nonfinite))


@distributed(2)
def test_nan_on_one_rank_is_the_norm_of_any_order_on_all(ctx: RankContext) -> None:
    """The maximum of gloo and NCCL may be a number although a rank has NaN."""
    for order, rank in itertools.product(ORDERS, range(ctx.world_size)):
        model = _sharded(ctx)
        _gradients(model)
        if ctx.rank == rank:
            model.exit.bias.grad.to_local().fill_(float("nan"))
        assert clip_grad_norm_(model.parameters(), 1.0, order).isnan(), (order, rank)


def _pending(ctx: RankContext) -> str:
    param = nn.Parameter(DTensor.from_local(torch.ones(4), ctx.mesh_1d()))
    param.grad = DTensor.from_local(torch.ones(4), ctx.mesh_1d(), [Partial()])
    return error_of(lambda: clip_grad_norm_(param, 1.0))


def test_pending_sum_and_order_that_is_none_are_refused() -> None:
    TEXTS.check("pending sum", same_on_all_ranks(_pending))
    TEXTS.check("no order", error_of(lambda: clip_grad_norm_([], 1.0, norm_type=0)))


@pytest.mark.ci
@distributed(4)
def test_one_norm_per_group_and_one_all_reduce_per_mesh_axis(ctx: RankContext) -> None:
    """A unit of one dtype lands its gradients behind each other; axes are summed over once for all that they cut."""
    model = _sharded(ctx, "tp")
    inputs = model.batch(torch.Generator().manual_seed(0))
    model.loss(model(*inputs), inputs).backward()
    norms = mock.patch.object(torch_names, "foreach_norm", wraps=torch_names.foreach_norm)
    sums = mock.patch.object(torch.distributed, "all_reduce", wraps=torch.distributed.all_reduce)
    with norms as normed, sums as summed:
        clip_grad_norm_(model.parameters(), 1.0)
    num_blocks, num_normed = len(model.blocks), sum(len(call.args[0]) for call in normed.call_args_list)
    assert num_normed == num_blocks + 1 + num_blocks  # what TP has cut, and what it has not, in each block
    assert summed.call_count == 2  # dp for all of them, tp for what it has cut


def test_gradients_that_touch_in_one_storage_are_joined() -> None:
    flat = torch.arange(16.0)
    a, b, c, d = flat[0:3], flat[3:7].view(2, 2), flat[9:12], flat[12:16].view(2, 2).t()
    alone, half = torch.ones(2), torch.ones(4, dtype=torch.bfloat16)
    found = joined_neighbours([c, b, d, torch.empty(0), a, half[:2], alone, half[2:]])
    assert {(str(tensor.dtype), tuple(tensor.flatten().tolist())) for tensor in found} == {
        ("torch.float32", tuple(range(7))),
        ("torch.float32", (9, 10, 11)),
        ("torch.float32", (12, 14, 13, 15)),
        ("torch.float32", (1, 1)),
        ("torch.bfloat16", (1, 1, 1, 1)),
    }
    for tensor in found:
        tensor.zero_()
    assert flat.tolist() == [0.0] * 7 + [7.0, 8.0] + [0.0] * 7  # views
    # An allocator may place two storages behind each other; a view of one ends where that one ends.
    memory = bytearray(32)
    first, second = (torch.frombuffer(memory, dtype=torch.float32, count=4, offset=offset) for offset in (0, 16))
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    assert [each.numel() for each in joined_neighbours([first, second])] == [4, 4]


@distributed(4)
def test_ranks_may_pass_parameters_in_another_order(ctx: RankContext) -> None:
    """Classes of parameters, and process groups, come in one order on all ranks."""
    mesh = ctx.mesh_2d(2, 2)
    placements = [(Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Replicate())]
    params = []
    for number, placement in enumerate(placements):
        param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, placement))
        param.grad = distribute_tensor(torch.full((4, 4), 10.0**number), mesh, placement)
        params.append(param)
    norm = clip_grad_norm_(params if ctx.rank in (0, 3) else params[::-1], 1e9)
    assert norm.item() == pytest.approx(4 * sum(100.0**number for number in range(4)) ** 0.5)
