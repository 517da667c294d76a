"""What holds how much memory during a step: plain values, from a rank's marks.

The memory of the runtime is known from plans: a gather takes it, and a reshard frees it. The memory of the user's
program is measured and comes as separate marks, ``Edge.HELD``. All of it lies on the time axis of the spans.

Plans say how much the gradients of a backward take in the end, but not when. So where an allocator has statistics,
gradients that are not reduced yet are part of the allocated memory that nothing else explains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fsdp2.report.timeline import BACKWARDS, BLOCKED, GATHERS, RESHARDS, Edge, Mark

SHARDS, OPTIMIZER_STATES, SHARD_GRADIENTS = "shards of parameters", "optimizer states", "gradients of shards"
PARAMETERS, GRADIENTS, REDUCTION = "unsharded parameters", "gradients and their copies", "gradients in flight"
SAVED = "saved by forward for backward"  # as counted
OTHER = "activations, gradients before reduction, and other"  # allocated memory beyond everything else
ALLOCATED = "allocated"  # by the device's allocator; not a series, but OTHER is computed from it
TEMPORARY = (PARAMETERS, GRADIENTS, REDUCTION)  # what ``fsdp2.memory.memory_plan`` knows
SERIES = (SHARDS, OPTIMIZER_STATES, SHARD_GRADIENTS, *TEMPORARY, SAVED, OTHER)


class Sizes(Protocol):
    """The bytes of a unit; see ``memory_plan.UnitBytes``."""

    @property
    def unsharded(self) -> int: ...
    @property
    def post_forward(self) -> int: ...
    @property
    def sent(self) -> int: ...
    @property
    def gather(self) -> int: ...
    def backward(self, *, reshards: bool) -> int: ...


@dataclass(frozen=True)
class Memory:
    """The memory held from start to stop of a step.

    Attributes:
        times: in seconds, in order; what is held changes there.
        series: bytes by purpose (:data:`SERIES`), one value per time.
        owners: (unit, what, bytes) when most was held, the largest first; no unit: of no unit, or not known of which.
        temporary: the most that the runtime held, according to plans: the sum of :data:`TEMPORARY`.
    """

    times: Sequence[float]
    series: Mapping[str, Sequence[int]]
    owners: Sequence[tuple[str, str, int]]
    temporary: int = 0

    @property
    def peak(self) -> int:
        """The most that was held at one time."""
        return sum(nbytes for _, _, nbytes in self.owners)


def memory(marks: Iterable[Mark], sizes: Mapping[str, Sizes], start: float, stop: float) -> Memory:
    """The memory of a step. ``marks`` are those of all steps so far, since memory that is kept counts."""
    return _Held(sizes, start, stop).of(marks)


class _Held:
    def __init__(self, sizes: Mapping[str, Sizes], start: float, stop: float) -> None:
        self._sizes, self._start, self._stop = sizes, start, stop
        self._held: dict[tuple[str, str], int] = {}
        self._totals = dict.fromkeys(SERIES, 0)
        self._times: list[float] = []
        self._rows: list[tuple[int, ...]] = []
        self._owners: list[tuple[str, str, int]] = []
        self._peak, self._temporary = -1, 0
        self._asks_allocator = False

    def of(self, marks: Iterable[Mark]) -> Memory:
        moment = 0.0
        for mark in _gathered_first(marks):
            changes = _changes(mark, self._sizes)
            if changes is None:
                continue
            for key, nbytes in changes.items():
                self._hold(key, nbytes)
            moment = max(moment, mark.any_time)  # streams run concurrently
            self._note_temporary(moment)
            if not self._asks_allocator or mark.name == ALLOCATED:  # otherwise the remainder is not known
                self._note(moment)
        series = dict(zip(SERIES, zip(*self._rows, strict=True), strict=True)) if self._rows else {}
        used = {what: list(values) for what, values in series.items() if any(values)}
        return Memory(self._times, used, sorted(self._owners, key=lambda owner: -owner[2]), self._temporary)

    def _hold(self, key: tuple[str, str], nbytes: int) -> None:
        _, what = key
        if what == ALLOCATED:
            self._asks_allocator = True
            known = sum(total for each, total in self._totals.items() if each not in (OTHER, GRADIENTS))
            key, what, nbytes = ("", OTHER), OTHER, max(nbytes - known, 0)
        self._totals[what] += nbytes - self._held.get(key, 0)
        self._held[key] = nbytes

    def _note_temporary(self, moment: float) -> None:
        if self._start <= moment <= self._stop:
            self._temporary = max(self._temporary, sum(self._totals[what] for what in TEMPORARY))

    def _is_shown(self, what: str) -> bool:
        return what != GRADIENTS or not self._asks_allocator

    def _note(self, moment: float) -> None:
        row = tuple(total if self._is_shown(what) else 0 for what, total in self._totals.items())
        if moment < self._start:
            self._times, self._rows = [self._start], [row]
        elif moment <= self._stop:
            self._times.append(moment)
            self._rows.append(row)
        if self._start <= moment <= self._stop and sum(row) > self._peak:
            shown = ((*key, nbytes) for key, nbytes in self._held.items() if nbytes and self._is_shown(key[1]))
            self._peak, self._owners = sum(row), list(shown)


def _gathered_first(marks: Iterable[Mark]) -> Iterator[Mark]:
    """Move the start of a unit's backward after the gather that it waits for, since its gradients come later."""
    backward: Mark | None = None
    for mark in marks:
        if backward is not None and not _is_gather_of(backward.unit, mark):
            yield backward
            backward = None
        if mark.edge is Edge.EVENT and mark.name in BACKWARDS:
            backward = mark
        else:
            yield mark
    if backward is not None:
        yield backward


def _is_gather_of(unit: str, mark: Mark) -> bool:
    return mark.name == BLOCKED or (mark.unit == unit and mark.name in (*GATHERS, "wait"))


def _changes(mark: Mark, sizes: Mapping[str, Sizes]) -> dict[tuple[str, str], int] | None:
    """The changes that ``mark`` makes to the bytes held."""
    unit, name = mark.unit, mark.name
    if mark.edge is Edge.HELD:
        return {(unit, name): mark.nbytes}
    size = sizes.get(unit)
    if size is None:
        return None
    if mark.edge is Edge.EVENT and name in BACKWARDS:
        return {(unit, GRADIENTS): size.backward(reshards=True)}
    if mark.edge is Edge.STOP and name == "reduce_land":
        return {(unit, REDUCTION): 0}
    if mark.edge is not Edge.ACTION:
        return None
    if name in GATHERS:
        return {(unit, PARAMETERS): size.gather}
    if name == "wait":
        return {(unit, PARAMETERS): size.unsharded}
    if name in RESHARDS:
        return {(unit, PARAMETERS): size.post_forward if name == "reshard_post_forward" else 0}
    return {(unit, GRADIENTS): 0, (unit, REDUCTION): size.sent} if name == "reduce" else None
