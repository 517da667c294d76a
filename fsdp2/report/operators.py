"""How long each operation ran within each unit, and when none ran, from what torch.profiler saw. Plain values."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fsdp2.report.timeline import COMPUTING, Does, Span


class Operation(NamedTuple):
    """One run of an operation or, on an accelerator, of a kernel, from ``start`` to ``stop`` in seconds. ``own``: the
    seconds that it spent itself, without the operations that it called."""

    start: float
    stop: float
    own: float
    name: str


Place = tuple[str, str, Does, str]  # the unit, its module, what computes, and the name of the operation
Operators = Mapping[Place, tuple[int, float]]  # how often it ran, and its own seconds


def operators(spans: Sequence[Span], operations: Iterable[Operation]) -> Operators:
    """The operations that ran in compute. ``spans`` are in order, without gaps."""
    starts = [span.start for span in spans]
    found: dict[Place, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for each in operations:
        middle = (each.start + each.stop) / 2  # both clocks differ by some microseconds
        span = spans[max(bisect_right(starts, middle) - 1, 0)]
        if span.start <= middle < span.stop and span.does in COMPUTING:
            place = span.unit, span.module, span.does, each.name
            calls, seconds = found[place]
            found[place] = calls + 1, seconds + each.own
    return dict(found)


def busy(operations: Iterable[Operation]) -> list[tuple[float, float]]:
    """The intervals in which operations ran, in order and without overlaps. ``operations`` are in order."""
    found: list[tuple[float, float]] = []
    for start, stop, *_ in operations:
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found
