"""Who the units are, and what they share while they work under one root.

``Unit`` is one ``fully_shard`` call. ``RootContext`` is what the units under one root share: which there are, the
passes that their events go through, and the way back to rest after an exception. The first unit whose forward runs
becomes the root; if a module around it runs later, that one takes over. Hooks report events here; nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.group.group import ParamGroup
from fsdp2.group.param import Slot
from fsdp2.plan.mesh import ParallelMesh
from fsdp2.runtime.agreement import check_agreement
from fsdp2.runtime.executor import Performer
from fsdp2.runtime.passes import Passes
from fsdp2.runtime.stalls import watch as watch_stalls
from fsdp2.runtime.tree_version import change_count, note_change, warn_of_unsharded
from fsdp2.runtime.units import check_tree, reshard_outdated
from fsdp2.runtime.used_params import Presence
from fsdp2.schedule.rank_skipping import Outcome
from fsdp2.schedule.schedule import Action, AfterForward, Pass, Phase, UnitRules
from fsdp2.schedule.states import Lent
from fsdp2.types import MixedPrecisionPolicy, ScheduleError

UNIT_ATTRIBUTE = "_fsdp2_unit"


class UnitHooks(Protocol):
    """What hooks of one unit call on those of another; they live in the room above."""

    def end_forward(self, output: Any) -> Any: ...


class Unit:
    """One ``fully_shard`` call: its modules and its parameter groups, none if it manages no parameter.

    Attributes:
        modules: the module given, or the modules given together.
        auto_reshard: whether the user left ``reshard_after_forward`` open, so that being the root decides.
        max_reductions: how many reductions the user lets be in flight; the largest number of all units counts.
        memory_limit: how many bytes of temporary memory the user allows, if it is the root.
        missing_modules: of several modules, those whose forward has not run in this pass.
        left_alone: where parameters stay plain, because the user asked for it or has been warned.
        left_out: where tied parameters stay plain until a unit around this one takes them.
        lent: what ``fsdp2.unsharded`` has bound of its parameters.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        groups: tuple[ParamGroup, ...],
        mesh: ParallelMesh,
        policy: MixedPrecisionPolicy,
        after_forward: AfterForward | None,
    ) -> None:
        self.modules = modules
        self.groups = groups
        self.mesh = mesh
        self.policy = policy
        self.auto_reshard = after_forward is None
        self.rules = UnitRules(
            after_forward=after_forward or AfterForward.RESHARD, keeps_alone=len(modules) > 1, ranks_may_skip=True
        )
        self.max_reductions = 1
        self.memory_limit: int | None = None
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        self.missing_modules: set[nn.Module] = set()
        self.left_alone: set[Slot] = set()
        self.left_out: list[Slot] = []
        self.lent = Lent.NOTHING
        self.hooks: UnitHooks | None = None
        self.name = type(modules[0]).__name__
        self.index = 0
        self._context: RootContext | None = None
        for module in modules:
            module.__dict__[UNIT_ATTRIBUTE] = self
        note_change()

    @property
    def context(self) -> RootContext:
        """The context this unit works in; it becomes a root of its own if it has none."""
        if self._context is None:
            RootContext(self)
            assert self._context is not None
        return self._context

    @property
    def running(self) -> Pass:
        """Where the pass of its root stands."""
        return Pass.IDLE if self._context is None else self._context.schedule.running

    @property
    def finalizes_by_hand(self) -> bool:
        """Whether, as a root, it leaves the end of backward to the user."""
        return self._context is not None and self._context.root is self and self._context.schedule.finalizes_by_hand

    def leave(self) -> None:
        """Another root takes over, or none: the unit was taken out of the tree. A module does not run inside its own
        child: if a forward of the present root is under way, it has raised."""
        if self._context is not None and self._context.schedule.forward_root is not None:
            self._context.abandon_forward()
        self._context = None

    def reshard(self) -> None:
        """The user asks for it."""
        if self._context is not None:  # else nothing was ever unsharded
            self._context.perform(Action.RESHARD, self)

    def unshard(self) -> None:
        """The user asks for it; returns before the data has arrived."""
        self.context.order_gathers()
        reshard_outdated(self)
        self.context.perform(Action.UNSHARD, self)
        for group in self.groups:
            group.note_writes()

    def gather_on_compute_stream(self, enabled: bool) -> None:
        """The user asks for it."""
        for group in self.groups:
            group.gather_on_compute_stream(enabled)

    def join(self, context: RootContext, index: int, name: str, *, is_leaf: bool) -> None:
        """Work in ``context`` from now on, under ``name``, the module's name from its root. ``is_leaf``: no other unit
        is inside."""
        splits = is_leaf and len(self.modules) == len(self.groups) == 1
        on_early = partial(context.on_early, self) if splits else None
        self._context, self.index, self.name = context, index, name or "(root)"
        for group in self.groups:
            group.attach(name, context.performer.story, context.on_halfway, on_early)

    def configure(self, **changes: object) -> None:
        """Replace rules of the schedule."""
        self.rules = replace(self.rules, **changes)  # type: ignore[arg-type]
        self.update_rules()

    def update_rules(self) -> None:
        """Carry rules and prefetch lists over to the schedule."""
        if self._context is not None:
            self._context.update_rules(self)

    def is_in_tree(self) -> bool:
        """Whether the module is still where its root has seen it."""
        try:
            return self.context.root.modules[0].get_submodule(self.name) in self.modules
        except AttributeError:
            return self.is_root

    @property
    def is_root(self) -> bool:
        """Whether it is the root, as far as forwards have shown so far."""
        return self._context is None or self._context.root is self

    def mark_stale(self) -> None:
        """Parameters may have been replaced: look at them again before their next use."""
        for group in self.groups:
            group.is_stale = True
        note_change()


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that ``fully_shard`` made of ``module``."""
    return module.__dict__.get(UNIT_ATTRIBUTE)


def units_under(module: nn.Module) -> Iterator[tuple[str, Unit]]:
    """All units of ``module``'s tree with their names in it, each once, outer ones first."""
    seen: set[int] = set()
    for name, child in module.named_modules():
        unit = unit_of(child)
        if unit is not None and id(unit) not in seen:
            seen.add(id(unit))
            yield name, unit


