"""Jobs that are killed at random moments go on as if nothing had happened, and nothing is left of what they had begun.

``python -m tests.faults.resume`` runs many more of them, and ``make soak`` for longer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.launch import ROOT
from tests.faults.jobs import BACKGROUND, BACKWARD, EXAMPLE, FILE_OPERATION, FORWARD, OVERLAPPING, Job, Kill
from tests.faults.resume import READS_ALONE, SENT, Found, Harness, Trial, compare, drawn
from tests.faults.soak import too_much
from tests.harness.selection import landing, long

pytestmark = pytest.mark.filterwarnings(f"ignore:{READS_ALONE}")


def _killed(tmp_path: Path, first: Job, kill: Kill, *, later: Job | None = None) -> Found:
    return Harness(tmp_path).run(Trial(0, (first, later or first), (kill,)))


DIRECTED: dict[str, tuple[Job, Kill, Job | None]] = {
    "in a save in the background, then on other ranks": (
        Job(2, "HSDP", "AdamW8bit", scaled=True, averaged=True, save=BACKGROUND, own_noise=False),
        Kill(SENT[0], 1, FILE_OPERATION, 0.6),
        Job(3, "FSDP", "AdamW8bit", scaled=True, averaged=True, save=BACKGROUND, own_noise=False),
    ),
    "in an export, while another save is written": (
        Job(2, "FSDP", "HostAdamW", save=OVERLAPPING, exports=True),
        Kill(SENT[1], 0, FILE_OPERATION, 0.5),
        None,
    ),
    "by a scheduler, and it saves": (
        Job(2, "FSDP", "Muon", scaled=True, saves_on_sigterm=True),
        Kill(SENT[2], 0, FORWARD, 0.5, 60.0),
        None,
    ),
    "in the example": (Job(1, save=EXAMPLE, exports=True), Kill(SENT[0], 0, FILE_OPERATION, 0.3), None),
}


@pytest.mark.in_turns
@pytest.mark.parametrize("name", long(*DIRECTED))
def test_a_killed_job_goes_on_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    first, kill, later = DIRECTED[name]
    found = _killed(tmp_path, first, kill, later=later)
    assert len(found.was_killed) == 1
    assert not found.problems


@pytest.mark.in_turns
@pytest.mark.parametrize("part", long("scaler", "data", "noise_0", "scheduler"))
def test_what_a_job_forgets_to_load_is_noticed(part: str, tmp_path: Path) -> None:
    job = Job(1, scaled=True, averaged=True, forgets=part)
    found = _killed(tmp_path, job, Kill(SENT[0], 0, BACKWARD, 0.6))
    assert any(each.startswith(f"loaded step 4: {part}") for each in found.problems), found.problems


def test_every_bit_and_every_name_is_compared() -> None:
    value = torch.tensor([0.0, torch.nan])
    assert compare({"a": value}, {"a": value.clone(), "average.b": value}, 0.0) == ([], 0.0)
    assert compare({"a": value}, {"a": -value}, 0.0) == (["a differs by 0"], 0.0)  # the signs of zero and of nan
    assert compare({"a": value + 1}, {"a": value}, 0.5) == (["a differs by 1"], 1.0)
    assert compare({"a": 1}, {"b": 1}, 0.0)[0] == ["b is missing", "a is not expected"]
    assert compare({"a": value}, {"a": value.double()}, 1.0)[0] == ["a differs by inf"]


def test_trials_have_every_kind_of_job_and_kill() -> None:
    trials = [drawn(0, number) for number in range(300)]
    jobs: list[Any] = [job for trial in trials for job in trial.starts]
    assert {(job.ranks, job.layout) for job in jobs} == {(n, name) for n in range(1, 5) for name in ("FSDP", "HSDP")}
    assert len({(job.optimizer, job.save) for job in jobs}) == 5 * 3 + 2
    assert {kill.sent for trial in trials for kill in trial.kills} == set(SENT)


def test_only_growth_beyond_the_limits_is_a_leak() -> None:
    assert too_much({"tensors": 1, "keys in the store": 17, "builtins.dict": 5}) == {
        "tensors": 1,
        "keys in the store": 17,
    }


@pytest.mark.ci
def test_two_minutes_of_the_soak() -> None:
    """Another seed at each landing. In a process of its own: the ranks of other tests have a log of collectives that
    grows."""
    command = [sys.executable, "-m", "tests.faults.soak", "--minutes", "2", "--seed", str(landing()[0])]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"\d lives with .* nothing wrong, nothing leaked$", ran.stdout.strip()), ran.stdout
