"""Notices gradients that a backward in two halves loses.

Zero-bubble pipeline schedules compute gradients of inputs first, and those of parameters later. Both halves ask the
module for its parameters. From a module that is resharded by then, they get shards, which are in no graph. The
gradients of its parameters are left out, without an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2 import _torch
from fsdp2.group.param import ShardedParam
from fsdp2.types import ScheduleError


class SplitBackwards:
    """Watches the backwards of a step of one root."""

    def __init__(self) -> None:
        self._params: Sequence[ShardedParam] = ()
        self._before: list[tuple[int, int]] = []
        self._unit = ""  # in the running backward: a unit that is resharded between the two halves
        self._losers: list[str] = []  # such a unit, for each backward that computed no gradient of a parameter

    def begin(self, unit: str, params: Sequence[ShardedParam]) -> None:
        """A backward begins that keeps the gradients of ``params``, and ends no step. ``unit``: a unit of theirs that
        does not stay unsharded between its forward and the end of the step."""
        self._unit, self._params = unit, params
        self._before = self._gradients()

    def end(self) -> None:
        """That backward is over."""
        if self._params and self._gradients() == self._before:
            self._losers.append(self._unit)
        self._params = ()

    def check(self, *, may_compute_shapes: bool) -> None:
        """The step is about to be reduced. ``may_compute_shapes``: one backward without gradients of parameters may be
        the one by which a pipeline finds out shapes.

        Raises:
            ScheduleError: gradients are lost.
        """
        losers, self._losers = self._losers, []
        if len(losers) > may_compute_shapes:
            raise ScheduleError(
                f"a backward computed gradients of inputs, but not of parameters, and unit '{losers[0]}' is resharded "
                "between forward and the end of the step. A schedule that computes the gradients of parameters later "
                "finds shards, and these gradients are lost. Pass reshard_after_forward=False to fully_shard for all "
                "units of the stage, call set_reshard_after_backward(False) before the backwards, and repeat the step "
                "after reset_iter_state()."
            )

    def _gradients(self) -> list[tuple[int, int]]:
        """Differs once autograd has computed a gradient of a parameter."""
        both = [grad for param in self._params for grad in (param.unsharded_grad, param.accumulated)]
        found = [grad for grad in both if grad is not None]
        return list(zip(map(id, found), _torch.versions_of(found), strict=True))
