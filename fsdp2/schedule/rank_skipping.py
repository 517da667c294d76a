"""Units that this rank skips and others may use: it goes through their events all the same, in one order.

A pass is a list of events: a unit begins its forward, and ends it; backward is the same list read backwards. When an
event happens here, those that come before it in the shared order and have not happened belong to units that this rank
skips. Whoever asks performs them, without computing anything. So every rank gathers and reduces the same, in the same
order, whatever its data decides (I4). Pure: no tensor, no process group.

The order is that of registration at first. At the end of a root's first forward the ranks compare what they used, and
go by that from then on. Units that no rank has used yet keep their place by registration: they may be used some day. A
pass that takes another order, or uses a unit again, is left alone: that all ranks must do alike.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

Event = int  # a unit's index where its forward begins, and its complement where it ends
MAX_FORWARDS = 256  # without a backward: of more, the first ones are forgotten
_MARK = 1 << 32  # sets events of units that this rank has not used apart


class Outcome(Enum):
    """What the end of a unit's forward leads to."""

    NOTHING = "nothing"  # its output needs no gradient
    BACKWARD = "backward"
    UNKNOWN = "unknown"  # gradients are off in this part of the forward: a checkpoint may run it again with them


class Used(NamedTuple):
    """What one rank did in a forward: the order it followed, or its own; which units it used, and which of those led to
    a backward."""

    events: tuple[Event, ...]
    units: tuple[int, ...]
    differentiable: tuple[int, ...]


class _Order(NamedTuple):
    """What all ranks go by: ``events`` of a forward, and which units may have a backward, given those with parameters
    that are trained."""

    events: Sequence[Event]
    differentiable: Collection[int]
    trainable: Collection[int]


class _Forward(NamedTuple):
    """One forward with gradients that no backward has come back through. Events of units that were not used here are
    marked."""

    order: tuple[int, bool]
    events: list[Event]


