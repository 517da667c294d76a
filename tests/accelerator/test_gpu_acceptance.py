"""``benchmarks/gpu_acceptance.py`` before a GPU runs it: on the simulated accelerator, and where parts go wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdp2.comm.backends import CollectiveComm

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import gpu_acceptance
import gpu_figures
from gpu_acceptance import FAIL, NOT_RUN, PASS, Part, Verdict, run_all, run_part

SCRIPT = BENCHMARKS / "gpu_acceptance.py"


def script(out: Path, *arguments: str, timeout_s: float = 280) -> tuple[int, list[dict[str, Any]]]:
    """The exit status, and the verdicts that were left."""
    command = [sys.executable, str(SCRIPT), *arguments, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    verdicts = json.loads((out / "acceptance.json").read_text())["verdicts"]
    for each in verdicts:
        assert f"{each['status']} {each['part']}: {each['detail']}" in done.stdout
    return done.returncode, verdicts


def of(verdicts: Sequence[dict[str, Any]], name: str) -> list[str]:
    return [each["status"] for each in verdicts if each["name"] == name]


# On the simulated accelerator


def test_contract_and_training_through_it_hold_on_the_simulated_accelerator(tmp_path: Path) -> None:
    status, verdicts = script(tmp_path, "--device", "sim", "--only", "1")
    assert status == 0, verdicts
    assert of(verdicts, "contract") == [PASS] * 8
    assert of(verdicts, "forced") == [PASS] * 3


@pytest.mark.long
def test_late_collectives_and_shared_devices_hold_on_the_simulated_accelerator(tmp_path: Path) -> None:
    status, verdicts = script(tmp_path, "--device", "sim", "--only", "2", "4")
    assert status == 0, verdicts
    assert of(verdicts, "late") == [PASS] * 9
    assert of(verdicts, "ranks 2") == of(verdicts, "ranks 4") == [PASS] * 5


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "left_out"),
    [("gpu_groups.py", "spoil(output)"), ("gpu_groups.py", "work.wait()")],
)
def test_parts_that_are_not_on_the_cpu_say_so(tmp_path: Path, place: str, left_out: str) -> None:
    status, verdicts = script(tmp_path, "--device", "cpu")
    assert status == 0, verdicts
