"""Gradient scalers: a gradient that overflowed on one rank skips the step on all of them, as under torch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP
from tests.harness.runtimes import Runtime, oracle, subject
from tests.harness.training import Step, sgd, sharded as shard_with
from tests.parity.setups import SETUPS, Setup, setups, whole

NUM_STEPS = 4
OVERFLOWS_AT = 1


def _scaler(sharded: bool) -> Any:
    if sharded:
        return ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=2, process_group=dist.group.WORLD)
    return GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def _overflow_in_one_shard(model: Any) -> None:
    """The other ranks have nothing but finite gradients. Replicas agree, as after a reduction."""
    grad = model.exit.weight.grad
    if grad.device_mesh.get_local_rank(grad.device_mesh.ndim - 1) == 0:
        grad.to_local()[0, 0] = float("inf")


def _train(
    ctx: RankContext, runtime: Runtime, setup: Setup, sharded: bool, where: str, clip: bool = False, fused: bool = False
) -> list[Any]:
    """Per step: the scale, and the parameters. In step 1 the loss of one rank overflows, or one shard's gradient."""
    model = setup.sharded(runtime, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) if fused else sgd(model.parameters())
    parameters, scaler = list(model.parameters()), _scaler(sharded)
    records = []
    for index in range(NUM_STEPS):
        overflows = index == OVERFLOWS_AT
        scale = float("inf") if overflows and where == "loss" and ctx.rank == ctx.world_size - 1 else 1.0
        scaler.scale(Step(index, ctx.rank, runtime).loss(model) * scale).backward()
        if overflows and where == "shard":
            _overflow_in_one_shard(model)
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, 0.1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Found a non-scalar tensor")  # ShardedGradScaler's own flag
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        records.append([scaler.get_scale(), whole(parameters)])
    return records


def _check_skips(records: list[Any]) -> None:
    before, skipped, after = records[OVERFLOWS_AT - 1 : OVERFLOWS_AT + 2]
    assert skipped[0] == before[0] / 2
    compare_values("parameters of the step that overflowed", skipped[1], before[1])
    assert not any(torch.equal(a, b) for a, b in zip(after[1], skipped[1], strict=True))


def _check(ctx: RankContext, *args: Any, **options: Any) -> None:
    found = _train(ctx, subject(), *args, **options)
    _check_skips(found)
    if ctx.world_size == 2:
        compare_values("against torch", found, _train(ctx, oracle(), *args, **options))


@pytest.mark.parametrize("where", ["loss", "shard"])
@pytest.mark.parametrize("sharded", [False, True], ids=["GradScaler", "ShardedGradScaler"])
@setups("uneven", "hsdp")
@distributed(2, 4)
def test_overflow_on_one_rank_skips_the_step_on_all(ctx: RankContext, setup: str, sharded: bool, where: str) -> None:
    _check(ctx, SETUPS[setup], sharded, where)


FP16 = {"param_dtype": torch.float16, "reduce_dtype": torch.float32}
WAYS: dict[str, tuple[Setup, bool, str, dict[str, bool]]] = {
    "unscaled before they are clipped": (SETUPS["uneven"], False, "shard", {"clip": True}),
    "fused, which unscales by itself": (SETUPS["uneven"], False, "shard", {"fused": True}),
    "in float16": (Setup(MLP, shard=shard_with(policy=FP16)), False, "loss", {}),
}


@pytest.mark.every_case
@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_scaled_gradients_are_unscaled(ctx: RankContext, way: str) -> None:
    *args, options = WAYS[way]
    _check(ctx, *args, **options)
