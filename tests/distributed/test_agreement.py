"""Ranks whose models differ are told so before they would hang, all of them alike, and can go on once mended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from tests.distributed.support import DIM, Stack, batch, same_on_all_ranks, seeded, shard, sharded, step
from tests.harness.distributed import RankContext
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of


def _wider(model: Stack) -> None:
    model.blocks[1].linear = nn.Linear(DIM, DIM, bias=False)


def _frozen(model: Stack) -> None:
    model.blocks[0].linear.bias.requires_grad_(False)


def _longer(model: Stack) -> None:
    model.blocks.append(seeded(Stack).blocks[0])


CHANGES: dict[str, Callable[[Stack], None]] = {
    "other shapes": _wider,
    "other trainable parameters": _frozen,
    "other lengths": _longer,
}


@pytest.mark.parametrize("name", CHANGES)
@golden_on_ranks()
def test_models_that_differ_between_ranks_are_refused(ctx: RankContext, name: str) -> str:
    model = seeded(Stack)
    if ctx.rank == ctx.world_size - 1:
        CHANGES[name](model)
    return error_of(lambda: step(shard(ctx, model)))


@golden_on_ranks(world_size=4)
def test_a_difference_on_one_replica_is_known_to_all(ctx: RankContext) -> str:
    model = seeded(Stack)
    if ctx.rank == 2:
        _frozen(model)
    fsdp2.fully_shard(model, mesh=ctx.mesh_2d(2, 2))
    return error_of(lambda: step(model))


def _mended(ctx: RankContext) -> list[float]:
    model = sharded(ctx)
    if ctx.rank == 1:
        model.blocks[2].linear.bias.requires_grad_(False)
    error_of(lambda: step(model))
    model.requires_grad_(True)
    return [step(model).item(), step(seeded(Stack)).item()]


def test_training_goes_on_once_the_ranks_agree() -> None:
    loss, expected = same_on_all_ranks(_mended)
    assert loss == pytest.approx(expected)


def _collectives_of_a_step(ctx: RankContext, ranks_may_differ: bool) -> list[int]:
    model, calls = sharded(ctx), []
    model.set_ranks_may_differ(ranks_may_differ)
    original = dist.all_reduce

    def counting(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> Any:
        if op is dist.ReduceOp.MIN:
            calls.append(tensor)
        return original(tensor, op, **kwargs)

    dist.all_reduce = counting
    try:
        found = []
        for _ in range(2):
            step(model)
            found.append(len(calls))
        for _ in range(2):
            with torch.no_grad():
                model(batch())
            found.append(len(calls))
        return found
    finally:
        dist.all_reduce = original


@pytest.mark.parametrize(("ranks_may_differ", "expected"), [(False, [2, 2, 2, 2]), (True, [3, 3, 4, 4])])
def test_ranks_compare_once(ranks_may_differ: bool, expected: list[int]) -> None:
    """Their units, and how the root is called; and where they may differ, what the first forward with gradients used,
    and the first without."""
    assert same_on_all_ranks(_collectives_of_a_step, ranks_may_differ=ranks_may_differ) == expected
