"""Bars of long work: on a terminal, with tqdm, and not if the user has disabled them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import time

import pytest
from torch import nn

import fsdp2
from fsdp2.extras.output import progress
from tests.harness.terminal import on_a_terminal
from tests.unit.planner_models import LanguageModel


def _work() -> None:
    with progress("work", 3, "step") as advance:
        for _ in range(3):
            advance(1)


def test_a_terminal_sees_the_work_go_on_to_its_end_and_nothing_else_sees_it() -> None:
    assert "work: 100%" in on_a_terminal(_work)
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        _work()
    assert shown.getvalue() == ""
    with contextlib.redirect_stderr(None):
        _work()


def test_without_tqdm_the_work_is_done_and_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert on_a_terminal(_work) == ""


def test_a_plan_shows_where_it_is_and_that_a_slow_builder_runs() -> None:
    seen, workload = [], fsdp2.planner.Workload(batch=1, sequence=16)
    found = on_a_terminal(lambda: fsdp2.planner.plan(LanguageModel, "H100", workload, num_gpus=2))
    assert "compare ways to shard: 100%" in found

    def build() -> nn.Module:
        ends = time.monotonic() + 60
        while not seen and time.monotonic() < ends:
            seen.extend(re.findall(r"compare ways to shard: +0%", sys.stderr.getvalue()))  # type: ignore[attr-defined]
        raise ValueError("slow")

    def plan() -> None:
        with pytest.raises(ValueError, match="slow"):
            fsdp2.planner.plan(build, "H100", workload, num_gpus=2)

    assert on_a_terminal(plan).endswith("\n")  # what is printed next has a line of its own
    assert seen


@pytest.mark.long
@pytest.mark.parametrize("disable", ["0", "1"])
def test_tqdm_disable_hides_bars(disable: str) -> None:
    code = "from tests.unit.test_progress import _work, on_a_terminal; print(on_a_terminal(_work))"
    environment = {**os.environ, "TQDM_DISABLE": disable if disable == "1" else ""}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert ("work: 100%" in result.stdout) is (disable == "0")
