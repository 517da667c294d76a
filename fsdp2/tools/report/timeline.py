"""What one rank did in a step, from the marks that it made: plain values, in seconds.

``spans`` says what the rank's thread (on an accelerator: its compute stream) did at each time, ``transfers`` which
collectives were in flight meanwhile, ``memory`` which unit held how much. Marks come in the order in which they were
made; no torch here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol


class Edge(Enum):
    """What a mark says."""

    EVENT = "event"  # a hook fired
    START = "start"  # work starts
    STOP = "stop"  # work is done or, on an accelerator, enqueued
    ACTION = "action"  # the action that has just stopped did something


BLOCKED = "blocked"  # work: the CPU waits for collectives


class Mark(NamedTuple):
    """``time`` is that of the thread or of the compute stream; None if the work needs neither. ``side``: on an
    accelerator, the time on the stream of the gather or of the reduction that the work belongs to."""

    edge: Edge
    name: str
    unit: str
    time: float | None
    side: float | None = None

    @property
    def any_time(self) -> float:
        """When it was made, on whatever stream is known."""
        found = self.time if self.time is not None else self.side
        assert found is not None
        return found


class Does(str, Enum):
    """What a thread or a compute stream does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OTHER = "other"  # outside of the model: loss, optimizer, data
    GATHER_WAIT = "gather wait"
    REDUCE_WAIT = "reduce wait"
    RANK_WAIT = "rank wait"  # at the end of a step, until all ranks are there
    COPY = "copy"  # out of buckets and into ``.grad``; on an accelerator, into the buckets of reductions
    LAUNCH = "launch"  # start collectives, fill their buckets, free memory
    IDLE = "idle"  # between operations of compute; only torch.profiler knows


_COMPUTING = (Does.FORWARD, Does.BACKWARD, Does.OTHER)


class Span(NamedTuple):
    does: Does
    unit: str
    start: float
    stop: float
    in_backward: bool


class Transfer(NamedTuple):
    """A collective in flight, or a copy from or to the host. ``stop``: when it had arrived; on the CPU, when the thread
    had waited for it. ``early``: it was a prefetch. ``order``: they were launched in this order."""

    order: int
    kind: str
    unit: str
    start: float
    stop: float
    in_backward: bool
    early: bool = False


ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
COPIES = TO_DEVICE, TO_HOST = "copy to device", "copy to host"

_GATHERS = ("unshard", "prefetch")
_RESHARDS = ("reshard", "reshard_post_forward")
_BACKWARDS = ("pre_backward", "join_backward")
_REDUCES = ("reduce", "reduce_jointly")
_OF_REDUCTIONS = ("reduce_launch", "reduce_finish", "reduce_land")


class _Passes:
    """Which unit computes, as far as events tell."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._forwards: list[str] = []
        self._backward = ""
        self.in_backward = False

    def take(self, event: str, unit: str) -> None:
        if event == "pre_forward":
            self._forwards.append(unit)
        elif event == "post_forward" and self._forwards:
            self._forwards.pop()
        elif event in _BACKWARDS:
            self.in_backward, self._backward = True, unit if event == "pre_backward" else self._backward
        elif event == "post_backward":
            self.in_backward, self._backward = True, self._root
        elif event == "end_backward":
            self.in_backward = False
            self._forwards.clear()

    @property
    def now(self) -> tuple[Does, str]:
        if self.in_backward:  # a forward that is recomputed belongs to backward
            return Does.BACKWARD, self._forwards[-1] if self._forwards else self._backward or self._root
        return (Does.FORWARD, self._forwards[-1]) if self._forwards else (Does.OTHER, "")


def spans(marks: Sequence[Mark], start: float, stop: float, root: str, *, on_device: bool) -> list[Span]:
    """What the thread did from ``start`` to ``stop``, without gaps. ``root``: the name of the root unit."""
    found: list[Span] = []
    passes, works = _Passes(root), [("", "")]
    landed = root

    def add(until: float) -> None:
        nonlocal start
        does, unit = passes.now if len(works) == 1 else _does(works, landed, on_device=on_device)
        if until > start:
            last = found[-1] if found else None
            if last and (last.does, last.unit, last.in_backward) == (does, unit, passes.in_backward):
                found[-1] = last._replace(stop=until)
            else:
                found.append(Span(does, unit, start, until, passes.in_backward))
            start = until

    for mark in marks:
        if mark.time is None:
            continue
        add(mark.time)
        if mark.edge is Edge.EVENT:
            passes.take(mark.name, mark.unit)
        elif mark.edge is Edge.START:
            works.append((mark.name, mark.unit))
        elif mark.edge is Edge.STOP:
            works.pop()
            landed = mark.unit if mark.name in _OF_REDUCTIONS else landed
    add(stop)
    return found


def with_idle(spans: Iterable[Span], busy: Sequence[tuple[float, float]]) -> list[Span]:
    """``spans``, with compute cut where no operation ran. ``busy``: from when to when operations ran, in order, without
    overlaps."""
    found: list[Span] = []
    position = 0
    for span in spans:
        if span.does not in _COMPUTING:
            found.append(span)
            continue
        at = span.start
        while at < span.stop:
            start, stop = busy[position] if position < len(busy) else (math.inf, math.inf)
            if start > at:
                until = min(start, span.stop)
                found.append(span._replace(does=Does.IDLE, start=at, stop=until))
            else:
                until = max(min(stop, span.stop), at)
                if until > at:
                    found.append(span._replace(start=at, stop=until))
                if stop <= span.stop:
                    position += 1
            at = until
    return found


def joined(spans: Iterable[Span], shortest: float) -> list[Span]:
    """``spans``, to draw: the thread counts as busy where it was idle for less than ``shortest`` seconds."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        is_short = span.does is Does.IDLE and span.stop - span.start < shortest
        is_same = last is not None and (last.unit, last.in_backward) == (span.unit, span.in_backward)
        if last is not None and is_same and (last.does is span.does or (is_short and last.does in _COMPUTING)):
            found[-1] = last._replace(stop=span.stop)
        else:
            found.append(span)
    return found


