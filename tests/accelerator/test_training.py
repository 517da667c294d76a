"""On the simulated accelerator models train as on the CPU, bit for bit, in whatever order streams leave open."""

from __future__ import annotations

import math

import pytest

from tests.accelerator import device
from tests.accelerator.cases import CASES, FEW, SCHEDULES, differences, mesh_of, reference, run
from tests.accelerator.support import on_device
from tests.harness.distributed import RankContext
from tests.harness.runtimes import Runtime, oracle, subject


def check(ctx: RankContext, name: str, runtime: Runtime, schedules: tuple[str, ...]) -> None:
    expected = reference(ctx, name)
    for schedule in schedules:
        found = differences(run(CASES[name], mesh_of(ctx, name), runtime, **SCHEDULES[schedule]), expected)
        assert not found, f"{name}, {schedule}: {len(found)} values differ, the first are {found[:4]}"
    assert device.load().ran_at_once() == set()  # else the order of streams was not free


def of_size(size: int, *, for_oracle: bool = False) -> list[str]:
    """The cases on so many ranks, or those of them that torch's ``fully_shard`` can run."""
    return [
        name for name, case in CASES.items() if math.prod(case.shape) == size and not (for_oracle and case.beyond_torch)
    ]


@pytest.mark.parametrize("name", of_size(2))
@on_device(2)
def test_subject_trains_as_on_the_cpu(ctx: RankContext, name: str) -> None:
    check(ctx, name, subject(), tuple(SCHEDULES))


@pytest.mark.parametrize("name", of_size(2, for_oracle=True))
@on_device(2)
def test_oracle_trains_as_on_the_cpu(ctx: RankContext, name: str) -> None:
    check(ctx, name, oracle(), FEW)


@pytest.mark.parametrize("name", of_size(4))
@on_device(4)
def test_subject_trains_as_on_the_cpu_with_4_ranks(ctx: RankContext, name: str) -> None:
    check(ctx, name, subject(), tuple(SCHEDULES))


@pytest.mark.parametrize("name", of_size(4, for_oracle=True))
@on_device(4)
def test_oracle_trains_as_on_the_cpu_with_4_ranks(ctx: RankContext, name: str) -> None:
    check(ctx, name, oracle(), FEW)
