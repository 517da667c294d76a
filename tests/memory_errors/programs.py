"""What a hunt runs besides the tests. The only file here that knows where programs come from."""

from __future__ import annotations

from tests.harness.runtimes import SUBJECT_IS_TORCH
from tests.harness.worker import RankContext
from tests.programs.check import check
from tests.programs.drawn import draw


def run_programs(ctx: RankContext, seeds: list[int]) -> None:
    """Train the random programs of ``seeds`` under the runtime that is tested, and unsharded. What they compute is
    another test's concern. torch's runtime hangs if ranks use different parameters, so it does not get such programs.
    """
    programs = [draw(seed, ctx.world_size) for seed in seeds]
    if SUBJECT_IS_TORCH:
        programs = [program for program in programs if not program.ranks_differ]
    check(ctx, programs, with_torch=False)
