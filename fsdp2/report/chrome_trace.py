"""The report in the format that Perfetto and chrome://tracing read. Plain values in, plain values out.

Each rank is a process with a thread for what the rank does, threads for collectives in flight, a counter for memory,
and arrows from the start of a collective to the use of its result. Rule: slices of a thread never partially overlap,
since viewers refuse or misplace such slices; so collectives that do are put on separate threads.

Source: "Trace Event Format" of the Chromium project; phases X, M, C, s, t and f.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_COMPUTE = 0  # the thread that shows what a rank does
_ARROWS = {"all-gather": "gather to use", "reduce-scatter": "reduce to landing", "all-reduce": "reduce to landing"}
_NOT_A_USE = ("launch", "other")
_THREADS_PER_KIND = 100  # there are never more in flight


Event = dict[str, Any]
Row = Sequence[int]  # of the spans of a timeline, or of its transfers


def chrome_trace(data: dict[str, Any]) -> dict[str, Any]:
    """The timelines and the memory of a report's ``data``. Times are in microseconds from the start of the step."""
    events: list[Event] = []
    for position, timeline in enumerate(data["timelines"]):
        rank = timeline["rank"]
        events.append(_named("process_name", rank, _COMPUTE, name=f"rank {rank} of {data['model']}"))
        events.append(_named("process_sort_index", rank, _COMPUTE, sort_index=position))
        events += _Rank(data, timeline).events()
    return {"traceEvents": events + list(_memory(data)), "displayTimeUnit": "ms"}


class _Rank:
    """The events of one rank."""

    def __init__(self, data: dict[str, Any], timeline: dict[str, Any]) -> None:
        self._rank, self._does, self._kinds, self._places = (
            timeline["rank"],
            data["does"],
            data["kinds"],
            data["places"],
        )
        self._units = [unit["name"] for unit in data["units"]] + [""]  # -1: no unit
        self._spans, self._transfers = timeline["spans"], timeline["transfers"]
        self._threads: dict[int, str] = {_COMPUTE: "compute"}
        self._ends: dict[int, int] = {}  # the end of the last transfer, by thread

    def events(self) -> list[Event]:
        slices, arrows = [], []
        for does, unit, start, duration, place in self._spans:
            where = self._units[unit] if place < 0 else self._places[place]
            slices.append(self._slice(_COMPUTE, f"{self._does[does]} {where}".strip(), start, duration))
        for number, transfer in enumerate(self._transfers):
            kind, unit, start, duration, early = transfer
            thread = self._thread(kind, start, start + duration)
            flight = self._slice(thread, f"{self._kinds[kind]} {self._units[unit]}", start, duration)
            slices.append(flight | {"args": {"prefetched": bool(early)}})
            arrows += self._arrow(f"{self._rank}.{number}", thread, transfer)
        names = []
        for thread, name in sorted(self._threads.items()):
            names.append(_named("thread_name", self._rank, thread, name=name))
            names.append(_named("thread_sort_index", self._rank, thread, sort_index=thread))
        return [*names, *slices, *arrows]

    def _slice(self, thread: int, name: str, start: int, duration: int) -> Event:
        return _event("X", self._rank, thread, name=name, ts=start, dur=duration)

    def _thread(self, kind: int, start: int, stop: int) -> int:
        """The first thread of ``kind`` on which nothing is in flight at ``start``."""
        first = 1 + _THREADS_PER_KIND * kind
        thread = next(each for each in range(first, first + len(self._transfers)) if self._ends.get(each, 0) <= start)
        self._ends[thread] = stop
        self._threads[thread] = self._kinds[kind] if thread == first else f"{self._kinds[kind]}, also in flight"
        return thread

    def _arrow(self, identity: str, thread: int, transfer: Row) -> list[Event]:
        """An arrow from the slice that starts a collective, through its flight, to the slice that uses its result."""
        kind, unit, start, duration, _ = transfer
        stop, name = start + duration, _ARROWS.get(self._kinds[kind])
        source, use = self._span_at(start), self._use(unit, start, stop)
        if name is None or source is None or use is None:
            return []
        # A viewer binds each end to the slice around it, so an end lies inside of its slice.
        points = [("s", _COMPUTE, start), ("t", thread, start), ("f", _COMPUTE, max(use[2], min(stop, _last(use))))]
        found = [
            _event(phase, self._rank, at, name=name, cat="collectives", id=identity, ts=ts) for phase, at, ts in points
        ]
        found[-1]["bp"] = "e"
        return found

    def _span_at(self, moment: int) -> Row | None:
        return next((span for span in self._spans if span[2] <= moment <= _last(span)), None)

    def _use(self, unit: int, start: int, stop: int) -> Row | None:
        """The first of the unit's waits, copies or computes that ends after the collective has arrived; else, what the
        rank does then."""
        for span in self._spans:
            does, of, begins, lasts, _ = span
            if of == unit and begins >= start and begins + lasts >= stop and self._does[does] not in _NOT_A_USE:
                return span
        return self._span_at(stop)


def _last(span: Row) -> int:
    return int(span[2] + max(span[3] - 1, 0))


def _memory(data: dict[str, Any]) -> Iterator[Event]:
    """A counter for each rank, whose series a viewer stacks."""
    drawn = [timeline["rank"] for timeline in data["timelines"]]
    for memory in data["memory"]:
        if memory["rank"] not in drawn:
            continue  # it would be a process without a timeline
        for i, time in enumerate(memory["times_us"]):
            values = {each["what"]: each["nbytes"][i] for each in memory["series"]}
            yield _event("C", memory["rank"], _COMPUTE, name="memory, bytes", ts=time, args=values)


def _named(what: str, rank: int, thread: int, **args: Any) -> Event:
    return _event("M", rank, thread, name=what, args=args)


def _event(phase: str, rank: int, thread: int, **rest: Any) -> Event:
    return {"ph": phase, "pid": rank, "tid": thread, **rest}
