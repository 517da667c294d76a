"""Optimizers of torch, each way they are implemented, on the shards: the same parameters as with torch's shards."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

from fsdp2._torch import torch_is_at_least
from tests.harness.compare import compare, compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of
from tests.harness.models import MLP, Uneven
from tests.harness.runtimes import Runtime, beyond_torch, oracle, subject
from tests.harness.selection import long
from tests.harness.training import Case, Step, Tolerance, dtensor_adamw, one_backward
from tests.parity.setups import SETUPS, Setup, hybrid_mesh, setups, train_steps, whole

# eps is well above the rounding noise of a gradient, so that noise stays noise in the update
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.02, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 1e-2, "eps": 1e-3, "amsgrad": True},
    "AdamW": {"lr": 1e-2, "eps": 1e-3},
    "Adagrad": {"lr": 1e-2, "eps": 1e-3},
    "RMSprop": {"lr": 1e-3, "eps": 1e-3, "momentum": 0.9, "centered": True},
    "NAdam": {"lr": 1e-2, "eps": 1e-3},
    "RAdam": {"lr": 1e-2, "eps": 1e-3},
    "Adamax": {"lr": 1e-2, "eps": 1e-3},
    "Adadelta": {"lr": 0.5, "eps": 1e-3},
    "ASGD": {"lr": 0.02},
}
MORE_OPTIMIZERS = ("AdamW", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta")
FUSED = ("Adam", "AdamW")  # DTensor has no rule for the fused kernels of SGD and Adagrad


def _optimizer(name: str, **options: Any) -> Any:
    return functools.partial(getattr(torch.optim, name), **OPTIMIZERS[name], **options)


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "for_loop"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "ASGD", *long(*MORE_OPTIMIZERS)])
@distributed(2)
def test_optimizer_trains(ctx: RankContext, name: str, foreach: bool) -> None:
    compare(Case(Uneven, optimizer=_optimizer(name, foreach=foreach)), ctx.mesh_1d())


@pytest.mark.parametrize("name", FUSED)
@distributed(2, 4)
def test_fused_optimizer_trains(ctx: RankContext, name: str) -> None:
    compare(Case(Uneven, optimizer=_optimizer(name, fused=True)), ctx.mesh_1d())


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@distributed(2)
def test_gradients_that_are_zeroed_in_place_on_hsdp(ctx: RankContext, options: dict[str, bool]) -> None:
    case = Case(MLP, optimizer=_optimizer("AdamW", **options), set_to_none=False)
    compare(case, hybrid_mesh(ctx))


@distributed(2)
def test_muon_orthogonalises_whole_matrices(ctx: RankContext) -> None:
    def muon(parameters: Any) -> Optimizer:
        return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.02)

    compare(Case(MLP, optimizer=muon, unsharded=Tolerance(rtol=5e-2, atol=1e-2)), ctx.mesh_1d())  # it works in bfloat16


@pytest.mark.parametrize("name", ["Adafactor", "fused SGD", *([] if torch_is_at_least(2, 15) else ["Rprop"])])
@distributed(2)
def test_optimizer_that_has_no_rule_for_dtensors_is_refused_as_under_torch(ctx: RankContext, name: str) -> None:
    messages = []
    for runtime in (oracle(), subject()):
        model = SETUPS["uneven"].sharded(runtime, ctx)
        options = {"fused": True} if name == "fused SGD" else {}
        optimizer = getattr(torch.optim, name.removeprefix("fused "))(model.parameters(), lr=0.1, **options)
        one_backward(Step(0, ctx.rank, runtime), model)
        messages.append(error_of(optimizer.step))
    assert messages[0] == messages[1]


@distributed(2)
def test_learning_rate_schedule(ctx: RankContext) -> None:
    def scheduled(parameters: Any) -> Optimizer:
        optimizer = dtensor_adamw(parameters)
        warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
        decay = lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
        schedule = lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[2])
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    compare(Case(MLP, optimizer=scheduled, num_steps=5), ctx.mesh_1d())


@distributed(2)
def test_parameter_groups_with_options_of_their_own(ctx: RankContext) -> None:
    def two_groups(parameters: Any) -> Optimizer:
        parameters = list(parameters)
        plain = [p for p in parameters if p.ndim < 2]
        decayed = [p for p in parameters if p.ndim >= 2]
        return dtensor_adamw([{"params": decayed}, {"params": plain, "weight_decay": 0.0, "lr": 0.1}])

    compare(Case(MLP, optimizer=two_groups), ctx.mesh_1d())


# Optimizers that step in backward


def _step_in_backward(model: Any) -> dict[Any, Optimizer]:
    """One optimizer per parameter, which steps as soon as its gradient is there and drops it."""
    optimizers = {parameter: dtensor_adamw([parameter]) for parameter in model.parameters()}

    def step(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return optimizers


def _trained_in_backward(
    setup: Setup, runtime: Runtime, ctx: RankContext, *, keep: bool = False, last: Sequence[int] = range(3)
) -> Any:
    """``last``: the backwards that are said to be the last of a step."""
    model = setup.sharded(runtime, ctx)
    model.set_reshard_after_backward(not keep)
    optimizers = _step_in_backward(model)
    losses = []
    for index in range(3):
        model.set_is_last_backward(index in last)
        losses += one_backward(Step(index, ctx.rank, runtime), model)
        assert index not in last or all(parameter.grad is None for parameter in optimizers)
    return whole([[loss.detach() for loss in losses], list(optimizers)])


def _trained_as_usual(setup: Setup, ctx: RankContext) -> Any:
    model = setup.sharded(subject(), ctx)
    parameters = list(model.parameters())
    losses = train_steps(ctx, model, dtensor_adamw(parameters), range(3))
    return whole([losses, parameters])


@setups("hsdp", "kept", long=("uneven", "resting", "tied"))
@distributed(2)
def test_optimizer_that_steps_in_backward(ctx: RankContext, setup: str) -> None:
    where = SETUPS[setup]
    found = _trained_in_backward(where, subject(), ctx)
    compare_values("against stepping after backward", found, _trained_as_usual(where, ctx))
    if ctx.world_size == 2:
        compare_values("against torch", found, _trained_in_backward(where, oracle(), ctx))


@setups("kept", long=("uneven", "hsdp"))
@distributed(2)
def test_optimizer_that_steps_in_backward_has_stepped_before_the_next_forward(ctx: RankContext, setup: str) -> None:
    """Also where the backward is not the last one of a step, so that nobody waits for its reductions."""
    where = SETUPS[setup]
    found = _trained_in_backward(where, subject(), ctx, last=[2])
    compare_values("against torch", found, _trained_in_backward(where, oracle(), ctx, last=[2]))


@beyond_torch("computes with the parameters that were gathered before the optimizer wrote the shards")
@setups("uneven", "kept", "resting")
@distributed(2)
def test_optimizer_that_steps_in_backward_outdates_parameters_kept_after_it(ctx: RankContext, setup: str) -> None:
    found = _trained_in_backward(SETUPS[setup], subject(), ctx, keep=True)
    compare_values("against stepping after backward", found, _trained_as_usual(SETUPS[setup], ctx))


class Repeated(MLP):
    """Runs one block three times."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for _ in range(3):
            x = self.blocks[0](x)
        return self.exit(x)


@distributed(2)
def test_optimizer_that_steps_in_backward_of_a_unit_that_runs_several_times(ctx: RankContext) -> None:
    """The unit is reduced after each of its backwards; the gradient is there after the last one only."""
    where = Setup(Repeated)
    found = _trained_in_backward(where, subject(), ctx, keep=False)
    compare_values("against stepping after backward", found, _trained_as_usual(where, ctx))
    compare_values("against torch", found, _trained_in_backward(where, oracle(), ctx, keep=False))
