"""In a steady step the host never waits for the simulated accelerator, but where it is to read what was copied."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2.planner import measure
from tests.accelerator import device
from tests.accelerator.cases import CASES, mesh_of, names, run
from tests.accelerator.support import on_device
from tests.harness.distributed import RankContext
from tests.harness.runtimes import subject
from tests.harness.training import Step

# I12: at the end of a pass, the host waits for copies of shards and of gradients.
_OF_OFFLOADED = "event.synchronize (core.comm.streams.wait_on_cpu)"

_OF_STEPS_ON_HOST = _OF_OFFLOADED + device.IN_HOST_THREAD


def syncs_of_a_step(ctx: RankContext, name: str) -> dict[str, int]:
    """What makes the host wait from the beginning of the last step on, its optimizer included."""
    case = CASES[name]

    def step(step: Step, model: Any) -> list[Tensor]:
        device.host_syncs.clear()
        return case.step(step, model)

    noted: list[str] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = case.optimizer(parameters)
        made.register_step_post_hook(lambda *_: noted.__setitem__(slice(None), device.host_syncs))
        return made

    run(replace(case, step=step, optimizer=optimizer), mesh_of(ctx, name), subject())
    return dict(Counter(noted))


# What the host must know before a step ends, or before it writes anything, and only the other ranks know.
_OF_UNUSED = {"copy to the host (extras.ranks_may_differ._anywhere)": 1}  # whether any rank has a gradient
_OF_MATRICES = {"copy to the host (optim.matrices.circles.agreed)": 1}  # that, and whether all ranks have succeeded
_OF_CASES = {
    "partly used, ranks may differ": _OF_UNUSED,
    "muon": _OF_MATRICES,
    "muon, gradients on rank 0 alone": _OF_MATRICES,
    "mirrored": {"copy to the host (checkpoint.mirrored.run)": 12},  # in its thread
}


@pytest.mark.parametrize("name", names(2))
@on_device(2)
def test_host_does_not_wait_in_a_steady_step(ctx: RankContext, name: str) -> None:
    found = syncs_of_a_step(ctx, name)
    if name == "offloaded, not pinned":
        return  # the user has chosen to wait
    if "offloaded" in name:
        assert found.pop(_OF_OFFLOADED) > 0
    if "stepped on the host" in name:
        found.pop(_OF_STEPS_ON_HOST, None)  # their thread's, at some time before the end of the step
    assert found == _OF_CASES.get(name, {}), found


@on_device(2)
def test_host_waits_for_what_it_measures(ctx: RankContext) -> None:
    x = torch.ones(4, device=device.DEVICE)
    measure._seconds(lambda: x.add_(1), x.device)
    assert torch.accelerator.current_stream().query()


@pytest.mark.parametrize("name", names(4))
@on_device(4)
def test_host_does_not_wait_in_a_steady_step_with_4_ranks(ctx: RankContext, name: str) -> None:
    found = syncs_of_a_step(ctx, name)
    assert found == {}, found
