"""A pool of ranks that outlives the tests which use it.

The parent's half: start ranks, send them a function by name, collect what each rank returned or raised, and replace
the whole pool when anything went wrong. Rule: a pool that saw a failure is never used again, because its ranks may
stand at different collectives.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.harness.patience import patient
from tests.harness.worker import READY, Call, Failure, Success, main
from tests.memory_errors.allocator import environment

START_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 120.0  # some machines of CI take twice the time of others
NO_ANSWER = "no answer within"  # begins the stacks of a rank that hangs
# After one rank has raised, the others either raise too or wait for it in a collective.
GRACE_S = 2.0
# Every process group keeps threads that wake a hundred times a second, used or not, and torch's oracle makes new groups
# for each mesh that parameters rest on. Measured: a pool of 4 with 130 groups each took 65% of a core while idle.
MAX_THREADS = 64
# Else each rank imports them: pytest with the first test, torch._dynamo at the first step of an optimizer, the last
# three with the first compiled block. Measured: 1 s per rank.
PRELOADED = [
    *("torch", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"),
    *("pytest", "_pytest.assertion.rewrite", "torch._dynamo.repro.after_dynamo"),
    *("torch._functorch.aot_autograd", "torch._inductor.compile_fx"),
    *("expecttest", "fsdp2", "tests.harness.models"),
]


class WorkerError(AssertionError):
    """One or more ranks raised, died or hung; the message says which, with each rank's traceback."""


@dataclass
class _Rank:
    index: int
    process: Any
    connection: Connection
    stacks: Path

    def receive(self) -> Any:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self.process.join(timeout=5)
            last_words = self.stacks.read_text()  # of a fatal signal
            return Failure(f"the worker process died with exit code {self.process.exitcode}\n{last_words}")

    def num_threads(self) -> int:
        """How many threads the process has; 0 where the system does not say."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        return len(list(tasks.iterdir())) if tasks.exists() else 0

    def stack_dump(self) -> str:
        """What the rank is doing now, as written by its faulthandler."""
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not self.stacks.read_text().strip():
            time.sleep(0.05)
        time.sleep(0.05)
        return self.stacks.read_text()


class WorkerPool:
    """``world_size`` processes in one process group; they start at the first call and stay.

    On ``device_type`` "cuda", rank i works on GPU i and NCCL carries what is there; gloo carries the rest.
    """

    def __init__(self, world_size: int, device_type: str = "cpu") -> None:
        self.world_size = world_size
        self.device_type = device_type
        self._ranks: list[_Rank] = []
        self._directory: Path | None = None

    def run(self, body: Callable[..., Any], timeout_s: float = CALL_TIMEOUT_S, **kwargs: Any) -> list[Any]:
        """Call ``body(ctx, **kwargs)`` on every rank; return the results in rank order.

        ``body`` travels by module and qualified name; ``kwargs`` and the results are pickled.

        Raises:
            WorkerError: a rank raised, died, or did not answer within ``timeout_s`` of an idle machine; the next call
                starts new ranks.
        """
        __tracebackhide__ = True
        if not self._ranks:
            self._start()
        message = pickle.dumps(Call(body.__module__, body.__qualname__, kwargs))
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # a dead rank is reported when its answer is read
                rank.connection.send_bytes(message)
        answers = self._collect(timeout_s)
        if all(isinstance(answer, Success) for answer in answers.values()) and len(answers) == self.world_size:
            if any(rank.num_threads() > MAX_THREADS for rank in self._ranks):
                self.close(kill=True)
            return [answers[rank].value for rank in range(self.world_size)]
        report = self._report(answers, timeout_s)
        self.close(kill=True)
        raise WorkerError(report)

    def close(self, kill: bool = False) -> None:
        """End the ranks: politely by closing their pipes, or at once."""
        for rank in self._ranks:
            rank.connection.close()
            if kill:
                rank.process.kill()
        for rank in self._ranks:
            rank.process.join(timeout=10)
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
        self._ranks = []
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _start(self) -> None:
        # A fork server imports torch once; a restarted pool then costs a fork, not an import of torch per rank. What it
        # imports may start CUDA, which no fork survives.
        os.environ.update(environment())
        context = multiprocessing.get_context("spawn" if self.device_type == "cuda" else "forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._directory = Path(tempfile.mkdtemp(prefix="fsdp2-pool-"))
        for index in range(self.world_size):
            ours, theirs = context.Pipe()
            stacks = self._directory / f"stacks-{index}"
            stacks.touch()
            store = self._directory / "store"
            args = (index, self.world_size, theirs, str(store), str(stacks), self.device_type)
            process = context.Process(target=main, args=args, daemon=True, name=f"rank{index}of{self.world_size}")
            process.start()
            theirs.close()
            self._ranks.append(_Rank(index, process, ours, stacks))
        answers = self._collect(START_TIMEOUT_S)
        if any(answers.get(index) != READY for index in range(self.world_size)):
            report = self._report(answers, START_TIMEOUT_S)
            self.close(kill=True)
            raise WorkerError(f"the pool did not start\n{report}")

    def _collect(self, timeout_s: float) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        start, deadline = time.monotonic(), float("inf")

        def left() -> float:
            return max(0.0, min(deadline, start + patient(timeout_s)) - time.monotonic())

        while len(answers) < len(self._ranks):
            pending = {rank.connection: rank for rank in self._ranks if rank.index not in answers}
            ready = multiprocessing.connection.wait(list(pending), timeout=left())
            if not ready and not left():
                break
            for connection in ready:
                rank = pending[connection]  # type: ignore[index]
                answers[rank.index] = answer = rank.receive()
                if isinstance(answer, Failure):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _report(self, answers: dict[int, Any], timeout_s: float) -> str:
        failures = {index: answer for index, answer in sorted(answers.items()) if isinstance(answer, Failure)}
        missing = [rank for rank in self._ranks if rank.index not in answers]
        alike: dict[str, list[int]] = {}
        for index, answer in failures.items():
            alike.setdefault(answer.traceback, []).append(index)
        lines = [
            f"\n--- rank {', '.join(map(str, indices))} of {self.world_size}\n{text}" for text, indices in alike.items()
        ]
        if missing and failures:
            waiting = ", ".join(str(rank.index) for rank in missing)
            lines.append(f"\n--- ranks without an answer, most likely waiting for the failed ones: {waiting}\n")
        elif missing:
            lines += [
                f"\n--- rank {rank.index} of {self.world_size}: {NO_ANSWER} {timeout_s:g} s; its stacks:\n"
                f"{rank.stack_dump() if rank.process.is_alive() else 'the process is dead'}"
                for rank in missing
            ]
        return "".join(lines)


_POOLS: dict[tuple[int, str], WorkerPool] = {}


def shared_pool(world_size: int, device_type: str = "cpu") -> WorkerPool:
    """The session's pool of ``world_size`` ranks on ``device_type``."""
    key = (world_size, device_type)
    return _POOLS.setdefault(key, WorkerPool(world_size, device_type))


def close_shared_pools() -> None:
    while _POOLS:
        _POOLS.popitem()[1].close()
