"""The pool reports what goes wrong on which rank, and is fit for use afterwards."""

from __future__ import annotations

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.harness.distributed import RankContext
from tests.harness.patience import MOST_S, patient
from tests.harness.pool import CALL_TIMEOUT_S, WorkerError, shared_pool
from tests.memory_errors import allocator

pytestmark = pytest.mark.long


def _rank_sum(ctx: RankContext, addend: int) -> int:
    value = torch.tensor(ctx.rank + addend)
    dist.all_reduce(value)
    return int(value)


def _go_wrong(ctx: RankContext, how: str) -> None:
    if how == "warns":
        warnings.warn("unexpected", UserWarning, stacklevel=1)
    if ctx.rank == 1:
        match how:
            case "raises":
                raise ValueError("only here")
            case "hangs":
                time.sleep(60)
            case "exits":
                os._exit(7)
            case "aborts":
                os.abort()
    if how == "raises":
        dist.barrier()


def _make_groups(ctx: RankContext) -> int:
    for _ in range(30):
        dist.new_group()
    return os.getpid()


def _process_id(ctx: RankContext) -> int:
    return os.getpid()


def test_ranks_stay_between_calls() -> None:
    assert shared_pool(2).run(_process_id) == shared_pool(2).run(_process_id)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", r"rank 1 of 2.*_go_wrong.*ValueError: only here.*waiting for the failed ones: 0"),
        ("exits", r"rank 1 of 2.*died with exit code 7"),
        ("aborts", r"rank 1 of 2.*died with exit code -6.*_go_wrong"),
        ("warns", r"rank 0, 1 of 2.*UserWarning: unexpected"),
        ("hangs", r"rank 1 of 2: no answer within 1 s.*_go_wrong"),
    ],
)
def test_failure_names_rank_and_cause_and_the_pool_restarts(how: str, message: str) -> None:
    timeout_s = 1 if how == "hangs" else CALL_TIMEOUT_S
    with pytest.raises(WorkerError, match=f"(?s){message}"):
        shared_pool(2).run(_go_wrong, timeout_s, how=how)
    assert shared_pool(2).run(_rank_sum, addend=0) == [1, 1]


def test_ranks_with_many_process_groups_are_replaced() -> None:
    """Idle groups take time from the tests that come after."""
    assert shared_pool(2).run(_make_groups) != shared_pool(2).run(_process_id)


def _sleep(ctx: RankContext, seconds: float) -> None:
    time.sleep(seconds)


def test_ranks_may_take_longer_where_programs_outnumber_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (20.0 * (os.cpu_count() or 1), 0.0, 0.0))
    shared_pool(2).run(_sleep, 0.2, seconds=1.0)
    assert patient(120.0) == MOST_S * allocator.patience()
    assert patient(1800.0) == 1800.0 * allocator.patience()
