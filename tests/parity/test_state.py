"""State: what is saved, loaded and initialised has the same keys, layouts and values as torch's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.harness.compare import compare, compare_values, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Buffers, ParityModel, SharedModules, Transformer, Uneven, freeze
from tests.harness.runtimes import Runtime, oracle, subject
from tests.harness.training import Case, Step, dtensor_adamw, dtensor_sgd, one_backward, shard_units_and_root
from tests.parity.setups import recorded

MODELS = [MLP, Uneven, functools.partial(Transformer, tied=True), SharedModules, Buffers]


def _sharded(runtime: Runtime, build: Callable[[], ParityModel], ctx: RankContext, seed: int = 0) -> ParityModel:
    torch.manual_seed(seed)
    model = build()
    shard_units_and_root(runtime, model, ctx.mesh_1d())
    return model


def _train(ctx: RankContext, runtime: Runtime, model: ParityModel, optimizer: Any, steps: range) -> list[Tensor]:
    losses = []
    for index in steps:
        losses += [loss.detach() for loss in one_backward(Step(index, ctx.rank, runtime), model)]
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("build", MODELS)
@distributed(2, 4)
def test_state_dict_has_the_keys_layouts_and_values_of_torch(ctx: RankContext, build) -> None:
    theirs, ours = (_sharded(runtime, build, ctx) for runtime in (oracle(), subject()))
    compare_values("state_dict", recorded(ours.state_dict()), recorded(theirs.state_dict()))


@distributed(2)
def test_state_dict_after_a_forward_holds_shards(ctx: RankContext) -> None:
    records = []
    for runtime in (oracle(), subject()):
        model = _sharded(runtime, MLP, ctx)
        for guard in (torch.no_grad, torch.enable_grad):
            with guard():
                Step(0, ctx.rank, runtime).loss(model)
            records.append(recorded(model.state_dict()))
    compare_values("state_dict", records[2:], records[:2])


@distributed(2)
def test_state_dict_of_a_unit_is_that_of_the_submodule(ctx: RankContext) -> None:
    theirs, ours = (_sharded(runtime, MLP, ctx) for runtime in (oracle(), subject()))
    compare_values("unit", recorded(ours.blocks[1].state_dict()), recorded(theirs.blocks[1].state_dict()))


def _load_other_weights(model: ParityModel, assign: bool) -> None:
    """Load what a model of another seed would have, cut as ``model`` is."""
    generator = torch.Generator().manual_seed(77)
    state = {}
    for name, value in model.state_dict().items():
        full = torch.randn(value.shape, generator=generator) * 0.2 if value.is_floating_point() else value
        if isinstance(value, DTensor):
            full = distribute_tensor(full, value.device_mesh, value.placements, src_data_rank=None)
        state[name] = full
    model.load_state_dict(state, assign=assign)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("model", [MLP, Uneven])
@distributed(2, 4)
def test_load_state_dict_before_the_first_forward(ctx: RankContext, model, assign: bool) -> None:
    def shard(runtime, model: ParityModel, mesh) -> None:
        shard_units_and_root(runtime, model, mesh)
        _load_other_weights(model, assign)

    compare(Case(model, shard=shard, unsharded=None), ctx.mesh_1d())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("after", ["backward", "evaluation"])
@distributed(2)
def test_load_state_dict_after_a_pass(ctx: RankContext, after: str, assign: bool) -> None:
    def shard(runtime, model: ParityModel, mesh) -> None:
        shard_units_and_root(runtime, model, mesh)
        step = Step(9, ctx.rank, runtime)
        if after == "backward":
            one_backward(step, model)
            model.zero_grad()
        else:
            with torch.no_grad():
                step.loss(model)
        _load_other_weights(model, assign)

    compare(Case(MLP, shard=shard, unsharded=None), ctx.mesh_1d())


@distributed(2)
def test_weights_of_an_unsharded_model_load_and_full_weights_come_back(ctx: RankContext) -> None:
    options = StateDictOptions(full_state_dict=True)
    torch.manual_seed(5)
    whole = Transformer().state_dict()
    records = []
    for runtime in (oracle(), subject()):
        model = _sharded(runtime, Transformer, ctx)
        set_model_state_dict(model, copy.deepcopy(whole), options=options)
        records.append(recorded(model.state_dict()))
        compare_values("full", recorded(get_model_state_dict(model, options=options)), recorded(whole))
    compare_values("sharded", records[1], records[0])


def _materialise(model: ParityModel, mesh: DeviceMesh, source: dict[str, Tensor]) -> None:
    """Give a meta model real memory, then its initial values."""
    model.to_empty(device=mesh.device_type)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        full = source[name]
        if isinstance(value, DTensor):
            full = distribute_tensor(full, value.device_mesh, value.placements, src_data_rank=None)
        with torch.no_grad():
            value.copy_(full)


@pytest.mark.parametrize("model", [MLP, Uneven, functools.partial(Transformer, tied=True), Buffers])
@distributed(2, 4)
def test_meta_model_is_sharded_then_materialised(ctx: RankContext, model) -> None:
    def shard(runtime, model: ParityModel, mesh) -> None:
        source = {name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
        model.to("meta")
        if isinstance(model, Transformer):
            model.output.weight = model.embedding.weight  # nn.Module.to("meta") unties
        shard_units_and_root(runtime, model, mesh)
        assert all(parameter.is_meta for parameter in model.parameters())
        _materialise(model, mesh, source)

    compare(Case(model, shard=shard), ctx.mesh_1d())


@distributed(2)
def test_meta_model_is_initialised_by_reset_parameters(ctx: RankContext) -> None:
    def shard(runtime, model: ParityModel, mesh) -> None:
        model.to("meta")
        shard_units_and_root(runtime, model, mesh)
        model.to_empty(device=mesh.device_type)
        torch.manual_seed(3)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()

    compare(Case(MLP, shard=shard, unsharded=None), ctx.mesh_1d())


@distributed(2)
def test_meta_model_receives_its_weights_by_load_with_assign(ctx: RankContext) -> None:
    def shard(runtime, model: ParityModel, mesh) -> None:
        source = model.state_dict()
        model.to("meta")
        shard_units_and_root(runtime, model, mesh)
        cut = {
            name: distribute_tensor(source[name], value.device_mesh, value.placements, src_data_rank=None)
            for name, value in model.named_parameters()
        }
        model.load_state_dict(cut, assign=True)

    compare(Case(MLP, shard=shard), ctx.mesh_1d())


@trains_alike(2, model=MLP)
def test_model_to_dtype_between_steps(step: Step, model: ParityModel) -> list[Tensor]:
    model.to(torch.bfloat16).to(torch.float32)
    return one_backward(step, model)


@pytest.mark.parametrize("optimizer", [dtensor_adamw, dtensor_sgd])
@distributed(2)
def test_optimizer_state_dict_is_that_of_torch_and_resumes(ctx: RankContext, optimizer) -> None:
    records = []
    for runtime in (oracle(), subject()):
        model = _sharded(runtime, MLP, ctx)
        first = optimizer(model.parameters())
        _train(ctx, runtime, model, first, range(2))
        saved = copy.deepcopy([model.state_dict(), first.state_dict()])
        expected = _train(ctx, runtime, model, first, range(2, 4))
        resumed = _sharded(runtime, MLP, ctx, seed=1)
        second = optimizer(resumed.parameters())
        resumed.load_state_dict(saved[0])
        second.load_state_dict(saved[1])
        compare_values("resumed losses", _train(ctx, runtime, resumed, second, range(2, 4)), expected)
        records.append(recorded([saved[1], expected]))
    if ctx.world_size == 2:  # bit for bit
        compare_values("optimizer", records[1], records[0])


@pytest.mark.parametrize("saver_is_torch", [True, False])
@distributed(2, 4)
def test_distributed_checkpoint_travels_between_the_runtimes(
    ctx: RankContext, saver_is_torch: bool, tmp_path: Path
) -> None:
    saver, loader = (oracle(), subject()) if saver_is_torch else (subject(), oracle())
    model = _sharded(saver, Transformer, ctx)
    optimizer = dtensor_adamw(model.parameters())
    _train(ctx, saver, model, optimizer, range(2))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=tmp_path / "checkpoint")

    other = _sharded(loader, Transformer, ctx, seed=1)
    other_optimizer = dtensor_adamw(other.parameters())
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer), strict=True))
    dcp.load(loaded, checkpoint_id=tmp_path / "checkpoint")
    set_state_dict(other, other_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    after = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer), strict=True))
    compare_values("loaded", recorded(after), recorded(states))
    expected = _train(ctx, saver, model, optimizer, range(2, 4))
    actual = _train(ctx, loader, other, other_optimizer, range(2, 4))
    if ctx.world_size == 2:
        compare_values("losses after loading", actual, expected)


@distributed(2)
def test_frozen_parameters_are_saved_and_stay_frozen(ctx: RankContext) -> None:
    def build() -> MLP:
        model = MLP()
        freeze(model, "blocks.1", "entry.bias")
        return model

    theirs, ours = (_sharded(runtime, build, ctx) for runtime in (oracle(), subject()))
    compare_values("state_dict", recorded(ours.state_dict()), recorded(theirs.state_dict()))
    frozen = [[name for name, p in model.named_parameters() if not p.requires_grad] for model in (theirs, ours)]
    assert frozen[0] == frozen[1]
    assert len(frozen[0]) == 5
