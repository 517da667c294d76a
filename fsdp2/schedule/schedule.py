"""When: from what happened to what to do. Pure: no tensor, no stream, no process group, so plain values test it.

Units are numbered. Each method stands for one event and returns the actions to perform, in order. Rules:

* A unit's parameters are there when its forward or backward starts, and are prefetched for at most the units that the
  order of the pass, or the user, names as next.
* The order of a pass is recorded as it runs. A forward prefetches along the order of the forward before it, a backward
  along its own forward in reverse. A wrong prediction costs memory until the end of the pass, never correctness.
* A forward inside a backward (activation checkpointing) gathers what it needs and decides nothing else.
* Each unit's backward reduces it. Which units this rank skips, and others may not, is another room's business: their
  events come in between, as if they had run (``skipped``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    __hash__ = object.__hash__  # Enum's own is Python; actions are looked up in the hot path

    UNSHARD = "unshard"  # start gathering; nothing happens if the parameters are there or on their way
    PREFETCH = "prefetch"  # the same, for a unit that is not needed yet
    WAIT = "wait"  # the parameters are usable when this returns
    RESHARD = "reshard"  # back to the shards
    RESHARD_POST_FORWARD = "reshard_post_forward"  # back to shards on the smaller mesh
    REDUCE = "reduce"  # start reducing the gradients that the backward left, if any
    REDUCE_JOINTLY = "reduce_jointly"  # the same, zeros if it left none here: it may have on other ranks
    KEEP = "keep"  # or keep them on this rank
    LAND = "land"  # every started reduction has arrived in its gradients


class AfterForward(Enum):
    """What becomes of a unit's parameters between its forward and its backward."""

    KEEP = "keep"
    RESHARD = "reshard"
    RESHARD_TO_SMALLER_MESH = "reshard to smaller mesh"


