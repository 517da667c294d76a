"""Notices gradients that a backward in two halves loses.

Zero-bubble pipeline schedules compute gradients of inputs first, and those of parameters later. Both halves ask the
module for its parameters. From a module that is resharded by then, they get shards, which are in no graph. The
gradients of its parameters are left out, without an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2 import _torch
from fsdp2.group.param import ShardedParam
from fsdp2.runtime.unit_tree import PlugIns, TreeChecks, UnitTree
from fsdp2.schedule.schedule import AfterForward
from fsdp2.types import ScheduleError


class SplitBackwards(TreeChecks):
    """Watches the backwards of a step of one root, if there are several."""

    def __init__(self, tree: UnitTree) -> None:
        self._tree = tree
        self._params: Sequence[ShardedParam] = ()  # of the running backward, those whose gradients it keeps
        self._before: list[tuple[int, int]] = []
        self._unit = ""  # in the running backward: a unit that is resharded between the two halves
        self._losers: list[str] = []  # such a unit, for each backward that computed no gradient of a parameter

    def begin_backward(self) -> None:
        """Gradients that are reduced at once are not lost."""
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
        """The step is about to be reduced. Where the user ends it, one backward without gradients of parameters may be
        the one by which a pipeline finds out shapes.

        Raises:
            ScheduleError: gradients are lost.
        """
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
        """Differs once autograd has computed a gradient of a parameter."""
        both = [grad for param in self._params for grad in (param.unsharded_grad, param.accumulated)]
        found = [grad for grad in both if grad is not None]
        return list(zip(map(id, found), _torch.versions_of(found), strict=True))


def register() -> None:
    """Let every root watch its backwards."""
    PlugIns.checks.append(SplitBackwards)
