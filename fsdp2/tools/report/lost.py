"""Where the time of a step goes that is not computed in: each millisecond once. Plain values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from fsdp2.tools.report.timeline import COMPUTING, OPTIMIZER, Does, Span


class Lost(str, Enum):
    """What a step loses time to."""

    GATHERS = "waits for gathers"
    REDUCTIONS = "waits for reductions"
    RANKS = "waits for other ranks"  # beyond what the rank that waits least for the same collectives waits
    OPTIMIZER = "waits inside the optimizer"
    LAUNCHES = "launches of collectives"
    COPIES = "copies from and to buckets"
    IDLE = "no operation runs"  # only torch.profiler knows


class Cell(NamedTuple):
    """A part of the lost time. ``unit``: whose collectives; empty if of none."""

    lost: Lost
    unit: str = ""
    in_backward: bool = False


_OF_UNITS = {Does.GATHER_WAIT: Lost.GATHERS, Does.REDUCE_WAIT: Lost.REDUCTIONS}
_OF_THREAD = {Does.LAUNCH: Lost.LAUNCHES, Does.COPY: Lost.COPIES, Does.IDLE: Lost.IDLE}
Waits = Mapping[tuple[Does, str, bool], float]


def least_waits(ranks: Sequence[Iterable[Span]]) -> Waits:
    """By kind, unit and pass: how long every rank waits at least. That is what the collective itself costs."""
    sums = [_sums(spans) for spans in ranks]
    return {key: min(each.get(key, 0.0) for each in sums) for key in sums[0]} if sums else {}


def _sums(spans: Iterable[Span]) -> Waits:
    found: dict[tuple[Does, str, bool], float] = defaultdict(float)
    for span in spans:
        if span.does in _OF_UNITS:
            found[span.does, span.unit, span.in_backward] += span.stop - span.start
    return found


def lost_time(spans: Iterable[Span], least: Waits) -> dict[Cell, float]:
    """What one rank loses, in the unit of its ``spans``. They add up to all that is not compute. ``least``: of all
    ranks; what this rank waits beyond that, it waits for other ranks."""
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
