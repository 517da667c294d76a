"""Detects what a step loses: gradients, hooks of gradients, and values that were written or assigned.

Late gradients: an optimizer steps without gradients that a backward has computed, and they would be part of the next
step. torch's ``fully_shard`` says nothing. They are in flight if no backward has waited for them, or they lie on
unsharded parameters if a backward reached the parameters of a unit, but no output of the unit. Rule: these checks
depend only on what all ranks do in the same way, never on the state of one message.

Backwards in two halves: zero-bubble pipeline schedules compute gradients of inputs first, and those of parameters
later. Both halves ask the module for its parameters. If the module has been resharded by then, they get shards, which
are in no graph. The gradients of its parameters are then left out without an error.

Hooks: autograd computes gradients of the unsharded parameters only, which hooks on a shard never see.

Writes: between two passes, a root that stays unsharded binds whole parameters. A write into them never reaches the
shards. Their versions tell.

Assignments: ``param.data = value`` gives the DTensor another storage, which nothing reads, and leaves the shard as it
is. Only the storage tells: neither the object nor its version changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from fsdp2.core import (
    AfterForward,
    GroupState,
    ParamGroup,
    ScheduleError,
    ShardedParam,
    TreeChecks,
    Unit,
    UnitTree,
    _torch,
)
from fsdp2.extras import torch_names


class LateGradients(TreeChecks):
    """Watches the steps of one root, and between passes writes to its parameters and assignments."""

    def __init__(self, tree: UnitTree) -> None:
        self._tree = tree
        self._num_steps: list[tuple[Unit, ParamGroup, int]] = []  # for gradients that the last backward left in flight
        self._unsharded: list[tuple[ParamGroup, list[int]]] = []  # after the last forward: groups, and their versions

    def begin_pass(self) -> None:
        if self._tree.is_reducing:
            raise ScheduleError(
                f"forward of {self._tree.class_name}: the handle of finalize_backward(async_op=True) is still pending. "
                "Call wait() on that handle first."
            )
        self._check_landed()
        for group, versions in self._unsharded:
            if group.state is GroupState.UNSHARDED and versions != _torch.versions_of(group.unsharded.versioned):
                _check_written(group, versions)
        kept = self._tree.schedule.kept
        for index, unit in enumerate(self._tree.units):
            for group in unit.groups:
                storages = list(map(_torch.key_of_storage, map(_torch.storage_of, group.shards.sharded)))
                if storages != group.shards.storages:
                    _warn_of_assigned(group)
                is_outdated = group.state is not GroupState.SHARDED and group.has_stepped
                if is_outdated and unit.config.reduces and index not in kept:
                    _check_reduced(unit, group)

    def end_forward(self, unit: Unit) -> None:
        self._unsharded.clear()
        for each in self._tree.units:
            for group in each.groups:
                if group.state is GroupState.UNSHARDED:
                    self._unsharded.append((group, _torch.versions_of(group.unsharded.versioned)))

    def begin_backward(self) -> None:
        self._check_landed()

    def end_backward(self) -> None:
        self._num_steps = [(unit, group, group.shards.num_steps) for unit, group in self._tree.executor.in_flight]

    def _check_landed(self) -> None:
        """Check that no optimizer has stepped without the gradients that the last backward left in flight."""
        in_flight = [group for _, group in self._tree.executor.in_flight]
        for unit, group, num_steps in self._num_steps if in_flight else ():
            if group.shards.num_steps != num_steps and group in in_flight:
                raise ScheduleError(
                    f"an optimizer stepped while gradients of unit '{unit.name}' were in flight: no backward waited "
                    "for them, since set_is_last_backward(False) was called. Call set_is_last_backward(True) on the "
                    "root before the last backward of each step. Or, after set_manual_backward_finalization(True), "
                    "call finalize_backward() before the step. To go on without these gradients, call "
                    "reset_iter_state() on the root."
                )


def _check_reduced(unit: Unit, group: ParamGroup) -> None:
    """After a step of an optimizer, check that all gradients of ``group`` had been reduced."""
    for param in group.params:
        if param.unsharded_grad is not None:
            raise ScheduleError(
                f"parameter '{param.full_name}' had a gradient that was not reduced when the optimizer stepped: a "
                f"backward reached it, but no output of its unit '{unit.name}'. Call fsdp2.allow_inner_losses(model) "
                "once, after all calls of fully_shard. To go on without this gradient, call reset_iter_state() on the "
                "root."
            )


class SplitBackwards(TreeChecks):
    """Watches the backwards of one root in steps that have several."""

    def __init__(self, tree: UnitTree) -> None:
        self._tree = tree
        self._params: Sequence[ShardedParam] = ()  # those whose gradients the running backward keeps
        self._before: list[tuple[int, int]] = []
        self._unit = ""  # in the running backward: a unit that is resharded between the two halves
        self._losers: list[str] = []  # a value of ``_unit`` for each backward that computed no gradient of a parameter

    def begin_backward(self) -> None:
        """Note the gradients that exist, unless this backward ends the step: gradients reduced at once are not lost."""
        if self._ends_step:
            return
        rules = zip(self._tree.units, self._tree.schedule.rules, strict=True)
        kept = [(unit, its) for unit, its in rules if not its.reduces]
        resharded = [
            unit.name
            for unit, its in kept
            if its.after_forward is not AfterForward.KEEP or its.reshard_after_backward
            if any(group.unsharded.trainable for group in unit.groups)
        ]
        if resharded:
            groups = [group for unit, _ in kept for group in unit.groups]
            self._params = [group.params[index] for group in groups for index in group.unsharded.trainable]
            self._unit, self._before = resharded[0], self._gradients()

    def end_backward(self) -> None:
        if self._ends_step:
            self.drop_step()
        elif self._params and self._gradients() == self._before:
            self._losers.append(self._unit)
        self._params = ()

    def finalize_backward(self) -> None:
        """Check the step before its reduction. If the user ends the step, one backward without gradients of parameters
        is allowed: a pipeline may run it to infer shapes."""
        losers, self._losers = self._losers, []
        if len(losers) > self._tree.schedule.finalizes_by_hand:
            raise ScheduleError(
                f"a backward computed gradients of inputs, but not of parameters, and unit '{losers[0]}' is resharded "
                "between forward and the end of the step. A schedule that computes the gradients of parameters later "
                "finds shards, and these gradients are lost. Pass reshard_after_forward=False to fully_shard for all "
                "units of the stage, call set_reshard_after_backward(False) before the backwards, and repeat the step "
                "after reset_iter_state()."
            )

    def drop_step(self) -> None:
        self._params, self._losers = (), []

    @property
    def _ends_step(self) -> bool:
        return self._tree.schedule.is_last_backward and not self._tree.schedule.finalizes_by_hand

    def _gradients(self) -> list[tuple[int, int]]:
        """A value that changes once autograd has computed a gradient of a parameter."""
        both = [grad for param in self._params for grad in (param.unsharded_grad, param.accumulated)]
        found = [grad for grad in both if grad is not None]
        return list(zip(map(id, found), _torch.versions_of(found), strict=True))


def _check_written(group: ParamGroup, before: Sequence[int]) -> None:
    """Refuse to go on after a write into an unsharded parameter of ``group``, unless it was gathered again since."""
    unsharded = group.unsharded
    now = _torch.versions_of(unsharded.versioned)
    if now == list(unsharded.saved_versions):
        return
    written = {id(each) for each, old, new in zip(unsharded.versioned, before, now, strict=True) if old != new}
    for param, bound in zip(group.params, unsharded.parameters, strict=True):
        if written.intersection(map(id, _torch.versioned(bound))):
            raise ScheduleError(
                f"parameter '{param.full_name}' was written since the last forward, while it was unsharded: its unit "
                f"'{group.name or '(root)'}' binds whole parameters until its next reshard, as roots do. The shards do "
                "not have this value, so it would be lost. Call reshard() on the module first, and write the shard; or "
                "write inside fsdp2.unsharded(module). To go on without this value, call reshard() now."
            )


def _warn_of_assigned(group: ParamGroup) -> None:
    shards = group.shards
    before, shards.storages = shards.storages, list(map(_torch.key_of_storage, map(_torch.storage_of, shards.sharded)))
    for param, local, old, new in zip(group.params, shards.locals, before, shards.storages, strict=True):
        if old != new and _torch.local_of(param.sharded) is local:  # else it was swapped or moved, as a whole
            warnings.warn(
                f"the data of parameter '{param.full_name}' was assigned, which has no effect on a sharded parameter, "
                "as in torch's fully_shard: the shard keeps its values. Write into the parameter instead: "
                "param.copy_(value) under torch.no_grad(), with a DTensor that is sharded like it.",
                stacklevel=2,
            )


def warn_of_hooks(params: Sequence[ShardedParam], *, is_sharded: bool) -> None:
    """Warn of hooks on ``params``. ``is_sharded``: they have been sharded, and their gather is about to be bound."""
    for param in params:
        way = torch_names.way_of_hooks(param.sharded)
        if is_sharded and way == "register_hook":
            warnings.warn(
                f"parameter '{param.full_name}': hooks of register_hook are never called on a sharded parameter. "
                "Call register_post_accumulate_grad_hook instead; its hooks get the shard, with the reduced gradient.",
                stacklevel=2,
            )
        elif way is not None and not is_sharded:
            warnings.warn(
                f"fully_shard: parameter '{param.name}' has hooks of {way}, which are lost: a shard takes its "
                "place. Call register_post_accumulate_grad_hook on the sharded parameter, after fully_shard; its hooks "
                "get the shard, with the reduced gradient.",
                stacklevel=6,
            )
