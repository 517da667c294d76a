"""``fsdp2.clip_grad_norm_``: the norm of the unsharded model, whatever meshes the parameters are on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from fsdp2 import ParamPlacement, _torch, clip_grad_norm_, fully_shard
from fsdp2.tools.clip import joined_neighbours
from tests.distributed.support import same_on_all_ranks
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of
from tests.harness.models import MLP, Uneven
from tests.harness.selection import long
from tests.parity.test_model_parallel import tensor_parallel

ORDERS = [1.0, 2, 3.5, float("inf")]


def _plain(model: Any, ctx: RankContext) -> None:
    for unit in (*model.units(), model):
        fully_shard(unit, mesh=ctx.mesh_1d())


def _hsdp(model: Any, ctx: RankContext) -> None:
    for unit in (*model.units(), model):
        fully_shard(unit, mesh=ctx.mesh_2d(2, ctx.world_size // 2))


def _tensor_parallel(model: Any, ctx: RankContext) -> None:
    mesh = ctx.mesh(dp=ctx.world_size // 2, tp=2)
    tensor_parallel(model, mesh["tp"])
    for unit in (*model.units(), model):
        fully_shard(unit, mesh=mesh["dp"])


def _experts(model: Any, ctx: RankContext) -> None:
    mesh = ctx.mesh_2d(2, ctx.world_size // 2)
    experts = {block.down.weight for block in model.blocks}
    for unit in (*model.units(), model):
        fully_shard(
            unit,
            mesh=ctx.mesh_1d(),
            shard_placement_fn=lambda param: ParamPlacement(None, mesh) if param in experts else None,
        )


def _ignored(model: Any, ctx: RankContext) -> None:
    for unit in (*model.units(), model):
        fully_shard(unit, mesh=ctx.mesh_1d(), ignored_params={model.exit.weight, model.exit.bias})


def _gradients(model: nn.Module, without: str = "") -> None:
    """The same gradients as the unsharded model has, cut like the parameters."""
    for index, (name, param) in enumerate(model.named_parameters()):
        grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(index))
        if name != without:
            param.grad = (
                distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
                if isinstance(param, DTensor)
                else grad
            )


def _whole(model: nn.Module) -> list[Tensor]:
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]


def _clips(ctx: RankContext, shard: Callable[..., None], order: float, make: Any = MLP, without: str = "") -> None:
    reference, model = make(), make()
    shard(model, ctx)
    for max_norm in (0.5, 1e6):
        _gradients(reference, without)
        _gradients(model, without)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type=order)
        found = clip_grad_norm_(model.parameters(), max_norm, norm_type=order)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        for ours, theirs in zip(_whole(model), _whole(reference), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shard", [_plain, _hsdp, _tensor_parallel, _experts, _ignored])
@distributed(4)
def test_norm_is_that_of_the_unsharded_model(ctx: RankContext, shard: Callable[..., None], order: float) -> None:
    _clips(ctx, shard, order)


@pytest.mark.parametrize("order", [*ORDERS[:1], *long(*ORDERS[1:])])
@distributed(4)
def test_empty_shards_and_missing_gradients_count_nothing(ctx: RankContext, order: float) -> None:
    _clips(ctx, _plain, order, make=Uneven)
    _clips(ctx, _tensor_parallel, order, without="blocks.1.down.weight")


@distributed(2)
def test_ranks_may_have_different_gradients(ctx: RankContext) -> None:
    """A rank without any gradient takes part all the same."""
    model = MLP()
    _plain(model, ctx)
    if ctx.rank == 0:
        _gradients(model)
    mine = [param.grad.to_local() for param in model.parameters() if param.grad is not None]  # type: ignore[attr-defined]
    expected = torch.tensor(0.0) if ctx.rank else nn.utils.get_total_norm(mine)
    torch.distributed.all_reduce(expected)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1.0), expected, rtol=1e-6, atol=0)


@distributed(2)
def test_norm_of_half_precision_gradients_does_not_overflow(ctx: RankContext) -> None:
    model = MLP().half()
    _plain(model, ctx)
    for param in model.parameters():
        param.grad = torch.full_like(param, 3000.0)
    numel = sum(param.numel() for param in model.parameters())
    found = clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(found, torch.tensor(3000.0 * numel**0.5), rtol=1e-3, atol=0)


@distributed(2)
def test_gradients_may_come_and_go(ctx: RankContext) -> None:
    model: Any = MLP()
    _plain(model, ctx)
    for present in (("blocks", "exit"), (), ("exit",), ("blocks", "exit")):
        for name, parameter in model.named_parameters():
            has_gradient = name.startswith(present) if present else False
            parameter.grad = torch.ones_like(parameter) if has_gradient else None
        numel = sum(parameter.numel() for parameter in model.parameters() if parameter.grad is not None)
        torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1e6), torch.tensor(float(numel)).sqrt())


@distributed(2)
def test_nothing_to_clip(ctx: RankContext) -> None:
    assert clip_grad_norm_([], 1.0).item() == 0.0


def _nonfinite(ctx: RankContext) -> str:
    model = MLP()
    _plain(model, ctx)
    _gradients(model)
    if ctx.rank == 1:
        model.exit.bias.grad.to_local().fill_(float("inf"))  # type: ignore[union-attr]
    before = [param.grad.to_local().clone() for param in model.parameters()]  # type: ignore[union-attr]
    error = error_of(lambda: clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True))
    assert all(torch.equal(param.grad.to_local(), old) for param, old in zip(model.parameters(), before, strict=True))  # type: ignore[union-attr]
    return error


def test_nonfinite_norm_is_refused_on_all_ranks() -> None:
    assert_expected_inline(
        same_on_all_ranks(_nonfinite),
        """\
