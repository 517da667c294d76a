"""Tracks units that this rank skips while other ranks may use them. This rank still gathers and reduces such units.

A forward is a list of events: the forward of a unit begins, or ends. A backward reads that list in reverse: where a
forward ended, a backward begins. All ranks share one order of events. If an event happens here and earlier events in
that order have not happened, this rank skips their units. It performs those events first, without computing. So all
ranks start the same collectives in the same order, even if control flow depends on their data (I4).

The first order is the order of registration. When the first forward of a root ends, the ranks compare what they used
and agree on an order, in which units that no rank used stay where they were registered. If a pass takes another order,
or uses a unit twice, nothing is inserted: then all ranks must run the same units.

Pure: no tensor, no process group.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from fsdp2.core import schedules

MAX_FORWARDS = 256  # forwards without a backward; if there are more, the oldest are forgotten
MAX_ORDERS = 64  # that ranks have agreed on


class Event(NamedTuple):
    """The forward of ``unit`` begins, or ends. If not ``is_used``, this rank skips the unit. If not ``is_last_use``,
    the backward that ends there reduces nothing, since it will reach the unit again."""

    unit: int
    begins: bool
    is_used: bool = True
    is_last_use: bool = True


class Used(NamedTuple):
    """What one rank did in a forward."""

    events: tuple[Event, ...]  # of the units that it used, without repetition
    is_following: bool  # whether the events followed the shared order
    differentiable: tuple[int, ...]  # the units that a backward may reach


class _Order(NamedTuple):
    """What the ranks have agreed on."""

    events: Sequence[Event]  # of a forward
    differentiable: Collection[int]  # the units that a backward may reach


class Forward:
    """One forward. The ranks share the events ``expected``."""

    def __init__(self, units: SkippedUnits, key: tuple[int, bool], expected: Sequence[Event]) -> None:
        self.key, self.expected = key, expected  # key: the root, and whether gradients are recorded
        self.has_gradients = key[1]  # a backward may pass through it
        self.events: list[Event] = []  # past events, including those of skipped units; a backward reads this list
        self.leads_to: dict[int, schedules.Outcome] = {}  # outcomes of the units that were used; the last use counts
        self._with_gradients: set[int] = set()  # units with a use that leads to a backward
        self._without: list[int] = []  # the positions in ``events`` where uses without gradients end
        self.is_following = bool(expected)  # this forward has followed the shared order
        self._begins, self._ends = units.begins, units.ends
        self._by_hand, self._alike = units.by_hand, units.alike
        self._position = 0
        self._skipped: set[int] = set()

    def begin(self, unit: int) -> Sequence[Event]:
        """``unit``'s forward begins. Returns the earlier events of units that this rank skips."""
        self._by_hand.discard(unit)
        return self._reach(self._begins[unit])

    def end(self, unit: int, leads_to: schedules.Outcome) -> Sequence[Event]:
        """``unit``'s forward ends. Returns the same as ``begin``."""
        self.leads_to[unit] = leads_to
        skipped = self._reach(self._ends[unit])
        if leads_to is schedules.Outcome.BACKWARD:
            self._with_gradients.add(unit)
        elif leads_to is schedules.Outcome.UNKNOWN:
            self._without.append(len(self.events) - 1)
        return skipped

    def differentiated(self) -> Sequence[Event]:
        """The events that a backward reaches. If a unit ran both with and without gradients, as in models that recycle
        their output, the uses without gradients are left out."""
        left_out: set[int] = set()
        for end in self._without:
            unit = self.events[end].unit
            if unit in self._with_gradients:
                begin = next(at for at in reversed(range(end)) if self.events[at].unit == unit)
                left_out.update((begin, end))
        return [event for at, event in enumerate(self.events) if at not in left_out] if left_out else self.events

    def _reach(self, event: Event) -> Sequence[Event]:
        skipped: Sequence[Event] = ()
        expected, position = self.expected, self._position
        if position < len(expected) and expected[position] is event:
            self._position = position + 1
        elif self.is_following:
            skipped = self._catch_up(event)
            self.events += skipped
        self.events.append(event)
        return skipped

    def _catch_up(self, event: Event) -> Sequence[Event]:
        if event not in self.expected[self._position :]:  # used again, or too late
            self.is_following = event.unit not in self._skipped
            return ()
        found = self.expected.index(event, self._position)
        passed, self._position = self.expected[self._position : found], found + 1
        left_alone = self._alike | self._by_hand
        self._skipped.update(each.unit for each in passed if each.begins and each.unit not in left_alone)
        return [each._replace(is_used=False) for each in passed if each.unit in self._skipped]


