"""A step may be captured into a CUDA graph: on the simulated accelerator, nothing that CUDA would refuse is asked for.

Every stream of the step belongs to the capture before it is given anything, no event of an earlier step is waited for,
the host neither waits nor asks, and the stream that was captured has waited for all others in the end.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.device import Simulated
from fsdp2.core.comm.streams import AcceleratorStreams
from tests.accelerator import device
from tests.accelerator.cases import CASES, mesh_of, run
from tests.accelerator.support import on_device
from tests.harness.distributed import RankContext
from tests.harness.runtimes import subject
from tests.harness.selection import long
from tests.harness.training import Step

# What must know on the host what the device has, in every step.
_WAITING = ("offloaded", "stepped on the host", "muon", "ranks may differ", "mirrored")
_NAMES = [name for name, case in CASES.items() if math.prod(case.shape) == 2]


def broken_in_a_step(ctx: RankContext, name: str) -> list[str]:
    """What CUDA would refuse of the last step, its optimizer included."""
    case = CASES[name]
    capture = ExitStack()
    found: list[list[str]] = []

    def step(step: Step, model: Any) -> list[Tensor]:
        found.append(capture.enter_context(device.captured()))
        return case.step(step, model)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = case.optimizer(parameters)
        made.register_step_post_hook(lambda *_: capture.close())
        return made

    with capture:
        run(replace(case, step=step, optimizer=optimizer), mesh_of(ctx, name), subject())
    assert len(found) > 1
    return list(dict.fromkeys(found[-1]))


@pytest.mark.parametrize("name", ["bf16", *long(*(name for name in _NAMES if name != "bf16"))])
@on_device(2)
def test_a_steady_step_may_be_captured_unless_the_host_waits_in_it(ctx: RankContext, name: str) -> None:
    found = broken_in_a_step(ctx, name)
    if any(each in name for each in _WAITING):
        assert any(what.startswith("the host waits") for what in found), found
    else:
        assert found == []


@on_device(2)
def test_a_stream_that_nothing_waits_for_is_noticed(ctx: RankContext) -> None:
    with mock.patch.object(AcceleratorStreams, "compute_after_reduce"):
        (found,) = broken_in_a_step(ctx, "bf16")
    assert found.startswith("the capture ends before its stream has waited for others")


@on_device(1)
def test_make_gpu_says_what_a_capture_may_not_contain_and_replays_after_the_first(ctx: RankContext) -> None:
    on, x, steps = Simulated(), torch.ones(4, device=device.DEVICE), []
    with pytest.raises(RuntimeError, match="the capture failed: the host waits: item"):
        on.captured(lambda: bool(x[0] > 0) and None)
    replay = on.captured(lambda: steps.append(x.sum()))
    assert len(steps) == 1
    replay()
    assert len(steps) == 1
    replay()
    assert len(steps) == 2