class SkippedUnits:
    """See the module's text. ``parents``: for each unit the innermost one around it.

    Attributes:
        by_hand: units that the user has unsharded: what becomes of those is the user's decision.
        ended: units whose backward was ended here although nobody has reported its end.
    """

    def __init__(self, parents: Sequence[int | None]) -> None:
        self._parents = parents
        self.by_hand: set[int] = set()
        self.ended: set[int] = set()
        self._alike: set[int] = set()  # units that all ranks skip or none
        self._orders: dict[tuple[int, bool], _Order] = {}  # by root, and by whether gradients are recorded
        self._current = (0, False)
        self._expected: Sequence[Event] = ()
        self._position = 0
        self._is_following = False
        self._used: list[Event] = []
        self._leads_to: dict[int, Outcome] = {}
        self._joined: set[int] = set()  # units that this rank has gone through without using them
        self._tape: list[Event] | None = None  # of the running forward, if a backward may come back through it
        self._forwards: list[_Forward] = []
        self._last_forwards: list[_Forward] = []  # that the last backward began with
        self._backward: list[Event] = []  # of the forwards that a backward comes back through, what is left
        self._reachable: set[int] = set()  # units that may have a backward in it
        self._roots: set[int] = set()  # of those forwards
        self._open: set[int] = set()  # units whose backward has begun here

    def may_skip(self, unit: int, *, enabled: bool) -> None:
        """Whether ranks may skip ``unit`` while others use it."""
        (self._alike.discard if enabled else self._alike.add)(unit)

    # Forward

    def begin_forward(self, root: int, *, grad_enabled: bool) -> None:
        """The forward of ``root`` is a pass of its own."""
        self._position, self._is_following = 0, len(self._alike) < len(self._parents)
        self._used, self._leads_to, self._joined = [], {}, set()
        if not self._is_following:
            self._expected, self._tape = (), None
            return
        self._current = (root, grad_enabled)
        order = self._orders.get(self._current)
        self._expected = self._registered(root) if order is None else order.events
        self._tape = [] if grad_enabled else None
        if self._tape is not None:
            self._forwards.append(_Forward(self._current, self._tape))
            del self._forwards[:-MAX_FORWARDS]

    def forward(self, event: Event, leads_to: Outcome = Outcome.NOTHING) -> Sequence[Event]:
        """``event`` is about to happen. Returns what comes before it, of units that this rank skips. ``leads_to``: what
        follows from the output of a unit whose forward ends."""
        skipped: Sequence[Event] = ()
        expected, position = self._expected, self._position
        if position < len(expected) and expected[position] == event:
            self._position = position + 1
        elif self._is_following:
            skipped = self._catch_up(event)
        if self._tape is not None:
            if skipped:
                self._tape += map(_marked, skipped)
            self._tape.append(event)
            if event < 0:
                self._leads_to[~event] = leads_to
        self._used.append(event)
        if self.by_hand:
            self.by_hand.discard(event)  # its forward does with it what it does with all
        return skipped

    def _catch_up(self, event: Event) -> Sequence[Event]:
        try:
            found = self._expected.index(event, self._position)
        except ValueError:  # used again, or too late
            self._is_following = event < 0 or event not in self._joined
            return ()
        passed, self._position = self._expected[self._position : found], found + 1
        skipped: list[Event] = []
        begun: set[int] = set()
        for each in passed:
            if each >= 0 and each not in self.by_hand and each not in self._alike:
                begun.add(each)
                skipped.append(each)
            elif ~each in begun:
                skipped.append(each)
        self._joined |= begun
        return skipped

    def leave_out(self, event: Event) -> None:
        """``event`` turns out to be no part of the pass on any rank."""
        if self._tape is not None:
            self._tape.remove(_marked(event))

    def end_forward(self, trainable: Collection[int]) -> Used | None:
        """The forward is over. Returns what ranks have to compare, if they have not yet. ``trainable``: units with
        parameters that are trained."""
        has_followed, self._is_following = self._is_following, False
        order = self._orders.get(self._current)
        if not self._expected or (order is not None and order.trainable == trainable):
            return None
        used = dict.fromkeys(self._used)
        units = sorted(event for event in used if event >= 0)
        trained = {Outcome.BACKWARD, Outcome.UNKNOWN}
        differentiable = sorted(
            unit
            for unit, outcome in self._leads_to.items()
            if outcome in (trained if unit in trainable else {Outcome.BACKWARD})
        )
        return Used(tuple(self._expected if has_followed else used), tuple(units), tuple(differentiable))

    def agree(self, used: Iterable[Used], trainable: Collection[int]) -> Sequence[int]:
        """``used``: what the ranks did in the forward that has just ended. Returns the order in which units are
        gathered."""
        used = list(used)
        root, _ = self._current
        order: tuple[Event, ...] = ()
        for each in dict.fromkeys(each.events for each in used):
            order = _merged(order, each)
        events, known = list(order), set(order)
        for unit in self._registered(root):
            if unit >= 0 and unit not in known:
                self._insert(unit, events)
        seen = {unit for one in used for unit in one.units}
        differentiable = {unit for one in used for unit in one.differentiable}
        differentiable.update(unit for unit in trainable if unit not in seen)
        self._orders[self._current] = _Order(tuple(events), frozenset(differentiable), trainable)
        return [event for event in events if event in seen or (event >= 0 and event not in self._alike)]

    def _insert(self, unit: int, events: list[Event]) -> None:
        """Where registration has it: behind its last sibling, or first of its parent."""
        parent = self._parents[unit]
        assert parent is not None  # the root of a pass is part of it
        siblings = [each for each in range(unit) if self._parents[each] == parent and ~each in events]
        at = events.index(~siblings[-1] if siblings else parent) + 1
        events[at:at] = [unit, ~unit]

    def _registered(self, root: int) -> Sequence[Event]:
        inside = {root: None}
        for unit in range(root + 1, len(self._parents)):
            if self._parents[unit] in inside:
                inside[unit] = None
        return tuple(unit if begins else ~unit for unit, begins in nested(list(inside), self._parents))

    # Backward

    def begin_backward(self) -> None:
        """The first unit's backward is about to begin."""
        if not self._forwards:  # once more through the same graph
            self._forwards = self._last_forwards
        self._last_forwards = list(self._forwards)
        self._backward = [event for forward in self._forwards for event in forward.events]
        self._is_following = bool(self._backward)
        self._roots = {forward.order[0] for forward in self._forwards}
        orders = [self._orders.get(forward.order) for forward in self._forwards]
        self._reachable = {unit for order in orders if order is not None for unit in order.differentiable} - self._alike
        self._open.clear()
        self.ended.clear()

    def backward(self, event: Event) -> Sequence[Event]:
        """As ``forward``; where the forward of a unit ended, its backward begins."""
        left = self._backward
        if left and left[-1] == event:
            left.pop()
            skipped: Sequence[Event] = ()
        else:
            skipped = self._catch_up_backward(event)
        if event < 0:
            self._open.add(~event)
            self.ended.discard(~event)
        else:
            self._open.discard(event)
        return skipped

    def _catch_up_backward(self, event: Event) -> Sequence[Event]:
        if not self._is_following:
            return ()
        left = self._backward
        at = next((i for i in range(len(left) - 1, -1, -1) if left[i] == event), None)
        if at is None:  # of what ranks have to do alike, this changes nothing
            self._is_following = event >= 0 or ~event not in self._reachable
            return ()
        skipped = self._pass_to(at + 1)
        left.pop()
        return skipped

    def recompute(self, unit: int) -> Sequence[Event]:
        """``unit``'s forward is about to run again, in a backward. Returns what comes before its own backward, unless
        that of another unit, which was used behind it, has to go on or to begin first."""
        left = self._backward
        at = next((i for i in range(len(left) - 1, -1, -1) if -_MARK <= left[i] < 0), None)
        if not self._is_following or at is None or left[at] != ~unit or self._open.intersection(left[at:]):
            return ()
        return self._pass_to(at + 1)

    def end_backward(self, *, is_last: bool, ends_open: bool) -> Sequence[Event]:
        """A backward is over. Returns what is left of the forward that it came back through. ``ends_open``: units whose
        end nobody has reported end now."""
        left, forwards = self._backward, self._forwards
        starts = [0, *itertools.accumulate(len(forward.events) for forward in forwards)]
        while forwards and starts[-2] >= len(left):
            del forwards[-1], starts[-1]
        skipped: Sequence[Event] = ()
        if forwards and self._is_following and len(left) < starts[-1]:
            if not ends_open:
                self._open.clear()
            skipped = self._join_backward(map(_plain, reversed(left[starts[-2] :])))
            del forwards[-1]
        self._is_following = False
        if is_last:
            self._forwards = []
        return skipped

    def _pass_to(self, at: int) -> Sequence[Event]:
        """Take what is left from ``at`` on. Autograd runs what was computed last first: a unit that is open has all its
        gradients. But the root of several forwards stays open for all of them."""
        passed = [event for event in map(_plain, self._backward[at:]) if event not in self._roots]
        del self._backward[at:]
        self.ended |= self._open.intersection(passed)
        return self._join_backward(reversed(passed))

    def _join_backward(self, passed: Iterable[Event]) -> list[Event]:
        """Of the events ``passed``, those that this rank goes through."""
        skipped: list[Event] = []
        for each in passed:
            if each < 0:
                if ~each in self._reachable and ~each not in self._open:
                    self._open.add(~each)
                    skipped.append(each)
            elif each in self._open:
                self._open.discard(each)
                skipped.append(each)
        return skipped

    def reset(self) -> None:
        """An exception has cut the pass short."""
        self._is_following, self._tape = False, None
        self._forwards, self._last_forwards = [], []
        self._backward.clear()
        self._open.clear()
        self.ended.clear()


def _marked(event: Event) -> Event:
    return event + _MARK if event >= 0 else event - _MARK


def _plain(event: Event) -> Event:
    """Without the mark, if it has one."""
    if -_MARK <= event < _MARK:
        return event
    return event - _MARK if event >= 0 else event + _MARK


def nested(order: Sequence[int], parents: Sequence[int | None]) -> list[tuple[int, bool]]:
    """Where the forwards of the units in ``order`` begin (True) and end, each inside its parent's."""
    events: list[tuple[int, bool]] = []
    running: list[int] = []
    for unit in order:
        while running and running[-1] != parents[unit]:
            events.append((running.pop(), False))
        running.append(unit)
        events.append((unit, True))
    return events + [(unit, False) for unit in reversed(running)]


def _merged(one: tuple[Event, ...], other: tuple[Event, ...]) -> tuple[Event, ...]:
    """What both contain, each event once, in an order that follows both where they do not contradict each other."""
    events: list[Event] = []
    for _, start, stop, other_start, other_stop in difflib.SequenceMatcher(None, one, other, False).get_opcodes():
        events += one[start:stop]
        events += other[other_start:other_stop]
    return tuple(dict.fromkeys(events))