class RootContext:
    """See the module's text."""

    def __init__(self, root: Unit) -> None:
        self.root = root
        self.units: list[Unit] = []
        self.performer = Performer(root.mesh.device)
        self.passes = Passes(self.performer)
        self.schedule = self.passes.schedule
        self.post_optim_event: torch.Event | None = None
        self.is_reducing = False  # finalize_backward has started to, and nobody has waited so far
        self.num_resets = 0
        self.presence = Presence(())
        self._is_agreed = False  # the ranks have compared their units
        watch_stalls(self.performer, root.mesh)
        note_change()  # for roots around this one, which have not seen its units yet
        self._collect()

    def _collect(self) -> None:
        """Take in the units of the tree as it is now; between passes only. Their order is recorded anew if they are
        others than before."""
        found = {unit: name for module in self.root.modules for name, unit in units_under(module)}
        check_tree(self.root_class, list(found.items()))
        before, self.units = self.units, list(found)
        self._is_agreed = self._is_agreed and self.units == before
        self._seen_changes = change_count()
        if self.units != before:
            for unit in dict.fromkeys([*before, *self.units]):
                if (unit._context is self) is not (unit in found):
                    unit.leave()
        names = list(found.values())
        for index, (unit, name) in enumerate(found.items()):
            following = names[index + 1 : index + 2]  # a unit's own units follow it
            is_leaf = not any(other.startswith(f"{name}." if name else "") for other in following)
            unit.join(self, index, name, is_leaf=is_leaf)
        if self.units != before:
            self.passes.take(self.units, [self._rules_of(unit) for unit in self.units])
            self.schedule = self.passes.schedule
            self.presence = Presence([group for unit in self.units for group in unit.groups])
        params = [param for unit in self.units for group in unit.groups for param in group.params]
        known = {slot for param in params for slot in param.slots}.union(*(unit.left_alone for unit in self.units))
        self.root.left_alone.update(warn_of_unsharded(self.root.modules, known))

    def _agree(self) -> None:
        """Find out whether all ranks have these units, before they wait for each other."""
        if not self._is_agreed:
            check_agreement(self.root_class, self.units)
            self._is_agreed = True

    # Configuration

    def update_rules(self, unit: Unit) -> None:
        """``unit`` was configured."""
        self.passes.configure(unit.index, self._rules_of(unit))

    def _rules_of(self, unit: Unit) -> UnitRules:
        rules = unit.rules
        if all(group.mesh.data_parallel_size == 1 for group in unit.groups):
            rules = replace(rules, ranks_may_skip=False)
        if unit.auto_reshard and unit is self.root:  # it would be gathered again at once
            rules = replace(rules, after_forward=AfterForward.KEEP)
        return replace(
            rules,
            forward_prefetch=self._indices(unit.forward_prefetch),
            backward_prefetch=self._indices(unit.backward_prefetch),
        )

    def _indices(self, units: list[Unit] | None) -> tuple[int, ...] | None:
        if units is None:
            return None
        return tuple(unit.index for unit in units if unit._context is self)

    # Events

    def recover(self, unit: Unit) -> None:
        """``unit``'s forward begins. If that shows that the last pass raised, return to rest first.

        Raises:
            ScheduleError: one of several modules of a unit runs, but no module around them ever has; or gradients that
                ``finalize_backward`` has started to reduce are not waited for.
        """
        schedule = self.schedule
        if _torch.in_backward():
            return
        if len(unit.modules) > 1 and unit is self.root:
            names = ", ".join(type(module).__name__ for module in unit.modules)
            raise ScheduleError(
                f"fully_shard([{names}]) has no root: several modules were sharded as one unit, and one of them ran on "
                "its own. Call fully_shard on the module that contains them, too, and run that first."
            )
        if schedule.forward_root is None and self.is_reducing:
            raise ScheduleError(
                f"forward of {unit.name}: the handle of finalize_backward(async_op=True) was not waited for. Call its "
                "wait() first."
            )
        if schedule.in_backward:
            self.reset()
        elif schedule.forward_root == unit.index and not unit.missing_modules:
            self.abandon_forward()

    def pre_forward(self, unit: Unit) -> Phase:
        """``unit`` is about to compute. Returns the phase it is in now."""
        if _torch.in_backward():
            return self.passes.pre_recompute(unit.index)
        if self.schedule.forward_root is None:
            if self._seen_changes != change_count():
                self._collect()
            self._agree()
            self.order_gathers()
            self.post_optim_event = None
            self._free_unused_gradients()
            self.passes.begin(unit.index, self.root.memory_limit)
        return self.passes.pre_forward(unit.index)

    def resume_forward(self, unit: Unit) -> Phase:
        """``unit``'s forward goes on, in a further module or method; the user may have resharded meanwhile."""
        return self.passes.resume_forward(unit.index)

    def forget_forward(self, unit: Unit) -> None:
        """``unit``'s forward has raised: the next one is not part of it."""
        self.schedule.phases[unit.index] = Phase.IDLE

    def post_forward(self, unit: Unit, leads_to: Outcome) -> None:
        """``unit`` has computed. ``leads_to``: what its output leads to."""
        is_root = self.schedule.forward_root == unit.index
        self.passes.post_forward(unit.index, leads_to)
        if self.schedule.forward_root is None:
            self._end_pass()
            if is_root:
                self.passes.agree()

    def pre_backward(self, unit: Unit) -> None:
        """A gradient has reached ``unit``: its output, or what something inside has returned."""
        if not self.schedule.in_backward:
            _torch.at_end_of_backward(self.end_backward)
            self._free_unused_gradients()
            self.passes.begin_backward()
            self.performer.reductions.max_in_flight = max(each.max_reductions for each in self.units)
            if any(group.has_hooks for each in self.units for group in each.groups):
                # Pre-hooks may read what was written since forward began.
                self.performer.services.streams.gather_after_compute()
        elif self.schedule.phases[unit.index] is Phase.BACKWARD:
            return
        self.passes.pre_backward(unit.index)

    def post_backward(self, unit: Unit) -> None:
        """The gradients of ``unit``'s parameters are there."""
        if self.schedule.phases[unit.index] is Phase.FORWARD:
            return  # the unit's own forward takes gradients on the way
        if not self.schedule.in_backward:  # of a loss that no output led to, and of parameters that were kept
            self.pre_backward(unit)
        self.passes.post_backward(unit.index)

    def on_early(self, unit: Unit) -> None:
        """The gradients of a large unit are there that leave now and are freed while the others are computed."""
        self.performer.do(self.schedule.half_backward(unit.index))

    def on_halfway(self) -> None:
        """Half of a unit's gradients are there, and the oldest reduction in flight has had that time to travel.

        It lands now: what it reads is freed before the other half needs memory. Measured with 2 ranks
        (benchmarks/gloo_step.py, peak_memory.py): 2% more time, 6 to 9% less memory at the peak.
        """
        self.performer.reductions.make_room()

    def order_gathers(self) -> None:
        """What is gathered from here on reads what the optimizer has written: the user may have said when that was."""
        if self.post_optim_event is None:
            self.performer.services.streams.gather_after_compute()
        else:
            self.performer.services.streams.gather_after(self.post_optim_event)

    def end_backward(self) -> None:
        self.performer.note("end_backward", self.root)
        for unit in self.units:
            unit.missing_modules.clear()
        is_last = self.passes.end_backward()
        self._end_pass()
        if is_last:
            self._settle()

    def finalize_backward(self) -> None:
        """Start reducing what backwards have left, as the user asks for."""
        self.performer.note("finalize_backward()", self.root)
        self.passes.finalize()
        for unit in reversed(self.units):
            for group in unit.groups:
                self.performer.reductions.start_partial(group)
        self.is_reducing = True
        self.performer.flush()

    def land(self) -> None:
        """The gradients that ``finalize_backward`` has started to reduce are there."""
        self._land()
        self.is_reducing = False
        self._settle()

    def _land(self) -> None:
        self.performer.do(((Action.LAND, self.root.index),))
        self.performer.finish_landings()

    def _settle(self) -> None:
        """A step's gradients have landed: all ranks end with the same."""
        if any(unit.rules.reduces for unit in self.units):
            self.presence.settle()

    def perform(self, action: Action, unit: Unit) -> None:
        """The user asks for ``action``."""
        self.performer.note(f"{action.value}()", unit)
        self.performer.do([(action, unit.index)])
        if action is Action.UNSHARD:
            self.passes.skipped.by_hand.add(unit.index)
        elif action is Action.RESHARD:
            self.passes.skipped.by_hand.discard(unit.index)
            self.performer.flush()
            self.performer.wait_for_reads()

    def abandon_forward(self) -> None:
        """Back to rest after an exception in forward: nothing in flight, shards bound. What earlier backwards have left
        is as good as it was."""
        try:
            if self.is_reducing:
                self.land()
            else:
                self._land()
        finally:
            self._come_to_rest()

    def reset(self) -> None:
        """Back to rest after any exception, with the gradients that have landed and no others: a backward has added to
        some of them, and the user may have zeroed the gradients since."""
        self.num_resets += 1
        self._come_to_rest()
        self.presence.forget()
        self.schedule.awaits_finalization = False
        for unit in self.units:
            for group in unit.groups:
                group.gradients.discard_unreduced()

    def _come_to_rest(self) -> None:
        self.performer.drop()
        self.is_reducing = False
        self.passes.reset()
        for unit in self.units:
            unit.missing_modules.clear()
            for group in unit.groups:
                group.reshard()
        self._end_pass()

    @property
    def root_class(self) -> str:
        """The class of the root's module, as the user knows it."""
        return type(self.root.modules[0]).__name__

    def _free_unused_gradients(self) -> None:
        """The user may have let go of gradients since the last pass."""
        for unit in self.units:
            for group in unit.groups:
                group.gradients.free_unused()

    def _end_pass(self) -> None:
        for unit in self.units:
            for group in unit.groups:
                group.note_writes()
        self.performer.services.memory.keep_freed(for_reuse=False)
        self.performer.flush()
        if not self.schedule.in_backward:  # I12
            self.performer.finish_landings()
