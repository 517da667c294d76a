"""Where parameters lie: meshes, dims, groups of modules, and parameters that are left alone."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from tests.harness.compare import compare, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Buffers, ParityModel, Transformer, Uneven
from tests.harness.runtimes import oracle, subject
from tests.harness.selection import long
from tests.harness.training import Case, Step, shard_units_and_root, snapshot


def _last_dim_if_even(parameter: nn.Parameter) -> Shard | None:
    return Shard(-1) if parameter.shape[-1] % 4 == 0 else None


def _dim_1_of_matrices(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[0] != 33 else None


@pytest.mark.parametrize("placement_fn", [_last_dim_if_even, _dim_1_of_matrices])
@distributed(2, 4)
def test_shard_placement_fn_chooses_the_dim(ctx: RankContext, placement_fn) -> None:
    shard = functools.partial(shard_units_and_root, shard_placement_fn=placement_fn)
    compare(Case(MLP, shard=shard, gather_full=True), ctx.mesh_1d())
    compare(Case(Transformer, shard=shard), ctx.mesh_1d())


@distributed(2)
def test_layout_equals_before_the_first_forward(ctx: RankContext) -> None:
    for model_class in (MLP, Uneven, Transformer, Buffers):
        specs = []
        for runtime in (oracle(), subject()):
            torch.manual_seed(0)
            model = model_class()
            original = dict(model.named_parameters())
            shard_units_and_root(runtime, model, ctx.mesh_1d())
            specs.append({name: snapshot(parameter).spec for name, parameter in model.named_parameters()})
            assert not any(parameter is original[name] for name, parameter in model.named_parameters())
        assert specs[0] == specs[1]


@distributed(2)
def test_default_mesh_spans_all_ranks(ctx: RankContext) -> None:
    def shard(runtime, model: MLP, mesh) -> None:
        for unit in (*model.units(), model):
            runtime.fully_shard(unit)

    if torch.accelerator.is_available():
        return  # the default mesh is then one of GPUs, which these gloo ranks do not have
    compare(Case(MLP, shard=shard), ctx.mesh_1d())


@pytest.mark.parametrize("model", [Uneven, *long(MLP, Transformer)])
@distributed(4)
def test_hsdp_replicates_on_axis_0_and_shards_on_axis_1(ctx: RankContext, model) -> None:
    compare(Case(model, gather_full=True), ctx.mesh_2d(2, 2))


@distributed(2, 4)
def test_hsdp_with_a_shard_axis_of_one_only_replicates(ctx: RankContext) -> None:
    compare(Case(MLP), ctx.mesh_2d(ctx.world_size, 1))
    compare(Case(Uneven), ctx.mesh_2d(ctx.world_size, 1))


@distributed(2)
def test_hsdp_with_a_replicate_axis_of_one_only_shards(ctx: RankContext) -> None:
    compare(Case(MLP), ctx.mesh_2d(1, ctx.world_size))
    compare(Case(Uneven), ctx.mesh_2d(1, ctx.world_size))


@pytest.mark.ci
@distributed(4)
def test_hsdp_with_a_chosen_dim(ctx: RankContext) -> None:
    shard = functools.partial(shard_units_and_root, shard_placement_fn=_last_dim_if_even)
    compare(Case(MLP, shard=shard), ctx.mesh_2d(2, 2))


@distributed(2)
def test_mesh_of_one_rank_needs_no_partner(ctx: RankContext) -> None:
    for model in (MLP, Uneven, Transformer):
        compare(Case(model), ctx.mesh_of_one())


@distributed(2, 4)
def test_list_of_modules_makes_one_group(ctx: RankContext) -> None:
    def shard(runtime, model: Transformer, mesh) -> None:
        for block in model.blocks:
            runtime.fully_shard([block.attention_norm, block.attention], mesh=mesh)
            runtime.fully_shard([block.mlp_norm, block.mlp], mesh=mesh, reshard_after_forward=False)
        runtime.fully_shard([model.norm, model.output], mesh=mesh)
        runtime.fully_shard(model, mesh=mesh)

    compare(Case(Transformer, shard=shard), ctx.mesh_1d())


@distributed(2)
def test_list_that_holds_both_ends_of_a_tie_keeps_it(ctx: RankContext) -> None:
    def shard(runtime, model: Transformer, mesh) -> None:
        for block in model.blocks:
            runtime.fully_shard(block, mesh=mesh)
        runtime.fully_shard([model.embedding, model.output], mesh=mesh)
        runtime.fully_shard(model, mesh=mesh)

    compare(Case(functools.partial(Transformer, tied=True), shard=shard), ctx.mesh_1d())


@distributed(2)
def test_ignored_parameters_stay_plain_and_local(ctx: RankContext) -> None:
    def shard(runtime, model: MLP, mesh) -> None:
        ignored = {model.entry.weight, model.blocks[1].up.bias, model.blocks[1].down.weight}
        shard_units_and_root(runtime, model, mesh, ignored_params=ignored)
        assert {parameter for parameter in model.parameters() if parameter in ignored} == ignored

    # Ignored parameters are not averaged, so ranks diverge and there is no one unsharded model to compare with.
    compare(Case(MLP, shard=shard, unsharded=None), ctx.mesh_1d())


@distributed(2)
def test_nothing_is_ignored_by_an_empty_list(ctx: RankContext) -> None:
    """As axolotl passes it."""
    compare(Case(MLP, shard=functools.partial(shard_units_and_root, ignored_params=[])), ctx.mesh_1d())


@trains_alike(2, 4, model=MLP, num_steps=1)
def test_class_is_both_the_original_and_fsdp_module(step: Step, model: ParityModel) -> list[Tensor]:
    step.note("names", [type(module).__name__ for module in model.modules()])
    step.note("original", [isinstance(model, MLP), isinstance(model.blocks[0], MLP)])
    fsdp = step.runtime and [isinstance(module, step.runtime.FSDPModule) for module in model.modules()]
    step.note("fsdp", fsdp)
    loss = step.loss(model)
    loss.backward()
    return [loss]
