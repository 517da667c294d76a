"""The passes that units go through under one root.

``Root`` is what the units under one root share. Hooks report events to the root; each event is one method: the schedule
says which actions follow, the executor performs them. The root also inserts events of units that this rank skips and
other ranks may use (``schedule.rank_skipping``).

The first unit whose forward runs becomes the root. If a unit around it runs later, that unit becomes the root.
"""

from __future__ import annotations

import itertools
import warnings
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.comm.streams import lost
from fsdp2.group.param import Slot
from fsdp2.group.plain_params import leave_alone
from fsdp2.plan.dtypes import GRADIENTS_FOLLOW_SHARDS
from fsdp2.runtime.executor import ActionFilter, Executor
from fsdp2.runtime.rank_checks import UsedParams, by_mesh, check_agreement, compare
from fsdp2.runtime.split_backward import SplitBackwards
from fsdp2.runtime.stalls import await_flags, watch_for_stalls
from fsdp2.runtime.ties import movable_ties
from fsdp2.runtime.unit import ModuleTrees, Unit, note_tree_change, parents_of, unit_of, units_under
from fsdp2.schedule.rank_skipping import Event, Outcome, SkippedUnits
from fsdp2.schedule.schedule import Action, AfterForward, Phase, Schedule, UnitRules
from fsdp2.schedule.states import GroupState, Pass
from fsdp2.types import CommunicationError, ScheduleError

_STORY_LENGTH = 12
_MAX_NAMES = 4

_numbers: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)  # of roots, by their ranks
_T = TypeVar("_T")


class _Registered:
    """What higher layers plug in."""

    limits_memory: Callable[[int, Root], ActionFilter] | None = None
    on_first_forward: Callable[[Root], object] | None = None


def register_memory_limit(make: Callable[[int, Root], ActionFilter]) -> None:
    """Use ``make``, of a limit in bytes and a root, for the action filter of every root with a ``memory_limit``."""
    _Registered.limits_memory = make


def register_first_forward(on_first_forward: Callable[[Root], object]) -> None:
    """Call ``on_first_forward`` before the first forward of each root, and again if its units have changed."""
    _Registered.on_first_forward = on_first_forward


