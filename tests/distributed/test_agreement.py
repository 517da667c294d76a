"""Ranks whose models differ are told so before they would hang, all of them alike, and can go on once mended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from tests.distributed.changes import evaluate
from tests.distributed.support import DIM, Stack, seeded, shard, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of

CHANGES: dict[str, Callable[[Any], object]] = {
    "other shapes": lambda model: setattr(model.blocks[1], "linear", nn.Linear(DIM, DIM, bias=False)),
    "other trainable parameters": lambda model: model.blocks[0].linear.bias.requires_grad_(False),
    "other lengths": lambda model: model.blocks.append(seeded(Stack).blocks[0]),
}


@pytest.mark.parametrize("name", CHANGES)
@golden_on_ranks()
def test_models_that_differ_between_ranks_are_refused(ctx: RankContext, name: str) -> str:
    """Training goes on once the ranks agree, also where one has made more units than others."""
    model = seeded(Stack)
    if ctx.rank == ctx.world_size - 1:
        CHANGES[name](model)
    error = error_of(lambda: step(shard(ctx, model)))
    mended = model.requires_grad_(True) if name == "other trainable parameters" else sharded(ctx)
    assert step(mended).item() == pytest.approx(step(seeded(Stack)).item())
    return error


@golden_on_ranks(world_size=4)
def test_a_difference_on_one_replica_is_known_to_all(ctx: RankContext) -> str:
    model = seeded(Stack)
    if ctx.rank == 2:
        model.blocks[0].linear.bias.requires_grad_(False)
    fsdp2.fully_shard(model, mesh=ctx.mesh_2d(2, 2))
    return error_of(lambda: step(model))


@pytest.mark.parametrize(("ranks_may_differ", "expected"), [(False, [2, 2, 2, 2]), (True, [3, 3, 4, 4])])
@distributed(2)
def test_ranks_compare_once(ctx: RankContext, ranks_may_differ: bool, expected: list[int]) -> None:
    """Their units, and how the root is called; and where they may differ, what the first forward with gradients used,
    and the first without."""
    model, calls, found = sharded(ctx), [], []
    model.set_ranks_may_differ(ranks_may_differ)
    original = dist.all_reduce

    def counting(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> Any:
        calls.extend([tensor] if op is dist.ReduceOp.MIN else [])
        return original(tensor, op, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counting)
        for use in (step, step, evaluate, evaluate):
            use(model)
            found.append(len(calls))
    assert found == expected
