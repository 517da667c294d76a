"""On the simulated accelerator models train as on the CPU, bit for bit, in whatever order streams leave open."""

from __future__ import annotations

import pytest

from tests.accelerator import device
from tests.accelerator.cases import CASES, FEW, SCHEDULES, differences, mesh_of, names, reference, run
from tests.accelerator.support import on_device
from tests.harness.distributed import RankContext
from tests.harness.runtimes import subject


def check(ctx: RankContext, name: str, schedules: list[str]) -> None:
    expected = reference(ctx, name)
    for schedule in schedules:
        found = differences(run(CASES[name], mesh_of(ctx, name), subject(), **SCHEDULES[schedule]), expected)
        assert not found, f"{name}, {schedule}: {len(found)} values differ, the first are {found[:4]}"
    assert device.load().ran_at_once() == set()  # else the order of streams was not free


_REST = [schedule for schedule in SCHEDULES if schedule not in FEW]
ORDERS = [pytest.param(FEW, id="few"), pytest.param(_REST, id="rest", marks=pytest.mark.long)]


@pytest.mark.parametrize("schedules", ORDERS)
@pytest.mark.parametrize("name", names(2))
@on_device(2)
def test_subject_trains_as_on_the_cpu(ctx: RankContext, name: str, schedules: list[str]) -> None:
    check(ctx, name, schedules)


@pytest.mark.parametrize("name", names(4))
@on_device(4)
def test_subject_trains_as_on_the_cpu_with_4_ranks(ctx: RankContext, name: str) -> None:
    check(ctx, name, list(SCHEDULES))


@pytest.mark.long
@pytest.mark.parametrize("name", ["direct bf16 reduced in fp32", "accumulated", "offloaded"])
@on_device(2)
def test_ranks_train_alike_though_their_streams_go_on_in_other_orders(ctx: RankContext, name: str) -> None:
    found = differences(run(CASES[name], mesh_of(ctx, name), subject(), seed=ctx.rank), reference(ctx, name))
    assert not found, found[:4]