class Root:
    """What the units under one root share: their passes, and the cleanup after an exception.

    Attributes:
        unit: the root itself.
        units: all units; the units inside a unit follow that unit.
        is_reducing: ``finalize_backward`` has started to reduce, and nobody has waited for it yet.
        identity: tells roots apart, and is the same on all ranks of a model: these form their roots in the same order.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.units: list[Unit] = []
        self.executor = Executor(unit.mesh.device)
        self.schedule = Schedule(())
        self.skipping = SkippedUnits(())
        self.post_optim_event: torch.Event | None = None
        self.is_reducing = False
        self.identity = ""
        self.num_resets = 0
        self._used: list[UsedParams] = []
        self._parents: Sequence[int | None] = ()
        self._split = SplitBackwards()
        self._story: deque[tuple[str, str]] = deque(maxlen=_STORY_LENGTH)
        self._is_agreed = False  # the ranks have compared their units
        self._has_new_flags = False  # some group has found flags that the user has changed
        self._agreed_flags: dict[str, bool] = {}  # ``trainable()`` when the ranks have compared it
        self._memory_limit: int | None = None
        self._seen_version = 0
        note_tree_change()  # for roots around this one, which have not seen its units yet
        self._collect()
        ranks = zlib.crc32(repr(self.ranks()).encode())
        self.identity = f"{ranks:x}/{next(_numbers[ranks])}"
        watch_for_stalls(self, self.executor.streams, unit.mesh)

    # The tree

    def _collect(self) -> None:
        """Take over the units of the present tree; between passes only. If the units have changed, their order is
        recorded anew."""
        found = {unit: name for module in self.unit.modules for name, unit in units_under(module)}
        named = list(found.items())
        ties = movable_ties(named, lambda unit: self._rules_of(unit).after_forward is AfterForward.KEEP)
        _check_tree(self.class_name, named)
        for tie in ties:
            tie.join()
        before, self.units = self.units, list(found)
        self._is_agreed = self._is_agreed and self.units == before
        self._seen_version = ModuleTrees.version
        for unit in dict.fromkeys([*before, *self.units]):
            if (unit.root is self) is not (unit in found):
                unit.leave()
        for index, (unit, name) in enumerate(found.items()):
            unit.join(self, index, name)
        self._parents = parents_of(self.units)
        for unit, around in zip(self.units, self._parents, strict=True):
            for watch in [] if around is None else self.units[around].watches:
                if watch not in unit.watches:
                    watch.add(unit)
        if self.units != before:
            self._take_units()
        params = [param for unit in self.units for group in unit.groups for param in group.params]
        known = {slot for param in params for slot in param.slots}.union(*(unit.left_alone for unit in self.units))
        warned = _warn_of_unsharded(self.unit.modules, known)
        self.unit.left_alone.update(warned)
        leave_alone(getattr(slot.module, slot.name) for slot in warned)

    def _take_units(self) -> None:
        earlier, self.schedule = self.schedule, Schedule([self._rules_of(unit) for unit in self.units])
        self.schedule.take_over(earlier)
        self.skipping = SkippedUnits(self._parents)
        for unit in self.units:
            self.update_rules(unit)
        self.executor.take(self.units)
        self._memory_limit = None
        self._used = [UsedParams(*each) for each in by_mesh(group for unit in self.units for group in unit.groups)]

    def update_rules(self, unit: Unit) -> None:
        """``unit`` was configured."""
        rules = self.schedule.rules[unit.index] = self._rules_of(unit)
        self.skipping.may_skip(unit.index, enabled=rules.ranks_may_skip)

    def _rules_of(self, unit: Unit) -> UnitRules:
        rules = unit.rules
        if all(group.mesh.data_parallel_size == 1 for group in unit.groups):
            rules = replace(rules, ranks_may_skip=False)
        if unit.auto_reshard and unit is self.unit:  # backward would gather the root again at once
            rules = replace(rules, after_forward=AfterForward.KEEP)
        return replace(
            rules,
            forward_prefetch=self._indices(unit.forward_prefetch),
            backward_prefetch=self._indices(unit.backward_prefetch),
        )

    def _indices(self, units: list[Unit] | None) -> tuple[int, ...] | None:
        return None if units is None else tuple(unit.index for unit in units if unit.root is self)

    def _is_in_tree(self, unit: Unit) -> bool:
        """Whether the unit's module is still at its old place in the tree."""
        try:
            return unit_of(self.unit.modules[0].get_submodule(unit.name)) is unit
        except AttributeError:
            return unit is self.unit

    @property
    def class_name(self) -> str:
        """The class name of the root's module."""
        return type(self.unit.modules[0]).__name__

    # What is noted

    def _note(self, event: str, unit: Unit) -> None:
        """``event`` happened to ``unit``."""
        self._story.append((event, unit.name))
        for watch in unit.watches:
            watch.observer.on_event(event, unit.name)

    @property
    def last_event(self) -> object:
        """A different object for each event; None before the first."""
        return self._story[-1] if self._story else None

    def story(self) -> str:
        """The last events, oldest first."""
        return ", ".join(f"{event} {unit}" for event, unit in self._story.copy()) or "none"

    @property
    def is_running(self) -> bool:
        """Whether a forward or backward runs."""
        return self.schedule.running is not Pass.IDLE

    def ranks(self) -> list[int]:
        """All ranks that hold a part of the model."""
        return sorted(
            {rank for unit in self.units for group in unit.groups for row in group.mesh.ranks for rank in row}
        )

    def trainable(self) -> dict[str, bool]:
        """Of each parameter that was used, whether it required a gradient then. Other threads may ask."""
        groups = [group for unit in self.units for group in unit.groups]
        flags = [(group.params, group.unsharded.requires_grad) for group in groups]
        return {param.full_name: flag for params, its in flags for param, flag in zip(params, its, strict=False)}

    def note_changed_flags(self) -> None:
        """A group has found flags that the user has changed."""
        self._has_new_flags = True

    def _agree_on_flags(self) -> None:
        """What is communicated next follows from flags. If these are not those that the ranks have agreed on, wait
        until all ranks have set them alike. A forward without gradients between two changes needs no agreement.

        Raises:
            ScheduleError: another rank has not.
        """
        if self._has_new_flags:
            flags = self.trainable()
            if flags != self._agreed_flags:
                await_flags(self.identity, self.unit.mesh, self.ranks(), flags, self.story)
            self._has_new_flags, self._agreed_flags = False, flags

    def _agree(self, what: str, agree: Callable[[], _T]) -> _T:
        """Call ``agree``, which communicates. If that fails, the error says that it was ``what``."""
        try:
            return agree()
        except CommunicationError as error:
            groups = [each for unit in self.units for group in unit.groups for each in group.mesh.process_groups]
            raise lost(what, error, self.story(), groups) from error.__cause__

    # Forward

    def _recover(self, unit: Unit) -> None:
        """``unit``'s forward begins, outside of backward. If this shows that the last pass raised, clean up after it.

        Raises:
            ScheduleError: one of several modules of a unit runs, but no module around them ever has; or nobody has
                waited for the gradients that ``finalize_backward`` has started to reduce.
        """
        schedule, running = self.schedule, self.schedule.forward_root
        if unit is self.unit and len(unit.modules) > 1:
            names = ", ".join(type(module).__name__ for module in unit.modules)
            raise ScheduleError(
                f"fully_shard([{names}]) made one unit without a root, and one of these modules ran alone. "
                "Call fully_shard also on the module that contains these modules, and run that module first."
            )
        if self.is_reducing and running is None:
            raise ScheduleError(
                f"forward of unit '{unit.name}': the handle of finalize_backward(async_op=True) is still pending. Call "
                "wait() on that handle first."
            )
        if schedule.in_backward:
            self.reset()
        elif running is not None and running >= unit.index and self._runs_again(unit, running):
            self.abandon_forward()

    def _runs_again(self, unit: Unit, running: int) -> bool:
        """Whether the unit ``running`` is ``unit``, or inside it, and so has raised: a module does not run inside its
        own child."""
        inner: int | None = running
        while inner is not None and inner > unit.index:  # the units inside a unit follow that unit
            inner = self._parents[inner]
        return inner == unit.index and not unit.missing_modules

    @_torch.outside_transforms
    def pre_forward(self, unit: Unit) -> Phase:
        """``unit`` is about to compute, outside of backward. Returns the phase it is in now."""
        schedule, index = self.schedule, unit.index
        running = schedule.forward_root
        if running is None or running >= index or schedule.in_backward:  # not inside a forward, as most units are
            self._recover(unit)
            if schedule.forward_root is None:
                self._begin_forward(unit)
                schedule, index = self.schedule, unit.index
        if skipped := self.skipping.forward.begin(index):
            self._join_forward(skipped)
        for group in unit.groups:
            if group.stamp is not None:
                group.reshard_if_outdated()
        self._note("pre_forward", unit)
        actions = schedule.pre_forward(index, in_backward=False, grad_enabled=torch.is_grad_enabled())
        self.executor.do(actions)
        return schedule.phases[index]

    @_torch.outside_transforms
    def pre_recompute(self, unit: Unit) -> Phase:
        """``unit`` is about to compute again, in a backward. Returns the phase it is in now."""
        schedule, index = self.schedule, unit.index
        if schedule.phases[index] is not Phase.BACKWARD:
            self._join_backward(self.skipping.backward.recompute(index))
        self._note("pre_forward", unit)
        # This prefetches nothing; the unit's own backward does.
        self.executor.do(schedule.pre_forward(index, in_backward=True, grad_enabled=torch.is_grad_enabled()))
        return schedule.phases[index]

    @_torch.outside_transforms
    def resume_forward(self, unit: Unit) -> Phase:
        """``unit``'s forward goes on in another of its modules or methods; the user may have resharded before."""
        self.executor.do(((Action.UNSHARD, unit.index), (Action.WAIT, unit.index)))
        return self.schedule.phases[unit.index]

    def forget_forward(self, unit: Unit) -> None:
        """``unit``'s forward has raised: the next call starts a new forward. In the unit's backward, the forward was a
        recomputation; checkpointing ends these by an exception."""
        if self.schedule.phases[unit.index] is not Phase.BACKWARD:
            self.schedule.phases[unit.index] = Phase.IDLE

    @_torch.outside_transforms
    def post_forward(self, unit: Unit, leads_to: Outcome) -> None:
        """``unit`` has computed, in a forward or a recomputation. ``leads_to``: what its output leads to."""
        schedule, index = self.schedule, unit.index
        is_root = schedule.forward_root == index
        if schedule.phases[index] is Phase.FORWARD and (skipped := self.skipping.forward.end(index, leads_to)):
            self._join_forward(skipped)
        self._note("post_forward", unit)
        self.executor.do(schedule.post_forward(index))
        if schedule.forward_root is None:
            self._end_pass()
            if is_root:
                self._agree_on_order()

    def _begin_forward(self, unit: Unit) -> None:
        """A forward pass begins with ``unit`` as its outermost unit.

        Raises:
            ScheduleError: autograd would copy the memory of parameters that is freed.
        """
        if _torch.copies_written_tensors():
            raise ScheduleError(
                f"forward of unit '{unit.name}' inside torch.autograd.graph.allow_mutation_on_saved_tensors(): this "
                "mode copies what autograd has saved, but fsdp2 frees the saved parameters and gathers them again. "
                "Leave the block, and clone what you write in place."
            )
        if self._seen_version != ModuleTrees.version:
            self._collect()
        if not self._is_agreed:  # before ranks wait for each other
            self._agree("the comparison of the models", partial(check_agreement, self.class_name, self.units))
            self._is_agreed = True
            self._take_flags()
            self._has_new_flags, self._agreed_flags = False, self.trainable()
            if _Registered.on_first_forward is not None:
                _Registered.on_first_forward(self)
        self.order_gathers()
        self.post_optim_event = None
        if self._memory_limit != self.unit.memory_limit:
            self._memory_limit = limit = self.unit.memory_limit
            make = _Registered.limits_memory
            self.executor.filter = None if limit is None or make is None else make(limit, self)
        if self.executor.filter is not None:
            self.executor.filter.begin_forward()
        self.skipping.begin_forward(unit.index, grad_enabled=torch.is_grad_enabled())

    def _agree_on_order(self) -> None:
        """A root's forward is over. If it was the first of its kind with these trainable units, find out what the other
        ranks have used."""
        trainable: set[int] = set()
        if self.skipping.forward.has_gradients:  # else no backward follows, which would depend on them
            self._agree_on_flags()
            units = enumerate(self.units)
            trainable = {i for i, unit in units for group in unit.groups if group.gradients.trainable}
        used = self.skipping.end_forward(trainable)
        if used is not None:
            used_by_all = self._agree("the agreement on the order of units", partial(compare, self.units, used))
            self.schedule.last_order = self.skipping.agree(used_by_all, trainable)

    def _join_forward(self, events: Sequence[Event]) -> None:
        """Gather units that this rank skips and other ranks may use."""
        for event in events:
            unit = self.units[event.unit]
            if not self._is_in_tree(unit):
                self.skipping.forward.events.remove(event)
                note_tree_change()
            elif event.begins:
                self._note("join_forward", unit)
                for group in unit.groups:
                    group.reshard_if_outdated()
                actions = self.schedule.pre_forward(event.unit, in_backward=False, grad_enabled=torch.is_grad_enabled())
                self.executor.do(actions)
            else:
                self.executor.do(self.schedule.post_forward(event.unit))

    # Backward

    @_torch.outside_transforms
    def pre_backward(self, unit: Unit) -> None:
        """A gradient has reached ``unit``: the gradient of its output, or of an output of something inside it."""
        schedule, index = self.schedule, unit.index
        if not schedule.in_backward:
            self._begin_backward()
        elif schedule.phases[index] is Phase.BACKWARD:
            return
        if skipped := self.skipping.backward.begin(index):
            self._join_backward(skipped)
        self._start_backward("pre_backward", unit)

    @_torch.outside_transforms
    def post_backward(self, unit: Unit) -> None:
        """The gradients of ``unit``'s parameters are there."""
        schedule, index = self.schedule, unit.index
        if schedule.phases[index] is Phase.FORWARD:  # the unit's own forward computes gradients inside
            if torch.is_grad_enabled():
                # With create_graph, and on an accelerator, what this made has low sequence numbers: autograd comes to
                # it last, behind the gradient of the unit's input.
                schedule.reduced_last.add(index)
            return
        if index in schedule.reduced_last:
            return
        if not schedule.in_backward:  # the loss comes from no output, and the parameters were kept unsharded
            self.pre_backward(unit)
        if skipped := self.skipping.backward.end(index):
            self._join_backward(skipped)
        if index not in self.skipping.backward.ended:
            self._note("post_backward", unit)
            self.executor.do(schedule.post_backward(index, is_last_use=self.skipping.backward.is_last_use))

    def _begin_backward(self) -> None:
        """The first unit's backward is about to begin."""
        self._take_flags()
        self._agree_on_flags()
        _torch.at_end_of_backward(self.end_backward)
        self.skipping.begin_backward()
        if self.schedule.finalizes_by_hand or not self.schedule.is_last_backward:
            self._watch_for_lost_gradients()
        self.executor.max_in_flight = max([unit.max_reductions for unit in self.units])
        if [group for unit in self.units for group in unit.groups if group.unsharded.hooked]:
            # Pre-hooks may read what was written since forward began.
            self.executor.streams.gather_after_compute()

    def _start_backward(self, event: str, unit: Unit) -> None:
        self._note(event, unit)
        if self.executor.filter is not None:
            self.executor.filter.begin_backward(unit.index)
        self.executor.do(self.schedule.pre_backward(unit.index))
        if GRADIENTS_FOLLOW_SHARDS:
            for group in unit.groups:
                group.gradients.begin_backward(keeps=not unit.rules.reduces)

    def _join_backward(self, events: Sequence[Event]) -> None:
        """Gather and reduce units that this rank skips and other ranks may use."""
        for event in events:
            if event.begins:  # its backward ends
                self.executor.do(self.schedule.post_backward(event.unit, is_last_use=event.is_last_use))
            else:
                self._start_backward("join_backward", self.units[event.unit])

    @_torch.outside_transforms
    def end_backward(self) -> None:
        """Autograd has executed the last node of a backward."""
        self._note("end_backward", self.unit)
        torch.clear_autocast_cache()  # as after a forward without gradients: see ModuleHooks
        for unit in self.units:
            unit.missing_modules.clear()
        by_hand = self.schedule.finalizes_by_hand
        is_last = self.schedule.is_last_backward and not by_hand
        self._join_backward(self.skipping.backward.finish(is_last=is_last, ends_open=not by_hand))
        self.executor.do(self.schedule.end_backward(self.skipping.backward.ended))
        self._end_pass()
        if is_last:
            self._split.forget()
            self._settle()
        else:
            self._split.end()

    def finalize_backward(self) -> None:
        """Start reducing the gradients that backwards have left; the user asks for it.

        Raises:
            ScheduleError: the gradients of parameters were to be computed later, and are lost.
        """
        self._split.check(may_compute_shapes=self.schedule.finalizes_by_hand)
        self._take_flags()
        self._agree_on_flags()
        self._note("finalize_backward()", self.unit)
        self.skipping.reset()
        self.executor.do(self.schedule.finalize())
        for unit in reversed(self.units):
            for group in unit.groups:
                self.executor.reduce_partial(group)
        self.is_reducing = True

    def land(self) -> None:
        """Land the gradients that ``finalize_backward`` has started to reduce."""
        self._land()
        self.is_reducing = False
        self._settle()

    def _land(self) -> None:
        self.executor.do(((Action.LAND, self.unit.index),))
        self.executor.finish_copies()

    def _settle(self) -> None:
        """A step's gradients have landed: make all ranks agree on which parameters have a gradient."""
        if any(unit.rules.reduces for unit in self.units):
            for used in self._used:
                self._agree("the agreement on which parameters had gradients", used.settle)

    def _take_flags(self) -> None:
        for unit in self.units:
            for group in unit.groups:
                group.take_flags()

    def _watch_for_lost_gradients(self) -> None:
        """A backward begins that ends no step. Gradients that are reduced at once are not lost."""
        kept = [(unit, rules) for unit, rules in zip(self.units, self.schedule.rules, strict=True) if not rules.reduces]
        resharded = [
            unit.name
            for unit, rules in kept
            if rules.after_forward is not AfterForward.KEEP or rules.reshard_after_backward
            if any(group.unsharded.trainable for group in unit.groups)
        ]
        if resharded:
            groups = [group for unit, _ in kept for group in unit.groups]
            params = [group.params[index] for group in groups for index in group.unsharded.trainable]
            self._split.begin(resharded[0], params)

    # Between passes

    def order_gathers(self) -> None:
        """Order later gathers behind the optimizer's writes; the user may have given an event that marks these."""
        streams, event = self.executor.streams, self.post_optim_event
        if event is None:
            streams.gather_after_compute()
            return
        streams.gather_after(event)
        if any(group.gathers_on_compute for unit in self.units for group in unit.groups):
            streams.wait_here(event)  # compute waits for the optimizer: compute reads the shards itself

    def unshard(self, unit: Unit) -> None:
        """Start gathering ``unit`` because the user asks; returns before the data has arrived."""
        self.order_gathers()
        for group in unit.groups:
            group.reshard_if_outdated()
        self.perform(Action.UNSHARD, unit)
        for group in unit.groups:
            group.note_writes()

    def perform(self, action: Action, unit: Unit) -> None:
        """Perform ``action`` on ``unit`` because the user asks."""
        self._note(f"{action.value}()", unit)
        self.executor.do([(action, unit.index)])
        if action is Action.UNSHARD:
            self.skipping.by_hand.add(unit.index)
        elif action is Action.RESHARD:
            self.skipping.by_hand.discard(unit.index)
            self.executor.wait_for_reads()

    def abandon_forward(self) -> None:
        """Clean up after an exception in forward: nothing in flight, shards bound. Gradients of earlier backwards stay
        valid, and land."""
        try:
            if self.is_reducing:
                self.land()
            else:
                self._land()
        finally:
            self._come_to_rest()

    def reset(self) -> None:
        """Clean up after any exception. Only gradients that have landed stay: a backward has added to some of the
        others, and the user may have zeroed the gradients since."""
        self.num_resets += 1
        try:
            self._come_to_rest()
        finally:
            self._split.forget()
            self.schedule.awaits_finalization = False
            for unit in self.units:
                for group in unit.groups:
                    group.gradients.settle(b"")  # drops those that are withheld
                    group.gradients.discard_unreduced()

    def _come_to_rest(self) -> None:
        """Give up what is in flight, and bind the shards. If a collective has failed, raise its error afterwards."""
        self.is_reducing = False
        self.schedule.reset()
        self.skipping.reset()
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
                if group.state is not GroupState.SHARDED:
                    group.note_writes()
        if not self.schedule.in_backward:  # I12
            self.executor.finish_copies()


