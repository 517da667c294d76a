"""What the executor does with reductions that are lost or cannot land; groups and reductions are stand-ins.

That compute waits for what has landed is shown by ``tests/distributed/test_stream_order.py``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp2 import CommunicationError
from fsdp2.core.runtime.executor import Executor


def _log(reduction: mock.Mock) -> list[str]:
    """What was done with it."""
    return [name for name, *_ in reduction.method_calls]


def _unit(reduction: mock.Mock) -> Any:
    """A unit whose group has partial gradients, and reduces them by ``reduction``."""

    def reduce_partial(*, ends_step: bool) -> bool:
        gradients.awaits_all_reduce = False
        reduction.launch()
        reduction.reset_mock()  # but for what it raises
        return True

    gradients = SimpleNamespace(
        awaits_all_reduce=True,
        in_flight=reduction,
        reduce_partial=reduce_partial,
        finish=reduction.finish,
        land=reduction.land,
        drop_in_flight=reduction.drop,
    )
    group = SimpleNamespace(
        mesh=SimpleNamespace(replicate=SimpleNamespace(size=2)),
        home=SimpleNamespace(is_staged=False),
        gradients=gradients,
        unsharded=SimpleNamespace(streams=mock.Mock()),
        lost=lambda what, error: CommunicationError(f"{what} of unit 'layer': {error}"),
    )
    return SimpleNamespace(groups=(group,), observers=[], name="layer")


def _executor(*reductions: mock.Mock) -> Executor:
    """With all ``reductions`` in flight."""
    executor = Executor(torch.device("cpu"))
    executor.max_in_flight = len(reductions)
    executor.take([_unit(reduction) for reduction in reversed(reductions)])
    executor.reduce_partial()
    return executor


LOST = CommunicationError("no peer")


@pytest.mark.parametrize("is_lost", [False, True], ids=["", "though the first is lost"])
def test_reductions_in_flight_are_dropped_once_and_do_not_land(is_lost: bool) -> None:
    reductions = [mock.Mock(), mock.Mock(), mock.Mock()]
    executor = _executor(*reductions)
    if is_lost:
        reductions[0].drop.side_effect = LOST
        with pytest.raises(CommunicationError, match="reduction of unit 'layer': no peer"):
            executor.drop()
    executor.drop()
    executor.land()
    assert [*map(_log, reductions)] == [["drop"]] * 3


def test_reductions_behind_one_that_cannot_land_are_dropped_and_its_error_is_raised_though_others_are_lost() -> None:
    """A user's hook raises there."""
    reductions = [mock.Mock(), mock.Mock(), mock.Mock()]
    reductions[0].land.side_effect, reductions[2].drop.side_effect = ValueError("by a hook"), LOST
    executor = _executor(*reductions)
    with pytest.raises(ValueError, match="by a hook"):
        executor.land()
    assert [*map(_log, reductions)] == [["finish", "land"], ["drop"], ["drop"]]
    assert not executor.has_unwaited


def test_reduction_over_replicas_that_cannot_start_names_the_unit() -> None:
    executor = _executor()
    executor.take([_unit(mock.Mock(**{"launch.side_effect": LOST}))])
    with pytest.raises(CommunicationError, match="reduction of unit 'layer': no peer"):
        executor.land()
