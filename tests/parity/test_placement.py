"""Where parameters lie: meshes, dims, groups of modules, and parameters that are left alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from tests.harness.compare import Cases, as_torchs, compare, each_compared, hsdp, one_replica, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Buffers, ParityModel, Transformer, Uneven
from tests.harness.runtimes import Runtime
from tests.harness.training import Case, Step, one_backward, shard_units_and_root, sharded, snapshot


def _last_dim_if_even(parameter: nn.Parameter) -> Shard | None:
    return Shard(-1) if parameter.shape[-1] % 4 == 0 else None


def _dim_1_of_matrices(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[0] != 33 else None


@pytest.mark.parametrize("placement_fn", [_last_dim_if_even, _dim_1_of_matrices])
@distributed(2, 4)
def test_shard_placement_fn_chooses_the_dim(ctx: RankContext, placement_fn) -> None:
    shard = sharded(shard_placement_fn=placement_fn)
    compare(Case(MLP, shard, gather_full=True), ctx.mesh_1d())
    compare(Case(Transformer, shard), ctx.mesh_1d())


@as_torchs(2)
def test_layout_equals_before_the_first_forward(ctx: RankContext, runtime: Runtime) -> Any:
    specs = []
    for model in (MLP(), Uneven(), Transformer(), Buffers()):
        original = dict(model.named_parameters())
        shard_units_and_root(runtime, model, ctx.mesh_1d())
        specs.append({name: snapshot(parameter).spec for name, parameter in model.named_parameters()})
        assert not any(parameter is original[name] for name, parameter in model.named_parameters())
    return specs


@distributed(2)
def test_default_mesh_spans_all_ranks(ctx: RankContext) -> None:
    def shard(runtime, model: MLP, mesh) -> None:
        for unit in (*model.units(), model):
            runtime.fully_shard(unit)

    if torch.accelerator.is_available():
        return  # the default mesh is then one of GPUs, which these gloo ranks do not have
    compare(Case(MLP, shard), ctx.mesh_1d())


@pytest.mark.ci
@each_compared(4, mesh=hsdp, ci=("chosen dim",), long=("MLP", "Transformer"))
def test_hsdp_replicates_on_axis_0_and_shards_on_axis_1() -> Cases:
    whole = {model.__name__: Case(model, gather_full=True) for model in (Uneven, MLP, Transformer)}
    return {**whole, "chosen dim": Case(MLP, sharded(shard_placement_fn=_last_dim_if_even))}


@each_compared(2, 4)
def test_meshes_with_an_axis_of_one() -> Cases:
    return {
        "HSDP that only replicates": (lambda ctx: ctx.mesh_2d(ctx.world_size, 1), Case(MLP), Case(Uneven)),
        "HSDP that only shards": (one_replica, Case(MLP), Case(Uneven)),
        "one rank, without a partner": (RankContext.mesh_of_one, Case(MLP), Case(Uneven), Case(Transformer)),
    }


@distributed(2, 4)
def test_list_of_modules_makes_one_group(ctx: RankContext) -> None:
    def shard(runtime, model: Transformer, mesh) -> None:
        for block in model.blocks:
            runtime.fully_shard([block.attention_norm, block.attention], mesh=mesh)
            runtime.fully_shard([block.mlp_norm, block.mlp], mesh=mesh, reshard_after_forward=False)
        runtime.fully_shard([model.norm, model.output], mesh=mesh)
        runtime.fully_shard(model, mesh=mesh)

    compare(Case(Transformer, shard), ctx.mesh_1d())


@each_compared(2)
def test_groups_of_ones_own() -> Cases:
    both_ends = sharded(units=lambda model: [*model.blocks, [model.embedding, model.output], model])
    return {
        "list with both ends of a tie": Case(functools.partial(Transformer, tied=True), both_ends),
        "nothing ignored by an empty list, as of axolotl": Case(MLP, sharded(ignored_params=[])),
    }


@distributed(2)
def test_ignored_parameters_stay_plain_and_local(ctx: RankContext) -> None:
    def shard(runtime, model: MLP, mesh) -> None:
        ignored = {model.entry.weight, model.blocks[1].up.bias, model.blocks[1].down.weight}
        shard_units_and_root(runtime, model, mesh, ignored_params=ignored)
        assert {parameter for parameter in model.parameters() if parameter in ignored} == ignored

    # Ignored parameters are not averaged, so ranks diverge and there is no one unsharded model to compare with.
    compare(Case(MLP, shard, unsharded=None), ctx.mesh_1d())


@trains_alike(2, 4, model=MLP, num_steps=1)
def test_class_is_both_the_original_and_fsdp_module(step: Step, model: ParityModel) -> list[Tensor]:
    step.note("names", [type(module).__name__ for module in model.modules()])
    step.note("original", [isinstance(model, MLP), isinstance(model.blocks[0], MLP)])
    fsdp = step.runtime and [isinstance(module, step.runtime.FSDPModule) for module in model.modules()]
    step.note("fsdp", fsdp)
    return one_backward(step, model)
