"""The setters that control a step: what backward gathers and reduces, how much is in flight, when a forward starts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.harness.compare import (
    Cases,
    compare,
    compare_losses_with_unsharded,
    each_compared,
    hsdp,
    one_replica,
    trains_alike,
)
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Branches, ParityModel, PartlyUsed, Transformer, frozen
from tests.harness.runtimes import Runtime, beyond_torch
from tests.harness.training import Case, Step, accumulate, one_backward, shard_units_and_root, sharded, snapshot

# unshard_in_backward


def _shard_embedding_alone(runtime: Runtime, model: Any, mesh: DeviceMesh, **kwargs: Any) -> None:
    runtime.fully_shard(model.embedding, mesh=mesh, **kwargs)
    shard_units_and_root(runtime, model, mesh, **kwargs)
    model.embedding.set_unshard_in_backward(False)


def _embedding(model: Any) -> str:
    return type(model.embedding.weight).__name__


@each_compared(2, 4, ci=("kept",))
def test_embedding_that_backward_does_not_gather() -> Cases:
    return {
        "resharded": Case(Transformer, functools.partial(_shard_embedding_alone, reshard_after_forward=True)),
        "kept": Case(Transformer, functools.partial(_shard_embedding_alone, reshard_after_forward=False)),
        "accumulation": Case(Transformer, _shard_embedding_alone, functools.partial(accumulate, note=_embedding)),
    }


# reduce_scatter_max_input_buffers


def _with_buffers(num: int) -> Any:
    return sharded(then=lambda model: model.set_reduce_scatter_max_input_buffers(num))


_used_twice = functools.partial(Branches, (0, 1, 0, 2))  # two reductions of one group in one backward


@each_compared(2, ci=("2", "3", "99"))
def test_any_number_of_reductions_in_flight() -> Cases:
    """Also if it differs between units. Backwards that are not the last leave reductions in flight for the next."""
    differ = sharded(then=lambda model: model.blocks[1].set_reduce_scatter_max_input_buffers(3, recurse=False))
    step = functools.partial(accumulate, switch="set_is_last_backward")
    return {
        **{str(num): Case(lambda: MLP(num_blocks=5), _with_buffers(num)) for num in (1, 2, 3, 99)},
        "differs between units": Case(MLP, differ),
        "two of one unit": Case(_used_twice, _with_buffers(4)),
        "backwards that are not the last": (Case(MLP, _with_buffers(3), step), Case(_used_twice, step=step)),
    }


@pytest.mark.long
@distributed(2)
def test_reductions_in_flight_on_hsdp_without_all_reduce_until_the_last_micro_batch(ctx: RankContext) -> None:
    step = functools.partial(accumulate, switch="set_requires_all_reduce")
    for mesh in (hsdp(ctx), one_replica(ctx)):
        compare(Case(MLP, _with_buffers(4), step), mesh)
        # torch sums the two uses in another order where the replicate axis is longer than 1, so only to rounding
        compare_losses_with_unsharded(Case(_used_twice, _with_buffers(4), step), mesh)


# reduce_scatter_unused_params


def _with_unused(model: ParityModel) -> None:
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]


WITH_UNUSED = sharded(then=_with_unused)


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
    for mesh in (ctx.mesh_1d(), hsdp(ctx)):
        compare(Case(PartlyUsed, WITH_UNUSED, _other_parameters_on_each_rank), mesh)
    with_frozen = Case(frozen(PartlyUsed, "blocks.1.side"), WITH_UNUSED, _other_parameters_on_each_rank)
    compare(with_frozen, ctx.mesh_1d())


@pytest.mark.every_case
@pytest.mark.parametrize("only_one", [False, True])
@distributed(2)
def test_parameters_that_no_rank_uses_get_zeros(ctx: RankContext, only_one: bool) -> None:
    """Those of all units, or of one only."""

    def unit(model: PartlyUsed) -> Any:
        return model.blocks[1] if only_one else model

    def step(step: Step, model: PartlyUsed) -> list[Tensor]:
        loss = step.loss(model, use_side=False)
        loss.backward()
        _zeros_for_unused(step, unit(model).get_submodule("side" if only_one else ""))
        unused = (model.blocks[1] if only_one else model.blocks[0]).side.weight.grad
        step.note("gradient of an unused parameter", snapshot(unused))
        return [loss]

    compare(Case(PartlyUsed, sharded(then=lambda model: _with_unused(unit(model))), step), ctx.mesh_1d())


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


def _may_differ(num_buffers: int = 1) -> Any:
    def configure(model: Any) -> None:
        model.set_ranks_may_differ(True)
        _with_unused(model)
        model.set_reduce_scatter_max_input_buffers(num_buffers)

    return sharded(then=configure, reshard_after_forward=False)  # backwards must gather the same


@beyond_torch("it reduces whole units in the order of each rank's own backward, so that other units meet")
@pytest.mark.parametrize("num_buffers", [1, 3])
@distributed(2)
def test_ranks_that_use_other_units(ctx: RankContext, num_buffers: int) -> None:
    case = Case(_Dropped, _may_differ(num_buffers), _other_units_on_each_rank)
    compare_losses_with_unsharded(case, ctx.mesh_1d())


@beyond_torch("it reduces whole units in the order of each rank's own backward, so that other units meet")
@distributed(4)
def test_ranks_that_use_other_units_on_hsdp(ctx: RankContext) -> None:
    compare_losses_with_unsharded(Case(_Dropped, _may_differ(), _other_units_on_each_rank), ctx.mesh_2d(2, 2))


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
