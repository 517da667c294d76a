"""Backwards in two halves whose gradients of parameters are lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fsdp2.runtime.split_backward import SplitBackwards
from fsdp2.types import ScheduleError


def _param() -> Any:
    return SimpleNamespace(unsharded_grad=None, accumulated=None)


def test_a_backward_that_computes_no_gradient_of_a_parameter_is_refused_at_the_end_of_the_step() -> None:
    backwards = SplitBackwards()
    backwards.begin("layers.0", [_param()])
    backwards.end()
    with pytest.raises(ScheduleError, match=r"unit 'layers\.0' is resharded"):
        backwards.check(may_compute_shapes=False)
    backwards.check(may_compute_shapes=False)  # said once