def _does(works: Sequence[tuple[str, str]], landed: str, *, on_device: bool) -> tuple[Does, str]:
    """The innermost of ``works`` runs. ``landed``: the unit whose reduction was worked on last."""
    name, unit = works[-1]
    if name == BLOCKED:
        name, unit = works[-2]
        if not name:
            return Does.RANK_WAIT, ""
        return (Does.REDUCE_WAIT if name.startswith(("reduce", "land")) else Does.GATHER_WAIT), unit
    if on_device:
        if name == "wait":
            return Does.GATHER_WAIT, unit
        if name in ("reduce_finish", "land"):  # ``land`` waits for the last reduction
            return Does.REDUCE_WAIT, unit if name == "reduce_finish" else landed
        return (Does.COPY if name == "reduce_launch" else Does.LAUNCH), unit
    return (Does.COPY if name in ("wait", "reduce_finish", "reduce_land", *COPIES) else Does.LAUNCH), unit


def transfers(marks: Sequence[Mark], replicated: Iterable[str], *, on_device: bool) -> list[Transfer]:
    """The collectives of a step, and copies from and to the host, in the order of their launches. ``replicated``: units
    that are also all-reduced."""
    return _Transfers(frozenset(replicated), on_device).of(marks)


class _Transfers:
    def __init__(self, replicated: frozenset[str], on_device: bool) -> None:
        self._replicated, self._on_device = replicated, on_device
        self._passes = _Passes("")
        self._started: dict[str, Mark] = {}  # by the name of the work: when it last started
        self._arrived: float | None = None  # when the thread had waited, since the last work started
        self._copies: list[Transfer] = []  # since the last work started
        self._issued: dict[str, Transfer] = {}  # gathers by unit: counts if the action did something
        self._gathers: dict[str, Transfer] = {}
        self._launched: list[Transfer] = []  # by the action that runs; the same
        self._reductions: dict[str, list[Transfer]] = defaultdict(list)  # by unit, oldest first
        self._found: list[Transfer] = []
        self._num_launched = 0

    def of(self, marks: Sequence[Mark]) -> list[Transfer]:
        steps = {Edge.START: self._start, Edge.STOP: self._stop, Edge.ACTION: self._act}
        for mark in marks:
            if mark.edge is Edge.EVENT:
                self._passes.take(mark.name, mark.unit)
            else:
                steps[mark.edge](mark)
        return sorted(self._found)

    def _start(self, mark: Mark) -> None:
        if mark.name == BLOCKED:
            return
        if mark.name in COPIES:
            self._started[mark.name] = mark
            return
        self._started[mark.name], self._arrived, self._copies = mark, None, []
        if mark.name in _REDUCES:
            self._launched = []

    def _stop(self, mark: Mark) -> None:
        name, unit = mark.name, mark.unit
        start = self._started.get(name, mark)
        if name == BLOCKED:
            self._arrived = mark.time
        elif name in COPIES:
            self._copies.append(self._transfer(name, mark, start.any_time))
            self._found.append(self._copies[-1])
        elif name in _GATHERS:
            begin = self._copies[-1].stop if self._copies else start.any_time  # shards come from the host first
            self._issued[unit] = self._transfer(ALL_GATHER, mark, begin, early=name == "prefetch")
        elif name == "reduce_launch":
            begin = start.any_time
            if self._on_device:  # compute fills buckets first
                begin = max(start.side or 0.0, mark.any_time)
            self._launched.append(self._before_copies(self._transfer(REDUCE_SCATTER, mark, begin)))
        elif name == "reduce_finish" and self._reductions[unit]:
            transfer = self._reductions[unit].pop(0)
            self._close(transfer, transfer.stop if self._on_device else self._waited(start))
            if unit in self._replicated:
                begin = self._found[-1].stop
                self._num_launched += 1
                all_reduce = transfer._replace(order=self._num_launched, kind=ALL_REDUCE, start=begin, stop=begin)
                self._reductions[unit].append(all_reduce)
        elif name == "reduce_land" and self._reductions[unit] and self._reductions[unit][0].kind == ALL_REDUCE:
            stop = self._waited(start)
            if mark.side is not None:
                stop = self._copies[0].start if self._copies else mark.side  # gradients go to the host behind it
            self._close(self._reductions[unit].pop(0), stop)

    def _act(self, mark: Mark) -> None:
        name, unit = mark.name, mark.unit
        if name in _GATHERS and unit in self._issued:
            self._gathers[unit] = self._issued.pop(unit)
        elif name == "reduce":
            self._reductions[unit] += self._launched
            self._launched = []
        elif unit in self._gathers and (name == "wait" or name in _RESHARDS):  # resharded: it was gathered in vain
            transfer = self._gathers.pop(unit)
            self._close(transfer, transfer.stop if self._on_device else self._waited(self._started.get(name, mark)))

    def _close(self, transfer: Transfer, stop: float) -> None:
        self._found.append(transfer._replace(stop=max(stop, transfer.stop)))

    def _before_copies(self, transfer: Transfer) -> Transfer:
        """``transfer``, which ends where its result begins to be copied to the host."""
        return transfer._replace(stop=max(transfer.start, self._copies[0].start)) if self._copies else transfer

    def _waited(self, start: Mark) -> float:
        """When the thread had waited for what it began to wait for at ``start``."""
        return start.any_time if self._arrived is None else self._arrived

    def _transfer(self, kind: str, launched: Mark, start: float, *, early: bool = False) -> Transfer:
        """``launched``: the end of the launch; on an accelerator, of the collective."""
        stop = launched.any_time if launched.side is None else launched.side
        self._num_launched += 1
        in_backward = self._passes.in_backward
        return Transfer(self._num_launched, kind, launched.unit, start, max(start, stop), in_backward, early)


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
    """What the runtime held from start to stop of a step: ``points`` are (time, bytes); ``owners`` are (unit, what,
    bytes) at the peak, the largest first."""

    points: list[tuple[float, int]]
    owners: list[tuple[str, str, int]]

    @property
    def peak(self) -> int:
        return sum(nbytes for _, _, nbytes in self.owners)


