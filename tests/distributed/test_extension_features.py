"""All-gather hooks beside everything else that a sharded module does, and its state: compared with a run by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp2 import fully_shard
from fsdp2.tensors import Float8AllGatherTensor, NF4Tensor, precompute_float8_scales, wrap_parameters
from fsdp2.tensors.float8 import magnitude, quantise_float8, scale_from
from tests.distributed.compile_support import BACKEND, start_compiling
from tests.distributed.extension_support import (
    SOME,
    UNEVEN,
    Net,
    Twins,
    batch,
    built,
    dtensor_adam,
    loss_of,
    sgd,
    sharded,
    twins_of,
)
from tests.harness.distributed import RankContext, distributed
from tests.harness.extension_reference import ON_LONGER_AXES, plain
from tests.harness.extensions import Aliasing, Halved, Padded, Ragged, Scaled, count, recorded, wrap
from tests.harness.pool import shared_pool
from tests.harness.selection import in_ci, long
from tests.parity.setups import load_states, states_of


class _Tied(Net):
    """One weight in two places of a block, and one in two blocks of the root's own."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.out = nn.Linear(6, dim)
        self.out.weight = self.entry.weight
        for block in self.blocks:
            block.down = nn.Linear(block.up.in_features, dim, bias=False)
            block.down.weight = block.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.out(x)


def _infer(twins: Twins) -> None:
    for num_steps in (2, 1):
        with torch.inference_mode():
            twins.model(batch(twins.rank, 77))
        twins.train(num_steps)


def _unshard_by_hand(twins: Twins) -> None:
    for _ in range(3):
        handles = [block.unshard(async_op=True) for block in twins.model.blocks]
        twins.model.unshard()
        handles[1].wait()
        assert torch.equal(twins.model.blocks[1].up.weight, twins.reference.unsharded("blocks.1.up.weight"))
        twins.model.blocks[0].reshard()
        twins.backward()
        twins.step()


def _step_while_unsharded(twins: Twins) -> None:
    for _ in range(3):
        twins.backward()
        for unit in (*twins.model.blocks, twins.model):
            unit.unshard()
        twins.step()


def _share_ties(twins: Twins) -> None:
    with recorded() as calls:
        twins.backward()
    assert count(calls, "post") == 3
    twins.step()
    twins.train(2)
    assert twins.model.out.weight is twins.model.entry.weight


