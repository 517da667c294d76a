"""What one rank did in a step, from the marks that it made: plain values, in seconds.

``spans`` says what the rank's thread (on an accelerator, its compute stream) did at each time, ``transfers`` which
collectives were in flight at the same time. Marks come in the order in which they were made; no torch here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple


class Edge(Enum):
    """The meaning of a mark."""

    EVENT = "event"  # a hook fired, or a module inside a unit, or an optimizer, starts or stops
    START = "start"  # work starts
    STOP = "stop"  # work is done or, on an accelerator, enqueued
    ACTION = "action"  # the action that just stopped had an effect
    HELD = "held"  # from here on, the unit holds so many bytes of what the name says


BLOCKED = "blocked"  # work: the CPU waits for collectives
ROOT = "(root)"  # the name of the root unit


class Mark(NamedTuple):
    """``time`` is that of the thread or of the compute stream; None if the work needs neither. ``side``: on an
    accelerator, the time on the stream of the gather or of the reduction that the work belongs to. ``module``: the full
    name of the module that starts or stops. ``nbytes``: what is held."""

    edge: Edge
    name: str
    unit: str
    time: float | None
    side: float | None = None
    module: str = ""
    nbytes: int = 0

    @property
    def any_time(self) -> float:
        """The time when it was made, on any stream for which it is known."""
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
    OTHER_WAIT = "other wait"  # for collectives of no unit, such as those of the optimizer
    COPY = "copy"  # out of buckets and into ``.grad``; on an accelerator, into the buckets of reductions
    LAUNCH = "launch"  # start collectives, fill their buckets, free memory
    IDLE = "idle"  # between operations of compute; only torch.profiler knows


COMPUTING = (Does.FORWARD, Does.BACKWARD, Does.OTHER)


# What a thread does outside of all units, where nothing more is known.
LOSS, OPTIMIZER, OUTSIDE = "loss and other code after forward", "optimizer", "other code outside of units"
OPTIMIZER_END = "optimizer_end"  # in a mark; its start is OPTIMIZER


class Span(NamedTuple):
    """``module``: the full name of the module of ``unit`` that computes, if it has a name; of no unit: what the program
    does, as far as it is known."""

    does: Does
    unit: str
    start: float
    stop: float
    in_backward: bool
    module: str = ""


class Transfer(NamedTuple):
    """A collective in flight, a copy from or to the host, or a step of a unit by the host's thread. ``stop``: when it
    had arrived; on the CPU, when the thread had waited for it. ``early``: it was a prefetch. ``order``: they were
    launched in this order; steps of the host count when they end."""

    order: int
    kind: str
    unit: str
    start: float
    stop: float
    in_backward: bool
    early: bool = False


ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
COPIES = TO_DEVICE, TO_HOST = "copy to device", "copy to host"
HOST_STEP = "step on host"
OF_HOST = (*COPIES, HOST_STEP)  # not collectives: other ranks may have different ones, in another order

GATHERS = ("unshard", "prefetch")
RESHARDS = ("reshard", "reshard_post_forward")
BACKWARDS = ("pre_backward", "join_backward")
_REDUCES = ("reduce", "reduce_jointly")
_OF_REDUCTIONS = ("reduce_launch", "reduce_finish", "reduce_land")


class _Passes:
    """The unit that computes, and its module, as far as marks tell.

    In backward, it is the innermost one that has begun and not ended. Some never end, since the gradients of their
    inputs are not needed: these count as over when another one begins that is not inside them.
    """

    def __init__(self) -> None:
        self._forwards: list[_Place] = []
        self._backwards: list[_Place] = []  # the innermost one last
        self._outside = OUTSIDE
        self._num_optimizers = 0
        self.in_backward = False

    def take(self, mark: Mark) -> None:
        name, place = mark.name, _Place(mark.unit, mark.module)
        if name in (*BACKWARDS, "post_backward"):
            self.in_backward = True
        if name in ("pre_forward", "forward"):
            self._forwards.append(place)
        elif name in ("post_forward", "forward_end"):
            self._end_forward(place)
        elif name == "pre_backward" or (name == "backward" and self.in_backward):
            self._begin_backward(place)
        elif name in ("post_backward", "backward_end"):
            self._end_backward(place)
        elif name == "end_backward":
            self.in_backward, self._outside = False, OUTSIDE
            self._forwards, self._backwards = [], []
        elif name == OPTIMIZER:
            self._num_optimizers += 1
        elif name == OPTIMIZER_END:
            self._num_optimizers, self._outside = max(self._num_optimizers - 1, 0), OUTSIDE

    def _end_forward(self, place: _Place) -> None:
        if place in self._forwards:  # with all that is inside it: that has raised
            del self._forwards[len(self._forwards) - 1 - self._forwards[::-1].index(place) :]
        if not self._forwards and not self.in_backward:
            self._outside = LOSS

    def _begin_backward(self, place: _Place) -> None:
        self._forwards.clear()  # those that were recomputed are over
        if place not in self._backwards:
            around = [each for each in self._backwards if place.is_inside(each)]
            self._backwards = [*around, place, *(each for each in self._backwards if each.is_inside(place))]

    def _end_backward(self, place: _Place) -> None:
        self._forwards.clear()
        self._backwards = [each for each in self._backwards if each != place and not each.is_inside(place)]

    @property
    def now(self) -> tuple[Does, str, str]:
        """What computes now: the kind, the unit, and the module."""
        if self.in_backward:  # a forward that is recomputed belongs to backward
            places = self._forwards or self._backwards
            return (Does.BACKWARD, *places[-1]) if places else (Does.BACKWARD, "", OUTSIDE)
        if self._forwards:
            return (Does.FORWARD, *self._forwards[-1])
        return Does.OTHER, "", OPTIMIZER if self._num_optimizers else self._outside


class _Place(NamedTuple):
    unit: str
    module: str

    @property
    def path(self) -> str:
        return self.module or self.unit

    def is_inside(self, other: _Place) -> bool:
        """Whether this is a part of ``other``, judging by their names."""
        if self == other:
            return False
        is_whole_unit = not other.module and self.unit == other.unit
        return other.path == ROOT or is_whole_unit or self.path.startswith(f"{other.path}.")


def spans(marks: Sequence[Mark], start: float, stop: float, *, on_device: bool) -> list[Span]:
    """What the thread did from ``start`` to ``stop``, without gaps."""
    found: list[Span] = []
    passes, works = _Passes(), [("", "")]
    landed = ROOT

    def add(until: float) -> None:
        nonlocal start
        does, unit, module = passes.now
        if len(works) > 1:
            is_step = (unit, module) == ("", OPTIMIZER)
            does, unit = _does(works, landed, on_device=on_device)
            module = OPTIMIZER if is_step and not unit else ""
        if until > start:
            _extend(found, Span(does, unit, start, until, passes.in_backward, module))
            start = until

    for mark in marks:
        if mark.time is None or mark.edge is Edge.HELD:
            continue
        add(mark.time)
        if mark.edge is Edge.EVENT:
            passes.take(mark)
        elif mark.edge is Edge.START:
            works.append((mark.name, mark.unit))
        elif mark.edge is Edge.STOP:
            works.pop()
            landed = mark.unit if mark.name in _OF_REDUCTIONS else landed
    add(stop)
    return found


def with_idle(spans: Iterable[Span], busy: Sequence[tuple[float, float]]) -> list[Span]:
    """``spans``, with compute split where no operation ran. ``busy`` has the intervals in which operations ran, in
    order and without overlaps."""
    found: list[Span] = []
    position = 0
    for span in spans:
        if span.does not in COMPUTING:
            found.append(span)
            continue
        at = span.start
        while at < span.stop:
            start, stop = busy[position] if position < len(busy) else (math.inf, math.inf)
            if stop <= at:
                position += 1
                continue
            until, does = (start, Does.IDLE) if start > at else (stop, span.does)
            found.append(span._replace(does=does, start=at, stop=min(until, span.stop)))
            at = until
    return found


def phases(spans: Iterable[Span]) -> list[tuple[str, float, float]]:
    """Forward, backward and steps of the optimizer, each with its start and stop. What is launched and waited for
    between them belongs to one of them; the loss and code outside of the model do not."""
    found: list[tuple[str, float, float]] = []
    for span in spans:
        is_after_backward = bool(found) and found[-1][0] == Does.BACKWARD.value
        if span.in_backward:
            phase = Does.BACKWARD.value
        elif not span.unit:
            phase = OPTIMIZER if span.module == OPTIMIZER else ""
        elif is_after_backward and span.does not in (Does.FORWARD, Does.GATHER_WAIT):
            phase = Does.BACKWARD.value  # its last reductions
        else:
            phase = Does.FORWARD.value
        if found and found[-1][0] == phase:
            found[-1] = phase, found[-1][1], span.stop
        elif phase:
            found.append((phase, span.start, span.stop))
    return found


def joined(spans: Iterable[Span], shortest: float) -> list[Span]:
    """``spans`` for drawing: the thread counts as busy where it was idle for less than ``shortest`` seconds."""
    found: list[Span] = []
    for span in spans:
        is_short = span.does is Does.IDLE and span.stop - span.start < shortest
        _extend(found, span, continues=COMPUTING if is_short else ())
    return found


def _extend(found: list[Span], span: Span, continues: Sequence[Does] = ()) -> None:
    """Add ``span``. If the last span is of the same place and does the same, or is one that ``span`` ``continues``,
    that one becomes longer instead."""
    if found:
        last = found[-1]
        is_same_place = (last.unit, last.module, last.in_backward) == (span.unit, span.module, span.in_backward)
        if is_same_place and last.does in (span.does, *continues):
            found[-1] = last._replace(stop=span.stop)
            return
    found.append(span)


def _does(works: Sequence[tuple[str, str]], landed: str, *, on_device: bool) -> tuple[Does, str]:
    """What the innermost of ``works``, which is running, does. ``landed`` is the unit of the latest reduction."""
    name, unit = works[-1]
    if name == BLOCKED:
        name, unit = works[-2]
        if not name:
            return Does.OTHER_WAIT, ""
        return (Does.REDUCE_WAIT if name.startswith(("reduce", "land")) else Does.GATHER_WAIT), unit
    if on_device:
        if name == "wait":
            return Does.GATHER_WAIT, unit
        if name in ("reduce_finish", "land"):  # ``land`` waits for the last reduction
            return Does.REDUCE_WAIT, unit if name == "reduce_finish" else landed
        return (Does.COPY if name == "reduce_launch" else Does.LAUNCH), unit
    return (Does.COPY if name in ("wait", "reduce_finish", "reduce_land", *COPIES) else Does.LAUNCH), unit


def transfers(marks: Sequence[Mark], replicated: Iterable[str], *, on_device: bool) -> list[Transfer]:
    """The collectives of a step, copies from and to the host, and steps on the host, in the order of their launches.
    ``replicated``: units that are also all-reduced."""
    return _Transfers(frozenset(replicated), on_device).of(marks)


class _Transfers:
    def __init__(self, replicated: frozenset[str], on_device: bool) -> None:
        self._replicated, self._on_device = replicated, on_device
        self._passes = _Passes()
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
                self._passes.take(mark)
            elif mark.edge in steps:
                steps[mark.edge](mark)
        return sorted(self._found)

    def _start(self, mark: Mark) -> None:
        if mark.name == BLOCKED:
            return
        self._started[mark.name] = mark
        if mark.name not in OF_HOST:
            self._arrived, self._copies = None, []
        if mark.name in _REDUCES:
            self._launched = []

    def _stop(self, mark: Mark) -> None:
        name, unit = mark.name, mark.unit
        start = self._started.get(name, mark)
        if name == BLOCKED:
            self._arrived = mark.time
        elif name in OF_HOST:
            self._found.append(self._transfer(name, mark, start.any_time))
            if name in COPIES:
                self._copies.append(self._found[-1])
        elif name in GATHERS:
            begin = self._copies[-1].stop if self._copies else start.any_time  # shards come from the host first
            self._issued[unit] = self._transfer(ALL_GATHER, mark, begin, early=name == "prefetch")
        elif name == "reduce_launch":
            # On an accelerator, compute fills buckets first.
            begin = max(start.side or 0.0, mark.any_time) if self._on_device else start.any_time
            transfer = self._transfer(REDUCE_SCATTER, mark, begin)
            if self._copies:  # of its result to the host
                transfer = transfer._replace(stop=max(begin, self._copies[0].start))
            self._launched.append(transfer)
        elif name == "reduce_finish" and self._reductions[unit]:
            transfer = self._reductions[unit].pop(0)
            self._close(transfer, start)
            if unit in self._replicated:
                begin = self._found[-1].stop
                self._num_launched += 1
                all_reduce = transfer._replace(order=self._num_launched, kind=ALL_REDUCE, start=begin, stop=begin)
                self._reductions[unit].append(all_reduce)
        elif name == "reduce_land" and self._reductions[unit] and self._reductions[unit][0].kind == ALL_REDUCE:
            transfer = self._reductions[unit].pop(0)
            if mark.side is not None:  # on an accelerator, whose copies of gradients to the host come after it
                stop = self._copies[0].start if self._copies else mark.side
                transfer = transfer._replace(stop=max(stop, transfer.stop))
            self._close(transfer, start)

    def _act(self, mark: Mark) -> None:
        name, unit = mark.name, mark.unit
        if name in GATHERS and unit in self._issued:
            self._gathers[unit] = self._issued.pop(unit)
        elif name == "reduce":
            self._reductions[unit] += self._launched
            self._launched = []
        elif unit in self._gathers and (name == "wait" or name in RESHARDS):  # if resharded, it was gathered in vain
            self._close(self._gathers.pop(unit), self._started.get(name, mark))

    def _close(self, transfer: Transfer, wait: Mark) -> None:
        """``transfer`` has arrived: on the CPU, when the ``wait`` for it was over."""
        if not self._on_device:
            waited = wait.any_time if self._arrived is None else self._arrived
            transfer = transfer._replace(stop=max(waited, transfer.stop))
        self._found.append(transfer)

    def _transfer(self, kind: str, launched: Mark, start: float, *, early: bool = False) -> Transfer:
        """``launched`` is the end of the launch or, on an accelerator, of the collective."""
        stop = launched.any_time if launched.side is None else launched.side
        self._num_launched += 1
        in_backward = self._passes.in_backward
        return Transfer(self._num_launched, kind, launched.unit, start, max(start, stop), in_backward, early)
