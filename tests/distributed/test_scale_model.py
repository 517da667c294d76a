"""The model of ``benchmarks/scale`` performs the actions that the runtime performs, in its order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fsdp2
from fsdp2.schedule.schedule import AfterForward, UnitRules
from fsdp2.tools import trace
from tests.distributed.support import Block, same_on_all_ranks, seeded, step
from tests.harness.distributed import RankContext

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from fsdp2.tools.planner.groups import Flight, GroupCost
from fsdp2.tools.planner.machine import Resource, Transfer
from fsdp2.tools.planner.simulate import Accelerator, UnitCost

NUM_BLOCKS = 3


def _runtime(ctx: RankContext, reshard_after_forward: Any) -> list[str]:
    """The actions of the second step."""
    model = seeded(lambda: nn.Sequential(*(Block() for _ in range(NUM_BLOCKS))))
    for block in model:
        fsdp2.fully_shard(block, mesh=ctx.mesh_1d(), reshard_after_forward=reshard_after_forward)
    model = fsdp2.fully_shard(model, mesh=ctx.mesh_1d())
    step(model)
    with trace.record(model) as recorded:
        step(model)
    return recorded.actions()


def _model(after_forward: AfterForward) -> list[str]:
    flight = Flight(Transfer(0.0, 1.0, Resource.NETWORK))
    group = GroupCost(flight, flight, (flight,), 1, 1, 1, 1, 1)
    device = Accelerator(
        [UnitCost("block", 1.0, 2.0, group)] * NUM_BLOCKS,
        [UnitRules(after_forward=AfterForward.KEEP), *[UnitRules(after_forward=after_forward)] * NUM_BLOCKS],
    )
    device.step()
    first = len(device.performed)
    device.step()
    names = ["(root)", *map(str, range(NUM_BLOCKS))]
    return [f"{action.value} {names[unit]}" for action, unit in device.performed[first:]]


@pytest.mark.parametrize(
    ("reshard_after_forward", "after_forward", "world_size"),
    [
        (True, AfterForward.RESHARD, 2),
        (False, AfterForward.KEEP, 2),
        (2, AfterForward.RESHARD_TO_SMALLER_MESH, 4),
    ],
)
def test_model_performs_what_the_runtime_performs(
    reshard_after_forward: Any, after_forward: AfterForward, world_size: int
) -> None:
    ran = same_on_all_ranks(_runtime, world_size=world_size, reshard_after_forward=reshard_after_forward)
    assert _model(after_forward) == ran
