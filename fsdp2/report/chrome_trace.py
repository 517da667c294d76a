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


def chrome_trace(data: dict[str, Any]) -> dict[str, Any]:
    """The timelines and the memory of a report's ``data``. Times are in microseconds from the start of the step."""
    events: list[dict[str, Any]] = []
    for position, timeline in enumerate(data["timelines"]):
        events += _names(data, timeline["rank"], position)
        events += _Rank(data, timeline).events()
    return {"traceEvents": events + list(_memory(data)), "displayTimeUnit": "ms"}


def _names(data: dict[str, Any], rank: int, position: int) -> list[dict[str, Any]]:
    name = f"rank {rank} of {data['model']}"
    return [
        _event("M", rank, _COMPUTE, name="process_name", args={"name": name}),
        _event("M", rank, _COMPUTE, name="process_sort_index", args={"sort_index": position}),
    ]


class _Rank:
    """The events of one rank."""

    def __init__(self, data: dict[str, Any], timeline: dict[str, Any]) -> None:
        self._data, self._rank = data, timeline["rank"]
        self._units = [unit["name"] for unit in data["units"]] + [""]  # -1: no unit
        self._spans = timeline["spans"]
        self._transfers = timeline["transfers"]
        self._threads: dict[int, str] = {_COMPUTE: "compute"}
        self._ends: dict[int, int] = {}  # the end of the last transfer, by thread

    def events(self) -> list[dict[str, Any]]:
        slices = [
            self._slice(_COMPUTE, f"{self._data['does'][does]} {self._where(unit, place)}".strip(), start, duration)
            for does, unit, start, duration, place in self._spans
        ]
        arrows = []
        for number, (kind, unit, start, duration, early) in enumerate(self._transfers):
            thread = self._thread(kind, start, start + duration)
            name = f"{self._data['kinds'][kind]} {self._units[unit]}"
            slices.append(self._slice(thread, name, start, duration) | {"args": {"prefetched": bool(early)}})
            arrows += self._arrow(number, kind, unit, thread, start, start + duration)
        return [*self._thread_names(), *slices, *arrows]

    def _where(self, unit: int, place: int) -> str:
        """The module that computes, or the unit."""
        return str(self._units[unit] if place < 0 else self._data["places"][place])

    def _slice(self, thread: int, name: str, start: int, duration: int) -> dict[str, Any]:
        return self._event("X", thread, name=name, ts=start, dur=duration)

    def _thread(self, kind: int, start: int, stop: int) -> int:
        """The first thread of ``kind`` on which nothing is in flight at ``start``."""
        first = 1 + _THREADS_PER_KIND * kind
        thread = next(each for each in range(first, first + len(self._transfers)) if self._ends.get(each, 0) <= start)
        self._ends[thread] = stop
        name = self._data["kinds"][kind]
        self._threads[thread] = name if thread == first else f"{name}, also in flight"
        return thread

    def _thread_names(self) -> Iterator[dict[str, Any]]:
        for thread, name in sorted(self._threads.items()):
            yield self._event("M", thread, name="thread_name", args={"name": name})
            yield self._event("M", thread, name="thread_sort_index", args={"sort_index": thread})

    def _arrow(self, number: int, kind: int, unit: int, thread: int, start: int, stop: int) -> list[dict[str, Any]]:
        """An arrow from the slice that starts a collective, through its flight, to the slice that uses its result."""
        name = _ARROWS.get(self._data["kinds"][kind])
        source, use = self._span_at(start), self._use(unit, start, stop)
        if name is None or source is None or use is None:
            return []
        # A viewer binds each end to the slice around it, so an end lies inside of its slice.
        points = [("s", _COMPUTE, start), ("t", thread, start), ("f", _COMPUTE, max(use[2], min(stop, _last(use))))]
        identity = f"{self._rank}.{number}"
        return [
            self._event(phase, at, name=name, cat="collectives", id=identity, ts=ts)
            | ({"bp": "e"} if phase == "f" else {})
            for phase, at, ts in points
        ]

    def _span_at(self, moment: int) -> Sequence[int] | None:
        return next((span for span in self._spans if span[2] <= moment <= _last(span)), None)

    def _use(self, unit: int, start: int, stop: int) -> Sequence[int] | None:
        """The first of the unit's waits, copies or computes that ends after the collective has arrived; else, what the
        rank does then."""
        uses = (
            span
            for span in self._spans
            if span[1] == unit and span[2] >= start and span[2] + span[3] >= stop
            if self._data["does"][span[0]] not in _NOT_A_USE
        )
        return next(uses, None) or self._span_at(stop)

    def _event(self, phase: str, thread: int, **rest: Any) -> dict[str, Any]:
        return _event(phase, self._rank, thread, **rest)


def _last(span: Sequence[int]) -> int:
    return int(span[2] + max(span[3] - 1, 0))


def _memory(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A counter whose series a viewer stacks."""
    memory = data["memory"]
    if memory["rank"] not in [timeline["rank"] for timeline in data["timelines"]]:
        return  # it would be a process without a timeline
    for i, time in enumerate(memory["times_us"]):
        values = {each["what"]: each["nbytes"][i] for each in memory["series"]}
        yield _event("C", memory["rank"], _COMPUTE, name="memory, bytes", ts=time, args=values)


def _event(phase: str, rank: int, thread: int, **rest: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": rank, "tid": thread, **rest}
