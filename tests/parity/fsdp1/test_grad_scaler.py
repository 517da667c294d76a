"""``ShardedGradScaler`` with the class's parameters: as torch's scaler with torch's class."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.sharded_grad_scaler

import fsdp2.fsdp1
from tests.parity.fsdp1.fronts import FULL_SHARD, NO_SHARD, Front, as_torchs, with_ours, wrapped_mlp


def scaler_of(front: Front) -> Any:
    names = fsdp2.fsdp1 if front.is_ours else torch.distributed.fsdp.sharded_grad_scaler
    return names.ShardedGradScaler("cpu", init_scale=8.0, growth_interval=2)


def local(tensors: Any) -> list[torch.Tensor]:
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@as_torchs(2, 4, exact=False, both_modes=True)
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(front: Front, strategy: Any) -> Any:
    model = wrapped_mlp(front, sharding_strategy=strategy)
    made, scaler = torch.optim.AdamW(model.parameters(), lr=0.1), scaler_of(front)
    found = []
    for step in range(5):
        loss = model(front.batch(3, 8, seed=step)).square().mean()
        scaler.scale(loss).backward()
        if step == 2 and front.ctx.rank == front.ctx.world_size - 1:
            grads = local(param.grad for param in model.parameters())
            next(grad for grad in grads if grad.numel()).view(-1)[0] = math.inf
        scaler.unscale_(made)
        scaler.step(made)
        scaler.update()
        made.zero_grad()
        found += [loss.detach(), torch.tensor(scaler.get_scale())]
    return found


@with_ours(2, both_modes=True)
def test_ranks_without_gradients_join(front: Front) -> None:
    # With torch's scaler, the other ranks would wait for this one, since an operator on DTensors communicates.
    model = wrapped_mlp(front)
    made, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of(front)
    scaler.scale(model(front.batch(3, 8)).sum()).backward()
    if front.ctx.rank == 0:
        made.zero_grad()
    else:
        local(param.grad for param in model.parameters())[-1].fill_(math.nan)
    before = [param.clone() for param in local(model.parameters())]
    scaler.step(made)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(map(torch.equal, before, local(model.parameters())))