def _step_in_backward(twins: Twins) -> None:
    """Each step writes the shards while the rest of backward runs."""
    for parameter in twins.model.parameters():
        optimizer = sgd([parameter])

        def step(_: Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        twins.backward()
        twins.reference.step()
        twins.check()


# What is done with the twins, and how they are made. tests/programs/regressions.py has what programs can say.
SCENARIOS: dict[str, tuple[Callable[[Twins], None], dict[str, Any]]] = {
    "first use in inference mode": (_infer, {}),
    "unshard by hand": (_unshard_by_hand, {}),
    "ties travel once": (_share_ties, {"model": _Tied}),
    "step while unsharded": (_step_while_unsharded, {"optimizer": dtensor_adam}),
    "optimizer in backward": (_step_in_backward, {"optimizer": sgd}),
    "foreach step while unsharded": (_step_while_unsharded, {"optimizer": partial(dtensor_adam, foreach=True)}),
}
SHORT = list(SCENARIOS)[:3]


@pytest.mark.every_case
@pytest.mark.parametrize("scenario", [*SHORT, *in_ci(*list(SCENARIOS)[3:])])
@pytest.mark.parametrize("name", ["scaled", *long("aliasing")])
@distributed(2)
def test_hooks_compute_what_is_computed_by_hand(ctx: RankContext, name: str, scenario: str) -> None:
    run, options = SCENARIOS[scenario]
    run(twins_of(ctx, name, **options))


class _Integers(Scaled):
    """Stays integers when it is unsharded: fit for a frozen parameter only."""

    @classmethod
    def decode(cls, outputs: tuple[Tensor, ...], size: torch.Size, num_ranks: int, dtype: torch.dtype) -> Tensor:
        return outputs[0].clone()


@distributed(2, 4)
def test_frozen_parameter_may_become_integers(ctx: RankContext) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(_Integers(torch.arange(30.0).view(UNEVEN, 6)), requires_grad=False)
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            assert self.table.dtype is torch.int8
            return x * self.scale * self.table.float().sum(0)

    model = fully_shard(Looks(), mesh=ctx.mesh_1d())
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
    rows = torch.arange(30.0).view(UNEVEN, 6)
    expected = (rows / (rows.abs().amax(1, keepdim=True) / 127)).round().sum(0)
    assert torch.equal(model.scale.grad.full_tensor(), 2 * 2 * expected)
    assert model.table.grad is None


@pytest.mark.ci
@pytest.mark.parametrize("make", [Scaled, *long(Aliasing, Padded)])
@distributed(2)
def test_compiled_blocks_train_and_are_compiled_once(ctx: RankContext, make: Any) -> None:
    twins = twins_of(ctx, make)
    start_compiling()
    for block in twins.model.blocks:
        block.compile(backend=BACKEND)
    twins.exact = False  # the compiler may order sums otherwise
    for index in range(4):
        with torch.compiler.set_stance("default" if index < 2 else "fail_on_recompile"):
            twins.train(1)


@pytest.mark.ci
@distributed(4)
def test_precomputed_scales_are_those_of_all_ranks_on_a_dim_that_tensor_parallelism_has_cut(ctx: RankContext) -> None:
    """Its shards are strided."""
    mesh = ctx.mesh(dp=2, tp=2)
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        model[0].weight.mul_(torch.arange(1.0, 9.0)[:, None])  # the largest magnitude is on one rank
    whole = model[0].weight.detach().clone()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    wrap_parameters(model, Float8AllGatherTensor)
    fully_shard(model, mesh=mesh["dp"])
    precompute_float8_scales(model)
    model.unshard()
    scale = scale_from(magnitude(whole))
    expected = quantise_float8(whole, scale).float() * scale
    mine = mesh["tp"].get_local_rank()
    assert torch.equal(model[0].weight.to_local(), expected[4 * mine : 4 * mine + 4])


# State: saved, loaded, cast, materialised, replaced

some = pytest.mark.parametrize("name", list(SOME))


def _full(value: Tensor) -> Tensor:
    """The whole value on every rank, through DTensor."""
    whole = value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()
    return whole.plain if hasattr(whole, "plain") else whole


@some
@distributed(2, 4)
def test_state_dict_holds_the_masters_in_their_class(ctx: RankContext, name: str) -> None:
    twins = twins_of(ctx, name)
    twins.train(1)
    state, loss = twins.model.state_dict(), loss_of(batch(ctx.rank, 5))
    with torch.no_grad():
        loss(twins.model)  # the root stays unsharded; a state dict holds shards all the same
    for key, value in twins.model.state_dict().items():
        assert isinstance(value, DTensor)
        assert type(value._local_tensor) is (SOME[name] if key.endswith("weight") else Tensor)
        assert torch.equal(plain(value), plain(state[key]))
        assert torch.equal(twins.reference._cut(key, _full(value)), plain(value))
    copied = copy.deepcopy(twins.model.entry.weight)
    assert type(copied._local_tensor) is SOME[name]
    with torch.no_grad():
        copied.zero_()
    twins.check()


@pytest.mark.parametrize("assign", [False, True])
@some
@distributed(2, 4)
def test_resumed_training_goes_on_as_by_hand(ctx: RankContext, name: str, assign: bool) -> None:
    twins = twins_of(ctx, name, optimizer=dtensor_adam)
    twins.train(2)
    saved = copy.deepcopy([twins.model.state_dict(), twins.optimizer.state_dict()])
    other = sharded(built(SOME[name], UNEVEN), ctx.mesh_1d())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        loss_of(batch(ctx.rank, 0))(other)  # what it has gathered is outdated then
    other.load_state_dict(saved[0], assign=assign)
    twins.use(other)
    twins.optimizer.load_state_dict(saved[1])
    twins.check()
    twins.train(2)


def _trained(ctx: RankContext, name: str, path: Path, loads: bool) -> dict[str, Tensor]:
    """Train two steps and save, or load. Then full values, and those after one more step.

    Data are the same on all ranks, so that the number of ranks does not matter.
    """
    model = sharded(built(SOME[name], UNEVEN), ctx.mesh_1d())
    optimizer = dtensor_adam(model.parameters())

    def train(index: int) -> None:
        loss_of(batch(0, index))(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    if loads:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            loss_of(batch(0, 0))(model)
        load_states(model, optimizer, path)
        assert type(model.entry.weight._local_tensor) is SOME[name]
    else:
        train(0)
        train(1)
        dcp.save(states_of(model, optimizer), checkpoint_id=path)
    found = {f"{key} before": _full(value).clone() for key, value in model.state_dict().items()}
    train(9)
    return found | {f"{key} after": _full(value) for key, value in model.state_dict().items()}


@pytest.mark.ci
@pytest.mark.parametrize(("savers", "loaders"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.long)])
@some
def test_checkpoint_is_loaded_on_another_number_of_ranks(name: str, savers: int, loaders: int, tmp_path: Path) -> None:
    saved = shared_pool(savers).run(_trained, name=name, path=tmp_path, loads=False)
    loaded = shared_pool(loaders).run(_trained, name=name, path=tmp_path, loads=True)
    for found in loaded:
        for key, value in saved[0].items():
            exact = {"rtol": 0.0, "atol": 0.0} if "before" in key else ON_LONGER_AXES
            torch.testing.assert_close(found[key], value, **exact)


@distributed(2, 4)
def test_packed_weights_are_loaded_from_rank_0_dequantised(ctx: RankContext) -> None:
    """torch broadcasts into plain tensors; shards quantise what they receive, to the codes that it came from."""
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 10, bias=False), torch.randn(3, 64)
    packed = NF4Tensor.quantise(linear.weight.detach() * (torch.arange(10).unsqueeze(1) + 1))
    linear.weight = nn.Parameter(NF4Tensor.quantise(torch.randn(10, 64)), requires_grad=False)
    fully_shard(linear, mesh=ctx.mesh_1d())
    given = {"weight": packed.dequantise()} if ctx.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(linear, given, options=options)
    local = linear.weight.to_local()
    assert type(local) is NF4Tensor
    rows = torch.chunk(torch.arange(10), ctx.world_size)[ctx.rank]
    assert torch.equal(local.dequantise(), packed.dequantise()[rows])
    assert torch.equal(linear(x), x @ packed.dequantise().T)


