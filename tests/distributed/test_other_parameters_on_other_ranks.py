"""Ranks that use other parameters of a unit: the mean over all ranks becomes the gradient on every one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.comm.offload import StagedOffloadPolicy
from tests.distributed.support import batch, seeded
from tests.harness.distributed import RankContext, distributed

DIM = 32


class Choosing(nn.Module):
    """Each pass takes one of several ways behind the trunk; one way is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(DIM, DIM)
        self.ways = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(5))

    def forward(self, x: Tensor, way: int) -> Tensor:
        return self.ways[way](torch.tanh(self.trunk(x)))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed": {"mp_policy": fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offloaded": {"offload_policy": StagedOffloadPolicy()},
}


def _losses(model: Any, rank: int, step: int) -> None:
    """Two microbatches: one way for each rank, and one that all of them take."""
    for microbatch, way in enumerate((rank % 4 if step == 0 else (rank + 1) % 4, step)):
        model(batch(seed=10 * rank + 2 * step + microbatch), way).float().square().mean().backward()


def _expected(world_size: int, step: int) -> list[Tensor | None]:
    models = [seeded(Choosing) for _ in range(world_size)]
    for rank, model in enumerate(models):
        _losses(model, rank, step)
    found = zip(*([parameter.grad for parameter in model.parameters()] for model in models), strict=True)
    sums = [[grad for grad in grads if grad is not None] for grads in found]
    return [torch.stack(grads).sum(0) / world_size if grads else None for grads in sums]


@pytest.mark.parametrize("setting", SETTINGS)
@distributed(2, 4)
def test_every_rank_ends_with_the_mean(ctx: RankContext, setting: str) -> None:
    mesh = ctx.mesh_1d() if ctx.world_size == 2 else ctx.mesh_2d(2, 2)
    model = fsdp2.fully_shard(seeded(Choosing), mesh=mesh, **SETTINGS[setting])
    model.set_ranks_may_differ(True)
    tolerance = 1e-6 if setting != "mixed" else 2e-3
    for step in range(2):
        _losses(model, ctx.rank, step)
        pairs = zip(model.named_parameters(), _expected(ctx.world_size, step), strict=True)
        for (name, parameter), expected in pairs:
            assert (parameter.grad is None) is (expected is None), (step, name)
            if expected is not None:
                found = parameter.grad.full_tensor()  # type: ignore[union-attr]
                assert torch.allclose(found.cpu(), expected.cpu(), atol=tolerance), (step, name)
        model.zero_grad()


@distributed(2)
def test_hooks_run_on_every_rank(ctx: RankContext) -> None:
    model = fsdp2.fully_shard(seeded(Choosing), mesh=ctx.mesh_1d())
    model.set_ranks_may_differ(True)
    called: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    model(batch(), ctx.rank).square().mean().backward()
    layers = ("trunk", "ways.0", "ways.1")
    assert sorted(called) == sorted(f"{layer}.{kind}" for layer in layers for kind in ("bias", "weight"))


@distributed(2)
def test_what_was_withheld_is_dropped_after_an_exception(ctx: RankContext) -> None:
    """The reduction has landed, but no rank has said yet who had a gradient."""
    model = fsdp2.fully_shard(seeded(Choosing), mesh=ctx.mesh_1d())
    model.set_ranks_may_differ(True)
    model.set_is_last_backward(False)
    model(batch(), ctx.rank).square().mean().backward()
    model.reset_iter_state()
    model.zero_grad()
    model.set_is_last_backward(True)
    model(batch(), 3).square().mean().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert grads["ways.3.weight"] is not None
    assert grads["ways.0.weight"] is None
    assert grads["ways.1.weight"] is None
