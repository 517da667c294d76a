"""Performs the schedule's actions on units, tells observers, and owns what is in flight of one root.

That is its reductions, and gradients on their way to the host; gathers belong to their groups. Knows which units there
are, not what made them run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from fsdp2.comm.services import compute_stream_services, services_for
from fsdp2.group.gradients import Unused
from fsdp2.group.group import ParamGroup
from fsdp2.runtime.reductions import Reductions
from fsdp2.runtime.units import GroupedUnit
from fsdp2.schedule.schedule import Action, Actions
from fsdp2.schedule.states import GroupState
from fsdp2.tools.memory_limit import Admission, Programs
from fsdp2.types import Observer

_STORY_LENGTH = 12
_REDUCTIONS = (Action.REDUCE, Action.REDUCE_JOINTLY, Action.REDUCE_EARLY)
_OF_GROUPS = {  # methods of a group
    Action.UNSHARD: "unshard",
    Action.PREFETCH: "unshard",
    Action.WAIT: "wait",
    Action.RESHARD: "reshard",
    Action.RESHARD_POST_FORWARD: "reshard_post_forward",
    Action.KEEP: "keep_gradients",
}


class Performer:
    """See the module's text.

    Attributes:
        observers: who is told.
        reductions: what has started and not landed.
        admission: what holds passes under a limit on temporary memory, if there is one.
    """

    def __init__(self, device: torch.device) -> None:
        self.services = services_for(device)
        self.observers: list[Observer] = []
        self.reductions = Reductions()
        self.admission: Admission | None = None
        self._device = device
        self._units: Sequence[GroupedUnit] = ()
        self._offloaded: list[ParamGroup] = []
        self._story: deque[tuple[str, str]] = deque(maxlen=_STORY_LENGTH)
        self._has_reduced = False
        self._programs: Programs = {}
        self._unlimited: Programs = {}

    def take(self, units: Sequence[GroupedUnit]) -> None:
        """Actions name units by their position in ``units`` from now on."""
        self._units = units
        pairs = [(action, index) for index in range(len(units)) for action in Action]
        self._programs = self._unlimited = {pair: self._program(*pair) for pair in pairs}
        self.admission = None
        self._offloaded = [group for unit in units for group in unit.groups if group.home.is_staged]
        self.observe_transitions()

    def begin_pass(self, memory_limit: int | None) -> None:
        """A forward begins that holds no more than ``memory_limit`` bytes of temporary memory, if there is a limit."""
        if memory_limit is None:
            self._programs, self.admission = self._unlimited, None
            return
        admission = self.admission
        if admission is None or admission.limit != memory_limit:
            parts = (self._units, self._unlimited, self.reductions, self.flush, self._tell)
            admission = self.admission = Admission(memory_limit, *parts)
            self._programs = admission.programs
        admission.recount()

    def start(self, actions: Actions) -> None:
        """Perform what comes right before a unit computes. If nothing is gathered meanwhile, the pass is unlikely to
        gather any more."""
        self.services.memory.keep_freed(for_reuse=self.do(actions))

    def do(self, actions: Actions) -> bool:
        """Perform ``actions``. Returns whether a gather was started."""
        if self.observers:
            return self._do_observed(actions)
        has_gathered = False
        for action in actions:
            for run in self._programs[action]:
                has_gathered |= run() is True
        return has_gathered

    def _program(self, action: Action, index: int) -> tuple[Callable[[], object], ...]:
        """What to call for ``action`` on unit ``index``. Those that start a gather return True."""
        unit = self._units[index]
        if action is Action.LAND:
            return (self.reductions.land,)
        if action is Action.REDUCE_EARLY:
            return (partial(self._reduce_early, unit),)
        if action in _REDUCTIONS:
            return (partial(self._reduce, unit, Unused.JOIN if action is Action.REDUCE_JOINTLY else Unused.LEAVE),)
        return tuple(getattr(group, _OF_GROUPS[action]) for group in unit.groups)

    def _do_observed(self, actions: Actions) -> bool:
        has_gathered = False
        for action, index in actions:
            unit = self._units[index]
            before = [group.state for group in unit.groups]
            pending = len(self.reductions)
            self._has_reduced = False
            for run in self._programs[action, index]:
                has_gathered |= run() is True
            sizes = [group.unsharded_nbytes for group in unit.groups]
            changed = [n for n, old, group in zip(sizes, before, unit.groups, strict=True) if old is not group.state]
            if action in _REDUCTIONS:
                changed = [0] if self._has_reduced else []
            elif action is Action.LAND:
                changed = [0] * pending
            if changed:
                name = "reduce" if action is Action.REDUCE_JOINTLY else action.value
                self._tell(name, unit, sum(changed))
        return has_gathered

    def _reduce(self, unit: GroupedUnit, unused: Unused) -> None:
        if unit.rules.reduces_unused:
            unused = Unused.ZERO
        for group in unit.groups:
            group.note_writes()  # before it lands: hooks on the shards may run an optimizer then
            self._has_reduced |= self.reductions.start(group, unused)

    def _reduce_early(self, unit: GroupedUnit) -> None:
        for group in unit.groups:
            self._has_reduced |= self.reductions.begin(group)

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

    def note(self, event: str, unit: GroupedUnit) -> None:
        """``event`` happened to ``unit``."""
        self._story.append((event, unit.name))
        if self.observers:
            for observer in self.observers:
                observer.on_event(event, unit.name)

    def _tell(self, action: str, unit: GroupedUnit, nbytes: int) -> None:
        for observer in self.observers:
            observer.on_action(action, unit.name, nbytes)

    @property
    def last_event(self) -> object:
        """An object of its own for each event; None before the first."""
        return self._story[-1] if self._story else None

    def story(self) -> str:
        """The last events, oldest first."""
        return ", ".join(f"{event} {unit}" for event, unit in self._story.copy()) or "none"

    def observe_transitions(self) -> None:
        """Report the groups' transitions to the observers; groups carry no callback while nobody watches."""
        for unit in self._units:
            for group in unit.groups:
                group.on_transition = self._transition_reporter(unit) if self.observers else None

    def _transition_reporter(self, unit: GroupedUnit) -> Callable[[GroupState, GroupState], None]:
        def report(before: GroupState, after: GroupState) -> None:
            for observer in self.observers:
                observer.on_transition(unit.name, before.value, after.value)

        return report
