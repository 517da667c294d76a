"""``whole_matrices`` on the simulated accelerator: messages come as late as streams let them, and values are the same.

Each wait of the exchange is needed: left out, some order of streams gives other values.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp2.optim import Muon, WholeMatrices, whole_matrices
from fsdp2.optim.matrices import Matrix
from tests.accelerator import device
from tests.accelerator.support import on_device
from tests.accelerator.test_left_out_waits import Wait, assert_noticed
from tests.harness.distributed import RankContext
from tests.harness.selection import in_ci

SCHEDULES: dict[str, dict[str, Any]] = {
    "late messages": {"late": ["all-to-all", "all-reduce"]},
    "compute first": {"first": "compute"},
    "side streams first": {"first": "side"},
    **{f"seed {seed}": {"seed": seed} for seed in range(1, 9)},
}
NUM_TENSORS, NUM_RUNS = 7, 3


def start(index: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(index), device="cpu")


def distributed(ctx: RankContext, index: int) -> DTensor:
    return distribute_tensor(start(index).to(device.DEVICE), ctx.mesh_1d(), [Shard(0)], src_data_rank=None)


def fn(whole: Tensor, _: Matrix) -> Tensor:
    return whole / (whole * whole).sum().sqrt()


def expected() -> list[Tensor]:
    found = [start(index) for index in range(NUM_TENSORS)]
    for _ in range(NUM_RUNS):
        found = [each * 1.5 for each in found]
        found = [each + fn(each, None) for each in found]  # type: ignore[arg-type]
    return found


def run(ctx: RankContext, **schedule: Any) -> list[Tensor]:
    """Compute writes the shards before each run, and reads the results behind it."""
    device.schedule(0)
    tensors = [distributed(ctx, index) for index in range(NUM_TENSORS)]
    plan = whole_matrices(tensors, bucket_nbytes=1)
    device.load().spoil_all_free()
    device.schedule(**schedule)
    for _ in range(NUM_RUNS):
        for each in tensors:
            each.to_local().mul_(1.5)
        for each, result in zip(tensors, plan.run(fn, tensors), strict=True):
            each.to_local().add_(result.to_local())
    return [each.to_local().cpu() for each in tensors]


def is_expected(ctx: RankContext, found: list[Tensor]) -> bool:
    rows = 8 // ctx.world_size
    mine = [each[ctx.rank * rows : (ctx.rank + 1) * rows] for each in expected()]
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, mine, strict=True))


@pytest.mark.parametrize("schedule", ["late messages", *in_ci(*list(SCHEDULES)[1:5])])
@on_device(2)
def test_values_do_not_depend_on_the_order_of_streams(ctx: RankContext, schedule: str) -> None:
    assert is_expected(ctx, run(ctx, **SCHEDULES[schedule]))


def step_with_a_gradient_on_rank_0(ctx: RankContext, **schedule: Any) -> list[Tensor]:
    """Whether rank 1 steps the parameter, it hears from rank 0 only."""
    device.schedule(0)
    param = torch.nn.Parameter(distributed(ctx, 0))
    optimizer = Muon([param], lr=1.0, ns_dtype=torch.float32)
    assert optimizer.plan.balance > 0
    if ctx.rank == 0:
        param.grad = torch.ones_like(param)
    device.schedule(**schedule)
    optimizer.step()
    assert isinstance(param.data, DTensor)
    return [param.detach().to_local().cpu()]


def steps_on_both_ranks(ctx: RankContext, found: list[Tensor]) -> bool:
    rows = 8 // ctx.world_size
    return not torch.allclose(found[0], start(0)[ctx.rank * rows : (ctx.rank + 1) * rows], atol=1e-3)


_EXCHANGE = "optim.matrices.exchange.Message"
RUNS = {
    Wait("gather_after_compute", f"{_EXCHANGE}.start", "run", "side streams first"): (run, is_expected),
    Wait("record", f"{_EXCHANGE}.start", "run", "late messages"): (run, is_expected),
    Wait("wait_here", f"{_EXCHANGE}.wait", "run", "late messages"): (run, is_expected),
    Wait("work", "optim.matrices.circles._reduced", "step", "late messages"): (
        step_with_a_gradient_on_rank_0,
        steps_on_both_ranks,
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("wait", RUNS, ids=str)
@on_device(2)
def test_wait_of_the_exchange_that_is_left_out_is_noticed(ctx: RankContext, wait: Wait) -> None:
    body, is_right = RUNS[wait]
    assert is_right(ctx, body(ctx, **SCHEDULES[wait.schedule]))
    with pytest.MonkeyPatch.context() as patch:
        if body is run:  # a message that comes too late may write into the memory of what ranks agree on
            patch.setattr(WholeMatrices, "agree", lambda self, failures, flags: list(flags))
        schedules = [SCHEDULES[wait.schedule], *SCHEDULES.values()]
        assert_noticed(ctx, wait, schedules, lambda **schedule: not is_right(ctx, body(ctx, **schedule)))
