"""Messages that arrive late under the guard allocator: no rank ends but the one that the scenario ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.cpp import compiler

pytestmark = [
    pytest.mark.long,  # tests/distributed/test_messages_in_flight.py has the same faults without the allocator
    pytest.mark.skipif(sys.platform != "linux", reason="the allocator is written for Linux"),
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the allocator cannot be built"),
]


def _output(scenario: str) -> str:
    command = [sys.executable, "-m", "tests.memory_errors.late_messages", scenario]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout.strip()


def test_message_after_the_death_of_another_rank_arrives_in_memory() -> None:
    assert _output("rank_dies") == "--- rank 1 of 3\nthe worker process died with exit code 0"


@pytest.mark.parametrize(
    ("scenario", "answers"),
    [
        ("wait_is_interrupted", ["interrupted", "no error", "no error"]),
        ("ranks_fork", ["no error", "no error", "no error"]),
    ],
)
def test_message_after_an_interrupt_or_a_fork_arrives_in_memory(scenario: str, answers: list[str]) -> None:
    assert _output(scenario) == str(answers)
