"""Plain training: what a user does who changes nothing but the import."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from tests.harness.comms import direct_from
from tests.harness.compare import compare, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Buffers, ParityModel, SharedModules, Transformer, Uneven
from tests.harness.training import Case, Step, dtensor_adamw, dtensor_sgd


@pytest.mark.parametrize("optimizer", [dtensor_adamw, dtensor_sgd])
@distributed(2, 4)
def test_mlp_trains_in_fp32(ctx: RankContext, optimizer) -> None:
    compare(Case(MLP, optimizer=optimizer), ctx.mesh_1d())


@distributed(2, 4)
def test_transformer_trains_in_fp32(ctx: RankContext) -> None:
    compare(Case(Transformer, num_steps=4), ctx.mesh_1d())


@distributed(2, 4)
def test_uneven_parameters_train_when_all_that_can_travels_direct(ctx: RankContext) -> None:
    with direct_from(0):
        compare(Case(Uneven, gather_full=True), ctx.mesh_1d())


@trains_alike(2, 4, model=functools.partial(Transformer, tied=True))
def test_tied_embedding_and_output_in_one_group_stay_tied(step: Step, model: Transformer) -> list[Tensor]:
    loss = step.loss(model)
    loss.backward()
    step.note("tied", model.output.weight is model.embedding.weight)
    step.note("names", [name for name, _ in model.named_parameters(remove_duplicate=False)])
    return [loss]


@distributed(2, 4)
def test_shared_modules_and_shared_parameters_train(ctx: RankContext) -> None:
    compare(Case(SharedModules), ctx.mesh_1d())


@distributed(2, 4)
def test_dims_uneven_or_smaller_than_the_world_train(ctx: RankContext) -> None:
    compare(Case(Uneven, gather_full=True), ctx.mesh_1d())


@distributed(2, 4)
def test_root_alone_makes_one_group_of_everything(ctx: RankContext) -> None:
    def shard(runtime, model, mesh) -> None:
        runtime.fully_shard(model, mesh=mesh)

    compare(Case(MLP, shard=shard), ctx.mesh_1d())
    compare(Case(Uneven, shard=shard), ctx.mesh_1d())


@distributed(2, 4)
def test_units_nest_three_deep(ctx: RankContext) -> None:
    def shard(runtime, model: Transformer, mesh) -> None:
        for block in model.blocks:
            runtime.fully_shard(block.mlp, mesh=mesh)
            runtime.fully_shard(block.attention, mesh=mesh)
            runtime.fully_shard(block, mesh=mesh)
        runtime.fully_shard(model, mesh=mesh)

    compare(Case(Transformer, shard=shard), ctx.mesh_1d())


@distributed(2, 4)
def test_root_without_parameters_of_its_own_trains(ctx: RankContext) -> None:
    def shard(runtime, model: MLP, mesh) -> None:
        for unit in (model.entry, *model.blocks, model.exit, model):
            runtime.fully_shard(unit, mesh=mesh)

    compare(Case(MLP, shard=shard), ctx.mesh_1d())


@distributed(2, 4)
def test_buffers_and_int_and_bool_inputs_pass_through(ctx: RankContext) -> None:
    compare(Case(Buffers), ctx.mesh_1d())


@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(2, 4)
def test_zero_grad_between_steps(ctx: RankContext, set_to_none: bool) -> None:
    compare(Case(MLP, set_to_none=set_to_none), ctx.mesh_1d())


@trains_alike(2, 4, model=MLP)
def test_inputs_that_require_grad_receive_their_gradient(step: Step, model: ParityModel) -> list[Tensor]:
    batch = step.batch(model)
    batch[0].requires_grad_()
    loss = model.loss(model(*batch), batch)
    loss.backward()
    assert batch[0].grad is not None
    return [loss, batch[0].grad]


@distributed(2, 4)
def test_parameters_of_float64_train_in_float64(ctx: RankContext) -> None:
    class Float64(MLP):
        def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
            return (super().batch(generator)[0].double(),)

    def shard(runtime, model: MLP, mesh) -> None:
        for unit in (*model.units(), model):
            runtime.fully_shard(unit, mesh=mesh)
        model.double()

    compare(Case(lambda: Float64().double(), reduce_dtype=torch.float64), ctx.mesh_1d())
    compare(Case(Float64, shard=shard, reduce_dtype=torch.float64, unsharded=None), ctx.mesh_1d())
