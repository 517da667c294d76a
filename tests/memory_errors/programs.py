"""What a hunt runs besides the tests. The only file here that knows where programs come from."""

from __future__ import annotations

from tests.fuzz.check import check
from tests.fuzz.program import draw
from tests.harness.worker import RankContext


def run_programs(ctx: RankContext, seeds: list[int]) -> None:
    """Train the random programs of ``seeds`` under torch's runtime, ours, and unsharded. What they compute is another
    test's concern."""
    check(ctx, [draw(seed, ctx.world_size) for seed in seeds])
