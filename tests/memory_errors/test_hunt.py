"""A hunt counts what ran, and reports what died."""

from __future__ import annotations

import json
import os
import signal
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.worker import RankContext
from tests.memory_errors.hunt import PROGRAMS_PER_CALL, Totals, hunt_programs, main

pytestmark = [pytest.mark.long, pytest.mark.in_turns]  # a tool of the tests, not a part of the package

OPTIONS = Namespace(work="programs", allocator="none", world_size=2, seed=7)


def _body(ctx: RankContext, seeds: list[int]) -> None:
    """Programs that end well."""
    time.sleep(0.1)


def _fail(ctx: RankContext, seeds: list[int]) -> None:
    raise AssertionError("wrong numbers")


def _die(ctx: RankContext, seeds: list[int]) -> None:
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    _fail(ctx, seeds)


@pytest.mark.parametrize(
    ("body", "counts"), [(_body, (PROGRAMS_PER_CALL, 0, 0)), (_fail, (0, 0, 1)), (_die, (0, 1, 0))]
)
def test_programs_are_counted_with_their_time_and_those_of_a_rank_that_dies_are_named(
    body: Callable[..., None], counts: tuple[int, int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    totals = Totals()
    hunt_programs(OPTIONS, time.monotonic() + 0.01, totals, body)
    assert (totals.programs, totals.deaths, totals.failures) == counts
    assert (totals.rank_seconds >= 2 * 0.1) if body is _body else (totals.rank_seconds == 0)
    if body is _die:
        (report,) = totals.reports
        assert report.startswith("programs [7, 8, 9, 10], Namespace(work='programs', allocator='none'")
        assert "died with exit code -11" in report
        assert report in capsys.readouterr().out


def test_tests_run_in_a_drawn_order_until_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FSDP2_TEST_SUBJECT", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # restored after main has set it
    results = tmp_path / "results"
    options = ["--minutes", "0.001", "--allocator", "none", "--results", str(results)]
    assert main(["tests", "tests/distributed/test_inner_losses.py::test_mixed_precision", *options]) == 0
    seen = json.loads(results.read_text())
    assert seen["tests"] == 1
    assert seen["rank_seconds"] > 0
    assert capsys.readouterr().out.startswith("0 programs, 1 tests, ")
