"""Passes other than one forward and one backward of the root, and what they may return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness.compare import Cases, compare, compare_losses_with_unsharded, each_compared, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import (
    MLP,
    Branches,
    Buffers,
    Nested,
    ParityModel,
    Transformer,
    as_dataclass,
    as_dict,
    as_namedtuple,
    as_tuple,
    frozen,
)
from tests.harness.runtimes import beyond_torch
from tests.harness.training import Case, Step, one_backward, shard_units_and_root, sharded

KEPT = sharded(reshard_after_forward=False)


@pytest.mark.parametrize("structure", [as_tuple, as_dict, as_namedtuple, as_dataclass])
@distributed(2, 4)
def test_nested_outputs_are_returned_and_differentiated(ctx: RankContext, structure) -> None:
    def step(step: Step, model: Nested) -> list[Tensor]:
        batch = step.batch(model)
        output = model(*batch)
        step.note("type", type(output).__name__)
        loss = model.loss(output, batch)
        loss.backward()
        return [loss]

    compare(Case(functools.partial(Nested, structure), step=step), ctx.mesh_1d())


class Chain(MLP):
    """Units inside of units, each of which returns what its last unit has returned. None but the innermost ones have
    parameters."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third = self.blocks
        self.chain = nn.Sequential(nn.Sequential(self.entry, first, second), nn.Sequential(third, self.exit))
        del self.entry, self.blocks, self.exit

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(x)

    def units(self) -> list[nn.Module]:
        return [*self.chain[0], *self.chain[1], *self.chain, self.chain]


class TwoExits(MLP):
    """A forward uses one of two exits."""

    def __init__(self) -> None:
        super().__init__()
        self.other_exit = nn.Linear(self.dim, 8)

    def units(self) -> list[nn.Module]:
        return [self.entry, *self.blocks, self.exit, self.other_exit]


def _four_forwards(step: Step, model: ParityModel) -> list[Tensor]:
    losses = [step.loss(model, micro) for micro in range(4)]
    losses[1].backward()  # in no order of forwards
    (losses[0] + losses[2]).backward()
    return losses  # nobody asks for the gradients of the last one


SHARED_OUTPUTS = {
    "root alone": Case(MLP, step=_four_forwards),
    "root without parameters": Case(MLP, sharded(units=lambda m: [m.entry, *m.blocks, m.exit, m]), _four_forwards),
    "as torchtitan": Case(
        MLP, sharded(units=lambda m: [m.entry, *m.blocks[:2], [m.blocks[2], m.exit], m]), _four_forwards
    ),
    "all but the entry": Case(MLP, sharded(units=lambda m: [*m.blocks, m.exit, m]), _four_forwards),
    "frozen entry": Case(frozen(MLP, "entry"), sharded(units=lambda m: [*m.blocks, m.exit, m]), _four_forwards),
    "chain": Case(Chain, step=_four_forwards),
    "two exits": Case(TwoExits, step=_four_forwards),
}


@each_compared(2, 4, ci=[*SHARED_OUTPUTS][1:])
def test_several_forwards_of_a_model_that_returns_what_a_unit_returned() -> Cases:
    """The gradient of that one tensor begins the backward of both."""
    return SHARED_OUTPUTS


def _backward_three_times(step: Step, model: ParityModel) -> list[Tensor]:
    loss = step.loss(model)
    loss.backward(retain_graph=True)
    (2 * loss).backward(retain_graph=True)
    loss.backward()
    return [loss]


@each_compared(2, 4, ci=("three times, kept",))
def test_several_forwards_and_backwards() -> Cases:
    reshards = sharded(reshard_after_forward=True)
    return {
        "in no order, kept": Case(MLP, KEPT, _four_forwards),
        "three times": Case(MLP, reshards, _backward_three_times),
        "three times, kept": Case(MLP, KEPT, _backward_three_times),
        "a unit that runs several times": Case(functools.partial(Branches, (0, 1, 0, 1, 0, 1, 2))),
    }


class CallsItself(nn.Module):
    """Each call computes, then makes the next one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor, num_calls: int = 3) -> Tensor:
        x = x + torch.tanh(self.linear(x))
        return self(x, num_calls - 1) if num_calls > 1 else x


class CallThemselves(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CallsItself(self.dim) for _ in range(2))


class Twice(MLP):
    """The root calls itself on each half of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) == 1 else torch.cat([self(x[:1]), self(x[1:])])


