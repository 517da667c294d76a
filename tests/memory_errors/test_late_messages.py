"""Messages that arrive when their step is over, under the guard allocator: it ends a rank that has freed their memory.

Each scenario frees what it can while the message of the last of three ranks is still to come.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

import fsdp2
from tests.distributed.support import sharded, step
from tests.harness.cpp import compiler
from tests.harness.pool import WorkerError, WorkerPool
from tests.harness.worker import RankContext
from tests.memory_errors.allocator import CHOICE, num_guarded_allocations

pytestmark = [
    pytest.mark.long,  # tests/distributed/test_messages_in_flight.py has the same faults without the allocator
    pytest.mark.skipif(sys.platform != "linux", reason="the allocator is written for Linux"),
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the allocator cannot be built"),
]
LATE_S = 0.8  # when the last rank sends its part; pools end their ranks 2 s after one has died


def _warm_model(ctx: RankContext) -> Any:
    model = sharded(ctx)
    step(model)
    assert num_guarded_allocations() > 0
    dist.barrier()
    return model


def _rank_dies(ctx: RankContext) -> None:
    """Rank 1 dies. Rank 0 notices at once, and cleans up before the message of rank 2 arrives."""
    model = _warm_model(ctx)
    time.sleep(LATE_S * ctx.rank / 2)
    if ctx.rank == 1:
        os._exit(0)
    try:
        model.unshard(async_op=True).wait()
    except fsdp2.CommunicationError:  # its traceback knows the messages
        model.reset_iter_state()
        time.sleep(LATE_S)


class _Interrupted(BaseException):
    """What the signal raises, as Ctrl-C raises ``KeyboardInterrupt``."""


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise _Interrupted


def _wait_is_interrupted(ctx: RankContext) -> str:
    """Rank 0 is interrupted while it waits for rank 1; rank 2 is late."""
    model, ended = _warm_model(ctx), "no error"
    if ctx.rank == 0:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, LATE_S / 4)
    time.sleep(LATE_S * ctx.rank / 2)
    try:
        model.unshard(async_op=True).wait()
        model.reshard()
    except _Interrupted:
        ended = "interrupted"
        model.reset_iter_state()
        time.sleep(LATE_S)
    step(model)
    return ended


def _ranks_fork(ctx: RankContext) -> str:
    """Children are forked while a gather is in flight, as workers of a data loader are; rank 2 is late."""
    model = _warm_model(ctx)
    time.sleep(LATE_S * (ctx.rank == 2))
    handle = model.unshard(async_op=True)
    for _ in range(2):
        child = os.fork()
        if child == 0:
            del model, handle
            gc.collect()
            torch.randn(4, 32).sum()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0
    handle.wait()
    model.reshard()
    step(model)
    return "no error"


def run(name: str) -> None:
    """Print the answers of the ranks, or why there are none. In a new process: pools take its environment."""
    os.environ[CHOICE] = "guard"
    pool = WorkerPool(3)
    try:
        print(pool.run(globals()[name]))
    except WorkerError as error:
        print(error)
    finally:
        pool.close(kill=True)


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ("_rank_dies", "--- rank 1 of 3\nthe worker process died with exit code 0"),
        ("_wait_is_interrupted", str(["interrupted", "no error", "no error"])),
        ("_ranks_fork", str(["no error", "no error", "no error"])),
    ],
)
def test_message_that_comes_late_arrives_in_memory(scenario: str, said: str) -> None:
    command = [sys.executable, "-c", f"from {__name__} import run; run('{scenario}')"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert found.stdout.strip() == said