@_torch.outside_transforms
def form_root(unit: Unit) -> Root:
    """The root of ``unit``. A unit without one becomes a root itself.

    Raises:
        ScheduleError: this rank is not in the mesh of the unit.
    """
    if unit.root is None:
        unit.check_rank()
    return unit.root or Root(unit)


def _check_tree(root_class: str, units: Sequence[tuple[Unit, str]]) -> None:
    """Check that ``units`` with their names, the root first, can work under one root of class ``root_class``.

    Raises:
        ScheduleError: a unit has settings that only a root may have, or leaves out a tied parameter.
    """
    for unit, name in units[1:]:
        settings = (
            (unit.finalizes_by_hand, "set_manual_backward_finalization", "False"),
            (unit.memory_limit is not None, "set_temporary_memory_limit", "None"),
        )
        for is_set, method, default in settings:
            if is_set:
                raise ScheduleError(
                    f"{method} was called on unit '{name}', but the root is {root_class}. "
                    f"Call {method}({default}) on '{name}'. Then call {method} on the root."
                )
    for unit, name in units:
        for slot in unit.left_out:
            where = f"a {type(slot.module).__name__} in unit '{name or '(root)'}'"
            raise ScheduleError(
                f"parameter '{slot.name}' of {where} is tied to a parameter of another unit, but fully_shard was not "
                "called on a module that contains both. Call fully_shard on the outermost module, too, or list the "
                "parameter in ignored_params."
            )


def _warn_of_unsharded(roots: Iterable[nn.Module], known: Collection[Slot]) -> list[Slot]:
    """Warn of trainable plain parameters under ``roots`` that are in none of the ``known`` slots: nothing reduces their
    gradients, so ranks diverge. Returns their slots."""
    found = {
        f"{prefix}.{name}" if prefix else name: slot
        for root in roots
        for prefix, module in root.named_modules()
        for name, param in _torch.parameters_dict(module).items()
        if param is not None
        and param.requires_grad
        and not isinstance(param, DTensor)
        and (slot := Slot(module, name)) not in known
    }
    if found:
        names = ", ".join(f"'{name}'" for name in list(found)[:_MAX_NAMES])
        if len(found) > _MAX_NAMES:
            names += f" and {len(found) - _MAX_NAMES} more"
        warnings.warn(
            f"parameters were added to a sharded module after fully_shard: {names}. These parameters are not sharded, "
            "and their gradients are not reduced, so the ranks will differ. Call fully_shard on the new modules, then "
            "build the optimizer. Or freeze these parameters with requires_grad_(False).",
            stacklevel=2,
        )
    return list(found.values())
