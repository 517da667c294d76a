"""torch's other APIs beside ``fully_shard``: they leave each other alone, and tools that watch see the same."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

import fsdp2
from fsdp2.extras.torch_view.state import FSDPState
from tests.harness.compare import as_torchs
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, ParityModel
from tests.harness.runtimes import Runtime, beyond_torch, oracle, subject
from tests.harness.training import Step, one_backward, shard_units_and_root


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def _trained(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """Two steps; the gradients and parameters, whole."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)  # DTensors and plain tensors together
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    found = {}
    for name, param in model.named_parameters():
        for key, tensor in ((name, param.detach()), (f"{name}.grad", param.grad)):
            assert tensor is not None, key
            found[key] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


@as_torchs(2)
def test_replicate_around_a_sharded_module_leaves_it_alone(ctx: RankContext, runtime: Runtime) -> dict[str, Tensor]:
    model = _model()
    runtime.fully_shard(model[0], mesh=ctx.mesh_1d())
    replicate(model)
    found = _trained(model, ctx.rank)
    assert len(replicate.state(model)._param_list) == 2  # weight and bias of the last layer, nothing sharded
    return found


@as_torchs(2)
def test_a_replicated_module_stays_whole_under_fully_shard(ctx: RankContext, runtime: Runtime) -> dict[str, Tensor]:
    model = _model()
    replicate(model[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the gradients of plain parameters are reduced: nothing to warn of
        runtime.fully_shard(model, mesh=ctx.mesh_1d())
        found = _trained(model, ctx.rank)
    assert not isinstance(model[0].weight, DTensor)
    assert isinstance(model[2].weight, DTensor)
    return found


@beyond_torch("its error names no runtime")
@distributed(2)
def test_a_model_of_one_runtime_is_refused_by_the_other(ctx: RankContext) -> None:
    theirs, ours = _model(), _model()
    oracle().fully_shard(theirs[0], mesh=ctx.mesh_1d())
    fsdp2.fully_shard(ours, mesh=ctx.mesh_1d())
    before = [type(module) for module in theirs.modules()]
    with pytest.raises(ValueError, match=r"module .0., a FSDPLinear, was given to torch"):
        fsdp2.fully_shard(theirs, mesh=ctx.mesh_1d())
    assert [type(module) for module in theirs.modules()] == before
    with pytest.raises(ValueError, match=r"this FSDPLinear was given to torch"):
        fsdp2.fully_shard(theirs[0], mesh=ctx.mesh_1d())
    with pytest.raises(AssertionError, match="fully_shard has already been applied"):
        oracle().fully_shard(ours, mesh=ctx.mesh_1d())


@as_torchs(2)
def test_the_same_modules_are_marked_for_the_compiler_and_for_generate(ctx: RankContext, runtime: Runtime) -> Any:
    model = nn.Sequential(_model(), _model(), nn.Linear(3, 6), _model())
    replicate(model[3])
    for module in (model[0][0], model[0], model):
        runtime.fully_shard(module, mesh=ctx.mesh_1d())
    found = {name: sorted(key for key in vars(module) if "_fsdp_" in key) for name, module in model.named_modules()}
    assert found["0.2"] == ["_fsdp_use_orig_params", "_is_fsdp_managed_module"]
    assert found["3"] == []
    return found


@beyond_torch("it has states of its own")
@distributed(2)
def test_the_state_of_a_module_is_found_by_torchs_name(ctx: RankContext) -> None:
    model = _model()
    fsdp2.fully_shard(model[0], mesh=ctx.mesh_1d())
    fsdp2.fully_shard(model, mesh=ctx.mesh_1d())
    model(torch.randn(4, 6))
    state_of = fsdp2.fully_shard.state  # type: ignore[attr-defined]
    state = state_of(model)
    assert isinstance(state, FSDPState)
    assert state == state_of(model) != state_of(model[0])
    assert state._state_ctx.all_states == [state, state_of(model[0])]
    assert state_of(model[1]) is None
    assert state_of(copy.deepcopy(model)) != state


c10d = torch.ops.c10d


def _sharded_mlp(runtime: Runtime, mesh: Any) -> ParityModel:
    torch.manual_seed(0)
    model = MLP()
    shard_units_and_root(runtime, model, mesh)
    return model


@pytest.mark.parametrize("adds", [0, 1])
@distributed(2)
def test_comm_debug_mode_counts_what_a_feature_adds_to_every_step(ctx: RankContext, adds: int) -> None:
    model: Any = _sharded_mlp(subject(), ctx.mesh_1d())
    if adds:
        model.set_ranks_may_differ(True)
    one_backward(Step(0, ctx.rank, None), model)  # in which ranks also compare their models
    with CommDebugMode() as mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the views and hooks that the mode makes
        one_backward(Step(1, ctx.rank, None), model)
    assert mode.get_comm_counts()[c10d.allreduce_] == adds


RANGES = ("FSDP::all_gather", "FSDP::all_gather_copy_out", "FSDP::post_backward_reduce")


@pytest.mark.ci
@as_torchs(2)
def test_profiler_shows_the_same_ranges(ctx: RankContext, runtime: Runtime) -> Any:
    model = _sharded_mlp(runtime, ctx.mesh_1d())
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        one_backward(Step(0, ctx.rank, runtime), model)
    found = Counter(event.name for event in profiler.events() if event.name.split(" ")[0] in RANGES)
    assert found["FSDP::all_gather (blocks.1)"] == 2  # in forward and in backward
    return sorted(found.items())
