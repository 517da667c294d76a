"""Says what this rank did last when nothing goes on any more, before the backend ends the process.

On the CPU, a collective that times out raises where it is waited for. On an accelerator nothing of ours raises: the CPU
waits somewhere else, for the device, until the backend's own watchdog (NCCL's) ends the process. So a thread looks now
and then. Steps do nothing for it: what they note as the last event is what it looks at.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable

import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.plan.mesh import ParallelMesh
from fsdp2.runtime.executor import Performer

_LOOKS_PER_TIMEOUT = 40
_PATIENCE = 0.5  # of the timeout: what has hung may have been enqueued long before the last event

_log = logging.getLogger("fsdp2")


class StallWatch:
    """Of all roots on one device, since their collectives queue behind each other.

    Args:
        rank: this process, for the message.
        is_idle: whether the device has done all collectives that were enqueued.
        timeout_s: after how many seconds the backend gives up.
    """

    def __init__(self, rank: int, is_idle: Callable[[], bool], timeout_s: float) -> None:
        self._rank, self._is_idle, self._timeout_s = rank, is_idle, timeout_s
        self._lock = threading.Lock()
        self._roots: weakref.WeakSet[Performer] = weakref.WeakSet()
        self._seen: list[object] = []
        self._since = 0.0
        self._has_told = False

    def add(self, root: Performer) -> None:
        """Watch what ``root`` performs, too."""
        with self._lock:
            self._roots.add(root)

    def look(self, now: float) -> str | None:
        """What is to be said at ``now`` (in seconds), once per stall."""
        with self._lock:
            roots = list(self._roots)
        seen = [root.last_event for root in roots]
        if len(seen) != len(self._seen) or any(a is not b for a, b in zip(seen, self._seen, strict=True)):
            self._seen, self._since, self._has_told = seen, now, False
        waited_s = now - self._since
        if self._has_told or waited_s < _PATIENCE * self._timeout_s or self._is_idle():
            return None
        self._has_told = True
        stories = "\n".join(f"Last events there: {root.story()}." for root in roots if root.last_event is not None)
        return (
            f"rank {self._rank}: nothing has happened for {waited_s:.0f} s, and a collective waits for other ranks; "
            f"the backend's timeout is {self._timeout_s:.0f} s.\n{stories}"
        )

    def run(self) -> None:
        """Look until there are no more roots."""
        while self._roots:
            time.sleep(self._timeout_s / _LOOKS_PER_TIMEOUT)
            message = self.look(time.monotonic())
            if message is not None:
                _log.error(message)


_watches: dict[object, tuple[StallWatch, threading.Thread]] = {}


def watch(root: Performer, mesh: ParallelMesh) -> None:
    """Have a thread of this process look at ``root`` from now on, if the CPU does not wait for collectives on ``mesh``.
    It ends with the process, or with its roots."""
    streams = root.services.streams
    groups = [axis.group for axis in (mesh.shard, mesh.replicate) if axis.group is not None]
    timeout = _torch.timeout_of(groups[0], mesh.device) if groups and streams.runs_ahead else None
    if timeout is None:
        return
    timeout_s = timeout.total_seconds()
    stalls, thread = _watches.get((streams, timeout_s), (None, None))
    if stalls is None or thread is None or not thread.is_alive():
        stalls = StallWatch(dist.get_rank(), streams.is_idle, timeout_s)
        thread = threading.Thread(target=stalls.run, name="fsdp2-stalls", daemon=True)
        _watches[streams, timeout_s] = stalls, thread
    stalls.add(root)
    if not thread.is_alive():
        thread.start()
