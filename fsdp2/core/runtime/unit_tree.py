"""The passes that the units of one tree go through.

``UnitTree`` holds what a root and the units inside it share. Hooks report events to the tree by calling one method per
event. The schedule says which actions follow, and the executor performs them. ``extras`` plug in another schedule and
other checks here.

The first unit used, by a forward or by a method such as ``unshard``, becomes the root. If a unit around it is used
later, that unit becomes the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace

import torch

from fsdp2.core import _torch, seams
from fsdp2.core.plan.dtypes import GRADIENTS_FOLLOW_SHARDS
from fsdp2.core.runtime import door
from fsdp2.core.runtime.door import SURROUNDINGS, ask, must_leave
from fsdp2.core.runtime.executor import Executor
from fsdp2.core.runtime.unit import ModuleTrees, Unit, note_tree_change, parents_of, units_under
from fsdp2.core.schedule.schedule import Action, AfterForward, Passes, Phase, Schedule, UnitRules
from fsdp2.core.schedule.states import GroupState, Outcome
from fsdp2.core.types import ScheduleError


class TreeChecks:
    """Checks that a tree makes at each event, such as whether all ranks do the same. This class checks nothing."""

    def check_units(self, units: Sequence[tuple[Unit, str]]) -> None:
        """``units``, given with their names, root first, are about to become the units of the tree."""

    def end_collection(self) -> None:
        """The units of the tree are known and scheduled."""

    def begin_pass(self) -> None:
        """A pass begins. The tree already knows what the user has changed."""

    def note_flags(self) -> None:
        """A group has found flags that the user has changed."""

    def agree_on_flags(self) -> None:
        """The next communication depends on flags."""

    def end_forward(self, unit: Unit) -> None:
        """The forward of ``unit``, a whole pass, is over."""

    def begin_backward(self) -> None:
        """A backward begins."""

    def end_backward(self) -> None:
        """A backward is over; unless it ends the step, it may have left gradients."""

    def finalize_backward(self) -> None:
        """The user asks to reduce the gradients that backwards have left."""

    def end_step(self) -> None:
        """A step's gradients have landed."""

    def drop_step(self) -> None:
        """The step is abandoned."""