@some
@distributed(2, 4)
def test_meta_model_is_materialised_and_trains(ctx: RankContext, name: str) -> None:
    twins = twins_of(ctx, name)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = built(None, UNEVEN)
    sharded(wrap(model, SOME[name]), ctx.mesh_1d())
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device=ctx.device_type)
    assert type(model.entry.weight._local_tensor) is SOME[name]
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            plain(parameter).copy_(twins.reference.shards[key])
    twins.use(model)
    twins.train(3)


@pytest.mark.every_case  # Scaled sends the same, whatever the dtype
@pytest.mark.parametrize("make", [Halved, Scaled, *long(Aliasing, Ragged)])
@distributed(2)
def test_cast_between_steps(ctx: RankContext, make: Any) -> None:
    twins = twins_of(ctx, make, optimizer=partial(torch.optim.SGD, lr=0.1))
    twins.train(1)
    for dtype in (torch.float64, torch.float32):
        twins.model.to(torch.bfloat16).to(dtype)
        for value in twins.reference.shards.values():
            value.data = value.data.bfloat16().to(dtype)
        assert twins.model.entry.weight.dtype is dtype
        assert type(twins.model.entry.weight._local_tensor) is make
        x = batch(ctx.rank, 50, dtype)
        for _ in range(2):
            loss = twins.model(x).square().mean()
            loss.backward()
            assert torch.equal(loss.detach(), twins.reference.backward(lambda model, x=x: model(x).square().mean()))
            assert twins.model.entry.weight.grad.dtype is dtype
            twins.step()


@distributed(2, 4)
def test_shard_of_another_class_assigned_before_the_first_use(ctx: RankContext) -> None:
    """A plain parameter is given a class, one of a class another one, and one becomes plain."""
    twins = twins_of(ctx, "scaled")
    model = sharded(built(None, UNEVEN), ctx.mesh_1d())
    _assign(model.entry, Scaled)
    for block in model.blocks:
        for linear in (block.up, block.down):
            _assign(linear, Halved)
            _assign(linear, Scaled)
    plain_again = sharded(built(Ragged, UNEVEN), ctx.mesh_1d())
    _assign(plain_again.entry, lambda value: value)
    with pytest.warns(UserWarning, match="'entry.weight' was a Ragged with all-gather hooks"):
        plain_again.unshard()
    assert torch.equal(plain_again.entry.weight, built(None, UNEVEN).entry.weight)
    twins.use(model)
    twins.train(2)


def _assign(linear: nn.Linear, make: Any) -> None:
    old = linear.weight
    local = make(plain(old).clone())
    shape, stride = old.shape, old.stride()
    made = DTensor.from_local(local, old.device_mesh, old.placements, run_check=False, shape=shape, stride=stride)
    linear.weight = nn.Parameter(made)
