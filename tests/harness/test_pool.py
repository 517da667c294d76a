"""The pool reports what goes wrong on which rank, and is fit for use afterwards."""

from __future__ import annotations

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.harness.distributed import RankContext
from tests.harness.pool import WorkerError, shared_pool

pytestmark = pytest.mark.long


def _rank_sum(ctx: RankContext, addend: int) -> int:
    value = torch.tensor(ctx.rank + addend)
    dist.all_reduce(value)
    return int(value)


def _raise_on_rank_1(ctx: RankContext) -> None:
    if ctx.rank == 1:
        raise ValueError("only here")
    dist.barrier()


def _hang_on_rank_1(ctx: RankContext) -> None:
    if ctx.rank == 1:
        time.sleep(60)


def _die_on_rank_0(ctx: RankContext) -> None:
    if ctx.rank == 0:
        os._exit(7)


def _abort_on_rank_1(ctx: RankContext) -> None:
    if ctx.rank == 1:
        os.abort()


def _make_groups(ctx: RankContext) -> int:
    for _ in range(30):
        dist.new_group()
    return os.getpid()


def _warn(ctx: RankContext) -> None:
    warnings.warn("unexpected", UserWarning, stacklevel=1)


def _process_id(ctx: RankContext) -> int:
    return os.getpid()


def test_ranks_stay_between_calls() -> None:
    assert shared_pool(2).run(_process_id) == shared_pool(2).run(_process_id)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_raise_on_rank_1, r"(?s)rank 1 of 2.*_raise_on_rank_1.*ValueError: only here.*waiting for the failed ones: 0"),
        (_die_on_rank_0, r"(?s)rank 0 of 2.*died with exit code 7"),
        (_abort_on_rank_1, r"(?s)rank 1 of 2.*died with exit code -6.*_abort_on_rank_1"),
        (_warn, r"(?s)rank 0, 1 of 2.*UserWarning: unexpected"),
    ],
)
def test_failure_names_rank_and_cause_and_the_pool_restarts(body, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        shared_pool(2).run(body)
    assert shared_pool(2).run(_rank_sum, addend=0) == [1, 1]


def test_hang_is_reported_with_the_stack_of_the_hanging_rank() -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 1 of 2: no answer within 1 s.*_hang_on_rank_1"):
        shared_pool(2).run(_hang_on_rank_1, timeout_s=1)
    assert shared_pool(2).run(_rank_sum, addend=0) == [1, 1]


def test_ranks_with_many_process_groups_are_replaced() -> None:
    """Idle groups take time from the tests that come after."""
    assert shared_pool(2).run(_make_groups) != shared_pool(2).run(_process_id)
