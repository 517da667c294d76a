"""Decides which actions follow from each event of a pass.

Units are numbered. Each method of ``Schedule`` is an event; most return the actions to perform, in order. Rules:

* A unit's parameters are unsharded when its forward or backward starts. Only the next unit is prefetched, or the units
  that the user lists.
* The order of each pass is recorded. A forward predicts the next unit from the previous forward, a backward from its
  own forward in reverse. Units that were prefetched but not used are resharded at the end of the pass, so a wrong
  prediction costs memory, never correctness.
* A unit stays unsharded after a use if its own next use is predicted to follow before that of any other unit. It is
  resharded when another unit is used after all, or the pass ends.
* A forward inside a backward (activation checkpointing) gathers what it needs and does nothing else.
* Each unit's backward reduces the gradients that it finds. After several uses, autograd has them only at the last.

Pure: no tensors, no streams, no process groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from fsdp2.core.schedule.states import Outcome


class Action(Enum):
    """What the executor does to one unit."""

    __hash__ = object.__hash__  # that of Enum is slow Python code, and the hot path looks up actions

    USE = "use"  # unshard, and wait: the parameters are usable when this returns
    UNSHARD = "unshard"  # start gathering, unless the parameters are already gathered or in flight
    PREFETCH = "prefetch"  # like UNSHARD, for a unit that is not needed yet
    WAIT = "wait"  # wait for what was gathered
    STAY = "stay"  # remain unsharded for the next use, and note what the shards are, since users may write them
    RESHARD = "reshard"  # return to the shards
    RESHARD_POST_FORWARD = "reshard_post_forward"  # return to shards on the smaller mesh
    REDUCE = "reduce"  # start reducing the gradients that the backward left, if any
    REDUCE_JOINTLY = "reduce_jointly"  # the same, but reduce zeros if there are none: other ranks may have some
    KEEP = "keep"  # keep the gradients on this rank
    LAND = "land"  # finish all reductions in flight, and put their sums in ``.grad`` of the shards


class AfterForward(Enum):
    """What happens to a unit's parameters between its forward and its backward."""

    __hash__ = object.__hash__

    KEEP = "keep"
    RESHARD = "reshard"
    RESHARD_TO_SMALLER_MESH = "reshard to smaller mesh"


class Phase(Enum):
    """Which phase one unit is in."""

    IDLE = "idle"
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    REDUCED = "reduced"  # its backward has run; another forward of the same step may bring a second one


COMPUTING = (Phase.FORWARD, Phase.RECOMPUTE)
MAX_ENDED = 4096  # uses of units whose backward is yet to come; no device could hold more activations


@dataclass(frozen=True)
class UnitRules:
    """What the user configured for one unit."""

    after_forward: AfterForward = AfterForward.RESHARD
    keeps_alone: bool = False  # stay unsharded after a forward that is a whole pass, since other modules follow
    unshard_in_backward: bool = True
    reshard_after_backward: bool = True
    reduces: bool = True  # if False, gradients stay on this rank
    ranks_may_differ: bool = False  # other ranks may use the unit, or other parameters of it
    forward_prefetch: tuple[int, ...] | None = None  # None: the predicted unit
    backward_prefetch: tuple[int, ...] | None = None


Actions = Sequence[tuple[Action, int]]


def in_parts(actions: Actions) -> Iterator[tuple[Action, int]]:
    """``actions``, with each USE split into UNSHARD and WAIT."""
    for action, unit in actions:
        yield from ((Action.UNSHARD, unit), (Action.WAIT, unit)) if action is Action.USE else ((action, unit),)


_AFTER_FORWARD = {
    AfterForward.RESHARD: Action.RESHARD,
    AfterForward.RESHARD_TO_SMALLER_MESH: Action.RESHARD_POST_FORWARD,
}


