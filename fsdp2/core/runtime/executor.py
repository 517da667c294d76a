"""Performs the schedule's actions on the units of one root.

The executor knows which groups have a reduction in flight, and in which order these land. The reductions themselves,
like the gathers, belong to the groups. The executor records each event and notifies observers. It makes no decisions;
only a ``limit`` may leave out or add actions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch

from fsdp2.core import _torch
from fsdp2.core.comm.streams import streams_for
from fsdp2.core.group.group import ParamGroup
from fsdp2.core.runtime.door import ask
from fsdp2.core.runtime.unit import Unit
from fsdp2.core.schedule.schedule import Action, Actions, in_parts
from fsdp2.core.schedule.states import GroupState
from fsdp2.core.types import CommunicationError

# Decorates the schedule: takes the event, its unit if any, and the actions that follow; returns what to perform.
Decorator = Callable[[str, Unit | None, Actions], Iterable[tuple[Action, int]]]
_T = TypeVar("_T")

_STORY_LENGTH = 12

_REDUCTIONS = (Action.REDUCE, Action.REDUCE_JOINTLY)
_OF_GROUPS = {
    Action.USE: ParamGroup.use,
    Action.UNSHARD: ParamGroup.unshard,
    Action.PREFETCH: ParamGroup.unshard,
    Action.WAIT: ParamGroup.wait,
    Action.STAY: ParamGroup.note_writes,
    Action.RESHARD: ParamGroup.reshard,
    Action.RESHARD_POST_FORWARD: ParamGroup.reshard_post_forward,
    Action.KEEP: ParamGroup.keep_gradients,
}


def _run(work: str, unit: Unit, group: ParamGroup, step: Callable[[], _T]) -> _T:
    """Run ``step``, which does the part ``work`` of a reduction of ``group``, and tell observers when it starts and
    stops. If a collective has failed, the error names the group's ``unit``."""
    try:
        for observer in unit.observers:
            observer.on_start(work, unit.name)
        result = step()
        for observer in unit.observers:
            observer.on_stop(work, unit.name)
        return result
    except CommunicationError as error:
        raise group.lost("reduction", error) from error.__cause__
    except BaseException:
        # Compute waits for the reduce stream: it frees what the stream reads, and gathers what hooks wrote on it.
        group.unsharded.streams.compute_after_reduce()
        raise


