"""When parameters are unsharded and resharded: the setting, the controls by hand, and prefetching."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.harness.compare import Cases, compare, each_compared, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Transformer, Uneven
from tests.harness.training import (
    Case,
    Step,
    accumulate,
    frozen_by_turns,
    sgd,
    shard_units_and_root,
    sharded,
    snapshot,
)


def _registered(model: nn.Module) -> dict[str, object]:
    """What the modules hold now: sharded, unsharded, or sharded on the post-forward mesh."""
    held: dict[str, object] = {}
    for name, parameter in model.named_parameters():
        placements = str(parameter.placements) if isinstance(parameter, DTensor) else None
        held[name] = (placements, snapshot(parameter).spec.local_shape)
    return held


def _step_with_notes(step: Step, model: MLP) -> list[Tensor]:
    loss = step.loss(model)
    step.note("after forward", _registered(model))
    loss.backward()
    step.note("after backward", _registered(model))
    return [loss]


@pytest.mark.parametrize("reshard", [True, False, None])
@distributed(2, 4)
def test_reshard_after_forward(ctx: RankContext, reshard: bool | None) -> None:
    compare(Case(MLP, sharded(reshard_after_forward=reshard), _step_with_notes), ctx.mesh_1d())


@each_compared(4, ci=("Uneven",), long=("MLP", "Transformer"))
def test_reshard_after_forward_to_two_ranks() -> Cases:
    to_two = sharded(reshard_after_forward=2)
    return {model.__name__: Case(model, to_two, _step_with_notes) for model in (Uneven, MLP, Transformer)}


def _stays(model: Any) -> None:
    """With torch's runtime, any number means True."""
    model.set_reshard_after_backward(2)


def _micro_batches(step: Step, model: Any) -> list[Tensor]:
    """Also a forward without gradients, and parameters that are written by hand behind the step before."""
    if step.index == 2:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    with torch.no_grad():
        step.note("evaluated", step.loss(model))
    return accumulate(step, model)


def _written_between_micro_batches(step: Step, model: Any) -> list[Tensor]:
    losses = []
    for micro in range(2):
        with torch.no_grad():
            next(model.parameters()).add_(0.01)
        losses.append(step.loss(model, micro))
        losses[-1].backward()
    return losses


@each_compared(4, ci=("written", "frozen by turns", "mixed precision"))
def test_shards_on_two_ranks_stay_until_the_parameters_change() -> Cases:
    shard = sharded(reshard_after_forward=2, then=_stays)
    in_bf16 = sharded(reshard_after_forward=2, then=_stays, policy={"param_dtype": torch.bfloat16})
    return {
        "micro-batches": Case(Uneven, shard, _micro_batches, num_steps=3),
        "written": Case(MLP, shard, _written_between_micro_batches),
        "frozen by turns": Case(MLP, shard, frozen_by_turns),
        "mixed precision": Case(MLP, in_bf16, _micro_batches, sgd, reduce_dtype=torch.bfloat16, unsharded=None),
    }


@trains_alike(2, model=MLP, num_steps=4)
def test_set_reshard_after_forward_between_steps(step: Step, model: MLP) -> list[Tensor]:
    step.control(model).set_reshard_after_forward(step.index % 2 == 0)
    step.control(model.blocks[1]).set_reshard_after_forward(step.index % 2 == 1, recurse=False)
    return _step_with_notes(step, model)


@trains_alike(2, model=MLP)
def test_unshard_by_hand_before_forward(step: Step, model: MLP) -> list[Tensor]:
    step.note("returns", step.control(model.blocks[0]).unshard() is None)
    step.control(model).unshard()
    step.note("unsharded", _registered(model))
    step.note("values", next(model.blocks[0].parameters()))
    return _step_with_notes(step, model)


@trains_alike(2, 4, model=MLP)
def test_unshard_async_hands_out_a_handle(step: Step, model: MLP) -> list[Tensor]:
    first = step.control(model.blocks[0]).unshard(async_op=True)
    second = step.control(model.blocks[1]).unshard(async_op=True)
    step.note("is handle", step.runtime and isinstance(first, step.runtime.UnshardHandle))
    second.wait()
    step.note("second is unsharded", _registered(model.blocks[1]))
    first.wait()
    first.wait()
    step.note("values", {name: parameter.clone() for name, parameter in model.blocks[0].named_parameters()})
    step.control(model.blocks[2]).unshard(async_op=True)  # waited on by the forward
    return _step_with_notes(step, model)


@trains_alike(2, model=MLP, shard=sharded(reshard_after_forward=False))
def test_reshard_by_hand_before_and_after_forward(step: Step, model: MLP) -> list[Tensor]:
    step.control(model.blocks[0]).unshard()
    step.control(model.blocks[0]).reshard()
    step.note("resharded", _registered(model))
    loss = step.loss(model)
    for module in (model, *model.units()):
        step.control(module).reshard()
    step.note("after forward", _registered(model))
    loss.backward()
    step.control(model).reshard()  # of a sharded module: nothing to do
    return [loss]


@trains_alike(2, model=MLP, unsharded=None)
def test_parameters_can_be_changed_while_unsharded_only_for_one_use(step: Step, model: MLP) -> list[Tensor]:
    step.control(model.blocks[0]).unshard()
    with torch.no_grad():
        model.blocks[0].up.bias.add_(1.0)  # the shards do not follow
    with torch.no_grad():
        changed = step.loss(model)
    step.note("loss of changed", changed)
    step.control(model.blocks[0]).reshard()
    return _step_with_notes(step, model)


@pytest.mark.parametrize("distance", [1, 2])
@distributed(2, 4)
def test_explicit_forward_and_backward_prefetch(ctx: RankContext, distance: int) -> None:
    def shard(runtime, model: Transformer, mesh) -> None:
        shard_units_and_root(runtime, model, mesh)
        blocks = list(model.blocks)
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + distance])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - distance) : index][::-1])
        model.set_modules_to_forward_prefetch(blocks[:distance])

    compare(Case(functools.partial(Transformer, num_blocks=3), shard=shard), ctx.mesh_1d())


@distributed(2)
def test_prefetch_in_an_order_that_does_not_come_is_harmless(ctx: RankContext) -> None:
    def configure(model: MLP) -> None:
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2]])
        model.blocks[2].set_modules_to_backward_prefetch([model.blocks[0]])

    compare(Case(MLP, sharded(then=configure), _step_with_notes), ctx.mesh_1d())
