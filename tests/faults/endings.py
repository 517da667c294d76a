"""Two ranks that train one step, and end while gloo still holds the step's last collective.

A process ends as a user's script does: fork returns into this script. gloo's thread tells that a collective is done,
and is then held until Python ends; an object that takes a second to go away keeps Python ending meanwhile.

Arguments: how the ranks end, each in two processes; a folder. Prints the exit codes of each.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh

import fsdp2

HELD_S = 1.0  # at most, after the functions at exit have begun
ENDING_S = 1.0

_ends, _folder = sys.argv[1:-1], sys.argv[-1]
_ending = threading.Event()
_all_reduce = dist.all_reduce


class _SlowToGo:
    _sleep = staticmethod(time.sleep)

    def __del__(self) -> None:
        self._sleep(ENDING_S)


class _Done:
    """A work whose ``wait`` returns when the result is there, while gloo's thread still holds the work."""

    def __init__(self, work: Any) -> None:
        self._work, self._future = work, work.get_future()
        self._future.add_done_callback(_hold)

    def wait(self) -> None:
        self._future.wait()


def _hold(future: Any) -> None:
    _ending.wait(20)
    until = time.monotonic() + HELD_S
    while not sys.is_finalizing() and time.monotonic() < until:
        time.sleep(0.01)


def _held_all_reduce(*args: Any, **kwargs: Any) -> Any:
    is_async = kwargs.pop("async_op", False)
    work = _Done(_all_reduce(*args, async_op=True, **kwargs))
    return work if is_async else work.wait()


def _fork() -> tuple[str, int]:
    """In each rank, how it ends and its number. The process that forks leaves here."""
    ranks = [(end, rank) for end in _ends for rank in range(2)]
    started = []
    for end, rank in ranks:
        process = os.fork()
        if process == 0:
            return end, rank
        started.append(process)
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started]
    print([(end, code) for (end, _), code in zip(ranks, codes, strict=True)], flush=True)
    os._exit(0)


_end, _rank = _fork()
sys.slow_to_go = _SlowToGo()  # type: ignore[attr-defined]  # Python clears ``sys`` late
atexit.register(_ending.set)
dist.init_process_group("gloo", init_method=f"file://{_folder}/{_end}", rank=_rank, world_size=2)
_mesh = DeviceMesh("cpu", [0, 1])
_model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
for _module in [*_model, _model]:
    fsdp2.fully_shard(_module, mesh=_mesh)
for _step in range(2):
    if _step == 1:
        dist.all_reduce = _held_all_reduce
    _model(torch.ones(2, 4)).sum().backward()
dist.all_reduce = _all_reduce
if _end == "destroy":
    dist.destroy_process_group()
if _end == "error":
    raise ValueError("the script's own error")
