"""Simulates operations on streams and determines when each of them runs.

A stream runs its operations one after another; an operation also waits for those operations of other streams that it
depends on. It has a fixed part, which nothing slows down, and then work on a resource. Transfers on the same resource
share it equally; compute and transfers slow each other down as the machine's contention says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from fsdp2.planner.machine import Contention, Resource

_NOTHING = 1e-15  # seconds: what is left of an operation after rounding


class Stream(Enum):
    __hash__ = object.__hash__

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"


@dataclass(eq=False)
class Op:
    """``fixed`` seconds, then ``work`` seconds on ``resource`` if alone. ``run`` fills in ``start`` and ``end``, and
    counts down what is left of both."""

    label: str
    stream: Stream
    fixed: float
    work: float
    resource: Resource
    waits: tuple[Op, ...]
    start: float = -1.0
    end: float = -1.0
    left_fixed: float = 0.0
    left_work: float = 0.0

    @property
    def works(self) -> bool:
        return self.left_fixed <= _NOTHING and self.left_work > _NOTHING

    @property
    def is_done(self) -> bool:
        return self.left_fixed <= _NOTHING and self.left_work <= _NOTHING


class Queues:
    """What has been enqueued, in the order of the program."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._last: dict[Stream, Op] = {}
        self._waits: dict[Stream, list[Op]] = {stream: [] for stream in Stream}

    def enqueue(
        self,
        stream: Stream,
        label: str,
        *,
        fixed: float = 0.0,
        work: float = 0.0,
        resource: Resource = Resource.COMPUTE,
    ) -> Op:
        """Append an operation to ``stream``; it also follows the operations that the stream was told to wait for."""
        op = Op(label, stream, fixed, work, resource, tuple(self._waits[stream]))
        self._waits[stream].clear()
        self._last[stream] = op
        self.ops.append(op)
        return op

    def wait(self, stream: Stream, op: Op | None) -> None:
        """Make all operations that are enqueued on ``stream`` from now on wait for ``op``."""
        if op is not None:
            self._waits[stream].append(op)

    def last(self, stream: Stream) -> Op | None:
        """The operation that was last enqueued on ``stream``, like an event recorded now."""
        return self._last.get(stream)


def run(ops: Sequence[Op], contention: Contention) -> None:
    """Fill in when each of ``ops`` starts and ends, in seconds from the start of the first.

    Raises:
        ValueError: operations wait for each other in a circle, or for one that is not among ``ops``.
    """
    waiting: dict[Stream, deque[Op]] = {stream: deque() for stream in Stream}
    for op in ops:
        op.left_fixed, op.left_work = op.fixed, op.work
        waiting[op.stream].append(op)
    running: dict[Stream, Op] = {}
    now = 0.0
    while True:
        _start(waiting, running, now)
        if not running:
            break
        now += _advance(list(running.values()), contention)
        for stream, op in list(running.items()):
            if op.is_done:
                op.end = now
                del running[stream]
    stuck = [queue[0].label for queue in waiting.values() if queue]
    if stuck:
        raise ValueError(f"these operations wait for what never ends: {stuck}.")


def _start(waiting: dict[Stream, deque[Op]], running: dict[Stream, Op], now: float) -> None:
    """Start all operations that may start. Those that take no time end at once, and may let others start."""
    again = True
    while again:
        again = False
        for stream, queue in waiting.items():
            if stream in running or not queue or any(other.end < 0 for other in queue[0].waits):
                continue
            op = queue.popleft()
            op.start = now
            if op.is_done:
                op.end = now
            else:
                running[stream] = op
            again = True


def _advance(running: list[Op], contention: Contention) -> float:
    """Let time pass until the first of ``running`` ends its fixed part or its work; returns how much."""
    working = [op.resource for op in running if op.works]
    computes = Resource.COMPUTE in working
    transfers = any(resource is not Resource.COMPUTE for resource in working)

    def rate(op: Op) -> float:
        if not op.works:
            return 1.0
        if op.resource is Resource.COMPUTE:
            return 1.0 - contention.compute * transfers
        return (1.0 - contention.transfer * computes) / working.count(op.resource)

    rates = [rate(op) for op in running]
    left = [op.left_work if op.works else op.left_fixed for op in running]
    passed = min(amount / speed for amount, speed in zip(left, rates, strict=True))
    for op, speed in zip(running, rates, strict=True):
        if op.works:
            op.left_work -= passed * speed
        else:
            op.left_fixed -= passed
    return passed
