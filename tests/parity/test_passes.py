"""Passes other than one forward and one backward of the root, and what they may return."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.harness.compare import compare, compare_losses_with_unsharded, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import (
    MLP,
    Buffers,
    Nested,
    ParityModel,
    Transformer,
    as_dataclass,
    as_dict,
    as_namedtuple,
    as_tuple,
)
from tests.harness.runtimes import Runtime, beyond_torch
from tests.harness.training import Case, Step, one_backward, shard_units_and_root


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


class FrozenEntry(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.entry.requires_grad_(False)


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


def _in_units(runtime: Runtime, model: MLP, mesh: DeviceMesh) -> None:
    """The root has no parameters, and returns what its last unit has returned."""
    for unit in (model.entry, *model.blocks, model.exit, model):
        runtime.fully_shard(unit, mesh=mesh)


def _as_torchtitan(runtime: Runtime, model: MLP, mesh: DeviceMesh) -> None:
    """The last modules are one unit."""
    for unit in (model.entry, *model.blocks[:2], [model.blocks[2], model.exit], model):
        runtime.fully_shard(unit, mesh=mesh)


def _all_but_entry(runtime: Runtime, model: MLP, mesh: DeviceMesh) -> None:
    for unit in (*model.blocks, model.exit, model):
        runtime.fully_shard(unit, mesh=mesh)


SHARED_OUTPUTS = [
    (MLP, shard_units_and_root),
    (MLP, _in_units),
    (MLP, _as_torchtitan),
    (MLP, _all_but_entry),
    (FrozenEntry, _all_but_entry),
    (Chain, shard_units_and_root),
    (TwoExits, shard_units_and_root),
]


@pytest.mark.parametrize(("model", "shard"), SHARED_OUTPUTS)
@distributed(2, 4)
def test_several_forwards_of_a_model_that_returns_what_a_unit_returned(ctx: RankContext, model, shard) -> None:
    """The gradient of that one tensor begins the backward of both."""

    def step(step: Step, model: ParityModel) -> list[Tensor]:
        losses = [step.loss(model, micro) for micro in range(4)]
        losses[1].backward()  # in no order of forwards
        (losses[0] + losses[2]).backward()
        return losses  # nobody asks for the gradients of the last one

    compare(Case(model, shard=shard, step=step), ctx.mesh_1d())


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_several_forwards_before_one_backward(ctx: RankContext, reshard: bool) -> None:
    def step(step: Step, model: ParityModel) -> list[Tensor]:
        loss = torch.stack([step.loss(model, micro) for micro in range(3)]).sum()
        loss.backward()
        return [loss]

    shard = functools.partial(shard_units_and_root, reshard_after_forward=reshard)
    compare(Case(MLP, shard=shard, step=step), ctx.mesh_1d())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
@distributed(2)
def test_several_forwards_before_as_many_backwards(ctx: RankContext, order: tuple[int, ...]) -> None:
    def step(step: Step, model: ParityModel) -> list[Tensor]:
        losses = [step.loss(model, micro) for micro in range(3)]
        for index in order:
            losses[index].backward()
        return losses

    compare(Case(MLP, step=step), ctx.mesh_1d())


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2, 4)
def test_several_backwards_through_one_forward(ctx: RankContext, reshard: bool) -> None:
    def step(step: Step, model: ParityModel) -> list[Tensor]:
        loss = step.loss(model)
        loss.backward(retain_graph=True)
        (2 * loss).backward(retain_graph=True)
        loss.backward()
        return [loss]

    shard = functools.partial(shard_units_and_root, reshard_after_forward=reshard)
    compare(Case(MLP, shard=shard, step=step), ctx.mesh_1d())


@distributed(2)
def test_one_unit_runs_several_times_in_a_forward(ctx: RankContext) -> None:
    class Recurrent(MLP):
        def forward(self, x: Tensor) -> Tensor:
            x = self.entry(x)
            for _ in range(3):
                x = self.blocks[1](self.blocks[0](x))
            return self.exit(self.blocks[2](x))

    compare(Case(Recurrent), ctx.mesh_1d())


def _evaluate_then_train(guard, first_step: int, step: Step, model: ParityModel) -> list[Tensor]:
    losses = []
    if step.index >= first_step:
        model.eval()
        with guard():
            losses = [step.loss(model, micro=7), step.loss(model, micro=8)]
        model.train()
    return losses + one_backward(step, model)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("model", [MLP, Transformer])
@distributed(2)
def test_evaluation_between_training_steps(ctx: RankContext, guard, model) -> None:
    compare(Case(model, step=functools.partial(_evaluate_then_train, guard, 1)), ctx.mesh_1d())


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2, 4)
def test_evaluation_under_no_grad_comes_first(ctx: RankContext, reshard: bool) -> None:
    shard = functools.partial(shard_units_and_root, reshard_after_forward=reshard)
    compare(Case(MLP, shard, functools.partial(_evaluate_then_train, torch.no_grad, 0)), ctx.mesh_1d())


@beyond_torch("raises: its buffers become inference tensors when the first forward is in inference mode")
@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_evaluation_under_inference_mode_comes_first(ctx: RankContext, reshard: bool) -> None:
    shard = functools.partial(shard_units_and_root, reshard_after_forward=reshard)
    case = Case(MLP, shard, functools.partial(_evaluate_then_train, torch.inference_mode, 0))
    detour = Case(MLP, shard, functools.partial(_evaluate_then_train, torch.no_grad, 0))
    compare(case, ctx.mesh_1d(), oracle_case=detour)


def _train_then_evaluate(reshard_by_hand: bool, step: Step, model: ParityModel) -> list[Tensor]:
    losses = one_backward(step, model)
    with torch.no_grad():
        losses.append(step.loss(model, micro=7))
    if reshard_by_hand:
        step.control(model).reshard()
    return losses


@distributed(2)
def test_evaluation_before_the_optimizer_step_and_reshard_by_hand(ctx: RankContext) -> None:
    compare(Case(MLP, step=functools.partial(_train_then_evaluate, True)), ctx.mesh_1d())


@beyond_torch("keeps the root unsharded after an evaluation, so the next step computes with parameters gone stale")
@distributed(2, 4)
def test_evaluation_before_the_optimizer_step_leaves_nothing_stale(ctx: RankContext) -> None:
    case = Case(MLP, step=functools.partial(_train_then_evaluate, False))
    compare_losses_with_unsharded(case, ctx.mesh_1d())


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


@distributed(2)
def test_two_roots_in_one_loss(ctx: RankContext) -> None:
    class Tower(ParityModel):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = MLP(2), MLP(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) * self.right(x)

    def shard(runtime, model: Tower, mesh) -> None:
        shard_units_and_root(runtime, model.left, mesh)
        shard_units_and_root(runtime, model.right, mesh)

    compare(Case(Tower, shard=shard), ctx.mesh_1d())


@trains_alike(2, model=MLP, unsharded=None)
def test_gradients_by_autograd_grad_of_the_inputs(step: Step, model: ParityModel) -> list[Tensor]:
    losses = one_backward(step, model)
    (x,) = step.batch(model, micro=1)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model.loss(model(x), (x,)), [x])
    return [*losses, gradient]


@distributed(2, 4)
def test_eval_mode_uses_the_running_buffers(ctx: RankContext) -> None:
    compare(Case(Buffers, step=functools.partial(_evaluate_then_train, torch.no_grad, 1)), ctx.mesh_1d())