class Executor:
    """Performs the actions of one root.

    Attributes:
        units: actions name units by their position here.
        max_in_flight: how many reductions may be in flight, including the one that starts. This trades memory for
            overlap: each reduction holds the gradients that it reads.
        ends_step: whether reductions that start now are the last of their step, but for units that are ``to_come``.
        in_flight: groups whose reduction is not finished, oldest first. The same on all ranks.
        limit: decides which actions are performed, and when. Without it, all are performed as scheduled.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams = streams_for(device)
        self.units: Sequence[Unit] = ()
        self.max_in_flight = 1
        self.ends_step, self.to_come = False, list[int]()
        self.limit: Decorator | None = None
        self._programs: dict[tuple[Action, int], Callable[[], object]] = {}  # performs an action on a unit
        self._story: deque[tuple[str, str]] = deque(maxlen=_STORY_LENGTH)
        self.in_flight: list[tuple[Unit, ParamGroup]] = []
        self._landing: tuple[Unit, ParamGroup] | None = None  # finished; lands after the next launch
        self._has_landed = False  # something that the current stream has not waited for
        self._offloaded: list[ParamGroup] = []
        self._replicated: list[tuple[Unit, ParamGroup]] = []

    def take(self, units: Sequence[Unit]) -> None:
        """Work on ``units`` from now on."""
        self.units, self.limit = units, None
        self._programs = {(action, i): self._program(action, unit) for i, unit in enumerate(units) for action in Action}
        groups = [(unit, group) for unit in units for group in unit.groups]
        self._offloaded = [group for _, group in groups if group.home.is_staged]
        self._replicated = [each for each in groups if each[1].mesh.replicate.size > 1]

    def let_go(self, unit: Unit, index: int) -> None:
        """The unit at ``index`` has left for another root; ``unit``, which has no groups, takes its place."""
        self._programs |= {(action, index): self._program(action, unit) for action in Action}
        mine = {group for each in self.units for group in each.groups}
        self._offloaded = [group for group in self._offloaded if group in mine]
        self._replicated = [each for each in self._replicated if each[1] in mine]

    def _program(self, action: Action, unit: Unit) -> Callable[[], object]:
        if action is Action.LAND:
            return self.land
        if action in _REDUCTIONS:
            jointly = action is Action.REDUCE_JOINTLY
            runs = [partial(self._reduce, unit, group, jointly=jointly) for group in unit.groups]
        else:
            runs = [partial(_OF_GROUPS[action], group) for group in unit.groups]
        return runs[0] if len(runs) == 1 else lambda: list(map(ask, runs))

    @property
    def last_event(self) -> object:
        """A different object for each event; None before the first."""
        return self._story[-1] if self._story else None

    def story(self) -> str:
        """The last events, oldest first."""
        return ", ".join(f"{event} {unit}" for event, unit in self._story.copy()) or "none"

    def do(self, actions: Actions, event: str = "", unit: Unit | None = None) -> None:
        """Perform ``actions``. If ``unit`` is given, they follow from ``event``, which has happened to it."""
        if unit is not None:
            self._story.append((event, unit.name))
            for observer in unit.observers:
                observer.on_event(event, unit.name)
        programs, units = self._programs, self.units
        for action in actions if self.limit is None else self.limit(event, unit, actions):
            if units[action[1]].observers:
                for part in in_parts((action,)):
                    self._do_observed(part)
            else:
                programs[action]()

    def _do_observed(self, action: tuple[Action, int]) -> None:
        kind, index = action
        unit = self.units[index]
        before = [group.state for group in unit.groups]
        pending = len(self.in_flight)
        for observer in unit.observers:
            observer.on_start(kind.value, unit.name)
        self._programs[action]()
        for observer in unit.observers:
            observer.on_stop(kind.value, unit.name)
        changed = [group for group, state in zip(unit.groups, before, strict=True) if group.state is not state]
        if changed or (kind is Action.LAND and pending):
            self.tell(kind.value, unit, sum(group.unsharded.nbytes for group in changed))

    def tell(self, action: str, unit: Unit, nbytes: int) -> None:
        """Tell observers that ``action`` was performed on ``unit``."""
        for observer in unit.observers:
            observer.on_action(action, unit.name, nbytes)

    # Reductions

    @property
    def has_unwaited(self) -> bool:
        """Whether some reduction has not landed, or the current stream has not waited for one that has."""
        return bool(self.in_flight) or self._landing is not None or self._has_landed

    def _reduce(self, unit: Unit, group: ParamGroup, *, jointly: bool) -> None:
        if group.state is not GroupState.SHARDED or group.keeps_post_forward:
            group.note_writes()  # before the reduction lands, since hooks on the shards may then run an optimizer
        ends_step = self.ends_step and unit.index not in self.to_come  # else another use may bring more gradients
        launch = partial(group.gradients.reduce, jointly=jointly, ends_step=ends_step)
        if _torch.is_profiling():
            launch = partial(_torch.in_range, "post_backward_reduce", unit.name, launch)
        if self._launch(unit, group, launch):
            for observer in unit.observers:
                observer.on_action("reduce", unit.name, 0)

    def reduce_partial(self) -> None:
        """Reduce over the replicate axis what groups have reduced only over the shard axis."""
        for unit, group in reversed(self._replicated):
            if group.gradients.awaits_all_reduce:
                self._launch(unit, group, partial(group.gradients.reduce_partial, ends_step=self.ends_step))

    def _launch(self, unit: Unit, group: ParamGroup, launch: Callable[[], bool]) -> bool:
        """Launch a reduction. Returns whether there was anything to reduce. Before that, finish the oldest reductions
        until another one may be in flight, and until ``group`` has none: its gradients land in order."""
        pending = self.in_flight
        while pending and (len(pending) >= self.max_in_flight or (unit, group) in pending):
            self._finish_oldest()
        if self._landing is not None and self._landing[1] is group:
            self._land_finished()
        is_launched = _run("reduce_launch", unit, group, launch)
        if is_launched:
            pending.append((unit, group))
        if self._landing is not None:  # its all-reduce over replicas overlapped with this launch
            self._land_finished()
        return is_launched

    def land(self, *, with_partial: bool = True) -> None:
        """Land everything in flight. ``with_partial`` also lands what was summed only over the shard axis. If a
        collective has failed, or a user's hook raises, nothing more lands."""
        try:
            if with_partial:
                self.reduce_partial()
            self.land_down_to(0)
        except Exception:
            with suppress(CommunicationError):  # the first error is the cause
                self.drop()
            raise
        self.wait_for_landed()

    def land_down_to(self, count: int) -> None:
        """Land the oldest reductions until no more than ``count`` are in flight."""
        while len(self.in_flight) > count:
            self._finish_oldest()
        if self._landing is not None:
            self._land_finished()

    def drop(self) -> None:
        """Wait for all reductions in flight without landing any.

        Raises:
            CommunicationError: one of them failed. Nothing is in flight afterwards.
        """
        pending = [*([] if self._landing is None else [self._landing]), *self.in_flight]
        self.in_flight, self._landing = [], None
        failed = None
        for _, group in pending:
            try:
                group.gradients.drop_in_flight()
            except CommunicationError as error:
                failed = failed or group.lost("reduction", error)
        self._has_landed |= bool(pending)  # on an accelerator, some have written ``.grad`` already
        self.wait_for_landed()
        for group in self._offloaded:
            group.gradients.drop_in_flight()
        if failed is not None:
            raise failed

    def _finish_oldest(self) -> None:
        if self._landing is not None:
            self._land_finished()
        unit, group = self.in_flight.pop(0)
        _run("reduce_finish", unit, group, group.gradients.finish)
        self._landing = unit, group

    def _land_finished(self) -> None:
        """Land the finished reduction. Users' hooks may raise."""
        assert self._landing is not None
        (unit, group), self._landing = self._landing, None
        if group.gradients.in_flight is not None or unit.observers:
            _run("reduce_land", unit, group, group.gradients.land)
        self._has_landed = True

    def wait_for_landed(self) -> None:
        """Make the current stream wait for everything that has landed."""
        if self._has_landed:
            self._has_landed = False
            self.streams.compute_after_reduce()

    # Between passes

    def finish_copies(self) -> None:
        """Wait until offloaded gradients are in host memory, and land them."""
        self.wait_for_reads()
        for group in reversed(self._offloaded):  # roughly the order of backward
            group.gradients.finish_copies()

    def wait_for_reads(self) -> None:
        """Wait until no copy reads shards on the host any more, so that the CPU may write them."""
        for group in self._offloaded:
            group.unsharded.wait_for_reads()
