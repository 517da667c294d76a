"""``python -m tests.memory_errors.late_messages NAME``: messages that arrive when their step is over, on three ranks.

Each scenario frees what it can while another rank's message is still to come. The guard allocator ends a rank whose
memory was freed too early. Prints the answers of the ranks, or why there are none.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import fsdp2
from tests.distributed.support import Stack, seeded, shard, step
from tests.harness.pool import WorkerError, WorkerPool
from tests.harness.worker import RankContext
from tests.memory_errors.allocator import CHOICE, num_guarded_allocations

WORLD_SIZE = 3
LATE_S = 0.8  # when the last rank sends its part; pools end their ranks 2 s after one has died


def _warm_model(ctx: RankContext) -> Any:
    model = shard(ctx, seeded(Stack), mesh=ctx.mesh_1d())
    step(model)
    assert num_guarded_allocations() > 0
    dist.barrier()
    return model


def _gather(model: Any) -> None:
    model.unshard(async_op=True).wait()


def rank_dies(ctx: RankContext) -> str:
    """Rank 1 dies. Rank 0 notices at once, and cleans up before the message of rank 2 arrives."""
    model = _warm_model(ctx)
    if ctx.rank == 1:
        time.sleep(LATE_S / 2)
        os._exit(0)
    if ctx.rank == 2:
        time.sleep(LATE_S)
    try:
        _gather(model)
    except fsdp2.CommunicationError as error:  # its traceback knows the messages
        model.reset_iter_state()
        time.sleep(LATE_S)
        return type(error).__name__
    return "no error"


class _Interrupted(BaseException):
    """What the signal raises, as Ctrl-C raises ``KeyboardInterrupt``."""


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise _Interrupted


def wait_is_interrupted(ctx: RankContext) -> str:
    """Rank 0 is interrupted while it waits for rank 1; rank 2 is late."""
    model = _warm_model(ctx)
    if ctx.rank == 0:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, LATE_S / 4)
    else:
        time.sleep(LATE_S * ctx.rank / 2)
    try:
        _gather(model)
    except _Interrupted:
        model.reset_iter_state()
        time.sleep(LATE_S)
        step(model)
        return "interrupted"
    model.reshard()
    step(model)
    return "no error"


def ranks_fork(ctx: RankContext) -> str:
    """Children are forked while a gather is in flight, as workers of a data loader are; rank 2 is late."""
    model = _warm_model(ctx)
    if ctx.rank == 2:
        time.sleep(LATE_S)
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


SCENARIOS: dict[str, Callable[[RankContext], str]] = {
    scenario.__name__: scenario for scenario in (rank_dies, wait_is_interrupted, ranks_fork)
}


def main(name: str) -> None:
    from tests.memory_errors import late_messages  # by a name that the ranks can import

    os.environ[CHOICE] = "guard"
    pool = WorkerPool(WORLD_SIZE)
    try:
        print(pool.run(getattr(late_messages, name)))
    except WorkerError as error:
        print(error)
    finally:
        pool.close(kill=True)


if __name__ == "__main__":
    main(sys.argv[1])