PARAMETERS, GRADIENTS, REDUCTION = "unsharded parameters", "gradients and their copies", "gradients in flight"


def memory(marks: Iterable[Mark], sizes: Mapping[str, Sizes], start: float, stop: float) -> Memory:
    """The memory of a step, as the plans say. ``marks`` are those of all steps so far: what is kept counts."""
    held: dict[tuple[str, str], int] = {}
    points: list[tuple[float, int]] = []
    owners: list[tuple[str, str, int]] = []
    peak, moment, total = -1, 0.0, 0
    for mark in _gathered_first(marks):
        changes = _changes(mark, sizes)
        if changes is None:
            continue
        moment = max(moment, mark.any_time)  # streams run beside each other
        total += sum(nbytes - held.get(key, 0) for key, nbytes in changes.items())
        held.update(changes)
        if moment < start:
            points = [(start, total)]
        elif moment <= stop:
            points.append((moment, total))
        if start <= moment <= stop and total > peak:
            peak = total
            owners = [(unit, what, nbytes) for (unit, what), nbytes in held.items() if nbytes]
    return Memory(points, sorted(owners, key=lambda owner: -owner[2]))


def _gathered_first(marks: Iterable[Mark]) -> Iterator[Mark]:
    """``marks``, with the start of a unit's backward behind the gather that it waits for: its gradients come later."""
    backward: Mark | None = None
    for mark in marks:
        if backward is not None and not _is_gather_of(backward.unit, mark):
            yield backward
            backward = None
        if mark.edge is Edge.EVENT and mark.name in _BACKWARDS:
            backward = mark
        else:
            yield mark
    if backward is not None:
        yield backward


def _is_gather_of(unit: str, mark: Mark) -> bool:
    return mark.name == BLOCKED or (mark.unit == unit and mark.name in (*_GATHERS, "wait"))


def _changes(mark: Mark, sizes: Mapping[str, Sizes]) -> dict[tuple[str, str], int] | None:
    """What ``mark`` changes in who holds how much."""
    unit, name = mark.unit, mark.name
    size = sizes.get(unit)
    if size is None:
        return None
    if mark.edge is Edge.EVENT and name in _BACKWARDS:
        return {(unit, GRADIENTS): size.backward(reshards=True)}
    if mark.edge is Edge.STOP and name == "reduce_land":
        return {(unit, REDUCTION): 0}
    if mark.edge is not Edge.ACTION:
        return None
    if name in _GATHERS:
        return {(unit, PARAMETERS): size.gather}
    if name == "wait":
        return {(unit, PARAMETERS): size.unsharded}
    if name in _RESHARDS:
        return {(unit, PARAMETERS): size.post_forward if name == "reshard_post_forward" else 0}
    return {(unit, GRADIENTS): 0, (unit, REDUCTION): size.sent} if name == "reduce" else None
