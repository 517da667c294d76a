"""The setters that control a step: what backward gathers and reduces, how much is in flight, when a forward starts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.harness.compare import compare, compare_losses_with_unsharded, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, ParityModel, PartlyUsed, Transformer
from tests.harness.runtimes import Runtime, beyond_torch
from tests.harness.training import Case, Step, accumulate, one_backward, shard_units_and_root, snapshot


def _shard_and(configure, runtime: Runtime, model: Any, mesh: DeviceMesh, **kwargs: Any) -> None:
    shard_units_and_root(runtime, model, mesh, **kwargs)
    configure(model)


# unshard_in_backward


def _shard_embedding_alone(runtime: Runtime, model: Any, mesh: DeviceMesh, **kwargs: Any) -> None:
    runtime.fully_shard(model.embedding, mesh=mesh, **kwargs)
    shard_units_and_root(runtime, model, mesh, **kwargs)
    model.embedding.set_unshard_in_backward(False)


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2, 4)
def test_embedding_that_backward_does_not_gather(ctx: RankContext, reshard: bool) -> None:
    shard = functools.partial(_shard_embedding_alone, reshard_after_forward=reshard)
    compare(Case(Transformer, shard), ctx.mesh_1d())


@distributed(2)
def test_embedding_that_backward_does_not_gather_with_accumulation(ctx: RankContext) -> None:
    def step(step: Step, model: Transformer) -> list[Tensor]:
        losses = []
        for micro in range(3):
            step.control(model).set_requires_gradient_sync(micro == 2)
            losses.append(step.loss(model, micro))
            losses[-1].backward()
            step.note(f"registered after {micro}", type(model.embedding.weight).__name__)
        return losses

    compare(Case(Transformer, _shard_embedding_alone, step), ctx.mesh_1d())


# reduce_scatter_max_input_buffers


def _with_buffers(num: int) -> Any:
    return functools.partial(_shard_and, lambda model: model.set_reduce_scatter_max_input_buffers(num))


@pytest.mark.parametrize("num_buffers", [1, 2, 3, 99])
@distributed(2)
def test_any_number_of_reductions_in_flight(ctx: RankContext, num_buffers: int) -> None:
    compare(Case(lambda: MLP(num_blocks=5), _with_buffers(num_buffers)), ctx.mesh_1d())


@distributed(2)
def test_numbers_of_reductions_in_flight_that_differ_between_units(ctx: RankContext) -> None:
    def configure(model: MLP) -> None:
        model.blocks[1].set_reduce_scatter_max_input_buffers(3, recurse=False)

    compare(Case(MLP, functools.partial(_shard_and, configure)), ctx.mesh_1d())


class _UsedTwice(MLP):
    """The same block at two depths: two reductions of one group in one backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2]):
            x = block(x)
        return self.exit(x)


@distributed(2)
def test_two_reductions_of_one_unit_in_flight_at_a_time(ctx: RankContext) -> None:
    compare(Case(_UsedTwice, _with_buffers(4)), ctx.mesh_1d())


@pytest.mark.long
@distributed(2)
def test_reductions_in_flight_on_hsdp_without_all_reduce_until_the_last_micro_batch(ctx: RankContext) -> None:
    step = functools.partial(accumulate, switch="set_requires_all_reduce")
    meshes = [ctx.mesh_2d(2, 1), ctx.mesh_2d(1, 2)] if ctx.world_size == 2 else [ctx.mesh_2d(2, 2)]
    for mesh in meshes:
        compare(Case(MLP, _with_buffers(4), step), mesh)
        # torch sums the two uses in another order where the replicate axis is longer than 1, so only to rounding
        compare_losses_with_unsharded(Case(_UsedTwice, _with_buffers(4), step), mesh)


# is_last_backward


@distributed(2)
def test_backwards_that_are_not_the_last_leave_reductions_in_flight_for_the_next(ctx: RankContext) -> None:
    step = functools.partial(accumulate, switch="set_is_last_backward")
    compare(Case(MLP, _with_buffers(3), step), ctx.mesh_1d())
    compare(Case(_UsedTwice, step=step), ctx.mesh_1d())


# reduce_scatter_unused_params


def _with_unused(model: ParityModel) -> None:
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]


def _zeros_for_unused(step: Step, model: nn.Module) -> None:
    """What the option does for a sharded model."""
    if step.runtime is None:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _other_parameters_on_each_rank(step: Step, model: PartlyUsed) -> list[Tensor]:
    loss = step.loss(model, use_side=(step.index + step.rank) % 2 == 0)
    loss.backward()
    _zeros_for_unused(step, model)
    return [loss]


@distributed(2)
def test_ranks_that_use_other_parameters_get_zeros_not_none(ctx: RankContext) -> None:
    shard = functools.partial(_shard_and, _with_unused)
    compare(Case(PartlyUsed, shard, _other_parameters_on_each_rank), ctx.mesh_1d())


