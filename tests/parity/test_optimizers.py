"""Optimizers of torch, each way they are implemented, on the shards: the same parameters as with torch's shards."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler

from fsdp2._torch import torch_is_at_least
from tests.harness.compare import Cases, as_torchs, compare, compare_values, each_compared, hsdp
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of
from tests.harness.models import MLP, Branches, Uneven
from tests.harness.runtimes import Runtime, beyond_torch, oracle, subject
from tests.harness.selection import long
from tests.harness.training import Case, Step, Tolerance, dtensor_adamw, one_backward
from tests.parity.setups import SETUPS, Setup, setups, train_steps, whole

# eps is well above the rounding noise of a gradient, so that noise stays noise in the update
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.02, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 1e-2, "eps": 1e-3, "amsgrad": True},
    "Adagrad": {"lr": 1e-2, "eps": 1e-3},
    "ASGD": {"lr": 0.02},
    "RMSprop": {"lr": 1e-3, "eps": 1e-3, "momentum": 0.9, "centered": True},
    "Adadelta": {"lr": 0.5, "eps": 1e-3},
    **{name: {"lr": 1e-2, "eps": 1e-3} for name in ("AdamW", "NAdam", "RAdam", "Adamax")},
}


def _optimizer(name: str, **options: Any) -> Any:
    return functools.partial(getattr(torch.optim, name), **OPTIMIZERS[name], **options)


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "for_loop"])
@pytest.mark.parametrize("name", [*[*OPTIMIZERS][:4], *long(*[*OPTIMIZERS][4:])])
@distributed(2)
def test_optimizer_trains(ctx: RankContext, name: str, foreach: bool) -> None:
    compare(Case(Uneven, optimizer=_optimizer(name, foreach=foreach)), ctx.mesh_1d())


def _muon(parameters: Any) -> Optimizer:
    """It orthogonalises whole matrices."""
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.02)


def _scheduled(parameters: Any) -> Optimizer:
    optimizer = dtensor_adamw(parameters)
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
    decay = lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    schedule = lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[2])
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def _two_groups(parameters: Any) -> Optimizer:
    parameters = list(parameters)
    plain, decayed = [p for p in parameters if p.ndim < 2], [p for p in parameters if p.ndim >= 2]
    return dtensor_adamw([{"params": decayed}, {"params": plain, "weight_decay": 0.0, "lr": 0.1}])


@each_compared(2, 4, ci=("fused AdamW", "in place", "in place, not foreach", "in place, fused", "Muon"))
def test_optimizers_and_what_is_around_them() -> Cases:
    """DTensor has no rule for the fused kernels of SGD and Adagrad."""
    in_place = functools.partial(Case, MLP, set_to_none=False)
    return {
        "fused Adam": Case(Uneven, optimizer=_optimizer("Adam", fused=True)),
        "fused AdamW": Case(Uneven, optimizer=_optimizer("AdamW", fused=True)),
        "in place": (hsdp, in_place(optimizer=_optimizer("AdamW", foreach=True))),
        "in place, not foreach": (hsdp, in_place(optimizer=_optimizer("AdamW", foreach=False))),
        "in place, fused": (hsdp, in_place(optimizer=_optimizer("AdamW", fused=True))),
        "Muon": Case(MLP, optimizer=_muon, unsharded=Tolerance(rtol=5e-2, atol=1e-2)),  # it works in bfloat16
        "schedule of learning rates": Case(MLP, optimizer=_scheduled, num_steps=5),
        "groups with options of their own": Case(MLP, optimizer=_two_groups),
    }


@pytest.mark.parametrize("name", ["Adafactor", "fused SGD", *([] if torch_is_at_least(2, 15) else ["Rprop"])])
@as_torchs(2)
def test_optimizer_that_has_no_rule_for_dtensors_is_refused_as_under_torch(
    ctx: RankContext, runtime: Runtime, name: str
) -> str:
    model = SETUPS["uneven"].sharded(runtime, ctx)
    options = {"fused": True} if name == "fused SGD" else {}
    optimizer = getattr(torch.optim, name.removeprefix("fused "))(model.parameters(), lr=0.1, **options)
    one_backward(Step(0, ctx.rank, runtime), model)
    return error_of(optimizer.step)


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


@distributed(2)
def test_optimizer_that_steps_in_backward_of_a_unit_that_runs_several_times(ctx: RankContext) -> None:
    """The unit is reduced after each of its backwards; the gradient is there after the last one only."""
    where = Setup(functools.partial(Branches, (0, 0, 0)))
    found = _trained_in_backward(where, subject(), ctx)
    compare_values("against stepping after backward", found, _trained_as_usual(where, ctx))
    compare_values("against torch", found, _trained_in_backward(where, oracle(), ctx))