class Passes:
    """The passes that the units of one tree are in. This is the only record of them, and only its methods write it.

    Attributes:
        phases: the innermost pass that each unit is in.
        root: the unit whose forward is the whole pass, while that forward runs.
        in_backward: a backward has reached a unit and has not ended.
        root_raised: the forward that is the whole pass has raised, and has not been cleaned up yet.
    """

    def __init__(self, num_units: int) -> None:
        self.phases: list[Phase] = []
        self.clear(num_units)

    def clear(self, num_units: int | None = None) -> None:
        """Note that nothing runs. If ``num_units`` is given, the tree has that many units from now on."""
        self.phases = [Phase.IDLE] * (len(self.phases) if num_units is None else num_units)
        self.root: int | None = None
        self.in_backward = self.root_raised = False

    @property
    def running(self) -> str:
        """Which pass the whole model is in: "forward", "backward", or "" if none."""
        if self.in_backward:
            return "backward"
        return "" if self.root is None else "forward"

    def begin_forward(self, unit: int) -> bool:
        """``unit`` is about to compute. Returns whether its forward is the whole pass."""
        is_root = self.root is None
        if is_root:
            self.root = unit
        self.phases[unit] = Phase.FORWARD
        return is_root

    def begin_recomputation(self, unit: int) -> None:
        """``unit`` is about to recompute its forward, for a backward that has not reached the unit."""
        self.phases[unit] = Phase.RECOMPUTE

    def end_forward(self, unit: int) -> bool:
        """``unit`` has computed. Returns whether its forward was the whole pass."""
        self.phases[unit] = Phase.IDLE
        is_root = unit == self.root
        if is_root:
            self.root = None
        return is_root

    def raise_from(self, unit: int) -> None:
        """The forward of ``unit`` has raised. In the unit's backward, this was a recomputation, which checkpointing
        ends with an exception."""
        phase = self.phases[unit]
        if phase is not Phase.BACKWARD:
            self.phases[unit] = Phase.IDLE
            self.root_raised = self.root_raised or (phase is Phase.FORWARD and unit == self.root)

    def begin_backward(self, unit: int) -> bool:
        """A gradient has reached ``unit``. Returns False if its backward has begun already."""
        self.in_backward = True
        is_first = self.phases[unit] is not Phase.BACKWARD
        self.phases[unit] = Phase.BACKWARD
        return is_first

    def end_backward(self, unit: int) -> None:
        """The gradients of ``unit`` have been computed."""
        self.phases[unit] = Phase.REDUCED

    def has_left_behind(self, unit: int, parents: Sequence[int | None]) -> bool:
        """Whether the recorded forward must have raised, now that a forward of ``unit`` begins outside of backward.
        This is so if its root is ``unit`` or inside ``unit``, since no module runs inside its own child. ``parents``
        has the unit around each unit; the units inside a unit follow that unit."""
        inner = self.root
        while inner is not None and inner > unit:
            inner = parents[inner]
        return self.root is not None and (self.root_raised or inner == unit)


class Tape:
    """Records what has run in the forwards of a step. A forward predicts from the last complete forward. A backward
    reads the recorded forwards from the end.

    Attributes:
        began: units in the order in which they began in the running forward, or in the last one.
        expected: ``began`` of the last complete forward. Code that can predict the next forward better may replace it.
        position: how far the running forward has come in ``expected``.
        ended: uses of units whose backward is still to come, in the order in which their forwards ended. The oldest
            are forgotten, since users may run forwards that no backward follows.
        start_of_pass: the length of ``ended`` when the last forward began.
        records: whether the last forward ran with gradients enabled.
    """

    def __init__(self) -> None:
        self.began: list[int] = []
        self.expected: Sequence[int] = ()
        self.ended: list[int] = []
        self.position = self.start_of_pass = 0
        self.records = False

    def start(self, *, records: bool) -> None:
        """A forward pass begins."""
        self.began, self.position, self.records = [], 0, records
        del self.ended[:-MAX_ENDED]
        self.start_of_pass = len(self.ended)

    def begin(self, unit: int) -> Sequence[int]:
        """The forward of ``unit`` begins. Returns the unit that followed this use of ``unit`` in the last forward, or
        nothing if this forward runs in another order."""
        self.began.append(unit)
        expected, position = self.expected, self.position
        if position >= len(expected) or expected[position] != unit:
            if unit not in expected[position:]:
                return ()
            position = expected.index(unit, position)
        self.position = position + 1
        return expected[position + 1 : position + 2]

    def reach(self, unit: int, *, in_one_pass: bool) -> Sequence[int]:
        """A backward reaches the last recorded use of ``unit``. Returns the unit that ended before it, if any. If
        ``in_one_pass``, the backward is not expected to go on from the last forward to the one before."""
        ended, start = self.ended, self.start_of_pass if in_one_pass else 0
        for position in reversed(range(len(ended))):
            if ended[position] == unit:
                del ended[position]
                return () if position in (0, start) else ended[position - 1 : position]
        return ()