class UnitTree:
    """What a root and the units inside it share: their passes, and cleanup after exceptions.

    Attributes:
        units: all units; the units inside a unit follow that unit. ``root`` is the first.
        passes: what the units are doing now.
        is_reducing: ``finalize_backward`` has started reductions that have not been waited for yet.
        checks: what is checked at each event.
        loop: the ``fsdp2.joined`` that runs this root, if any.
    """

    def __init__(self, unit: Unit) -> None:
        self.root = unit
        self.units: list[Unit] = []
        self.executor = Executor(unit.mesh.device)
        self.passes = Passes(0)
        self.schedule = Schedule((), self.passes)
        self.post_optim_event: torch.Event | None = None
        self.is_reducing = False
        self.loop: object = None
        self._backward = _torch.BackwardToken()
        self.num_resets = 0
        self.parents: Sequence[int | None] = ()  # for each unit, the innermost unit around it
        self._seen_version = 0
        note_tree_change()  # outer trees have not seen the units of this one yet
        self.checks: Sequence[TreeChecks] = [make(self) for make in seams.tree_checks]
        self._usual_checks = self.checks
        self._collect()

    # The tree

    def _collect(self) -> None:
        """Adopt the units that the module tree has now. Called only between passes. If the units have changed, their
        order is recorded again."""
        found = {unit: name for module in self.root.modules for name, unit in units_under(module)}
        for check in self.checks:
            check.check_units(list(found.items()))
        for unit in dict.fromkeys([*self.units, *found]):
            belongs, is_here = unit in found, unit.tree is self
            if belongs != is_here:
                unit.leave()
            for group in unit.groups if not belongs else ():  # no tree would reshard it
                group.reshard()
                group.unsharded.release_post_forward()
        before, self.units = self.units, list(found)
        self._seen_version = ModuleTrees.version
        for index, (unit, name) in enumerate(found.items()):
            unit.join(self, index, name)
        self.parents = parents_of(self.units)
        for unit, around in zip(self.units, self.parents, strict=True):
            of_parent = [] if around is None else self.units[around].observers
            unit.tell(list(dict.fromkeys([*unit.observers, *of_parent])))
        may_differ = any(unit.config.ranks_may_differ for unit in self.units)
        if self.units != before or may_differ is (self.checks is self._usual_checks):
            self._schedule_units(may_differ=may_differ)
        else:  # the user may have configured them while another root had them
            for unit in self.units:
                self.schedule.rules[unit.index] = self.rules_of(unit)
        for check in self.checks:
            check.end_collection()  # last, because users may turn its warnings into errors

    def _schedule_units(self, *, may_differ: bool) -> None:
        for unit in self.units:
            for group in unit.groups:
                group.gradients.on_missing = None
        earlier, rules = self.schedule, [self.rules_of(unit) for unit in self.units]
        self.passes.clear(len(self.units))
        if may_differ:
            self.schedule, self.checks = seams.where_ranks_differ(self, self._usual_checks)
        else:
            self.schedule, self.checks = Schedule(rules, self.passes), self._usual_checks
        owing = {unit.index for unit in self.units if any(group.gradients.are_kept for group in unit.groups)}
        self.schedule.take_over(earlier, owing)
        self.executor.take(self.units)

    def rules_of(self, unit: Unit) -> UnitRules:
        """What the schedule must know about the configuration of ``unit``."""
        config, has_others = unit.config, any(group.mesh.data_parallel_size > 1 for group in unit.groups)
        stays = config.stays_as_root and unit is self.root  # backward would immediately gather it again
        return replace(
            config,
            after_forward=AfterForward.KEEP if stays else config.after_forward,
            keeps_alone=len(unit.modules) > 1,
            ranks_may_differ=config.ranks_may_differ and has_others,
            forward_prefetch=self._indices(config.forward_units),
            backward_prefetch=self._indices(config.backward_units),
        )

    def _indices(self, units: Sequence[Unit] | None) -> tuple[int, ...] | None:
        return None if units is None else tuple(unit.index for unit in units if unit.tree is self)

    @property
    def class_name(self) -> str:
        """The class name of the root's module."""
        return type(self.root.modules[0]).__name__

    # Forward

    def _recover_backward(self) -> None:
        """``passes`` says that a backward is running, but this call is not part of it. If that backward has raised,
        clean up after it. Otherwise, the backward that is running here is nested in it.

        Raises:
            ScheduleError: it is still running, and this thread is not running any backward.
        """
        if _torch.running_backward() != _torch.NO_BACKWARD:
            if not self._backward.is_over():
                return
        elif not self._backward.is_over_soon():
            raise ScheduleError(
                f"a backward of {self.class_name} is running in another thread. Run forwards and backwards of one "
                "model one after another."
            )
        if self.passes.in_backward:  # else it ended normally while this thread waited
            self.reset()

    def pre_forward(self, unit: Unit, *, grad_enabled: bool) -> tuple[Phase, bool]:
        """``unit`` is about to compute or recompute. Returns its new phase, and whether its forward begins with this
        call: the modules of one unit share a forward, which lasts from the first module to the last."""
        if any(map(ask, SURROUNDINGS)) and must_leave():
            return door.outside(self.pre_forward, unit, grad_enabled=grad_enabled)
        passes = self.passes
        if passes.in_backward and _torch.running_backward() != self._backward.task:
            self._recover_backward()
        # Most units run inside a forward that has already begun.
        if not passes.in_backward and (passes.root is None or passes.root >= unit.index or passes.root_raised):
            begins = not unit.missing_modules  # else its forward continues in another of its modules
            if passes.root_raised or (begins and passes.has_left_behind(unit.index, self.parents)):
                self.abandon_forward()
            if passes.root is None:
                self._begin_forward()
        if len(unit.modules) > 1 and passes.root is not None and not passes.in_backward:
            if unit.missing_modules:
                return self.resume_forward(unit), False
            unit.missing_modules = set(unit.modules)  # outside of the root's forward, each call is a forward
        unit.leads_to = Outcome.NOTHING
        schedule, index = self.schedule, unit.index  # the tree may have changed
        self.executor.do(schedule.pre_forward(index, grad_enabled=grad_enabled), "pre_forward", unit)
        return passes.phases[index], True

    @door.entry
    def resume_forward(self, unit: Unit) -> Phase:
        """``unit``'s forward continues in another of its modules or methods. The user may have resharded in between."""
        self.executor.do(((Action.USE, unit.index),))
        return self.passes.phases[unit.index]

    def post_forward(self, unit: Unit) -> None:
        """``unit`` has computed, in a forward or a recomputation."""
        if any(map(ask, SURROUNDINGS)) and must_leave():
            door.outside(self.post_forward, unit)
            return
        passes = self.passes
        is_root, ending = passes.root == unit.index, [unit]
        if is_root:  # also ends the forward of units whose modules did not all run in it
            ending = [*(inner for inner in reversed(self.units) if inner.missing_modules), unit]
        for each in ending:
            each.missing_modules.clear()
            self.executor.do(self.schedule.post_forward(each.index, each.leads_to), "post_forward", each)
        if passes.root is None:
            self._end_pass()
            if is_root:
                for check in self.checks:
                    check.end_forward(unit)

    def _begin_forward(self) -> None:
        """Begin a forward pass, and adopt what the user has changed since the last pass."""
        if self._seen_version != ModuleTrees.version:
            self._collect()
        for check in self.checks:
            check.begin_pass()
        self.order_gathers()
        self.post_optim_event = None
        self.executor.limit = seams.decorated(self) if self.loop or self.root.config.memory_limit else None

    # Backward

    def pre_backward(self, unit: Unit) -> None:
        """A gradient has reached ``unit``: that of an output of the unit, or of something inside it."""
        if any(map(ask, SURROUNDINGS)) and must_leave():
            door.outside(self.pre_backward, unit)
            return
        passes = self.passes
        if passes.in_backward and _torch.running_backward() != self._backward.task:
            self._recover_backward()
        if not passes.in_backward:
            self._begin_backward()
        elif passes.phases[unit.index] is Phase.BACKWARD:
            return
        self.executor.do(self.schedule.pre_backward(unit.index), "pre_backward", unit)
        if GRADIENTS_FOLLOW_SHARDS:
            self.begin_gradients(unit)

    def begin_gradients(self, unit: Unit) -> None:
        """The backward of ``unit`` has begun. With torch 2.15, this determines the dtypes of gradients."""
        for group in unit.groups:
            group.gradients.begin_backward(keeps=not unit.config.reduces)

    def post_backward(self, unit: Unit) -> None:
        """The gradients of ``unit``'s parameters have been computed."""
        if any(map(ask, SURROUNDINGS)) and must_leave():
            door.outside(self.post_backward, unit)
            return
        schedule, passes, index = self.schedule, self.passes, unit.index
        if passes.phases[index] is Phase.FORWARD:  # the unit computes gradients inside its own forward
            if torch.is_grad_enabled():
                # With create_graph, and on an accelerator, the nodes made here have low sequence numbers: autograd
                # reaches them last, after the gradient of the unit's input.
                schedule.reduced_last.add(index)
            return
        if index in schedule.reduced_last:
            return
        if passes.in_backward and _torch.running_backward() != self._backward.task:
            self._recover_backward()
        if not passes.in_backward:  # the loss uses no output, and the parameters stayed unsharded
            self.pre_backward(unit)
        self.executor.do(schedule.post_backward(index), "post_backward", unit)

    def _begin_backward(self) -> None:
        """The first unit's backward is about to begin."""
        self._backward.begin(self.end_backward)
        self._take_flags()
        for check in self.checks:
            check.begin_backward()
        schedule, self.executor.to_come = self.schedule, self.schedule.tape.ended
        self.executor.ends_step = schedule.is_last_backward and not schedule.finalizes_by_hand
        self.executor.max_in_flight = max([unit.config.max_reductions for unit in self.units])
        if [group for unit in self.units for group in unit.groups if group.unsharded.hooked]:
            # Pre-hooks may read what has been written since the forward began.
            self.executor.streams.gather_after_compute()

    @_torch.runs_between_graphs
    def end_backward(self) -> None:
        """Autograd has executed the last node of a backward."""
        if any(map(ask, SURROUNDINGS)) and must_leave():
            door.outside(self.end_backward)
            return
        try:
            self._end_backward()
        except BaseException:
            self.reset()  # reductions that were launched must not land in a later step
            raise

    def _end_backward(self) -> None:
        self.executor.do((), "end_backward", self.root)
        torch.clear_autocast_cache()  # a later forward would reach old nodes of casts after the unit has been reduced
        for unit in self.units:
            unit.missing_modules.clear()
        late = [u.index for u in self.units if u.config.reduces for g in u.groups if g.gradients.has_late()]
        self.executor.do(self.schedule.end_backward(late))
        self._end_pass()
        for check in self.checks:
            check.end_backward()
        if self.schedule.is_last_backward and not self.schedule.finalizes_by_hand:
            self._end_step()

    @door.entry
    def finalize_backward(self) -> None:
        """Start reducing the gradients that backwards have left, because the user asks for it.

        Raises:
            ScheduleError: the gradients of some parameters were deferred, and are now lost.
        """
        for check in self.checks:
            check.finalize_backward()
        self._take_flags()
        self.executor.do(self.schedule.finalize(), "finalize_backward()", self.root)
        self.executor.reduce_partial()
        self.is_reducing = True

    @door.entry
    def land(self) -> None:
        """Land the gradients that ``finalize_backward`` has started to reduce."""
        self.executor.do(((Action.LAND, self.root.index),))
        self.executor.finish_copies()
        self.is_reducing = False
        self._end_step()

    def _end_step(self) -> None:
        if any(unit.config.reduces for unit in self.units):
            for check in self.checks:
                check.end_step()

    def _take_flags(self) -> None:
        for unit in self.units:
            for group in unit.groups:
                group.take_flags()
        for check in self.checks:
            check.agree_on_flags()

    def note_flags(self) -> None:
        """A group has found flags that the user has changed."""
        for check in self.checks:
            check.note_flags()

    # Between passes

    def order_gathers(self) -> None:
        """Order later gathers after the optimizer's writes. The user may have given an event that marks them."""
        groups = [group for unit in self.units for group in unit.groups]
        if self.executor.has_unwaited and any(group.gradients.are_hooked for group in groups):
            # Hooks update shards as gradients land (an optimizer in backward), and no backward has ended the step.
            self.executor.land_down_to(0)
            self.executor.wait_for_landed()
        streams, event = self.executor.streams, self.post_optim_event
        if event is None:
            streams.gather_after_compute()
            return
        streams.gather_after(event)
        if any(group.gathers_on_compute for group in groups):
            streams.wait_here(event)  # compute waits for the optimizer: compute reads the shards itself

    @door.entry
    def unshard(self, unit: Unit) -> None:
        """Start gathering ``unit`` because the user asks; returns before the data has arrived."""
        if self.passes.in_backward and _torch.running_backward() != self._backward.task:
            self._recover_backward()
        self.order_gathers()
        self.executor.do(self.schedule.by_hand(Action.UNSHARD, unit.index), "unshard()", unit)
        for group in unit.groups:
            group.note_writes()

    def finish_unshard(self, unit: Unit) -> None:
        """Wait for ``unshard``. Do nothing if this was done already, or the unit was resharded since. If an optimizer
        has stepped since, the gather may have read some of what it wrote, so gather again."""
        pending = [group for group in unit.groups if group.state is GroupState.UNSHARDING]
        if any(group.has_stepped for group in pending):
            self.order_gathers()
        for group in pending:
            group.use()
        for group in unit.groups:
            group.note_writes()

    @door.entry
    def reshard(self, unit: Unit) -> None:
        """Reshard ``unit`` because the user asks."""
        self.executor.do(self.schedule.by_hand(Action.RESHARD, unit.index), "reshard()", unit)
        for group in unit.groups:
            group.unsharded.release_post_forward()  # the user may write the shards next
        self.executor.wait_for_reads()

    def release(self, unit: Unit) -> None:
        """``unit`` is about to leave for another root. Land what is in flight here; its other gradients move with its
        groups, and no later event of this tree acts on these, not even the end of a backward.

        Raises:
            ScheduleError: a backward of the present root is running.
        """
        if self.passes.in_backward and _torch.running_backward() != self._backward.task:
            self._recover_backward()
        if self.passes.in_backward:
            raise ScheduleError(
                f"a backward of {self.class_name} is running, and a module that takes over its units runs for the "
                "first time. Run that module before, or after backward() has returned."
            )
        if self.passes.root is not None or self.executor.has_unwaited:  # a module does not run inside its own child
            self.abandon_forward()
            self._end_step()
        left = copy(unit)
        left.groups, left.tree = (), None
        self.units[unit.index] = left
        self.executor.let_go(left, unit.index)

    def abandon_forward(self) -> None:
        """End the running pass, if any: land what is in flight, and bind the shards. Other gradients stay."""
        try:
            if self.is_reducing:
                self.land()
            else:
                self.executor.land(with_partial=False)
                self.executor.finish_copies()
        finally:
            self._come_to_rest()

    def reset(self) -> None:
        """Clean up after any exception. Drop gradients that are not in ``.grad`` yet: sums may be incomplete, and a
        repeated step would count them twice. On an accelerator, some of those in flight may have landed already."""
        self.num_resets += 1
        try:
            self._come_to_rest()
        finally:
            self.schedule.drop_kept()
            for check in self.checks:
                check.drop_step()
            for unit in self.units:
                for group in unit.groups:
                    group.gradients.take_used()
                    group.gradients.drop()

    def _come_to_rest(self) -> None:
        """Drop what is in flight, and bind the shards. If a collective has failed, raise its error afterwards."""
        self.is_reducing = False
        self.schedule.reset()
        with ExitStack() as stack:  # calls all of these in reverse order, even if some raise
            stack.callback(self._end_pass)
            for unit in reversed(self.units):
                unit.missing_modules.clear()
                for group in unit.groups:
                    stack.callback(group.reshard)
            stack.callback(self.executor.drop)

    def _end_pass(self) -> None:
        for unit in self.units:
            for group in unit.groups:
                if group.state is not GroupState.SHARDED or group.keeps_post_forward:
                    group.note_writes()
        if not self.passes.in_backward:  # I12
            self.executor.finish_copies()


def tree_of(unit: Unit) -> UnitTree:
    """The tree of ``unit``. A unit without a tree becomes the root of a new one, unless the checks refuse it."""
    return unit.tree or door.entry(UnitTree)(unit)
