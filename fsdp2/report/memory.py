"""What holds how much memory during a step: plain values, from a rank's marks.

The memory of the runtime is known from plans: a gather takes it, and a reshard frees it. The memory of the user's
program is measured and comes as separate marks, ``Edge.HELD``. All of it lies on the time axis of the spans.

Plans say how much the gradients of a backward take in the end, but not when. So where an allocator has statistics,
gradients that are not reduced yet are part of the allocated memory that nothing else explains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp2.memory.plan import UnitBytes
from fsdp2.report.timeline import BACKWARDS, BLOCKED, GATHERS, Edge, Mark

SHARDS, OPTIMIZER_STATES, SHARD_GRADIENTS = "shards of parameters", "optimizer states", "gradients of shards"
PARAMETERS, GRADIENTS, REDUCTION = "unsharded parameters", "gradients and their copies", "gradients in flight"
SAVED = "saved by forward for backward"  # as counted
OTHER = "activations, gradients before reduction, and other"  # allocated memory beyond everything else
ALLOCATED = "allocated"  # by the device's allocator; not a series, but OTHER is computed from it
TEMPORARY = (PARAMETERS, GRADIENTS, REDUCTION)  # what ``fsdp2.memory.memory_plan`` knows
SERIES = (SHARDS, OPTIMIZER_STATES, SHARD_GRADIENTS, *TEMPORARY, SAVED, OTHER)

Bytes = dict[tuple[str, str], int]  # by unit and purpose


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


def memory(marks: Iterable[Mark], sizes: Mapping[str, UnitBytes], start: float, stop: float) -> Memory:
    """The memory of a step. ``marks`` are those of all steps so far, since memory that is kept counts."""
    held = _Held()
    rows: list[tuple[float, dict[str, int]]] = []
    owners: list[tuple[str, str, int]] = []
    moment, temporary, peak = 0.0, 0, -1
    for mark in _gathered_first(marks):
        changes = _changes(mark, sizes)
        if not changes:
            continue
        held.change(changes)
        moment = max(moment, mark.any_time)  # streams run concurrently
        if moment > stop:
            break
        if moment >= start:
            temporary = max(temporary, sum(held.totals[what] for what in TEMPORARY))
        if held.asks_allocator and mark.name != ALLOCATED:
            continue  # the remainder is not known
        row = held.shown()
        if moment < start:
            rows = [(start, row)]
            continue
        rows.append((moment, row))
        if sum(row.values()) > peak:
            peak = sum(row.values())
            owners = [(*owner, nbytes) for owner, nbytes in held.by_owner.items() if nbytes and owner[1] in row]
    series = {what: [row.get(what, 0) for _, row in rows] for what in SERIES}
    used = {what: values for what, values in series.items() if any(values)}
    return Memory([time for time, _ in rows], used, sorted(owners, key=lambda owner: -owner[2]), temporary)


class _Held:
    """The bytes held now. ``asks_allocator``: the allocator has statistics, so that a remainder is known."""

    def __init__(self) -> None:
        self.by_owner: Bytes = {}
        self.totals = dict.fromkeys(SERIES, 0)
        self.asks_allocator = False

    def change(self, changes: Bytes) -> None:
        for owner, nbytes in changes.items():
            if owner[1] == ALLOCATED:
                self.asks_allocator = True
                known = sum(total for what, total in self.totals.items() if what not in (OTHER, GRADIENTS))
                owner, nbytes = ("", OTHER), max(nbytes - known, 0)
            self.totals[owner[1]] += nbytes - self.by_owner.get(owner, 0)
            self.by_owner[owner] = nbytes

    def shown(self) -> dict[str, int]:
        """The series' values, without those that the allocator's remainder contains."""
        return {what: total for what, total in self.totals.items() if what != GRADIENTS or not self.asks_allocator}


def _gathered_first(marks: Iterable[Mark]) -> Iterator[Mark]:
    """Move the start of a unit's backward after the gather that it waits for, since its gradients come later."""
    backward: Mark | None = None
    for mark in marks:
        if backward is not None:
            is_of_gather = mark.unit == backward.unit and mark.name in (*GATHERS, "wait")
            if not is_of_gather and mark.name != BLOCKED:
                yield backward
                backward = None
        if mark.edge is Edge.EVENT and mark.name in BACKWARDS:
            backward = mark
        else:
            yield mark
    if backward is not None:
        yield backward


def _changes(mark: Mark, sizes: Mapping[str, UnitBytes]) -> Bytes:
    """The changes that ``mark`` makes to the bytes held."""
    unit, name, edge = mark.unit, mark.name, mark.edge
    size = sizes.get(unit)
    if edge is Edge.HELD:
        return {(unit, name): mark.nbytes}
    if size is None:
        return {}
    if edge is Edge.EVENT and name in BACKWARDS:
        return {(unit, GRADIENTS): size.backward(reshards=True)}
    if edge is Edge.STOP and name == "reduce_land":
        return {(unit, REDUCTION): 0}
    if edge is Edge.ACTION and name == "reduce":
        return {(unit, GRADIENTS): 0, (unit, REDUCTION): size.sent}
    parameters = {
        **dict.fromkeys(GATHERS, size.gather),
        "wait": size.unsharded,
        "reshard": 0,
        "reshard_post_forward": size.post_forward,
    }
    return {(unit, PARAMETERS): parameters[name]} if edge is Edge.ACTION and name in parameters else {}
