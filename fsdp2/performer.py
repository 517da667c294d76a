"""Performs the schedule's actions on units, tells observers, and owns what is in flight of one root.

That is its reductions, and gradients on their way to the host; gathers belong to their groups. Knows which units there
are, not what made them run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from fsdp2.api import Observer
from fsdp2.group import ParamGroup
from fsdp2.reductions import Reductions
from fsdp2.schedule import Action, Actions, UnitRules
from fsdp2.services import compute_stream_services, services_for
from fsdp2.states import GroupState

_STORY_LENGTH = 12


class PerformedUnit(Protocol):
    """What is performed on: the groups of one unit."""

    @property
    def name(self) -> str: ...
    @property
    def groups(self) -> tuple[ParamGroup, ...]: ...
    @property
    def rules(self) -> UnitRules: ...


class Performer:
    """See the module's text.

    Attributes:
        observers: who is told.
        reductions: what has started and not landed.
    """

    def __init__(self, device: torch.device) -> None:
        self.services = services_for(device)
        self.observers: list[Observer] = []
        self.reductions = Reductions()
        self._device = device
        self._units: Sequence[PerformedUnit] = ()
        self._offloaded: list[ParamGroup] = []
        self._story: deque[tuple[str, str]] = deque(maxlen=_STORY_LENGTH)
        self._has_gathered = False
        self._has_reduced = False
        self._perform: dict[Action, Callable[[PerformedUnit], None]] = {
            Action.UNSHARD: self._unshard,
            Action.PREFETCH: self._unshard,
            Action.WAIT: self._wait,
            Action.RESHARD: self._reshard,
            Action.RESHARD_POST_FORWARD: self._reshard_post_forward,
            Action.REDUCE: self._reduce,
            Action.KEEP: self._keep,
            Action.LAND: self._land,
        }

    def take(self, units: Sequence[PerformedUnit]) -> None:
        """Actions name units by their position in ``units`` from now on."""
        self._units = units
        self._offloaded = [group for unit in units for group in unit.groups if group.home.is_staged]
        self.observe_transitions()

    def start(self, actions: Actions) -> None:
        """Perform what comes right before a unit computes. If nothing is gathered meanwhile, the pass is unlikely to
        gather any more."""
        self._has_gathered = False
        self.do(actions)
        self.services.memory.keep_freed(for_reuse=self._has_gathered)

    def do(self, actions: Actions) -> None:
        if self.observers:
            self._do_observed(actions)
            return
        units, perform = self._units, self._perform
        for action, index in actions:
            perform[action](units[index])

    def _do_observed(self, actions: Actions) -> None:
        for action, index in actions:
            unit = self._units[index]
            before = [group.state for group in unit.groups]
            pending = len(self.reductions)
            self._has_reduced = False
            self._perform[action](unit)
            sizes = [group.unsharded_nbytes for group in unit.groups]
            changed = [n for n, old, group in zip(sizes, before, unit.groups, strict=True) if old is not group.state]
            if action is Action.REDUCE:
                changed = [0] if self._has_reduced else []
            elif action is Action.LAND:
                changed = [0] * pending
            if changed:
                for observer in self.observers:
                    observer.on_action(action.value, unit.name, sum(changed))

    def _unshard(self, unit: PerformedUnit) -> None:
        for group in unit.groups:
            self._has_gathered |= group.unshard()

    def _wait(self, unit: PerformedUnit) -> None:
        for group in unit.groups:
            group.wait()

    def _reshard(self, unit: PerformedUnit) -> None:
        for group in unit.groups:
            group.reshard()

    def _reshard_post_forward(self, unit: PerformedUnit) -> None:
        for group in unit.groups:
            group.reshard_post_forward()

    def _reduce(self, unit: PerformedUnit) -> None:
        for group in unit.groups:
            group.note_writes()  # before it lands: hooks on the shards may run an optimizer then
            self._has_reduced |= self.reductions.start(group, with_unused=unit.rules.reduces_unused)

    def _keep(self, unit: PerformedUnit) -> None:
        for group in unit.groups:
            group.keep_gradients()

    def _land(self, _: PerformedUnit) -> None:
        self.reductions.land()

    # Between passes

    def finish_landings(self) -> None:
        """What was offloaded is in the memory of the host."""
        if self._offloaded:
            self.wait_for_reads()
            offloaded = reversed(self._offloaded)  # about the order in which backward ran
            for landing in [landing for group in offloaded for landing in group.gradients.take_landings()]:
                landing.finish()

    def wait_for_reads(self) -> None:
        """Shards on the host are the CPU's again."""
        for group in self._offloaded:
            group.wait_for_reads()

    def drop(self) -> None:
        """Wait for what is in flight, and land nothing."""
        self.reductions.drop()
        for group in self._offloaded:
            group.gradients.take_landings()

    def flush(self) -> None:
        """Carry out deferred releases of memory."""
        for services in {self.services, compute_stream_services(self._device)}:
            services.flush()

    # What others are told

    def note(self, event: str, unit: PerformedUnit) -> None:
        """``event`` happened to ``unit``."""
        self._story.append((event, unit.name))
        for observer in self.observers:
            observer.on_event(event, unit.name)

    def story(self) -> str:
        """The last events, oldest first."""
        return ", ".join(f"{event} {unit}" for event, unit in self._story) or "none"

    def observe_transitions(self) -> None:
        """Report the groups' transitions to the observers; groups carry no callback while nobody watches."""
        for unit in self._units:
            for group in unit.groups:
                group.on_transition = self._transition_reporter(unit) if self.observers else None

    def _transition_reporter(self, unit: PerformedUnit) -> Callable[[GroupState, GroupState], None]:
        def report(before: GroupState, after: GroupState) -> None:
            for observer in self.observers:
                observer.on_transition(unit.name, before.value, after.value)

        return report