class Pass(Enum):
    """Where the whole model stands."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"  # a forward inside a backward


class Phase(Enum):
    """Where one unit stands."""

    IDLE = "idle"
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    REDUCED = "reduced"  # its backward has run; another forward of the same step may still bring a second one


@dataclass(frozen=True)
class UnitRules:
    """What the user configured for one unit. ``None`` prefetches along the recorded order."""

    after_forward: AfterForward = AfterForward.RESHARD
    keeps_alone: bool = False  # after a forward that no other surrounds: other modules of the unit run soon
    unshard_in_backward: bool = True
    reshard_after_backward: bool = True
    reduces: bool = True
    reduces_unused: bool = False
    ranks_may_skip: bool = False  # what this rank has no gradient of, others may have
    forward_prefetch: tuple[int, ...] | None = None
    backward_prefetch: tuple[int, ...] | None = None


Actions = Sequence[tuple[Action, int]]

_AFTER_FORWARD = {
    AfterForward.RESHARD: Action.RESHARD,
    AfterForward.RESHARD_TO_SMALLER_MESH: Action.RESHARD_POST_FORWARD,
}


class Schedule:
    """The order of units, and where each stands. ``rules`` may be replaced by the owner between passes."""

    def __init__(self, rules: Sequence[UnitRules]) -> None:
        self.rules = list(rules)
        units = range(len(self.rules))
        self._unsharding = [((Action.UNSHARD, unit), (Action.WAIT, unit)) for unit in units]
        self._prefetching = [((Action.PREFETCH, unit),) for unit in units]
        self._resharding = [((Action.RESHARD, unit),) for unit in units]
        self.phases = [Phase.IDLE] * len(self.rules)
        self.forward_root: int | None = None  # the unit whose forward is the whole pass
        self.is_last_backward = True
        self.finalizes_by_hand = False
        self.awaits_finalization = False
        self._in_backward = False
        self._last_order: list[int] = []  # pre-forward order of the last complete forward
        self._order: list[int] = []  # pre-forward order of the running forward
        self._cursor = 0  # where _order stands in _last_order
        self._prefetched: set[int] = set()  # in the running pass, and not used so far
        self._records_uses = False
        self._uses: list[int] = []  # post-forward order of every forward since the last backward
        self._use_positions: list[list[int]] = [[] for _ in self.rules]
        self._owed: set[int] = set()  # units that backwards have left to be reduced

    def take_over(self, earlier: Schedule) -> None:
        """Go on with the settings of a schedule of other units; what those owe, all of these may owe."""
        self.is_last_backward = earlier.is_last_backward
        self.finalizes_by_hand = earlier.finalizes_by_hand
        self.awaits_finalization = earlier.awaits_finalization
        self._owed = set(range(len(self.rules))) if earlier._owed else set()

    @property
    def last_order(self) -> Sequence[int]:
        """The order in which units began in the last complete forward."""
        return self._last_order

    def expect(self, order: Sequence[int]) -> None:
        """The next forward is more likely to take this order than that of the last one."""
        self._last_order = list(order)

    @property
    def in_backward(self) -> bool:
        """Whether a backward has reached a unit and has not ended."""
        return self._in_backward

    @property
    def running(self) -> Pass:
        if self._in_backward:
            return Pass.RECOMPUTE if Phase.RECOMPUTE in self.phases else Pass.BACKWARD
        return Pass.IDLE if self.forward_root is None else Pass.FORWARD

    def pre_forward(self, unit: int, *, in_backward: bool, grad_enabled: bool) -> Actions:
        if self._in_backward and not in_backward:  # the last backward raised
            self.reset()
        here = self._unsharding[unit]
        if self.phases[unit] is Phase.BACKWARD:  # checkpointing around the unit: its own backward owns it
            return here
        if in_backward:
            self.phases[unit] = Phase.RECOMPUTE
            return here
        if self.forward_root == unit:  # its last forward raised
            self.reset()
        if self.forward_root is None:
            self._start_forward(unit, grad_enabled)
        self.phases[unit] = Phase.FORWARD
        self._order.append(unit)
        self._prefetched.discard(unit)
        return here + self._prefetches(self._next_in_forward(unit))

    def post_forward(self, unit: int) -> Actions:
        if self.phases[unit] is Phase.BACKWARD:
            return ()
        recomputed = self.phases[unit] is Phase.RECOMPUTE
        self.phases[unit] = Phase.IDLE
        if recomputed:  # its backward follows at once, and reshards
            return ()
        if self._records_uses:
            self._use_positions[unit].append(len(self._uses))
            self._uses.append(unit)
        rules, is_root = self.rules[unit], unit == self.forward_root
        reshard = _AFTER_FORWARD.get(rules.after_forward)
        actions = () if reshard is None or (is_root and rules.keeps_alone) else ((reshard, unit),)
        return (*actions, *self._end_forward()) if is_root else actions

    def pre_backward(self, unit: int) -> Actions:
        self._in_backward = True
        if self.phases[unit] is Phase.BACKWARD:  # a second output of the same forward
            return ()
        self.phases[unit] = Phase.BACKWARD
        self._prefetched.discard(unit)
        here = self._unsharding[unit] if self.rules[unit].unshard_in_backward else ()
        return here + self._prefetches(self._next_in_backward(unit))

    def post_backward(self, unit: int) -> Actions:
        self.phases[unit] = Phase.REDUCED
        return (*self._reshard_after_backward(unit), self._reduce_jointly(unit))

    def end_backward(self, ended: Collection[int] = ()) -> Actions:
        """Units whose inputs needed no gradient, or that took no part, have had no ``post_backward``: run it now, and
        a second time for those that are ``ended``."""
        actions: list[tuple[Action, int]] = []
        for unit in reversed(range(len(self.phases))):
            if self.phases[unit] is not Phase.REDUCED or unit in ended:
                actions += self._reshard_after_backward(unit)
                actions.append(self._keep(unit) if self.finalizes_by_hand else self._reduce(unit))
        unused, self._prefetched = self._prefetched, set()
        actions += [(Action.RESHARD, unit) for unit in sorted(unused) if self.rules[unit].reshard_after_backward]
        self.phases = [Phase.IDLE] * len(self.phases)
        self._in_backward = False
        self.forward_root = None
        self.awaits_finalization = self.finalizes_by_hand
        if self.is_last_backward and not self.finalizes_by_hand:
            self._forget_uses()
            actions.append((Action.LAND, 0))
        return actions

    def finalize(self) -> Actions:
        """The user says that no backward follows: reduce what the backwards have left. Landing is another matter."""
        actions: list[tuple[Action, int]] = []
        for unit in reversed(range(len(self.phases))):
            actions += self._reshard_after_backward(unit)
            if unit in self._owed:
                actions.append(self._reduce_jointly(unit))
        self.awaits_finalization = False
        self._forget_uses()
        return actions

    def reset(self) -> None:
        """Forget the pass that an exception cut short; the order of the last complete forward stays."""
        self.phases = [Phase.IDLE] * len(self.phases)
        self.awaits_finalization &= not self._in_backward
        self._in_backward = False
        self.forward_root = None
        self._prefetched.clear()
        self._forget_uses()

    def _prefetches(self, targets: Sequence[int]) -> tuple[tuple[Action, int], ...]:
        if len(targets) == 1:
            return self._prefetching[targets[0]]
        return tuple((Action.PREFETCH, target) for target in targets)

    def _reshard_after_backward(self, unit: int) -> tuple[tuple[Action, int], ...]:
        return self._resharding[unit] if self.rules[unit].reshard_after_backward else ()

    def _reduce(self, unit: int) -> tuple[Action, int]:
        if not self.rules[unit].reduces:
            return self._keep(unit)
        self._owed.discard(unit)
        return Action.REDUCE, unit

    def _reduce_jointly(self, unit: int) -> tuple[Action, int]:
        action, _ = reduce = self._reduce(unit)
        return (Action.REDUCE_JOINTLY, unit) if action is Action.REDUCE and self.rules[unit].ranks_may_skip else reduce

    def _keep(self, unit: int) -> tuple[Action, int]:
        self._owed.add(unit)
        return Action.KEEP, unit

    def _start_forward(self, unit: int, grad_enabled: bool) -> None:
        self.forward_root = unit
        self._records_uses = grad_enabled
        self._order = []
        self._cursor = 0

    def _end_forward(self) -> list[tuple[Action, int]]:
        self.forward_root = None
        self._last_order = self._order
        unused, self._prefetched = self._prefetched, set()
        return [(Action.RESHARD, unit) for unit in sorted(unused)]

    def _next_in_forward(self, unit: int) -> Sequence[int]:
        explicit = self.rules[unit].forward_prefetch
        targets = self._predicted_next(unit) if explicit is None else explicit
        for target in targets:
            if self.phases[target] is not Phase.FORWARD:
                self._prefetched.add(target)
        return targets

    def _predicted_next(self, unit: int) -> Sequence[int]:
        """What followed this use of ``unit`` in the last forward; nothing once the order has left it."""
        order, cursor = self._last_order, self._cursor
        if cursor >= len(order) or order[cursor] != unit:
            if unit not in order[cursor:]:
                return ()
            cursor = order.index(unit, cursor)
        self._cursor = cursor + 1
        return order[cursor + 1 : cursor + 2]

    def _next_in_backward(self, unit: int) -> Sequence[int]:
        explicit = self.rules[unit].backward_prefetch
        positions = self._use_positions[unit]
        position = positions.pop() if positions else 0
        predicted = self._uses[position - 1 : position] if position > 0 else ()
        targets = [t for t in (predicted if explicit is None else explicit) if self.rules[t].unshard_in_backward]
        for target in targets:
            if self.phases[target] is Phase.REDUCED:
                self._prefetched.add(target)
        return targets

    def _forget_uses(self) -> None:
        self._uses.clear()
        for positions in self._use_positions:
            positions.clear()