RuntimeError: clip_grad_norm_: the norm of order 2.0 of all gradients is inf. Find the loss that is
not finite, or pass error_if_nonfinite=False to scale the gradients anyway.""",
    )


@distributed(2)
def test_nan_on_one_rank_is_the_norm_of_any_order_on_all(ctx: RankContext) -> None:
    """The maximum of gloo and NCCL may be a number although a rank has NaN."""
    for order, rank in itertools.product(ORDERS, range(ctx.world_size)):
        model = MLP()
        _plain(model, ctx)
        _gradients(model)
        if ctx.rank == rank:
            model.exit.bias.grad.to_local().fill_(float("nan"))  # type: ignore[union-attr]
        assert clip_grad_norm_(model.parameters(), 1.0, order).isnan(), (order, rank)


def _pending(ctx: RankContext) -> str:
    mesh: DeviceMesh = ctx.mesh_1d()
    param = nn.Parameter(DTensor.from_local(torch.ones(4), mesh))
    param.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    return error_of(lambda: clip_grad_norm_(param, 1.0))


def test_pending_sum_is_refused() -> None:
    assert_expected_inline(
        same_on_all_ranks(_pending),
        """\
ValueError: clip_grad_norm_: a gradient of shape (4,) has placements (Partial(sum),), so its sum is
still pending. Clip after backward has reduced the gradient.""",
    )


def test_order_that_is_none_is_refused() -> None:
    assert_expected_inline(
        error_of(lambda: clip_grad_norm_([], 1.0, norm_type=0)),
        """ValueError: clip_grad_norm_: norm_type=0, expected a positive number or float("inf").""",
    )


@distributed(4)
def test_one_norm_per_group_and_one_all_reduce_per_mesh_axis(ctx: RankContext) -> None:
    """A unit of one dtype lands its gradients behind each other; axes are summed over once for all that they cut."""
    model: Any = MLP()
    _tensor_parallel(model, ctx)
    inputs = model.batch(torch.Generator().manual_seed(0))
    model.loss(model(*inputs), inputs).backward()
    normed, summed = [], []
    with (
        mock.patch.object(_torch, "foreach_norm", side_effect=_noting(_torch.foreach_norm, normed)),
        mock.patch.object(torch.distributed, "all_reduce", side_effect=_noting(torch.distributed.all_reduce, summed)),
    ):
        clip_grad_norm_(model.parameters(), 1.0)
    of_units = len(model.blocks) + 1
    assert sum(map(len, normed)) == of_units + len(model.blocks)  # what TP has cut, and what it has not, in each block
    assert len(summed) == 2  # dp for all of them, tp for what it has cut


def _noting(function: Callable[..., Any], noted: list[Any]) -> Callable[..., Any]:
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        noted.append(first)
        return function(first, *args, **kwargs)

    return call


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


def test_neighbours_in_memory_that_are_not_in_one_storage_stay_apart() -> None:
    """An allocator may place two storages behind each other; a view of one ends where that one ends."""
    memory = bytearray(32)
    first, second = (torch.frombuffer(memory, dtype=torch.float32, count=4, offset=offset) for offset in (0, 16))
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    assert [each.numel() for each in joined_neighbours([first, second])] == [4, 4]
