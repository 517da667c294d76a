"""Ranks whose models differ are told so before they would hang, all of them alike, and can go on once mended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fsdp2
from tests.distributed.support import DIM, Stack, batch, same_on_all_ranks, seeded, shard, sharded, step
from tests.harness.distributed import RankContext
from tests.harness.messages import error_of


def _wider(model: Stack) -> None:
    model.blocks[1].linear = nn.Linear(DIM, DIM, bias=False)


def _frozen(model: Stack) -> None:
    model.blocks[0].linear.bias.requires_grad_(False)


def _longer(model: Stack) -> None:
    model.blocks.append(seeded(Stack).blocks[0])


def _refused(ctx: RankContext, change: Callable[[Stack], None]) -> str:
    model = seeded(Stack)
    if ctx.rank == ctx.world_size - 1:
        change(model)
    return error_of(lambda: step(shard(ctx, model)))


def test_models_of_other_shapes_are_refused() -> None:
    assert_expected_inline(
        same_on_all_ranks(_refused, change=_wider),
        """\
ScheduleError: FSDPStack is not the same on all ranks. The ranks would hang, or add wrong gradients.
First difference:
  rank 0: parameter 'blocks.1.linear.bias' of unit 'blocks.1': torch.float32 (32,) trainable, dim 0
cut in 2, gathered in torch.float32, reduced in torch.float32
  rank 1: unit 'blocks.2', after forward: reshard
Build the same model on all ranks, with the same calls of fully_shard and the same requires_grad.""",
    )


def test_models_of_which_other_parameters_are_trained_are_refused() -> None:
    assert_expected_inline(
        same_on_all_ranks(_refused, change=_frozen),
        """\
ScheduleError: FSDPStack is not the same on all ranks. The ranks would hang, or add wrong gradients.
First difference:
  rank 0: parameter 'blocks.0.linear.bias' of unit 'blocks.0': torch.float32 (32,) trainable, dim 0
cut in 2, gathered in torch.float32, reduced in torch.float32
  rank 1: parameter 'blocks.0.linear.bias' of unit 'blocks.0': torch.float32 (32,) frozen, dim 0 cut
in 2, gathered in torch.float32, reduced in torch.float32
Build the same model on all ranks, with the same calls of fully_shard and the same requires_grad.""",
    )


def test_models_of_other_lengths_are_refused() -> None:
    assert_expected_inline(
        same_on_all_ranks(_refused, change=_longer),
        """\
ScheduleError: FSDPStack is not the same on all ranks. The ranks would hang, or add wrong gradients.
First difference:
  rank 0: nothing more
  rank 1: unit 'blocks.3', after forward: reshard
Build the same model on all ranks, with the same calls of fully_shard and the same requires_grad.""",
    )


def _on_a_replica(ctx: RankContext) -> str:
    model = seeded(Stack)
    if ctx.rank == 2:
        _frozen(model)
    fsdp2.fully_shard(model, mesh=ctx.mesh_2d(2, 2))
    return error_of(lambda: step(model))


def test_a_difference_on_one_replica_is_known_to_all() -> None:
    assert_expected_inline(
        same_on_all_ranks(_on_a_replica, world_size=4),
        """\
ScheduleError: FSDPStack is not the same on all ranks. The ranks would hang, or add wrong gradients.
First difference:
  ranks 0, 1, 3: parameter 'blocks.0.linear.bias' of unit '(root)': torch.float32 (32,) trainable,
dim 0 cut in 2, gathered in torch.float32, reduced in torch.float32
  rank 2: parameter 'blocks.0.linear.bias' of unit '(root)': torch.float32 (32,) frozen, dim 0 cut
in 2, gathered in torch.float32, reduced in torch.float32
Build the same model on all ranks, with the same calls of fully_shard and the same requires_grad.""",
    )


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


def _collectives_of_a_step(ctx: RankContext) -> list[int]:
    model, calls = sharded(ctx), []
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


def test_ranks_compare_once() -> None:
    """Their units, and what the first forward with gradients used, and the first without."""
    assert same_on_all_ranks(_collectives_of_a_step) == [2, 2, 3, 3]
