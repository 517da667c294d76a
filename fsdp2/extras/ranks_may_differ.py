"""Lets ranks use different units, or different parameters of a unit, and still end a step with the same gradients.

``set_ranks_may_differ(True)`` enables it. ``JoiningSchedule`` inserts the events of units that this rank skips
(``skipped_units``). At the end of a step, one small all-reduce finds which parameters had a gradient on some rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import compress

import torch
import torch.distributed as dist

from fsdp2.core import ParallelMesh, ParamGroup, TreeChecks, Unit, UnitTree, comms, plans, schedules, unit_of
from fsdp2.extras.alike import Alike
from fsdp2.extras.plain_names import with_inside
from fsdp2.extras.rank_checks import agree, by_mesh, compare_on, reduce
from fsdp2.extras.skipped_units import Event, SkippedUnits


class JoiningSchedule(schedules.Schedule):
    """The schedule of a root whose passes also cover the units that this rank skips. Where other ranks run such a unit,
    this rank performs the same gathers and reductions without computing."""

    def __init__(self, tree: UnitTree) -> None:
        super().__init__([tree.rules_of(unit) for unit in tree.units], tree.passes)
        self._tree, self.skipping = tree, SkippedUnits(tree.parents, self.rules)

    def pre_forward(self, unit: int, *, grad_enabled: bool) -> schedules.Actions:
        if not self.passes.in_backward:
            if self.passes.root is None:
                self.skipping.begin_forward(unit, grad_enabled=grad_enabled)
            self._join_forward(self.skipping.forward.begin(unit), grad_enabled=grad_enabled)
        elif self.passes.phases[unit] is not schedules.Phase.BACKWARD:
            self._join_backward(self.skipping.backward.recompute(unit))
        return super().pre_forward(unit, grad_enabled=grad_enabled)

    def post_forward(self, unit: int, leads_to: schedules.Outcome = schedules.Outcome.BACKWARD) -> schedules.Actions:
        if self.passes.phases[unit] is schedules.Phase.FORWARD:
            self._join_forward(self.skipping.forward.end(unit, leads_to), grad_enabled=torch.is_grad_enabled())
        return super().post_forward(unit)  # ranks that skip the unit do not know what it leads to

    def pre_backward(self, unit: int) -> schedules.Actions:
        self._join_backward(self.skipping.backward.begin(unit))
        return super().pre_backward(unit)

    def post_backward(self, unit: int, *, is_last_use: bool = True) -> schedules.Actions:
        backward = self.skipping.backward
        self._join_backward(backward.end(unit))
        return () if unit in backward.ended else super().post_backward(unit, is_last_use=backward.is_last_use)

    def end_backward(self, ended: Collection[int] = ()) -> schedules.Actions:
        """Ignores ``ended``, the units with late gradients, since other ranks may have none."""
        is_last = self.is_last_backward and not self.finalizes_by_hand
        self._join_backward(self.skipping.backward.finish(is_last=is_last, ends_open=not self.finalizes_by_hand))
        return super().end_backward(self.skipping.backward.ended)

    def finalize(self) -> schedules.Actions:
        self.skipping.reset()
        return super().finalize()

    def by_hand(self, action: schedules.Action, unit: int) -> schedules.Actions:
        if action is schedules.Action.UNSHARD:
            self.skipping.by_hand.add(unit)
        elif action is schedules.Action.RESHARD:
            self.skipping.by_hand.discard(unit)
        return super().by_hand(action, unit)

    def reset(self) -> None:
        self.skipping.reset()
        super().reset()

    def _join_forward(self, events: Sequence[Event], *, grad_enabled: bool) -> None:
        """Gather units that this rank skips and other ranks may use."""
        tree = self._tree
        for event in events:
            unit = tree.units[event.unit]
            if not _is_in_tree(tree, unit):
                self.skipping.forward.events.remove(event)
                unit.mark_stale()
            elif event.begins:
                actions = super().pre_forward(event.unit, grad_enabled=grad_enabled)
                tree.executor.do(actions, "join_forward", unit)
            else:
                tree.executor.do(super().post_forward(event.unit))

    def _join_backward(self, events: Sequence[Event]) -> None:
        """Gather and reduce units that this rank skips and other ranks may use."""
        tree = self._tree
        for event in events:
            if event.begins:  # its backward ends
                tree.executor.do(super().post_backward(event.unit, is_last_use=event.is_last_use))
            else:
                unit = tree.units[event.unit]
                tree.executor.do(super().pre_backward(event.unit), "join_backward", unit)
                if plans.GRADIENTS_FOLLOW_SHARDS:
                    tree.begin_gradients(unit)


def _is_in_tree(tree: UnitTree, unit: Unit) -> bool:
    """Whether the unit's module is still at its old place in the tree."""
    try:
        there = tree.root.modules[0].get_submodule(unit.name)
        return any(unit_of(each) is unit for each in with_inside(there))
    except AttributeError:
        return unit is tree.root


