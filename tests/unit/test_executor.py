"""What the executor does with reductions, on groups and reductions that only take notes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fsdp2.runtime.executor import Executor


class NotedReduction:
    """Notes what is done with it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.log.append(name)


def _with_a_reduction() -> tuple[Executor, NotedReduction]:
    executor, reduction = Executor(torch.device("cpu")), NotedReduction()
    mesh = SimpleNamespace(replicate=SimpleNamespace(size=2))
    group: Any = SimpleNamespace(mesh=mesh, reduce_partial=lambda: reduction, on_work=None)
    executor.reduce_partial(group)
    return executor, reduction


def test_landed_gradients_are_waited_for_when_the_rest_is_dropped() -> None:
    """They are in ``.grad``, which the user reads after an exception."""
    executor, reduction = _with_a_reduction()
    executor.land_down_to(0)
    assert reduction.log == ["finish", "land"]
    executor.drop()
    assert reduction.log == ["finish", "land", "wait"]


def test_reductions_in_flight_are_dropped_once_and_do_not_land() -> None:
    executor, reduction = _with_a_reduction()
    executor.drop()
    executor.land()
    assert reduction.log == ["drop"]
