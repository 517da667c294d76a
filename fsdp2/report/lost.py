"""Divides the time of a step that is not compute by cause, each millisecond once. Plain values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from fsdp2.report.timeline import OPTIMIZER, Does, Span


class Lost(str, Enum):
    """The causes of lost time."""

    GATHERS = "waits for gathers"
    REDUCTIONS = "waits for reductions"
    RANKS = "waits for other ranks"  # beyond the shortest wait of any rank for the same collectives
    OPTIMIZER = "waits inside the optimizer"
    LAUNCHES = "launches of collectives"
    COPIES = "copies from and to buckets"
    IDLE = "gaps between operations"  # only torch.profiler knows


class Cell(NamedTuple):
    """A part of the lost time. ``unit`` is the one whose collectives lost it; empty if none."""

    lost: Lost
    unit: str = ""
    in_backward: bool = False


_OF_UNITS = {Does.GATHER_WAIT: Lost.GATHERS, Does.REDUCE_WAIT: Lost.REDUCTIONS}
_OF_THREAD = {Does.LAUNCH: Lost.LAUNCHES, Does.COPY: Lost.COPIES, Does.IDLE: Lost.IDLE}
Sums = Mapping[tuple[Does, str, bool], float]  # by kind, unit and pass


def sums(spans: Iterable[Span]) -> Sums:
    """How long one rank did what."""
    found: dict[tuple[Does, str, bool], float] = defaultdict(float)
    for span in spans:
        found[span.does, span.unit, span.in_backward] += span.stop - span.start
    return found


def least_waits(ranks: Sequence[Sums]) -> Sums:
    """The shortest wait of any rank, which is the cost of the collective itself."""
    waits = [key for key in ranks[0] if key[0] in _OF_UNITS] if ranks else []
    return {key: min(each.get(key, 0.0) for each in ranks) for key in waits}


def lost_time(spans: Sequence[Span], least: Sums) -> dict[Cell, float]:
    """The time that one rank loses, in the unit of its ``spans``. It adds up to everything except compute. ``least`` is
    the least of all ranks; any wait beyond that is a wait for other ranks."""
    found: dict[Cell, float] = defaultdict(float)
    for (does, unit, in_backward), lasted in sums(spans).items():
        if does in _OF_THREAD:
            found[Cell(_OF_THREAD[does], unit, in_backward)] += lasted
        elif does in _OF_UNITS:
            own = min(lasted, least.get((does, unit, in_backward), 0.0))
            found[Cell(_OF_UNITS[does], unit, in_backward)] += own
            found[Cell(Lost.RANKS)] += lasted - own
    for span in spans:
        if span.does is Does.OTHER_WAIT:
            found[Cell(Lost.OPTIMIZER if span.module == OPTIMIZER else Lost.RANKS)] += span.stop - span.start
    return {cell: value for cell, value in found.items() if value > 0}
