"""Ranks that may be lost: processes with a process group of their own and a short timeout, for one function.

The pools of ``tests/harness`` do not fit. They start again after every failure, and their ranks end without the
cleanup of Python. Here a rank ends as a user's process does, and the test sees how each of them ended.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.docs.launch import free_port
from tests.harness.pool import PRELOADED
from tests.harness.worker import RankContext

TIMEOUT_S = 5.0  # of the mesh's process group; gloo takes that long at most to connect, too
DEADLINE_S = 120.0  # only to find what hangs


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code (None if it hung), what it returned, or the type and text of what it raised."""

    exit_code: int | None
    value: Any = None
    error_type: str = ""
    error: str = ""
    trace: str = ""


class World:
    """``num_ranks`` processes that run ``body(ctx, mesh, **kwargs)``; ``join`` says how they ended. If ``is_hosted``,
    rank 0 hosts the store, as it does without torchrun; else the store is a file, which outlives them."""

    def __init__(
        self,
        body: Callable[..., Any],
        num_ranks: int = 2,
        timeout_s: float = TIMEOUT_S,
        is_hosted: bool = False,
        **kwargs: Any,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="fsdp2-faults-")
        where = Path(self._folder.name)
        self._answers = [where / f"answer-{rank}" for rank in range(num_ranks)]
        name = (body.__module__, body.__qualname__)
        store = f"tcp://127.0.0.1:{free_port()}" if is_hosted else f"file://{where / 'store'}"
        self.processes = [
            context.Process(
                target=run_rank,
                args=(rank, num_ranks, store, timeout_s, name, kwargs, str(self._answers[rank])),
                daemon=True,
            )
            for rank in range(num_ranks)
        ]
        for process in self.processes:
            process.start()

    def join(self, but: int | None = None) -> list[Ended]:
        """Wait until all ranks have ended, but for rank ``but``, which is stopped and is killed then."""
        ended = []
        with self._folder:
            for rank, process in enumerate(self.processes):
                if rank != but:
                    process.join(DEADLINE_S)
            for rank, process in enumerate(self.processes):
                exit_code = process.exitcode
                process.kill()
                process.join()
                path = self._answers[rank]
                answer = pickle.loads(path.read_bytes()) if path.exists() else {}
                ended.append(Ended(exit_code, **answer))
        return ended


def run_rank(
    rank: int, num_ranks: int, store: str, timeout_s: float, name: tuple[str, str], kwargs: dict[str, Any], path: str
) -> None:
    """The process of one rank: exit code 1 if ``name``, a module and a qualified name, raises. ``store``: its URL."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    body: Any = importlib.import_module(name[0])
    for part in name[1].split("."):
        body = getattr(body, part)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    dist.barrier()  # on a busy machine, ranks start seconds apart: more than the timeout that counts
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    try:
        answer = {"value": body(RankContext(rank, num_ranks), DeviceMesh.from_group(group, "cpu"), **kwargs)}
    except Exception as error:
        answer = {"error_type": type(error).__name__, "error": str(error), "trace": traceback.format_exc()}
    unfinished = Path(path + ".unfinished")
    unfinished.write_bytes(pickle.dumps(answer))
    unfinished.rename(path)  # a rank may be killed at any moment, this one too: half an answer is none
    sys.exit("error" in answer)
