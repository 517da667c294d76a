"""What a hunt runs besides the tests. The only file here that knows where programs come from."""

from __future__ import annotations

from tests.harness.worker import RankContext
from tests.parity.test_random_programs import _check


def run_programs(ctx: RankContext, seeds: list[int]) -> None:
    """Train the random programs of ``seeds`` under torch's runtime, ours, and unsharded."""
    for seed in seeds:
        _check(ctx, range(seed, seed + 1))
