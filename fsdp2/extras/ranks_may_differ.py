"""Ranks that use other units, or other parameters of a unit: all end a step with the same gradients.

``set_ranks_may_differ(True)`` asks for it. ``RootWhereRanksDiffer`` inserts the events of units that this rank skips
(``skipped_units``). At the end of a step, one small all-reduce tells which parameters had a gradient on some rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import compress

import torch
import torch.distributed as dist

from fsdp2.extras.rank_checks import by_mesh, compare, reduce
from fsdp2.extras.skipped_units import Event, SkippedUnits
from fsdp2.group.gradients import Landed, deposit
from fsdp2.group.group import ParamGroup
from fsdp2.plan.mesh import ParallelMesh
from fsdp2.runtime.root import Root, register_root_where_ranks_differ
from fsdp2.runtime.unit import Unit, note_tree_change
from fsdp2.schedule.schedule import Action, Phase
from fsdp2.schedule.states import Outcome


class RootWhereRanksDiffer(Root):
    """A root whose passes go through the units that this rank skips, too."""

    # The tree

    def take_units(self) -> None:
        self.skipping = SkippedUnits(self.parents)
        super().take_units()
        groups = [group for unit in self.units for group in unit.groups]
        self._used_params = [UsedParams(*each) for each in by_mesh(groups)]

    def update_rules(self, unit: Unit) -> None:
        super().update_rules(unit)
        self.skipping.may_skip(unit.index, enabled=self.schedule.rules[unit.index].ranks_may_differ)

    # Forward

    def begin_forward(self, unit: Unit) -> None:
        super().begin_forward(unit)
        self.skipping.begin_forward(unit.index, grad_enabled=torch.is_grad_enabled())

    def start_forward(self, unit: Unit, event: str = "pre_forward") -> None:
        self._join_forward(self.skipping.forward.begin(unit.index))
        super().start_forward(unit, event)

    def start_recompute(self, unit: Unit) -> None:
        if self.schedule.phases[unit.index] is not Phase.BACKWARD:
            self._join_backward(self.skipping.backward.recompute(unit.index))
        super().start_recompute(unit)

    def stop_forward(self, unit: Unit, leads_to: Outcome) -> None:
        if self.schedule.phases[unit.index] is Phase.FORWARD:
            self._join_forward(self.skipping.forward.end(unit.index, leads_to))
        super().stop_forward(unit, leads_to)

    def end_forward(self, unit: Unit) -> None:
        """If the forward was the first of its kind with these trainable units, find out what other ranks have used."""
        trainable: set[int] = set()
        if self.skipping.forward.has_gradients:  # else no backward follows, which would depend on them
            self.checks.agree_on_flags()
            units = enumerate(self.units)
            trainable = {i for i, unit in units for group in unit.groups if group.gradients.trainable}
        used = self.skipping.end_forward(trainable)
        if used is not None:
            used_by_all = self.agree("the agreement on the order of units", partial(compare, self.units, used))
            self.schedule.last_order = self.skipping.agree(used_by_all, trainable)

    def _join_forward(self, events: Sequence[Event]) -> None:
        """Gather units that this rank skips and other ranks may use."""
        for event in events:
            unit = self.units[event.unit]
            if not self.is_in_tree(unit):
                self.skipping.forward.events.remove(event)
                note_tree_change()
            elif event.begins:
                super().start_forward(unit, "join_forward")
            else:
                self.executor.do(self.schedule.post_forward(event.unit))

    # Backward

    def begin_backward(self) -> None:
        super().begin_backward()
        self.skipping.begin_backward()

    def compare_uses(self) -> None:
        """Ranks may have used others."""

    def start_backward(self, unit: Unit, event: str = "pre_backward") -> None:
        self._join_backward(self.skipping.backward.begin(unit.index))
        super().start_backward(unit, event)

    def stop_backward(self, unit: Unit) -> None:
        backward = self.skipping.backward
        self._join_backward(backward.end(unit.index))
        if unit.index not in backward.ended:
            self.note("post_backward", unit)
            self.executor.do(self.schedule.post_backward(unit.index, is_last_use=backward.is_last_use))

    def stop_units(self) -> None:
        by_hand = self.schedule.finalizes_by_hand
        is_last = self.schedule.is_last_backward and not by_hand
        self._join_backward(self.skipping.backward.finish(is_last=is_last, ends_open=not by_hand))
        self.executor.do(self.schedule.end_backward(self.skipping.backward.ended))

    def _join_backward(self, events: Sequence[Event]) -> None:
        """Gather and reduce units that this rank skips and other ranks may use."""
        for event in events:
            if event.begins:  # its backward ends
                self.executor.do(self.schedule.post_backward(event.unit, is_last_use=event.is_last_use))
            else:
                super().start_backward(self.units[event.unit], "join_backward")

    def settle(self) -> None:
        for used in self._used_params:
            self.agree("the agreement on which parameters had gradients", used.settle)

    # Between passes

    def perform(self, action: Action, unit: Unit) -> None:
        super().perform(action, unit)
        if action is Action.UNSHARD:
            self.skipping.by_hand.add(unit.index)
        elif action is Action.RESHARD:
            self.skipping.by_hand.discard(unit.index)

    def forget_passes(self) -> None:
        self.skipping.reset()

    def reset(self) -> None:
        super().reset()
        for used in self._used_params:
            used.forget()


class UsedParams:
    """Which parameters of ``groups``, all groups of a root on ``mesh``, had a gradient on some rank.

    A parameter without a gradient on this rank contributes zeros to the reduction, but the sum may still be a gradient.
    It is withheld until the end of the step. Then the ranks exchange, in one small all-reduce, which of their
    parameters had a gradient in which reduction, and each rank hands over the sums that are gradients. (I15)
    """

    def __init__(self, mesh: ParallelMesh, groups: Sequence[ParamGroup]) -> None:
        self._gradients = [group.gradients for group in groups]
        self._mesh, self._has_others = mesh, mesh.data_parallel_size > 1
        self._withheld: list[list[tuple[int, Landed]]] = [[] for _ in groups]
        self._mine = b""
        self._sent = torch.empty(0, dtype=torch.uint8)  # the same, where the device copies it from
        for gradients, withheld in zip(self._gradients, self._withheld, strict=True):
            gradients.on_missing = partial(_withhold, withheld)

    def settle(self) -> None:
        """All gradients of a step have landed, except the withheld ones: hand these over if another rank had one, and
        drop the others. Those are zero, and a hook of the user would take each for one more gradient."""
        mine = [gradients.take_used() for gradients in self._gradients]
        used = self._anywhere(b"".join(mine)) if self._has_others else b""
        start = 0
        for its, gradients, withheld in zip(mine, self._gradients, self._withheld, strict=True):
            for at, landed in withheld if used else ():
                anywhere = set(compress(gradients.params, used[start + at :]))
                late = [param in anywhere for param in landed.params]
                if True in late:
                    deposit(landed.where(late))
            withheld.clear()
            start += len(its)

    def forget(self) -> None:
        """The step is given up."""
        for gradients, withheld in zip(self._gradients, self._withheld, strict=True):
            gradients.take_used()
            withheld.clear()

    def _anywhere(self, mine: bytes) -> bytes:
        """``mine``, a byte per parameter and reduction of all groups, or-ed over all ranks. Empty if this rank
        withholds no gradient: then the CPU does not wait for the device.

        We tried not to wait for the all-reduce either in that case: a step was no shorter (0.2 ms of 44 with 2 gloo
        ranks), and processes crashed when torch's profiler, recording memory, stopped while the all-reduce still ran.
        """
        device = self._mesh.device
        if not mine:  # on all ranks: these have landed the same reductions
            return b""
        if mine != self._mine:
            sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            self._mine, self._sent = mine, sent if device.type == "cpu" else sent.pin_memory()
        flags = self._sent.to(device, copy=True, non_blocking=True)
        reduce(self._mesh, flags, dist.ReduceOp.MAX)
        return bytes(flags.tolist()) if any(self._withheld) else b""


def _withhold(withheld: list[tuple[int, Landed]], at: int, landed: Landed) -> None:
    """Keep what has ``landed`` without a gradient here, and where its bytes start. Copies: the buffers are larger."""
    withheld.append((at, landed._replace(shards=[shard.clone() for shard in landed.shards])))


def register() -> None:
    """Use this root where users have asked for it."""
    register_root_where_ranks_differ(RootWhereRanksDiffer)
