"""A process that imports clients once, with one runtime in force, and forks the ranks of each case from there.

A client takes torch's names when it is imported. So each runtime needs a process of its own, in which fsdp2 was
installed before the client was imported, or was not. Clients keep their state in globals, so each case gets new ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RUNTIMES = ("torch", "fsdp2")


@dataclass(frozen=True)
class Call:
    """A case by module and qualified name, with its arguments."""

    module: str
    qualname: str
    kwargs: dict[str, Any]
    num_ranks: int
    timeout_s: float


def serve(runtime: str, preload: Sequence[str], connection: Connection) -> None:
    """Import ``preload`` under ``runtime``, then answer calls until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends pytest, which closes the connection
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", ACCELERATE_USE_CPU="1")
    import torch

    torch.set_num_threads(1)
    if runtime == "fsdp2":
        import fsdp2

        fsdp2.install()
    for name in preload:
        importlib.import_module(name)
    try:
        while True:
            call: Call = connection.recv()
            answer, has_hung = _answers(runtime, call)
            if has_hung and runtime == "torch":  # once in 600 cases, on a busy machine; ours has no second try
                answer, _ = _answers(runtime, call)
            connection.send(answer)
    except (EOFError, ConnectionError):
        pass


def _answers(runtime: str, call: Call) -> tuple[list[Any] | str, bool]:
    """What each rank returned, or a text if one of them failed; and whether the time was over before one had failed."""
    folder = Path(tempfile.mkdtemp(prefix="fsdp2-client-"))
    port = _free_port()
    pids = []
    for rank in range(call.num_ranks):
        pid = os.fork()
        if pid == 0:
            _run_rank(runtime, call, rank, port, folder)
        pids.append(pid)
    deadline = time.monotonic() + call.timeout_s
    failed, has_hung = _wait(pids, deadline)
    results = [folder / f"result.{rank}" for rank in range(call.num_ranks)]
    answer: list[Any] | str
    if failed or not all(path.exists() for path in results):
        answer = f"with {runtime}'s runtime:\n" + "\n".join(
            f"--- rank {rank}\n{(folder / f'log.{rank}').read_text()[-6000:]}" for rank in range(call.num_ranks)
        )
    else:
        answer = [pickle.loads(path.read_bytes()) for path in results]
    shutil.rmtree(folder, ignore_errors=True)
    return answer, has_hung


def _wait(pids: list[int], deadline: float) -> tuple[bool, bool]:
    """Wait for all ranks: whether one failed or the time is over, and whether it is over and none had failed. Two
    seconds after a failure, the others are ended."""
    waiting, failed, has_hung = list(pids), False, False
    while waiting:
        for pid in list(waiting):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                waiting.remove(pid)
                if status:
                    failed, deadline = True, min(deadline, time.monotonic() + 2)
        if waiting and time.monotonic() > deadline:
            failed, has_hung = True, not failed
            for pid in waiting:
                os.kill(pid, signal.SIGABRT)  # faulthandler writes where it stands
                os.waitpid(pid, 0)
            break
        time.sleep(0.01)
    return failed, has_hung


def _run_rank(runtime: str, call: Call, rank: int, port: int, folder: Path) -> None:
    """In the forked rank; does not return."""
    status = 1
    log = os.open(folder / f"log.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        import faulthandler

        faulthandler.enable()
        result = _result(runtime, call, rank, port, folder)
        path = folder / f"part.{rank}"
        path.write_bytes(pickle.dumps(result))
        path.rename(folder / f"result.{rank}")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # skip gloo's orderly shutdown, which waits for ranks that may be gone


def _result(runtime: str, call: Call, rank: int, port: int, folder: Path) -> Any:
    size = call.num_ranks
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    torch.set_num_threads(1)  # makes the thread pool anew after the fork, before threads of a client race to do so
    num_units = _count_units()
    torch.manual_seed(0)
    body: Any = importlib.import_module(call.module)
    for part in call.qualname.split("."):
        body = getattr(body, part)
    shared = folder / "shared"
    shared.mkdir(exist_ok=True)
    result = body(rank, shared, **call.kwargs)
    assert (num_units() > 0) == (runtime == "fsdp2"), f"fsdp2 made {num_units()} units in a run with {runtime}"
    return result


def _count_units() -> Callable[[], int]:
    """A function that says how many units fsdp2 has made since: the proof of who has sharded the model."""
    from fsdp2.core.runtime.unit import Unit

    made = []
    init = Unit.__init__

    def counted(self: Unit, *args: Any, **kwargs: Any) -> None:
        made.append(None)
        init(self, *args, **kwargs)

    Unit.__init__ = counted  # type: ignore[method-assign]
    return lambda: len(made)


_ports = itertools.count(os.getpid() * 101)


def _free_port() -> int:
    """A port that no other server tries next, and that the system gives to no outgoing connection meanwhile."""
    while True:
        port = 10_000 + next(_ports) % 20_000
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