class ChecksWhereRanksDiffer(TreeChecks):
    """Exchanges which units and parameters the ranks used, instead of checking that they are the same. ``usual`` checks
    everything else."""

    def __init__(self, tree: UnitTree, schedule: JoiningSchedule, usual: Alike) -> None:
        self._tree, self._schedule, self._usual = tree, schedule, usual
        self._meshes = by_mesh(group for unit in tree.units for group in unit.groups)  # the largest one is the last
        self._used_params = [UsedParams(*each) for each in self._meshes]

    def begin_pass(self) -> None:
        self._usual.begin_pass()

    def note_flags(self) -> None:
        self._usual.note_flags()

    def agree_on_flags(self) -> None:
        self._usual.agree_on_flags()

    def end_forward(self, unit: Unit) -> None:
        """If the ranks have no order for this kind of forward with these trainable units, agree on one."""
        tree, schedule, skipping = self._tree, self._schedule, self._schedule.skipping
        trainable: set[int] = set()
        if skipping.forward.has_gradients:  # else no backward follows, which would depend on them
            self.agree_on_flags()
            units = enumerate(tree.units)
            trainable = {i for i, unit in units for group in unit.groups if group.gradients.trainable}
        used = skipping.end_forward(trainable)
        if used is not None:
            found = partial(compare_on, self._meshes[-1][0], used)
            used_by_all = agree(tree, "the agreement on the order of units", found)
            schedule.tape.expected = skipping.agree(used_by_all, trainable)

    def begin_backward(self) -> None:
        self._usual.num_backwards += 1
        self._schedule.skipping.begin_backward()

    def end_step(self) -> None:
        for used in self._used_params:
            agree(self._tree, "the agreement on which parameters had gradients", used.land_kept)

    def drop_step(self) -> None:
        for used in self._used_params:
            used.forget()


class UsedParams:
    """Which parameters of ``groups``, all groups of a root on ``mesh``, had a gradient on some rank.

    A parameter without a gradient on this rank contributes zeros to the reduction, but the sum may still be a gradient.
    The sum is kept until the end of the step. Then the ranks exchange, in one small all-reduce, which parameters had a
    gradient in which reduction, and each rank lands the sums that are gradients. (I15)
    """

    def __init__(self, mesh: ParallelMesh, groups: Sequence[ParamGroup]) -> None:
        self._gradients = [group.gradients for group in groups]
        self._mesh, self._has_others = mesh, mesh.data_parallel_size > 1
        self._kept: list[list[tuple[int, comms.Landed]]] = [[] for _ in groups]
        self._mine = b""
        self._sent = torch.empty(0, dtype=torch.uint8)  # the same, where the device copies it from
        for group, kept in zip(groups, self._kept, strict=True):
            group.gradients.on_missing = partial(_keep, kept)

    def land_kept(self) -> None:
        """After all other gradients of a step have landed, land the kept ones for which another rank had a gradient,
        and drop the rest. Those are zero, and a hook of the user would take each for one more gradient."""
        mine = [gradients.take_used() for gradients in self._gradients]
        used = self._anywhere(b"".join(mine)) if self._has_others else b""
        start = 0
        for its, gradients, kept in zip(mine, self._gradients, self._kept, strict=True):
            for at, landed in kept if used else ():
                anywhere = set(compress(gradients.params, used[start + at :]))
                late = [param in anywhere for param in landed.params]
                if True in late:
                    landed.where(late).land()
            kept.clear()
            start += len(its)

    def forget(self) -> None:
        """Forget what was kept, since the step is given up."""
        for gradients, kept in zip(self._gradients, self._kept, strict=True):
            gradients.take_used()
            kept.clear()

    def _anywhere(self, mine: bytes) -> bytes:
        """``mine``, a byte per parameter and reduction of all groups, or-ed over all ranks. Empty if this rank has kept
        no gradient: then the CPU does not wait for the device.

        We tried not to wait for the all-reduce either in that case: a step was no shorter (0.2 ms of 44 with 2 gloo
        ranks), and processes crashed when torch's profiler, recording memory, stopped while the all-reduce still ran.
        """
        device = self._mesh.device
        if not mine:  # then all ranks have nothing, since they have landed the same reductions
            return b""
        if mine != self._mine:
            sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            self._mine, self._sent = mine, sent if device.type == "cpu" else sent.pin_memory()
        flags = self._sent.to(device, copy=True, non_blocking=True)
        reduce(self._mesh, flags, dist.ReduceOp.MAX)
        return bytes(flags.tolist()) if any(self._kept) else b""


def _keep(kept: list[tuple[int, comms.Landed]], landed: comms.Landed, at: int) -> None:
    """Keep copies of what has ``landed`` without a gradient here, and where its bytes start. The buffers are larger."""
    kept.append((at, landed._replace(shards=[shard.clone() for shard in landed.shards])))


def where_ranks_differ(tree: UnitTree, usual: Sequence[TreeChecks]) -> tuple[schedules.Schedule, Sequence[TreeChecks]]:
    schedule = JoiningSchedule(tree)
    checks = [ChecksWhereRanksDiffer(tree, schedule, each) if isinstance(each, Alike) else each for each in usual]
    return schedule, checks
