"""No gradient is lost through a cast that torch.autocast keeps until its region ends, as torch's loses some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.changes import assert_step_is_that_of
from tests.distributed.support import DIM, Stack, batch, seeded, shard
from tests.harness.distributed import RankContext, distributed


class _Net(Stack):
    """Blocks of two layers. ``checkpoints``: blocks run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(3)
        )
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.checkpoints else block(x)
        return self.exit(x)


def _loss(model: nn.Module, seed: int = 0) -> Tensor:
    return model(batch(seed)).float().square().mean()


def _evaluation_first(model: nn.Module) -> None:
    """As models that condition on their own output, or recycle it."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            earlier = model(batch(1))
        loss = _loss(model) + (model(batch(2)) - earlier).float().square().mean()
    loss.backward()


def _two_micro_batches(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        for seed in range(2):
            _loss(model, seed).backward()


def _checkpointed(model: nn.Module) -> None:
    model.checkpoints = True
    with torch.autocast("cpu", torch.bfloat16):
        _loss(model).backward()
    model.checkpoints = False


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("backward", [_evaluation_first, _two_micro_batches, _checkpointed])
@distributed(2)
def test_no_gradient_is_lost_in_one_autocast_region(
    ctx: RankContext, backward: Callable[[Any], None], reshard: bool
) -> None:
    model, reference = shard(ctx, seeded(_Net), reshard_after_forward=reshard), seeded(_Net)
    for _ in range(2):
        for each in (model, reference):
            backward(each)
        for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert param.grad is not None, name
            assert torch.allclose(param.grad.full_tensor(), expected.grad, rtol=0.02, atol=1e-3), name
        for each in (model, reference):
            each.zero_grad()
    assert_step_is_that_of(model, reference)  # nothing is left for a later step
