"""The passes that the units of one tree go through.

``UnitTree`` is what a root and the units inside it share. Hooks report events to the tree; each event is one method:
the schedule says which actions follow, the executor performs them. ``extras`` plug in here: another schedule and other
checks.

The first unit whose forward runs becomes the root. If a unit around it runs later, that unit becomes the root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import ClassVar

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.plan.dtypes import GRADIENTS_FOLLOW_SHARDS
from fsdp2.runtime.executor import Decorator, Executor
from fsdp2.runtime.unit import ModuleTrees, Unit, note_tree_change, parents_of, units_under
from fsdp2.schedule.schedule import Action, Actions, AfterForward, Phase, Schedule, UnitRules
from fsdp2.schedule.states import GroupState, Outcome
from fsdp2.types import ScheduleError


class PlugIns:
    """What higher layers plug in.

    Attributes:
        limits_memory: decorates the actions of a tree with a ``memory_limit``, from the start of a forward up to the
            next one; gets the limit in bytes, and the tree.
        checks: make the checks of a tree.
        where_ranks_differ: the schedule and the checks of a tree where ranks may differ in some unit; gets the tree,
            and its usual checks.
    """

    limits_memory: Callable[[int, UnitTree], Decorator]
    checks: ClassVar[list[Callable[[UnitTree], TreeChecks]]] = []
    where_ranks_differ: Callable[[UnitTree, Sequence[TreeChecks]], tuple[Schedule, Sequence[TreeChecks]]]


class TreeChecks:
    """What a tree asks at each of its events, such as whether all ranks do alike. Here it asks nothing."""

    def check_units(self, units: Sequence[tuple[Unit, str]]) -> None:
        """``units``, with their names, the root first, are about to be those of the tree."""

    def end_collection(self) -> None:
        """The units of the tree are known, and scheduled."""

    def begin_pass(self) -> None:
        """A pass begins. What the user has changed in the tree is known."""

    def note_flags(self) -> None:
        """A group has found flags that the user has changed."""

    def agree_on_flags(self) -> None:
        """What is communicated next follows from flags."""

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
        """The step is given up."""


class UnitTree:
    """What a root and the units inside it share: their passes, and the cleanup after an exception.

    Attributes:
        root: the outermost unit.
        units: all units; the units inside a unit follow that unit.
        is_reducing: ``finalize_backward`` has started to reduce, and nobody has waited for it yet.
        checks: what is asked at each event.
    """

    def __init__(self, unit: Unit) -> None:
        self.root = unit
        self.units: list[Unit] = []
        self.executor = Executor(unit.mesh.device)
        self.schedule = Schedule(())
        self.post_optim_event: torch.Event | None = None
        self.is_reducing = False
        self._backward = _torch.RunningBackward()
        self.num_resets = 0
        self.parents: Sequence[int | None] = ()  # of each unit, the innermost unit around it
        self._seen_version = 0
        note_tree_change()  # for trees around this one, which have not seen its units yet
        self.checks: Sequence[TreeChecks] = [make(self) for make in PlugIns.checks]
        self._usual_checks = self.checks
        self._collect()

    # The tree

    def _collect(self) -> None:
        """Take over the units of the present tree; between passes only. If the units have changed, their order is
        recorded anew."""
        found = {unit: name for module in self.root.modules for name, unit in units_under(module)}
        for check in self.checks:
            check.check_units(list(found.items()))
        before, self.units = self.units, list(found)
        self._seen_version = ModuleTrees.version
        for unit in dict.fromkeys([*before, *self.units]):
            if (unit.tree is self) is not (unit in found):
                unit.leave()
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
                self.schedule.set_rules(unit.index, self.rules_of(unit))
        for check in self.checks:
            check.end_collection()  # last: users may make warnings errors

    def _schedule_units(self, *, may_differ: bool) -> None:
        for unit in self.units:
            for group in unit.groups:
                group.gradients.on_missing = None
        earlier = self.schedule
        if may_differ:
            self.schedule, self.checks = PlugIns.where_ranks_differ(self, self._usual_checks)
        else:
            self.schedule, self.checks = Schedule([self.rules_of(unit) for unit in self.units]), self._usual_checks
        self.schedule.take_over(earlier)
        self.executor.take(self.units)

    def rules_of(self, unit: Unit) -> UnitRules:
        """What the schedule has to know of the configuration of ``unit``."""
        config, has_others = unit.config, any(group.mesh.data_parallel_size > 1 for group in unit.groups)
        stays = config.stays_as_root and unit is self.root  # backward would gather it again at once
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

    def _recover(self, unit: Unit) -> None:
        """``unit``'s forward begins, outside of backward. If this shows that the last pass raised, clean up after it.

        Raises:
            ScheduleError: one of several modules of a unit runs, but no module around them ever has; or nobody has
                waited for the gradients that ``finalize_backward`` has started to reduce.
        """
        passes = self.schedule.passes
        if unit is self.root and len(unit.modules) > 1:
            names = ", ".join(type(module).__name__ for module in unit.modules)
            raise ScheduleError(
                f"fully_shard([{names}]) made one unit without a root, and one of these modules ran alone. "
                "Call fully_shard also on the module that contains these modules, and run that module first."
            )
        if self.is_reducing and passes.root is None:
            raise ScheduleError(
                f"forward of unit '{unit.name}': the handle of finalize_backward(async_op=True) is still pending. Call "
                "wait() on that handle first."
            )
        if passes.in_backward:
            self.reset()
        elif passes.root_raised or (not unit.missing_modules and passes.has_left_behind(unit.index, self.parents)):
            self.abandon_forward()

    def pre_forward(self, unit: Unit, *, in_backward: bool) -> Phase:
        """``unit`` is about to compute, or, in a backward, to compute again. Returns the phase it is in now."""
        if _torch.in_transform():
            return _torch.outside_transforms(self.pre_forward, unit, in_backward=in_backward)
        passes = self.schedule.passes
        if in_backward:
            if passes.in_backward and _torch.running_backward() != self._backward.task:
                self._recover_backward()
        # Most units are inside a forward that goes on.
        elif passes.root is None or passes.root >= unit.index or passes.in_backward or passes.root_raised:
            self._recover(unit)
            if passes.root is None:
                self._begin_forward()
        schedule, index = self.schedule, unit.index  # the tree may have changed
        actions = schedule.pre_forward(index, in_backward=in_backward, grad_enabled=torch.is_grad_enabled())
        self.executor.do(actions, "pre_forward", unit)
        return schedule.passes.phases[index]

    def resume_forward(self, unit: Unit) -> Phase:
        """``unit``'s forward goes on in another of its modules or methods; the user may have resharded before."""
        if _torch.in_transform():
            return _torch.outside_transforms(self.resume_forward, unit)
        self.executor.do(((Action.USE, unit.index),))
        return self.schedule.passes.phases[unit.index]

    def post_forward(self, unit: Unit, leads_to: Outcome) -> None:
        """``unit`` has computed, in a forward or a recomputation. ``leads_to``: what its output leads to."""
        if _torch.in_transform():
            return _torch.outside_transforms(self.post_forward, unit, leads_to)
        schedule, index = self.schedule, unit.index
        is_root = schedule.passes.root == index
        self.executor.do(schedule.post_forward(index, leads_to), "post_forward", unit)
        if schedule.passes.root is None:
            self._end_pass()
            if is_root:
                for check in self.checks:
                    check.end_forward(unit)
        return None

    def _begin_forward(self) -> None:
        """A forward pass begins. Take over what the user has changed since the last pass.

        Raises:
            ScheduleError: autograd would copy the memory of parameters that is freed.
        """
        if _torch.copies_written_tensors():
            raise ScheduleError(
                f"forward of {self.class_name} inside torch.autograd.graph.allow_mutation_on_saved_tensors(): this "
                "mode copies what autograd has saved, but fsdp2 frees the saved parameters and gathers them again. "
                "Leave the block, and clone what you write in place."
            )
        if self._seen_version != ModuleTrees.version:
            self._collect()
        for check in self.checks:
            check.begin_pass()
        self.order_gathers()
        self.post_optim_event = None
        limit = self.root.config.memory_limit
        self.executor.limit = None if limit is None else PlugIns.limits_memory(limit, self)

    # Backward

    def pre_backward(self, unit: Unit) -> None:
        """A gradient has reached ``unit``: the gradient of its output, or of an output of something inside it."""
        if _torch.in_transform():
            return _torch.outside_transforms(self.pre_backward, unit)
        schedule, index = self.schedule, unit.index
        if schedule.passes.in_backward and _torch.running_backward() != self._backward.task:
            self._recover_backward()
        if not schedule.passes.in_backward:
            self._begin_backward()
        elif schedule.passes.phases[index] is Phase.BACKWARD:
            return None
        return self.enter_backward("pre_backward", unit, schedule.pre_backward(index))

    def enter_backward(self, event: str, unit: Unit, actions: Actions) -> None:
        """``event`` begins the backward of ``unit``, in a backward that has begun: perform ``actions``."""
        self.executor.do(actions, event, unit)
        if GRADIENTS_FOLLOW_SHARDS:
            for group in unit.groups:
                group.gradients.begin_backward(keeps=not unit.config.reduces)

    def post_backward(self, unit: Unit) -> None:
        """The gradients of ``unit``'s parameters are there."""
        if _torch.in_transform():
            return _torch.outside_transforms(self.post_backward, unit)
        schedule, index = self.schedule, unit.index
        if schedule.passes.phases[index] is Phase.FORWARD:  # the unit's own forward computes gradients inside
            if torch.is_grad_enabled():
                # With create_graph, and on an accelerator, what this made has low sequence numbers: autograd comes to
                # it last, behind the gradient of the unit's input.
                schedule.reduced_last.add(index)
            return None
        if index in schedule.reduced_last:
            return None
        if schedule.passes.in_backward and _torch.running_backward() != self._backward.task:
            self._recover_backward()
        if not schedule.passes.in_backward:  # the loss comes from no output, and the parameters were kept unsharded
            self.pre_backward(unit)
        return self.executor.do(schedule.post_backward(index), "post_backward", unit)

    def _recover_backward(self) -> None:
        """Another backward than the one that has begun computes. If that one raised, clean up after it."""
        if self._backward.was_left():
            self.reset()

    def _begin_backward(self) -> None:
        """The first unit's backward is about to begin."""
        self._backward.begin()
        self._take_flags()
        for check in self.checks:
            check.begin_backward()
        self.schedule.begin_backward()
        _torch.at_end_of_backward(self.end_backward)
        schedule = self.schedule
        self.executor.ends_step = schedule.is_last_backward and not schedule.finalizes_by_hand
        self.executor.max_in_flight = max([unit.config.max_reductions for unit in self.units])
        if [group for unit in self.units for group in unit.groups if group.unsharded.hooked]:
            # Pre-hooks may read what was written since forward began.
            self.executor.streams.gather_after_compute()

    def end_backward(self) -> None:
        """Autograd has executed the last node of a backward."""
        if _torch.in_transform():
            return _torch.outside_transforms(self.end_backward)
        self.executor.do((), "end_backward", self.root)
        torch.clear_autocast_cache()  # as after a forward without gradients: see ModuleHooks
        for unit in self.units:
            unit.missing_modules.clear()
        late = [u.index for u in self.units if u.config.reduces for g in u.groups if g.gradients.has_late()]
        self.executor.do(self.schedule.end_backward(late))
        self._end_pass()
        for check in self.checks:
            check.end_backward()
        if self.schedule.is_last_backward and not self.schedule.finalizes_by_hand:
            self._end_step()
        return None

    def finalize_backward(self) -> None:
        """Start reducing the gradients that backwards have left; the user asks for it.

        Raises:
            ScheduleError: the gradients of parameters were to be computed later, and are lost.
        """
        for check in self.checks:
            check.finalize_backward()
        self._take_flags()
        self.executor.do(self.schedule.finalize(), "finalize_backward()", self.root)
        self.executor.reduce_partial()
        self.is_reducing = True

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
        """Order later gathers behind the optimizer's writes; the user may have given an event that marks these."""
        groups = [group for unit in self.units for group in unit.groups]
        if self.executor.has_unwaited and any(group.gradients.are_hooked for group in groups):
            # Hooks update shards when gradients land: an optimizer in backward, and no backward has ended the step.
            self.executor.land_down_to(0)
            self.executor.wait_for_landed()
        streams, event = self.executor.streams, self.post_optim_event
        if event is None:
            streams.gather_after_compute()
            return
        streams.gather_after(event)
        if any(group.gathers_on_compute for group in groups):
            streams.wait_here(event)  # compute waits for the optimizer: compute reads the shards itself

    def unshard(self, unit: Unit) -> None:
        """Start gathering ``unit`` because the user asks; returns before the data has arrived."""
        self.order_gathers()
        self.executor.do(self.schedule.by_hand(Action.UNSHARD, unit.index), "unshard()", unit)
        for group in unit.groups:
            group.note_writes()

    def finish_unshard(self, unit: Unit) -> None:
        """The user waits for ``unshard``, unless somebody has waited for it, or has resharded since. If an optimizer
        has stepped meanwhile, the gather may have read a part of what that has written: gather again."""
        pending = [group for group in unit.groups if group.state is GroupState.UNSHARDING]
        if any(group.has_stepped for group in pending):
            self.order_gathers()
        for group in pending:
            group.use()
        for group in unit.groups:
            group.note_writes()

    def reshard(self, unit: Unit) -> None:
        """Reshard ``unit`` because the user asks."""
        self.executor.do(self.schedule.by_hand(Action.RESHARD, unit.index), "reshard()", unit)
        for group in unit.groups:
            group.unsharded.release_post_forward()  # the user may write the shards next
        self.executor.wait_for_reads()

    def abandon_forward(self) -> None:
        """Clean up after an exception in forward: nothing in flight, shards bound. Gradients of earlier backwards stay
        valid, and land."""
        try:
            if self.is_reducing:
                self.land()
            else:
                self.executor.land(with_partial=False)
                self.executor.finish_copies()
        finally:
            self._come_to_rest()

    def reset(self) -> None:
        """Clean up after any exception. Gradients that are not in ``.grad`` yet are dropped: they are incomplete sums,
        which the next backward would add to."""
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
                    group.gradients.discard_unreduced()

    def _come_to_rest(self) -> None:
        """Give up what is in flight, and bind the shards. If a collective has failed, raise its error afterwards."""
        self.is_reducing = False
        self.schedule.reset()
        with ExitStack() as stack:  # calls all of these, last ones first, whichever raises
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
        if not self.schedule.passes.in_backward:  # I12
            self.executor.finish_copies()


def tree_of(unit: Unit) -> UnitTree:
    """The tree of ``unit``. A unit without one becomes the root of its own.

    Raises:
        ScheduleError: this rank is not in the mesh of the unit.
    """
    if unit.tree is not None:
        return unit.tree
    if not unit.mesh.has_this_rank:
        raise ScheduleError(
            f"rank {dist.get_rank()} is not in the mesh of unit '{unit.name}', which has the ranks "
            f"{sorted(unit.mesh.mesh.mesh.flatten().tolist())}: its shards are empty. Run the model only on ranks "
            "where fsdp2.reshard_to returned True, or bring this rank in: call fsdp2.reshard_to on all ranks with "
            "a mesh that has it."
        )
    return _torch.outside_transforms(UnitTree, unit)
