"""Programs on the simulated accelerator, whose gathers and reductions come late."""

from __future__ import annotations

import torch

from tests.accelerator import device
from tests.accelerator.other_suites import SCHEDULE
from tests.accelerator.support import prepare
from tests.fuzz.check import Verdict, check
from tests.fuzz.program import Program
from tests.harness.distributed import RankContext


def check_on_device(ctx: RankContext, programs: list[Program], *, with_torch: bool = True) -> list[Verdict]:
    """What a pool of ranks runs."""
    prepare()
    device.load().spoil_all_free()  # else values of an earlier run stand in for those that came too late
    device.schedule(**SCHEDULE)
    try:
        with torch.device(device.DEVICE):
            return check(ctx, programs, with_torch=with_torch)
    finally:
        device.load().drain()  # what other ranks may wait for