class Backward:
    """One backward through ``forwards``, the last forward first. It may reach the units ``reachable``. At its end it
    removes from the list the forwards that it has passed through.

    Autograd has the gradient of a parameter after all of its uses. So if a unit is used several times, its last use in
    this backward reduces. The backward is assumed to pass through as many forwards as the last one that began with the
    same number of forwards, since users run some forwards without a backward.
    """

    def __init__(self, units: SkippedUnits, forwards: list[Forward], reachable: Collection[int]) -> None:
        self._forwards, self._num_forwards, self._num_passed = forwards, len(forwards), units.num_passed
        self.ended: set[int] = set()  # units whose backward was ended here although no hook has reported its end
        self.is_last_use = True  # the unit that ``end`` was last called for does not run again, and is reduced
        self._begins, self._ends = units.begins, units.ends
        self._reachable = reachable
        events = [forward.differentiated() for forward in forwards]
        self._left = list(chain(*events))
        self._starts = [0, *accumulate(map(len, events))]
        self._is_following = bool(self._left)
        self._open: set[int] = set()  # units whose backward has begun and not ended
        self._num_uses = [0] * len(units.begins)  # remaining uses of each unit
        for event in chain(*events[-units.num_passed.get(len(forwards), 1) :]):
            if event.begins:
                self._num_uses[event.unit] += 1
        self._postponed: set[int] = set()  # units that have ended a backward without a reduction

    def begin(self, unit: int) -> Sequence[Event]:
        """``unit``'s backward begins. Returns the earlier events of units that this rank skips."""
        skipped = self._reach(self._ends[unit])
        self._open.add(unit)
        self.ended.discard(unit)
        return skipped

    def end(self, unit: int) -> Sequence[Event]:
        """``unit``'s backward ends. Returns the same as ``begin``."""
        skipped = self._reach(self._begins[unit])
        self._open.discard(unit)
        if unit not in self.ended:
            self.is_last_use = self._ends_last_use(unit)
        return skipped

    def _ends_last_use(self, unit: int) -> bool:
        """Whether no further use of ``unit`` follows. If one follows, the reduction is postponed."""
        if self._is_following and self._num_uses[unit] > 0:
            self._postponed.add(unit)
            return False
        self._postponed.discard(unit)
        return True

    def _reach(self, event: Event) -> Sequence[Event]:
        left = self._left
        if left and left[-1] is event:
            self._note_passed(left.pop())
        elif self._is_following and event in left:
            at = len(left) - left[::-1].index(event)
            around = _ends_around(event, left[at:])
            skipped = self._pass_to(at)
            self._note_passed(left.pop())
            # A unit around this one may have returned the same tensor: its backward then begins after this one's.
            left += [each for each in around if each.unit not in self._reachable]
            return skipped
        elif self._is_following:  # it may be in the past; units that either all ranks or no ranks use change nothing
            self._is_following = event.begins or event.unit not in self._reachable
        return ()

    def _note_passed(self, event: Event) -> None:
        if event.begins:
            self._num_uses[event.unit] -= 1

    def recompute(self, unit: int) -> Sequence[Event]:
        """``unit``'s forward is about to be recomputed, and its backward follows. Returns the events before that
        backward, or none if a unit that was used later must begin or end its backward first. Both may be in one
        checkpoint if both ran with gradients, or both without."""
        if not (self._is_following and self._left):
            return ()
        leads_to = self._forwards[bisect(self._starts, len(self._left) - 1) - 1].leads_to
        for at in reversed(range(len(self._left))):
            event = self._left[at]
            if event is self._ends[unit]:
                return self._pass_to(at + 1)
            is_in_same = not event.begins and leads_to.get(event.unit) is leads_to.get(unit)
            if event.is_used and (event.unit in self._open or is_in_same):
                break
        return ()

    def finish(self, *, is_last: bool, ends_open: bool) -> Sequence[Event]:
        """The backward is over. Returns the remaining events of the forward that it has passed partly. ``is_last``: no
        later backward passes through the other forwards. ``ends_open``: units whose end no hook reported end now."""
        forwards, left, starts = self._forwards, self._left, self._starts
        skipped: Sequence[Event] = ()
        while forwards and starts[-2] >= len(left):
            del forwards[-1], starts[-1]
        if forwards and self._is_following and len(left) < starts[-1]:
            if not ends_open:
                self._open.clear()
            skipped = self._skip(left[starts[-2] :])
            del forwards[-1]
        self._num_passed[self._num_forwards] = max(self._num_forwards - len(forwards), 1)
        if is_last:
            forwards.clear()
        self._is_following = False
        return [*skipped, *(self._begins[unit] for unit in sorted(self._postponed, reverse=True))]

    def _pass_to(self, at: int) -> list[Event]:
        """Take the remaining events from ``at`` on. Autograd runs first what was computed last, so an open unit has all
        its gradients. Two kinds of units stay open, since further forwards may follow: the roots, and units that were
        used first in their forward, whose end no hook reports."""
        left = self._left
        staying = {root for root, _ in (forward.key for forward in self._forwards)}
        start = max(start for start in self._starts if start < len(left))
        first = left[start:] if at <= start else []
        if all(event.begins or event.unit in self._open for event in first):
            staying.update(event.unit for event in first)
        passed = [event for event in left[at:] if not event.begins or event.unit not in staying]
        for event in left[at:]:
            if event.unit in staying:  # ``_skip`` notes the others
                self._note_passed(event)
        del left[at:]
        self.ended.update(event.unit for event in passed if event.begins and event.unit in self._open)
        return self._skip(passed)

    def _skip(self, passed: Sequence[Event]) -> list[Event]:
        """Read ``passed`` from its end. Returns the events that this rank has to perform."""
        skipped = []
        for event in reversed(passed):
            unit = event.unit
            self._note_passed(event)
            if event.begins:
                if unit in self._open:
                    self._open.discard(unit)
                    skipped.append(event._replace(is_last_use=self._ends_last_use(unit)))
            elif unit in self._reachable and unit not in self._open:
                self._open.add(unit)
                skipped.append(event)
        return skipped


