"""Backwards in two halves whose gradients of parameters are lost, on a unit that is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fsdp2.core.schedule.schedule import Schedule, UnitRules
from fsdp2.core.types import ScheduleError
from fsdp2.extras.lost_updates import SplitBackwards


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
