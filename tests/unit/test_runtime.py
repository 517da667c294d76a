"""What the runtime does with reductions, on groups and reductions that are stand-ins; backwards in two halves whose
gradients of parameters are lost; and the hook for gradients of what the calls of a submodule return."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import CommunicationError
from fsdp2.core import _torch
from fsdp2.core.runtime.executor import Executor
from fsdp2.core.schedule.schedule import Schedule, UnitRules
from fsdp2.core.trees import find_tensors
from fsdp2.core.types import ScheduleError
from fsdp2.extras import torch_names
from fsdp2.extras.lost_updates import SplitBackwards


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


def test_landed_gradients_are_waited_for_when_the_rest_is_dropped() -> None:
    """They are in ``.grad``, which the user reads after an exception."""
    executor = _executor(reduction := mock.Mock())
    executor.streams = mock.Mock()
    executor.land_down_to(0)
    assert _log(reduction) == ["finish", "land"]
    executor.drop()
    executor.drop()
    executor.streams.compute_after_reduce.assert_called_once_with()


def test_gradients_that_may_have_landed_at_launch_are_waited_for_when_they_are_dropped() -> None:
    executor = _executor(mock.Mock())
    executor.streams = mock.Mock()
    executor.drop()
    executor.drop()
    executor.streams.compute_after_reduce.assert_called_once_with()


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


def test_a_backward_that_computes_no_gradient_of_a_parameter_is_refused_at_the_end_of_the_step() -> None:
    param = SimpleNamespace(unsharded_grad=None, accumulated=None)
    group = SimpleNamespace(unsharded=SimpleNamespace(trainable=[0]), params=[param])
    schedule = Schedule([UnitRules(reduces=False)])
    schedule.is_last_backward = False
    unit = SimpleNamespace(name="layers.0", groups=[group])
    backwards = SplitBackwards(SimpleNamespace(units=[unit], schedule=schedule))  # type: ignore[arg-type]
    backwards.begin_backward()
    backwards.end_backward()
    with pytest.raises(ScheduleError, match=r"unit 'layers\.0' is resharded"):
        backwards.finalize_backward()
    backwards.finalize_backward()  # said once


class _Twice(nn.Module):
    """Returns a tensor, or several of them inside of something."""

    def __init__(self, *, nested: bool) -> None:
        super().__init__()
        self.linear, self._nested = nn.Linear(3, 3), nested

    def forward(self, x: Tensor) -> Tensor | dict[str, list[Tensor]]:
        first, second = self.linear(x).tanh(), x.detach()
        return {"several": [first, second]} if self._nested else first


def _watched(*, nested: bool = False, is_late: bool = False) -> tuple[_Twice, list[Tensor]]:
    module, seen = _Twice(nested=nested), []
    module.hook = _torch.GradientHook(lambda gradient: seen.append(gradient.clone()))  # type: ignore[assignment]
    torch_names.watch_calls(module, module.hook, find_tensors, lambda: is_late)  # type: ignore[arg-type]
    return module, seen


@pytest.mark.parametrize("nested", [False, True])
def test_a_gradient_of_an_output_calls_the_hook_once(nested: bool) -> None:
    module, seen = _watched(nested=nested)
    with torch.no_grad():
        assert nested or module(torch.randn(2, 3)).grad_fn is None  # what needs no gradient has no hook
    output = module(torch.randn(2, 3))
    (output["several"][0] if nested else output).sum().backward()
    assert [each.tolist() for each in seen] == [[[1.0] * 3] * 2]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_calls_the_hook_once_unless_it_is_late(use_reentrant: bool, is_late: bool) -> None:
    """Reentrant checkpointing has no graph before: its second forward makes one, inside of the backward. Once the
    unit's backward has begun, gradients inside it say nothing new. A forward is never late."""
    module, seen = _watched(is_late=is_late)
    checkpoint(module, torch.randn(2, 3, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    assert module.linear.weight.grad is not None
    assert len(seen) == (0 if use_reentrant and is_late else 1)
