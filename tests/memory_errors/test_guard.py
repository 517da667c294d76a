"""The guard allocator ends a process at its memory error, and says which tensor, and who touched it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.harness.cpp import compiler
from tests.memory_errors.allocator import CHOICE, environment

pytestmark = [
    pytest.mark.long,  # a tool of the tests, not a part of the package
    pytest.mark.skipif(sys.platform != "linux", reason="the allocator is written for Linux"),
]


@pytest.fixture(scope="module")
def ends() -> dict[str, Any]:
    """How each of ``faults.ERRORS`` ended."""
    if compiler() is None:
        pytest.skip("no C++ compiler: the allocator cannot be built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHOICE, "guard")
        variables = os.environ | environment()
    command = [sys.executable, "-m", "tests.memory_errors.faults"]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=True)
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize(
    ("fault", "ended_by", "says"),
    [
        ("use_after_free", signal.SIGSEGV, "in a freed block of 4000 bytes, at offset 0"),
        ("overflow_by_one_element", signal.SIGABRT, "behind a live block of 4000 bytes, at offset 4000"),
        ("overflow_of_whole_cache_lines", signal.SIGSEGV, "behind a live block of 4096 bytes, at offset 4096"),
        ("underflow", signal.SIGABRT, "before a live block of 4000 bytes, at offset -1"),
        ("write_to_a_storage_that_was_resized", signal.SIGSEGV, "in a freed block of 4000 bytes, at offset 0"),
        ("message_into_memory_that_was_freed", signal.SIGABRT, "recv: bad address"),
    ],
)
def test_memory_error_ends_the_process_and_names_the_tensor_and_who_freed_it(
    ends: dict[str, Any], fault: str, ended_by: signal.Signals, says: str
) -> None:
    report = ends[fault]["report"]
    assert ends[fault]["signal"] == ended_by, report
    assert says in report
    assert "native stack of this thread" in report
    assert f"in {fault}" in report  # of Python's stack
    if "resized" in fault:
        freed_by = report.partition("the block was freed by:")[2].partition("native stack of this thread")[0]
        assert "libtorch_python.so" in freed_by


def test_right_use_of_memory_goes_on(ends: dict[str, Any]) -> None:
    assert ends["nothing"] == {"signal": 0, "exitcode": 0, "report": ""}