def _ends_around(event: Event, behind: Iterable[Event]) -> list[Event]:
    """The ends of the units around ``event`` among the events ``behind``, which come after it. Units that this rank
    skipped, or whose backward is over, may lie between."""
    inside = {event.unit}
    ends = []
    for each in behind:
        if each.begins:
            inside.add(each.unit)
        elif each.unit not in inside:
            ends.append(each)
    return ends


class SkippedUnits:
    """The units that this rank skips. ``forward`` and ``backward`` follow the passes that run, or ran last.
    ``parents`` holds, for each unit, the innermost unit around it. ``rules`` may change between passes."""

    def __init__(self, parents: Sequence[int | None], rules: Sequence[schedules.UnitRules]) -> None:
        # One object for each event that is used: the hot path compares identities.
        self.begins = [Event(unit, begins=True) for unit in range(len(parents))]
        self.ends = [Event(unit, begins=False) for unit in range(len(parents))]
        self.by_hand: set[int] = set()  # units that the user has unsharded, and handles until their next use
        self._parents, self._rules = parents, rules
        self._orders: dict[tuple[int, bool], _Order] = {}  # maps the key of a forward to the order that was used last
        # All orders that ranks have agreed on: if units are frozen in turn, each combination is compared only once.
        self._agreed: dict[tuple[tuple[int, bool], frozenset[int]], _Order] = {}
        self.num_passed: dict[int, int] = {}  # maps a number of forwards to how many the last such backward passed
        self.reset()

    def reset(self) -> None:
        """Forget the running passes, since an exception has ended them."""
        self.forward = Forward(self, (0, False), ())
        self.backward = Backward(self, [], ())
        self._forwards: list[Forward] = []  # forwards that no backward has passed through
        self._last_forwards: list[Forward] = []  # the value of ``_forwards`` when the last backward began

    @property
    def alike(self) -> set[int]:
        """The units that either all ranks use, or none."""
        return {unit for unit, rules in enumerate(self._rules) if not rules.ranks_may_differ}

    def begin_forward(self, root: int, *, grad_enabled: bool) -> None:
        """A forward pass begins with ``root`` as its outermost unit."""
        key = (root, grad_enabled)
        expected: Sequence[Event] = ()
        if any(rules.ranks_may_differ for rules in self._rules):
            expected = self._orders[key].events if key in self._orders else self._registered(root)
        self.forward = Forward(self, key, expected)
        if grad_enabled and expected:
            self._forwards.append(self.forward)
            del self._forwards[:-MAX_FORWARDS]

    def end_forward(self, trainable: Collection[int]) -> Used | None:
        """The forward is over. Returns what the ranks have to compare, or None if they have already done so.
        ``trainable``: units with trainable parameters; the same on all ranks."""
        forward = self.forward
        if not forward.expected:
            return None
        agreed = self._agreed.get((forward.key, frozenset(trainable)))
        if agreed is not None:
            self._orders[forward.key] = agreed
            return None
        events = dict.fromkeys(event for event in forward.events if event.is_used)
        differentiable = sorted(
            unit
            for unit, outcome in forward.leads_to.items()
            if outcome is schedules.Outcome.BACKWARD or (outcome is schedules.Outcome.UNKNOWN and unit in trainable)
        )
        return Used(tuple(events), forward.is_following, tuple(differentiable))

    def agree(self, used: Iterable[Used], trainable: Collection[int]) -> Sequence[int]:
        """``used``: what the ranks did in the forward that has just ended. Returns the order in which units are
        gathered."""
        used, key = list(used), self.forward.key
        # Ranks that leave the shared order all take the same other order; the longest list has the most units.
        own_orders = [one.events for one in used if not one.is_following]
        order = max(own_orders, key=len) if own_orders else self.forward.expected
        events = [self._event(event.unit, event.begins) for event in order]
        registered, present = self._registered(key[0]), set(events)
        if not present.issuperset(registered):
            at = 0
            for event in registered:
                if event.begins and event not in events:  # insert after its last sibling, or first in its parent
                    events[at:at] = [event, self.ends[event.unit]]
                if event in events:
                    at = events.index(event) + 1
        seen = {event.unit for one in used for event in one.events}
        differentiable = {unit for one in used for unit in one.differentiable}
        differentiable.update(unit for unit in trainable if unit not in seen)
        self._orders[key] = self._agreed[key, frozenset(trainable)] = _Order(events, differentiable)
        if len(self._agreed) > MAX_ORDERS:
            del self._agreed[next(iter(self._agreed))]  # the oldest: the same one on all ranks
        unused = self.alike - seen
        return [event.unit for event in events if event.begins and event.unit not in unused]

    def _registered(self, root: int) -> list[Event]:
        """A forward of ``root`` that uses all units inside it in the order of registration."""
        inside = {root: None}
        for unit in range(root + 1, len(self._parents)):
            if self._parents[unit] in inside:
                inside[unit] = None
        return [self._event(unit, begins) for unit, begins in nested(list(inside), self._parents)]

    def _event(self, unit: int, begins: bool) -> Event:
        return self.begins[unit] if begins else self.ends[unit]

    def begin_backward(self) -> None:
        """The first unit's backward is about to begin."""
        self._forwards = self._forwards or self._last_forwards  # a second backward through the same graph
        self._last_forwards = list(self._forwards)
        orders = [self._orders.get(forward.key) for forward in self._forwards]
        reachable = {unit for order in orders if order is not None for unit in order.differentiable}
        self.backward = Backward(self, self._forwards, reachable - self.alike)


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
