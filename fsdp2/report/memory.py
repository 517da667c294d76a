"""What holds how much memory during a step: plain values, from a rank's marks.

The memory of the runtime is known from plans: a gather takes it, and a reshard frees it. The memory of the user's
program is measured and comes as separate marks, ``Edge.HELD``. All of it lies on the time axis of the spans.

Plans say how much the gradients of a backward take in the end, but not when. So where an allocator has statistics,
gradients that are not reduced yet are part of the allocated memory that nothing else explains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp2.core import schedules
from fsdp2.memory.plan import TEMPORARY, Held, Ledger, UnitBytes
from fsdp2.report.timeline import BACKWARDS, BLOCKED, GATHERS, RESHARDS, Edge, Mark

ALLOCATED = "allocated"  # by the device's allocator; not a purpose, but ``Held.OTHER`` is computed from it
_OF_PARAMETERS = (*GATHERS, "wait", *RESHARDS)  # actions

Bytes = dict[tuple[str, str], int]  # by unit and purpose


@dataclass(frozen=True)
class Memory:
    """The memory held from start to stop of a step.

    Attributes:
        times: in seconds, in order; what is held changes there.
        series: bytes by purpose (:class:`Held`), one value per time.
        owners: (unit, what, bytes) when most was held, the largest first; no unit: of no unit, or not known of which.
        temporary: the most that the runtime held, according to plans: the sum of ``TEMPORARY``.
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
    ledger = Ledger(sizes)
    rows: list[tuple[float, dict[Held, int]]] = []
    owners: list[tuple[str, str, int]] = []
    moment, temporary, peak, asks_allocator = 0.0, 0, -1, False
    for mark in _gathered_first(marks):
        if not _count(ledger, mark):
            continue
        is_of_allocator = mark.name == ALLOCATED
        asks_allocator = asks_allocator or is_of_allocator
        moment = max(moment, mark.any_time)  # streams run concurrently
        if moment > stop:
            break
        if moment >= start:
            temporary = max(temporary, sum(ledger.totals.get(what, 0) for what in TEMPORARY))
        if asks_allocator and not is_of_allocator:
            continue  # the remainder is not known
        row = dict(ledger.totals)
        if asks_allocator:
            row.pop(Held.GRADIENTS, None)  # a part of the remainder
        if moment < start:
            rows = [(start, row)]
            continue
        rows.append((moment, row))
        if sum(row.values()) > peak:
            peak = sum(row.values())
            held = ((unit, what, nbytes) for (unit, what), nbytes in ledger.by_owner.items() if what in row)
            owners = [(unit, what.value, nbytes) for unit, what, nbytes in held if nbytes]
    series = {what.value: [row.get(what, 0) for _, row in rows] for what in Held}
    used = {what: values for what, values in series.items() if any(values)}
    return Memory([time for time, _ in rows], used, sorted(owners, key=lambda owner: -owner[2]), temporary)


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


def _count(ledger: Ledger, mark: Mark) -> bool:
    """Count the bytes that ``mark`` tells of, and return whether it tells of any."""
    unit, name, edge = mark.unit, mark.name, mark.edge
    if edge is Edge.HELD and name == ALLOCATED:
        in_remainder = (Held.OTHER, Held.GRADIENTS)
        known = sum(total for what, total in ledger.totals.items() if what not in in_remainder)
        ledger.set("", Held.OTHER, max(mark.nbytes - known, 0))
    elif edge is Edge.HELD:
        ledger.set(unit, Held(name), mark.nbytes)
    elif unit not in ledger.sizes:
        return False
    elif edge is Edge.EVENT and name in BACKWARDS:
        ledger.run_backward(unit, gathers=False, reshards=True)
    elif edge is Edge.STOP and name == "reduce_land":
        ledger.set(unit, Held.REDUCTION, 0)
    elif edge is Edge.ACTION and name == "reduce":  # each group of the unit says so
        ledger.keep(unit)
        ledger.set(unit, Held.REDUCTION, ledger.sizes[unit].sent)
    elif edge is Edge.ACTION and name in _OF_PARAMETERS:
        ledger.count(schedules.Action(name), unit)
    else:
        return False
    return True