@each_compared(2, 4, ci=("blocks",))
def test_units_that_call_themselves() -> Cases:
    return {
        "blocks": Case(CallThemselves),
        "blocks, kept": Case(CallThemselves, KEPT),
        "root": Case(Twice),
    }


def _evaluate_then_train(
    step: Step, model: ParityModel, guard: Callable[[], Any] = torch.no_grad, first_step: int = 0
) -> list[Tensor]:
    losses = []
    if step.index >= first_step:
        model.eval()
        with guard():
            losses = [step.loss(model, micro=7), step.loss(model, micro=8)]
        model.train()
    return losses + one_backward(step, model)


def _train_then_evaluate(step: Step, model: ParityModel) -> list[Tensor]:
    losses = one_backward(step, model)
    with torch.no_grad():
        return [*losses, step.loss(model, micro=7)]


def _train_then_evaluate_and_reshard(step: Step, model: ParityModel) -> list[Tensor]:
    losses = _train_then_evaluate(step, model)
    step.control(model).reshard()
    return losses


_infer_then_train = functools.partial(_evaluate_then_train, guard=torch.inference_mode)
INFERENCE = ("inference, MLP", "no_grad, Transformer", "inference, Transformer", "first, kept")


@each_compared(2, 4, ci=INFERENCE)
def test_evaluation_between_training_steps() -> Cases:
    steps = {"no_grad": _evaluate_then_train, "inference": _infer_then_train}
    later = {
        f"{name}, {model.__name__}": Case(model, step=functools.partial(step, first_step=1))
        for model in (MLP, Transformer)
        for name, step in steps.items()
    }
    return {
        **later,
        "running buffers": Case(Buffers, step=functools.partial(_evaluate_then_train, first_step=1)),
        "first": Case(MLP, sharded(reshard_after_forward=True), _evaluate_then_train),
        "first, kept": Case(MLP, KEPT, _evaluate_then_train),
        "before the optimizer's step, resharded by hand": Case(MLP, step=_train_then_evaluate_and_reshard),
    }


@beyond_torch("raises: its buffers become inference tensors when the first forward is in inference mode")
@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_evaluation_under_inference_mode_comes_first(ctx: RankContext, reshard: bool) -> None:
    shard = sharded(reshard_after_forward=reshard)
    detour = Case(MLP, shard, _evaluate_then_train)
    compare(Case(MLP, shard, _infer_then_train), ctx.mesh_1d(), oracle_case=detour)


@beyond_torch("keeps the root unsharded after an evaluation, so the next step computes with parameters gone stale")
@distributed(2, 4)
def test_evaluation_before_the_optimizer_step_leaves_nothing_stale(ctx: RankContext) -> None:
    compare_losses_with_unsharded(Case(MLP, step=_train_then_evaluate), ctx.mesh_1d())


@trains_alike(2, model=MLP)
def test_evaluation_between_forward_and_backward(step: Step, model: ParityModel) -> list[Tensor]:
    loss = step.loss(model)
    with torch.no_grad():
        other = step.loss(model, micro=7)
    loss.backward()
    return [loss, other]


@trains_alike(2, model=MLP)
def test_a_unit_alone_evaluates_after_the_root_has_run(step: Step, model: MLP) -> list[Tensor]:
    losses = one_backward(step, model)
    with torch.no_grad():
        encoded = model.blocks[1](step.batch(model, micro=7)[0])
    return [*losses, encoded]


@trains_alike(2, 4, model=MLP)
def test_a_unit_alone_trains_after_the_root_has_run(step: Step, model: MLP) -> list[Tensor]:
    losses = one_backward(step, model)
    alone = model.blocks[1](step.batch(model, micro=7)[0]).square().mean()
    alone.backward()
    return [*losses, alone]


class Tower(ParityModel):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = MLP(2), MLP(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * self.right(x)


@distributed(2)
def test_two_roots_in_one_loss(ctx: RankContext) -> None:
    def shard(runtime, model: Tower, mesh) -> None:
        shard_units_and_root(runtime, model.left, mesh)
        shard_units_and_root(runtime, model.right, mesh)

    compare(Case(Tower, shard), ctx.mesh_1d())


@trains_alike(2, model=MLP, unsharded=None)
def test_gradients_by_autograd_grad_of_the_inputs(step: Step, model: ParityModel) -> list[Tensor]:
    losses = one_backward(step, model)
    (x,) = step.batch(model, micro=1)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model.loss(model(x), (x,)), [x])
    return [*losses, gradient]
