"""Steps of a rank that can be computed by hand, and the actions of the runtime."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import fsdp2
from fsdp2.core.schedule.schedule import AfterForward
from fsdp2.memory.plan import Held, UnitBytes
from fsdp2.planner.groups import GroupCost
from fsdp2.planner.machine import Contention, Resource, Transfer
from fsdp2.planner.simulate import StepTime, steady_step
from fsdp2.report import trace
from tests.distributed.support import Block, step
from tests.harness.alone import on_one_rank
from tests.harness.distributed import RankContext
from tests.unit.planner.round_figures import KEEP, SMALLER, device_of, group_of


@pytest.mark.parametrize(
    ("num_units", "after_forward", "exposed"),
    [
        (1, AfterForward.RESHARD, 1 + 1 + 2),  # one group hides nothing
        (2, AfterForward.RESHARD, 1 + 1 + 2),  # first of forward, first of backward; last of backward
        (2, KEEP, 1 + 2),
        (2, SMALLER, 1 + 0.25 + 2),
    ],
)
def test_all_but_the_ends_is_hidden(num_units: int, after_forward: AfterForward, exposed: float) -> None:
    group = group_of(1, 2, regather=0.25 if after_forward is SMALLER else None)
    time = steady_step(device_of(num_units, group, after_forward=after_forward), Contention())
    assert time == StepTime(step=pytest.approx(num_units * 12 + exposed), compute=num_units * 12)


def test_a_reduction_that_outlasts_the_next_backward_holds_it_up() -> None:
    """One is in flight: the next backward may run meanwhile, the one behind it may not."""
    device = device_of(3, group_of(gather_seconds=0, reduce_seconds=10), forward=0, backward=8)
    assert steady_step(device, Contention()).step == pytest.approx(8 + 10 + 10 + 10)


def test_two_groups_are_in_flight_and_nothing_is_held_when_a_step_has_ended() -> None:
    """At the end of the fifth backward of six, four units rest: the fourth has been prefetched and has not arrived."""
    device = device_of(6, group_of(1, 2, regather=0.25), after_forward=SMALLER)
    device.step()
    assert device.memory.at_peak[Held.PARAMETERS] == 2 * 100 + 4 * 25
    assert device.memory.at_peak[Held.REDUCTION] == 210
    assert device.memory.at_peak[Held.GRADIENTS] == 100 + 110  # with copies that take more than the unit frees
    assert device.memory.held == 0


def _actions(after_forward: AfterForward) -> list[str]:
    transfer = Transfer(0.0, 1.0, Resource.NETWORK)
    device = device_of(
        3, GroupCost(transfer, transfer, (transfer,), UnitBytes(1, gradients=1), 1, 1, 1), after_forward=after_forward
    )
    device.step()
    first = len(device.performed)
    device.step()
    return [f"{action.value} {('(root)', '0', '1', '2')[unit]}" for action, unit in device.performed[first:]]


def _actions_of_the_runtime(ctx: RankContext, reshard_after_forward: Any) -> list[str]:
    """Of the second step."""
    model: Any = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        fsdp2.fully_shard(block, mesh=ctx.mesh_1d(), reshard_after_forward=reshard_after_forward)
    step(fsdp2.fully_shard(model, mesh=ctx.mesh_1d()))
    with trace.record(model) as recorded:
        step(model)
    return recorded.actions()


@pytest.mark.parametrize(
    ("reshard_after_forward", "after_forward"), [(True, AfterForward.RESHARD), (False, KEEP), (2, SMALLER)]
)
def test_model_acts_as_the_runtime(reshard_after_forward: bool | int, after_forward: AfterForward) -> None:
    ran = on_one_rank(_actions_of_the_runtime, world_size=4, reshard_after_forward=reshard_after_forward)
    assert _actions(after_forward) == ran
