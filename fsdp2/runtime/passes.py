"""The passes of one root: each event of a unit goes to the schedule, and its actions to the performer.

In between come the events of units that this rank skips (``skipped``): what they lead to is performed first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2.runtime.agreement import compare
from fsdp2.runtime.executor import Performer
from fsdp2.runtime.tree_version import note_change
from fsdp2.runtime.units import GroupedUnit, parents_of, reshard_outdated
from fsdp2.schedule.rank_skipping import Event, Outcome, SkippedUnits
from fsdp2.schedule.schedule import Action, Phase, Schedule, UnitRules


class Passes:
    """See the module's text.

    Attributes:
        schedule: what follows from events.
        performer: performs it.
        skipped: which units this rank skips.
    """

    def __init__(self, performer: Performer) -> None:
        self.performer = performer
        self.schedule = Schedule(())
        self.skipped = SkippedUnits(())
        self._units: Sequence[GroupedUnit] = ()

    def take(self, units: Sequence[GroupedUnit], rules: Sequence[UnitRules]) -> None:
        """Passes go through ``units`` from now on, the root first."""
        self._units = units
        earlier, self.schedule = self.schedule, Schedule(rules)
        self.schedule.take_over(earlier)
        self.skipped = SkippedUnits(parents_of(units))
        for index, each in enumerate(rules):
            self.configure(index, each)
        self.performer.take(units)

    def configure(self, index: int, rules: UnitRules) -> None:
        """From the next pass on, the unit ``index`` has these ``rules``."""
        self.schedule.rules[index] = rules
        self.skipped.may_skip(index, enabled=rules.ranks_may_skip)

    def reset(self) -> None:
        """An exception has cut the pass short."""
        self.schedule.reset()
        self.skipped.reset()

    # Forward

    def begin(self, root: int, memory_limit: int | None) -> None:
        """A forward of unit ``root`` begins that is a pass of its own."""
        self.performer.begin_pass(memory_limit)
        self.skipped.begin_forward(root, grad_enabled=torch.is_grad_enabled())

    def pre_forward(self, index: int) -> Phase:
        """A unit is about to compute. Returns the phase it is in now."""
        self._join_forward(self.skipped.forward(index))
        unit = self._units[index]
        reshard_outdated(unit)
        self.performer.note("pre_forward", unit)
        actions = self.schedule.pre_forward(index, in_backward=False, grad_enabled=torch.is_grad_enabled())
        self.performer.start(actions)
        return self.schedule.phases[index]

    def pre_recompute(self, index: int) -> Phase:
        """A unit is about to compute again, in a backward."""
        schedule = self.schedule
        if schedule.phases[index] is not Phase.BACKWARD:
            self._join_backward(self.skipped.recompute(index))
        self.performer.note("pre_forward", self._units[index])
        actions = schedule.pre_forward(index, in_backward=True, grad_enabled=torch.is_grad_enabled())
        self.performer.do(actions)  # its own backward prefetches
        return schedule.phases[index]

    def resume_forward(self, index: int) -> Phase:
        """A unit's forward goes on, in a further module or method; the user may have resharded meanwhile."""
        self.performer.do(((Action.UNSHARD, index), (Action.WAIT, index)))
        return self.schedule.phases[index]

    def post_forward(self, index: int, leads_to: Outcome) -> None:
        """A unit has computed, for the first time or again."""
        if self.schedule.phases[index] is Phase.FORWARD:
            self._join_forward(self.skipped.forward(~index, leads_to))
        self.performer.note("post_forward", self._units[index])
        self.performer.do(self.schedule.post_forward(index))

    def agree(self) -> None:
        """A forward is over. If it was the first of its kind, or others were trained then, find out what the other
        ranks have used."""
        units = enumerate(self._units)
        trainable = {i for i, unit in units if any(group.gathered.trainable for group in unit.groups)}
        used = self.skipped.end_forward(trainable)
        if used is not None:
            self.schedule.expect(self.skipped.agree(compare(self._units, used), trainable))

    def _join_forward(self, events: Sequence[Event]) -> None:
        """Gather what other ranks may use."""
        for event in events:
            unit = self._units[event if event >= 0 else ~event]
            if not unit.is_in_tree():
                self.skipped.leave_out(event)
                note_change()
            elif event < 0:
                self.performer.do(self.schedule.post_forward(~event))
            else:
                self.performer.note("join_forward", unit)
                reshard_outdated(unit)
                actions = self.schedule.pre_forward(event, in_backward=False, grad_enabled=torch.is_grad_enabled())
                self.performer.do(actions)

    # Backward

    def begin_backward(self) -> None:
        """The first unit's backward is about to begin."""
        self.skipped.begin_backward()

    def pre_backward(self, index: int) -> None:
        """The gradient of a unit's output is there."""
        self._join_backward(self.skipped.backward(~index))
        self._begin_backward("pre_backward", index)

    def post_backward(self, index: int) -> None:
        """The gradients of a unit's parameters are there."""
        self._join_backward(self.skipped.backward(index))
        if index not in self.skipped.ended:
            self.performer.note("post_backward", self._units[index])
            self.performer.do(self.schedule.post_backward(index))

    def end_backward(self) -> bool:
        """A backward is over. Returns whether it was the last of its step."""
        by_hand = self.schedule.finalizes_by_hand
        is_last = self.schedule.is_last_backward and not by_hand
        self._join_backward(self.skipped.end_backward(is_last=is_last, ends_open=not by_hand))
        self.performer.do(self.schedule.end_backward(self.skipped.ended))
        return is_last

    def finalize(self) -> None:
        """Start reducing what backwards have left."""
        self.skipped.reset()
        self.performer.do(self.schedule.finalize())

    def _begin_backward(self, event: str, index: int) -> None:
        unit = self._units[index]
        self.performer.note(event, unit)
        if self.performer.admission is not None:
            self.performer.admission.begin_backward(unit)
        self.performer.start(self.schedule.pre_backward(index))

    def _join_backward(self, events: Sequence[Event]) -> None:
        """Gather and reduce what other ranks may."""
        for event in events:
            if event < 0:
                self._begin_backward("join_backward", ~event)
            else:
                self.performer.do(self.schedule.post_backward(event))
