"""State of models with all-gather hooks: saved, loaded, cast, materialised, replaced; checked by what they compute."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as states_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import fully_shard
from fsdp2.tensors import NF4Tensor
from tests.distributed.extension_support import SOME, UNEVEN, batch, built, dtensor_adam, loss_of, sharded, twins_of
from tests.harness.distributed import RankContext, distributed
from tests.harness.extension_reference import ON_LONGER_AXES, plain
from tests.harness.extensions import Aliasing, Halved, KeptHalved, Ragged, Scaled, wrap
from tests.harness.pool import shared_pool
from tests.harness.selection import long

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


@some
@distributed(2, 4)
def test_values_loaded_between_steps_are_computed_with(ctx: RankContext, name: str) -> None:
    twins = twins_of(ctx, name)
    start = copy.deepcopy(twins.model.state_dict())
    by_hand = {key: value.clone() for key, value in twins.reference.shards.items()}
    for _ in range(2):
        twins.train(1)
        twins.model.load_state_dict(start)
        for key, value in by_hand.items():
            twins.reference.shards[key].copy_(value)
        twins.evaluate()
        twins.check()


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
        states = dict(zip(("model", "optimizer"), states_of.get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=path)
        given = {"model_state_dict": states["model"], "optim_state_dict": states["optimizer"]}
        states_of.set_state_dict(model, optimizer, **given)
        assert type(model.entry.weight._local_tensor) is SOME[name]
    else:
        train(0)
        train(1)
        states = dict(zip(("model", "optimizer"), states_of.get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=path)
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
    options = states_of.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states_of.set_model_state_dict(linear, given, options=options)
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
@pytest.mark.parametrize("make", [Halved, Scaled, *long(KeptHalved, Aliasing, Ragged)])
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


@some
@distributed(2, 4)
def test_gradients_are_clipped_by_their_global_norm(ctx: RankContext, name: str) -> None:
    twins = twins_of(ctx, name)
    twins.backward()
    squares = torch.stack([value.grad.double().square().sum() for value in twins.reference.shards.values()]).sum()
    torch.distributed.all_reduce(squares)
    found = nn.utils.clip_grad_norm_(twins.model.parameters(), 0.01)
    assert torch.allclose(found.full_tensor().double(), squares.sqrt(), rtol=1e-5)
    for key, parameter in twins.parameters.items():
        expected = twins.reference.shards[key].grad * (0.01 / squares.sqrt().float())
        assert torch.allclose(plain(parameter.grad), expected, rtol=1e-4, atol=1e-8)
