"""Refuses to go on where an optimizer has stepped without gradients that a backward had computed: they would be part of
the next step. torch's ``fully_shard`` says nothing.

They are in flight, if no backward has waited for them. Or they lie on unsharded parameters, if a backward has reached
the parameters of a unit, but no output of it. Rule: what all ranks do alike decides, never the state of one message.
"""

from __future__ import annotations

from fsdp2.group.group import ParamGroup
from fsdp2.runtime.unit import Unit
from fsdp2.runtime.unit_tree import PlugIns, TreeChecks, UnitTree
from fsdp2.schedule.states import GroupState
from fsdp2.types import ScheduleError


class LateGradients(TreeChecks):
    """Watches the steps of one root."""

    def __init__(self, tree: UnitTree) -> None:
        self._tree = tree
        self._num_steps: list[tuple[Unit, ParamGroup, int]] = []  # of what the last backward has left in flight

    def begin_pass(self) -> None:
        self._check_landed()
        kept = self._tree.schedule.kept
        for index, unit in enumerate(self._tree.units):
            for group in unit.groups:
                is_outdated = group.state is not GroupState.SHARDED and group.has_stepped
                if is_outdated and unit.config.reduces and index not in kept:
                    _check_reduced(unit, group)

    def begin_backward(self) -> None:
        self._check_landed()

    def end_backward(self) -> None:
        self._num_steps = [(unit, group, group.shards.num_steps) for unit, group in self._tree.executor.in_flight]

    def _check_landed(self) -> None:
        """Check that optimizers that have stepped since the last backward had what it has left in flight.

        Raises:
            ScheduleError: the gradients of a unit are still in flight.
        """
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
    """An optimizer has stepped: check that it had all gradients of ``group``.

    Raises:
        ScheduleError: an optimizer has stepped without.
    """
    for param in group.params:
        if param.unsharded_grad is not None:
            raise ScheduleError(
                f"parameter '{param.full_name}' had a gradient that was not reduced when the optimizer stepped: a "
                f"backward reached it, but no output of its unit '{unit.name}'. Call fsdp2.allow_inner_losses(model) "
                "once, after all calls of fully_shard. To go on without this gradient, call reset_iter_state() on the "
                "root."
            )


def register() -> None:
    """Let every root watch its steps."""
    PlugIns.checks.append(LateGradients)
