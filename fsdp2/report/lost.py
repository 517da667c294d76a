"""Divides the time of a step that is not compute by cause, each millisecond once. Plain values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from fsdp2.report.timeline import COMPUTING, OPTIMIZER, Does, Span


class Lost(str, Enum):
    """The causes of lost time."""

    GATHERS = "waits for gathers"
    REDUCTIONS = "waits for reductions"
    RANKS = "waits for other ranks"  # beyond the shortest wait of any rank for the same collectives
    OPTIMIZER = "waits inside the optimizer"
    LAUNCHES = "launches of collectives"
    COPIES = "copies from and to buckets"
    IDLE = "no operation runs"  # only torch.profiler knows


class Cell(NamedTuple):
    """A part of the lost time. ``unit`` is the one whose collectives lost it; empty if none."""

    lost: Lost
    unit: str = ""
    in_backward: bool = False


_OF_UNITS = {Does.GATHER_WAIT: Lost.GATHERS, Does.REDUCE_WAIT: Lost.REDUCTIONS}
_OF_THREAD = {Does.LAUNCH: Lost.LAUNCHES, Does.COPY: Lost.COPIES, Does.IDLE: Lost.IDLE}
Waits = Mapping[tuple[Does, str, bool], float]


def least_waits(ranks: Sequence[Iterable[Span]]) -> Waits:
    """The shortest wait of any rank, by kind, unit and pass, which is the cost of the collective itself."""
    sums = [_sums(spans) for spans in ranks]
    return {key: min(each.get(key, 0.0) for each in sums) for key in sums[0]} if sums else {}


def _sums(spans: Iterable[Span]) -> Waits:
    found: dict[tuple[Does, str, bool], float] = defaultdict(float)
    for span in spans:
        if span.does in _OF_UNITS:
            found[span.does, span.unit, span.in_backward] += span.stop - span.start
    return found


def lost_time(spans: Iterable[Span], least: Waits) -> dict[Cell, float]:
    """The time that one rank loses, in the unit of its ``spans``. It adds up to everything except compute. ``least`` is
    the least of all ranks; any wait beyond that is a wait for other ranks."""
    found: dict[Cell, float] = defaultdict(float)
    spans = list(spans)
    for span in spans:
        lasted = span.stop - span.start
        if span.does in _OF_THREAD:
            found[Cell(_OF_THREAD[span.does], span.unit, span.in_backward)] += lasted
        elif span.does is Does.RANK_WAIT:
            found[Cell(Lost.OPTIMIZER if span.module == OPTIMIZER else Lost.RANKS)] += lasted
        else:
            assert span.does in COMPUTING or span.does in _OF_UNITS, span.does
    for (does, unit, in_backward), waited in _sums(spans).items():
        own = min(waited, least.get((does, unit, in_backward), 0.0))
        found[Cell(_OF_UNITS[does], unit, in_backward)] += own
        found[Cell(Lost.RANKS)] += waited - own
    return {cell: value for cell, value in found.items() if value > 0}
