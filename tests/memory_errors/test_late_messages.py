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


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ("rank_dies", "--- rank 1 of 3\nthe worker process died with exit code 0"),
        ("wait_is_interrupted", str(["interrupted", "no error", "no error"])),
        ("ranks_fork", str(["no error", "no error", "no error"])),
    ],
)
def test_message_that_comes_late_arrives_in_memory(scenario: str, said: str) -> None:
    command = [sys.executable, "-m", "tests.memory_errors.late_messages", scenario]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert found.stdout.strip() == said