class Schedule:
    """Decides actions from the running passes and the tape. The owner may replace ``rules`` at any time."""

    def __init__(self, rules: Sequence[UnitRules], passes: Passes | None = None) -> None:
        self.rules = list(rules)
        self.passes, self.tape = passes or Passes(len(self.rules)), Tape()
        # Built once: looking up members of an Enum is slow in Python 3.11.
        self._use: list[Actions] = [((Action.USE, unit),) for unit in range(len(self.rules))]
        self.is_last_backward = True  # set by the user: the next backward is the last of the step
        self.finalizes_by_hand = False  # set by the user: ``finalize`` ends the step, not a backward
        self.reduced_last: set[int] = set()  # units that are reduced only when the whole backward is over
        self.awaits_finalization = False  # a backward has ended, and ``finalize`` has not been called since
        self._unused_prefetches: set[int] = set()  # units that the running pass has prefetched but not used
        self._postponed: Actions = ()  # the reshard of the unit that stays unsharded for its next use
        self._next_in_backward: Sequence[int] = ()  # the unit that ran before what backward has reached last
        self.kept: set[int] = set()  # units whose gradients are kept until they are reduced

    def take_over(self, earlier: Schedule, kept: set[int]) -> None:
        """Adopt the settings of the schedule before the units changed. ``kept``: units with unreduced gradients."""
        self.is_last_backward = earlier.is_last_backward
        self.finalizes_by_hand = earlier.finalizes_by_hand
        self.awaits_finalization = earlier.awaits_finalization
        self.kept = kept

    def pre_forward(self, unit: int, *, grad_enabled: bool) -> Actions:
        """``unit`` is about to compute."""
        passes, use = self.passes, self._use[unit]
        if self._postponed:
            use = (*self._reshard_other(unit), *use)
        if passes.in_backward:
            if passes.phases[unit] is not Phase.BACKWARD:  # else an outer checkpoint reruns it: keep the phase
                passes.begin_recomputation(unit)
            return use
        if passes.begin_forward(unit):
            self.tape.start(records=grad_enabled)
        predicted, listed = self.tape.begin(unit), self.rules[unit].forward_prefetch
        self._unused_prefetches.discard(unit)
        actions = list(use)
        for target in predicted if listed is None else listed:  # the user's list replaces the prediction
            actions.append((Action.PREFETCH, target))
            if passes.phases[target] is not Phase.FORWARD:
                self._unused_prefetches.add(target)
        return actions

    def post_forward(self, unit: int, leads_to: Outcome = Outcome.BACKWARD) -> Actions:
        """``unit`` has computed. ``leads_to`` says what follows from its output."""
        passes, tape = self.passes, self.tape
        phase = passes.phases[unit]
        if phase is Phase.BACKWARD:
            return ()
        is_root = passes.end_forward(unit)
        if phase is Phase.RECOMPUTE:  # its backward follows immediately, and reshards
            return ()
        if tape.records and leads_to is not Outcome.NOTHING:
            tape.ended.append(unit)
        rules = self.rules[unit]
        reshard = _AFTER_FORWARD.get(rules.after_forward)
        actions = () if reshard is None or (is_root and rules.keeps_alone) else ((reshard, unit),)
        if is_root:
            tape.expected = tape.began
            return *self._postponed, *actions, *((Action.RESHARD, other) for other in self._take_unused())
        if actions and unit in tape.expected[tape.position : tape.position + 1]:
            self._postponed, actions = actions, ((Action.STAY, unit),)
        return actions

    def pre_backward(self, unit: int) -> Actions:
        """The gradient of an output of ``unit`` has been computed."""
        passes = self.passes
        if not passes.begin_backward(unit):  # a second output of the same forward
            return ()
        self._unused_prefetches.discard(unit)
        rules, predicted = self.rules[unit], self.tape.reach(unit, in_one_pass=not self.is_last_backward)
        self._next_in_backward = predicted
        actions = list(self._reshard_other(unit)) if self._postponed else []
        actions += self._use[unit] if rules.unshard_in_backward else ()
        for target in predicted if rules.backward_prefetch is None else rules.backward_prefetch:
            if self.rules[target].unshard_in_backward:
                actions.append((Action.PREFETCH, target))
                if passes.phases[target] is Phase.REDUCED:  # ``end_backward`` reshards the others anyway
                    self._unused_prefetches.add(target)
        return actions

    def post_backward(self, unit: int, *, is_last_use: bool = True) -> Actions:
        """The gradients of ``unit``'s parameters have been computed. If not ``is_last_use``, this backward will use the
        unit again, so reduce only what earlier backwards have kept, as torch does: autograd has the gradient of a
        parameter only after its last use."""
        has_begun = self.passes.phases[unit] is Phase.BACKWARD  # else backward has not reached the use that ends here
        self.passes.end_backward(unit)
        reshard = self._reshard_after_backward(unit)
        if has_begun and unit in self._next_in_backward:
            self._postponed, reshard = reshard, ()
        return (*reshard, self._reduce(unit, jointly=True)) if is_last_use or unit in self.kept else reshard

    def end_backward(self, ended: Collection[int] = ()) -> Actions:
        """The backward is over. Reshard and reduce units that had no ``post_backward``, because their inputs needed no
        gradient or they took no part; and reshard and reduce units in ``ended`` a second time."""
        actions = list(self._postponed)
        for unit in reversed(range(len(self.passes.phases))):
            if self.passes.phases[unit] is not Phase.REDUCED or unit in ended:
                actions += self._reshard_after_backward(unit)
                actions.append(self._keep(unit) if self.finalizes_by_hand else self._reduce(unit, jointly=False))
        for unit in self._take_unused():
            actions += self._reshard_after_backward(unit)
        self.passes.clear()
        self.awaits_finalization = self.finalizes_by_hand
        if self.is_last_backward and not self.finalizes_by_hand:
            self._forget_step()
            actions.append((Action.LAND, 0))
        return actions

    def finalize(self) -> Actions:
        """The user says that no backward follows: reduce the kept gradients. Landing them is left to the user."""
        actions: list[tuple[Action, int]] = []
        for unit in reversed(range(len(self.passes.phases))):
            actions += self._reshard_after_backward(unit)
            if unit in self.kept:
                actions.append(self._reduce(unit, jointly=True))
        self.awaits_finalization = False
        self._forget_step()
        return actions

    def by_hand(self, action: Action, unit: int) -> Actions:
        """The user asks for ``action`` on ``unit``, which from then on is as the user wants it."""
        self._postponed = self._reshard_other(unit)
        return ((action, unit),)

    def drop_kept(self) -> None:
        """The gradients that were kept are lost."""
        self.kept.clear()
        self.awaits_finalization = False

    def reset(self) -> None:
        """Forget the pass, which an exception has ended. The order of the last complete forward stays."""
        if self.passes.in_backward:
            self.awaits_finalization = False
        self.passes.clear()
        self._take_unused()
        self._forget_step()

    def _forget_step(self) -> None:
        self.tape.ended.clear()
        self.reduced_last.clear()

    def _reshard_other(self, unit: int) -> Actions:
        """``unit`` is used next. Return the reshard of the other unit that has stayed unsharded, if one has."""
        postponed, self._postponed = self._postponed, ()
        return () if postponed and postponed[0][1] == unit else postponed

    def _reshard_after_backward(self, unit: int) -> Actions:
        return ((Action.RESHARD, unit),) if self.rules[unit].reshard_after_backward else ()

    def _reduce(self, unit: int, *, jointly: bool) -> tuple[Action, int]:
        rules = self.rules[unit]
        if not rules.reduces:
            return self._keep(unit)
        self.kept.discard(unit)
        return Action.REDUCE_JOINTLY if jointly and rules.ranks_may_differ else Action.REDUCE, unit

    def _keep(self, unit: int) -> tuple[Action, int]:
        self.kept.add(unit)
        return Action.KEEP, unit

    def _take_unused(self) -> Sequence[int]:
        """The pass is over. Return the units that it has prefetched but not used, and forget what it expected."""
        unused, self._unused_prefetches, self._postponed = self._unused_prefetches, set(), ()
        return sorted(unused)