@distributed(2)
def test_ranks_that_use_other_parameters_on_hsdp(ctx: RankContext) -> None:
    shard = functools.partial(_shard_and, _with_unused)
    mesh = ctx.mesh_2d(2, ctx.world_size // 2)
    compare(Case(PartlyUsed, shard, _other_parameters_on_each_rank), mesh)


@distributed(2)
def test_parameters_that_no_rank_uses_get_zeros(ctx: RankContext) -> None:
    def step(step: Step, model: PartlyUsed) -> list[Tensor]:
        loss = step.loss(model, use_side=False)
        loss.backward()
        _zeros_for_unused(step, model)
        step.note("gradient of an unused parameter", snapshot(model.blocks[0].side.weight.grad))
        return [loss]

    compare(Case(PartlyUsed, functools.partial(_shard_and, _with_unused), step), ctx.mesh_1d())


@distributed(2)
def test_frozen_parameters_get_no_zeros(ctx: RankContext) -> None:
    def model() -> PartlyUsed:
        model = PartlyUsed()
        model.blocks[1].side.requires_grad_(False)
        return model

    shard = functools.partial(_shard_and, _with_unused)
    compare(Case(model, shard, _other_parameters_on_each_rank), ctx.mesh_1d())


@distributed(2)
def test_unused_parameters_of_one_unit_only(ctx: RankContext) -> None:
    def configure(model: PartlyUsed) -> None:
        model.blocks[1].set_reduce_scatter_unused_params(True)

    def step(step: Step, model: PartlyUsed) -> list[Tensor]:
        loss = step.loss(model, use_side=False)
        loss.backward()
        if step.runtime is None:
            for parameter in model.blocks[1].side.parameters():
                parameter.grad = torch.zeros_like(parameter)
        return [loss]

    compare(Case(PartlyUsed, functools.partial(_shard_and, configure), step), ctx.mesh_1d())


class _Dropped(MLP):
    """All blocks run, as the ranks' gathers must match, but a rank goes on without the outputs of some."""

    def forward(self, x: Tensor, dropped: tuple[int, ...] = ()) -> Tensor:  # type: ignore[override]
        x = self.entry(x)
        for index, block in enumerate(self.blocks):
            output = block(x)
            x = x if index in dropped else output
        return self.exit(x)


def _other_units_on_each_rank(step: Step, model: _Dropped) -> list[Tensor]:
    losses = []
    for micro in range(2):
        step.control(model).set_requires_gradient_sync(micro == 1)
        first = (step.index + step.rank + micro) % 3
        losses.append(step.loss(model, micro, dropped=(first, (first + 1) % 3)))
        losses[-1].backward()
    _zeros_for_unused(step, model)
    return losses


@beyond_torch("it reduces whole units in the order of each rank's own backward, so that other units meet")
@pytest.mark.parametrize("num_buffers", [1, 3])
@distributed(2)
def test_ranks_that_use_other_units(ctx: RankContext, num_buffers: int) -> None:
    def configure(model: ParityModel) -> None:
        model.set_ranks_may_differ(True)  # type: ignore[operator]
        _with_unused(model)
        model.set_reduce_scatter_max_input_buffers(num_buffers)  # type: ignore[operator]

    shard = functools.partial(_shard_and, configure, reshard_after_forward=False)  # backwards must gather the same
    case = Case(_Dropped, shard, _other_units_on_each_rank)
    compare_losses_with_unsharded(case, ctx.mesh_1d())


@beyond_torch("it reduces whole units in the order of each rank's own backward, so that other units meet")
@distributed(4)
def test_ranks_that_use_other_units_on_hsdp(ctx: RankContext) -> None:
    def configure(model: ParityModel) -> None:
        model.set_ranks_may_differ(True)  # type: ignore[operator]
        _with_unused(model)

    shard = functools.partial(_shard_and, configure, reshard_after_forward=False)
    case = Case(_Dropped, shard, _other_units_on_each_rank)
    compare_losses_with_unsharded(case, ctx.mesh_2d(2, 2))


# How a forward begins, and on which stream it gathers


@trains_alike(2, model=MLP)
def test_post_optim_event(step: Step, model: ParityModel) -> list[Tensor]:
    step.control(model).set_post_optim_event(torch.cpu.current_stream().record_event())
    return one_backward(step, model)


@trains_alike(2, model=MLP)
def test_unshard_async_op_switched_between_steps(step: Step, model: ParityModel) -> list[Tensor]:
    step.control(model)._set_unshard_async_op(step.index != 1)
    if step.runtime is not None:
        for unit in model.units():
            unit.unshard(async_op=True)  # type: ignore[operator]
    return one_backward(step, model)
