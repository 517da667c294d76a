"""What the executor does with reductions, on groups and reductions that only take notes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch

from fsdp2 import CommunicationError
from fsdp2.runtime.executor import Executor


class NotedReduction:
    """Notes what is done with it. ``raises``: what is raised then."""

    def __init__(self, **raises: Exception) -> None:
        self.log: list[str] = []
        self._raises = raises

    def __getattr__(self, name: str) -> Any:
        def note() -> None:
            self.log.append(name)
            if name in self._raises:
                raise self._raises[name]

        return note


def _unit(reduce: Callable[[], object]) -> Any:
    """A unit whose group has partial gradients."""
    gradients = SimpleNamespace(awaits_all_reduce=True)

    def reduce_partial(*, ends_step: bool) -> object:
        gradients.awaits_all_reduce = False
        return reduce()

    group = SimpleNamespace(
        mesh=SimpleNamespace(replicate=SimpleNamespace(size=2)),
        home=SimpleNamespace(is_staged=False),
        gradients=gradients,
        reduce=reduce,
        reduce_partial=reduce_partial,
        on_work=None,
        lost=lambda what, error: CommunicationError(f"{what} of unit 'layer': {error}"),
    )
    return SimpleNamespace(groups=(group,), watches=[])


def _executor(*reductions: NotedReduction) -> Executor:
    """With all ``reductions`` in flight."""
    executor = Executor(torch.device("cpu"))
    executor.max_in_flight = len(reductions)
    executor.take([_unit(lambda reduction=reduction: reduction) for reduction in reversed(reductions)])
    executor.reduce_partial()
    return executor


def _with_a_reduction() -> tuple[Executor, NotedReduction]:
    reduction = NotedReduction()
    return _executor(reduction), reduction


def test_landed_gradients_are_waited_for_when_the_rest_is_dropped() -> None:
    """They are in ``.grad``, which the user reads after an exception."""
    executor, reduction = _with_a_reduction()
    executor.streams = mock.Mock()
    executor.land_down_to(0)
    assert reduction.log == ["finish", "land"]
    executor.drop()
    executor.drop()
    executor.streams.compute_after_reduce.assert_called_once_with()


def test_reductions_in_flight_are_dropped_once_and_do_not_land() -> None:
    executor, reduction = _with_a_reduction()
    executor.drop()
    executor.land()
    assert reduction.log == ["drop"]


def test_all_reductions_are_dropped_though_the_first_is_lost() -> None:
    reductions = [NotedReduction(drop=CommunicationError("no peer")), NotedReduction(), NotedReduction()]
    executor = _executor(*reductions)
    with pytest.raises(CommunicationError, match="reduction of unit 'layer': no peer"):
        executor.drop()
    assert [reduction.log for reduction in reductions] == [["drop"]] * 3
    executor.drop()
    assert [reduction.log for reduction in reductions] == [["drop"]] * 3


def test_reductions_behind_one_that_cannot_land_are_dropped() -> None:
    """A user's hook raises there."""
    reductions = [NotedReduction(land=ValueError("by a hook")), NotedReduction(), NotedReduction()]
    executor = _executor(*reductions)
    with pytest.raises(ValueError, match="by a hook"):
        executor.land()
    assert [reduction.log for reduction in reductions] == [["finish", "land"], ["drop"], ["drop"]]
    assert executor.num_reductions == 0


def test_the_error_that_kept_a_reduction_from_landing_is_raised_though_others_are_lost() -> None:
    executor = _executor(
        NotedReduction(land=ValueError("by a hook")),
        NotedReduction(),
        NotedReduction(drop=CommunicationError("no peer")),
    )
    with pytest.raises(ValueError, match="by a hook"):
        executor.land()


def test_reduction_over_replicas_that_cannot_start_names_the_unit() -> None:
    def refuse() -> NoReturn:
        raise CommunicationError("no peer")

    executor = _executor()
    executor.take([_unit(refuse)])
    with pytest.raises(CommunicationError, match="reduction of unit 'layer': no peer"):
        executor.land()
