"""``ShardedGradScaler`` with the class's parameters: as torch's scaler with torch's class."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.sharded_grad_scaler

import fsdp2.fsdp1
from tests.harness.distributed import RankContext, distributed
from tests.parity.fsdp1.fronts import Front, as_torchs, batch
from tests.parity.fsdp1.test_training import FULL, NO_SHARD, wrapped_mlp

OURS = functools.partial(Front, names=fsdp2.fsdp1)
both_modes = pytest.mark.parametrize("use_orig_params", [True, False])


def scaler_of(front: Front, **options):
    names = fsdp2.fsdp1 if front.is_ours else torch.distributed.fsdp.sharded_grad_scaler
    return names.ShardedGradScaler("cpu", init_scale=8.0, growth_interval=2, **options)


@both_modes
@pytest.mark.parametrize("strategy", [FULL, NO_SHARD])
@as_torchs(2, 4, exact=False)
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(front: Front, strategy, use_orig_params) -> Any:
    model = wrapped_mlp(front, sharding_strategy=strategy, use_orig_params=use_orig_params)
    made = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = scaler_of(front)
    found = []
    for step in range(5):
        loss = model(batch(front.ctx, 3, 8, seed=step)).square().mean()
        scaler.scale(loss).backward()
        if step == 2 and front.ctx.rank == front.ctx.world_size - 1:
            grads = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters() if p.grad is not None]
            next(grad for grad in grads if grad.numel()).view(-1)[0] = math.inf
        scaler.unscale_(made)
        scaler.step(made)
        scaler.update()
        made.zero_grad()
        found += [loss.detach(), torch.tensor(scaler.get_scale())]
    return found


@both_modes
@distributed(2)
def test_ranks_without_gradients_join(ctx: RankContext, use_orig_params) -> None:
    # With torch's scaler, the other ranks would wait for this one, since an operator on DTensors communicates.
    model = wrapped_mlp(OURS(ctx), use_orig_params=use_orig_params)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = scaler_of(OURS(ctx))
    scaler.scale(model(batch(ctx, 3, 8)).sum()).backward()
    if ctx.rank == 0:
        made.zero_grad()
    else:
        grads = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
        grads[-1].fill_(math.nan)
    before = [getattr(p, "_local_tensor", p).clone() for p in model.parameters()]
    scaler.step(made)
    scaler.update()
    assert scaler.get_scale() == 4.0
    for value, param in zip(before, model.parameters(), strict=True):
        assert torch.equal(value, getattr(param, "_local_tensor", param))
