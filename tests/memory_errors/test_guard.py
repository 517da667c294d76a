"""The guard allocator ends a process at its memory error, and says which tensor, and who touched it; and messages that
arrive when their step is over find their memory. ``tests/distributed/test_messages_in_flight.py`` has other ends of a
step, without the allocator."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp2
from tests.distributed.support import sharded, step
from tests.harness.cpp import compiler
from tests.harness.pool import WorkerError, WorkerPool
from tests.harness.worker import RankContext
from tests.memory_errors.allocator import CHOICE, environment, num_guarded_allocations

pytestmark = [
    *(pytest.mark.long, pytest.mark.in_turns),  # a tool of the tests, not a part of the package
    pytest.mark.skipif(sys.platform != "linux", reason="the allocator is written for Linux"),
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the allocator cannot be built"),
]


@pytest.fixture(scope="module")
def ends() -> dict[str, Any]:
    """How each of ``faults.ERRORS`` ended."""
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


LATE_S = 0.8  # when the last rank sends its part; pools end their ranks 2 s after one has died


def _end_of(ctx: RankContext, scenario: str) -> str:
    """Three ranks gather, and rank 2 is late. "dies": rank 1 does, rank 0 notices at once, and cleans up before the
    message of rank 2 arrives. "fork": children are forked meanwhile, as workers of a data loader are."""
    model = sharded(ctx)
    step(model)
    assert num_guarded_allocations() > 0
    dist.barrier()
    time.sleep(LATE_S * (ctx.rank / 2 if scenario == "dies" else ctx.rank == 2))
    if scenario == "dies" and ctx.rank == 1:
        os._exit(0)
    try:
        handle = model.unshard(async_op=True)
        for _ in range(2 * (scenario == "fork")):
            child = os.fork()
            if child == 0:
                del model, handle
                gc.collect()
                torch.randn(4, 32).sum()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        handle.wait()
    except fsdp2.CommunicationError:  # its traceback knows the messages
        model.reset_iter_state()
        time.sleep(LATE_S)
        return "lost"
    model.reshard()
    step(model)
    return "no error"


def run(scenario: str) -> None:
    """Print the answers of the ranks, or why there are none. In a new process: pools take its environment."""
    os.environ[CHOICE] = "guard"
    pool = WorkerPool(3)
    try:
        print(pool.run(_end_of, scenario=scenario))
    except WorkerError as error:
        print(error)
    finally:
        pool.close(kill=True)


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ("dies", "--- rank 1 of 3\nthe worker process died with exit code 0"),
        ("fork", str(["no error"] * 3)),
    ],
)
def test_message_that_comes_late_arrives_in_memory(scenario: str, said: str) -> None:
    command = [sys.executable, "-c", f"from {__name__} import run; run('{scenario}')"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert found.stdout.strip().startswith(said)  # a rank that waits for the one that died may be named, too
