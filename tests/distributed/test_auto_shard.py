"""``auto_shard``: what a policy chooses becomes a unit, as if ``fully_shard`` had been called on each."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

import fsdp2
from fsdp2.runtime.root import units_under
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Block


def units(model: nn.Module) -> list[str]:
    return [name for name, _ in units_under(model)]


@distributed(2)
def test_units_are_what_the_policy_chooses(ctx: RankContext) -> None:
    mesh = ctx.mesh_1d()
    assert units(fsdp2.auto_shard(MLP(2), ModuleWrapPolicy({Block}), mesh=mesh)) == ["", "blocks.0", "blocks.1"]
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=1)
    assert "blocks.0.up" in units(fsdp2.auto_shard(MLP(2), by_size, mesh=mesh))
    model = MLP(2)
    policy = CustomPolicy(lambda module: {"reshard_after_forward": False} if module is model.blocks[1] else False)
    assert units(fsdp2.auto_shard(model, policy, mesh=mesh)) == ["", "blocks.1"]


@distributed(2)
def test_it_trains_as_if_sharded_by_hand(ctx: RankContext) -> None:
    losses = []
    for by_policy in (True, False):
        torch.manual_seed(0)
        model = MLP(2)
        policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16)
        if by_policy:
            fsdp2.auto_shard(model, ModuleWrapPolicy({Block}), mesh=ctx.mesh_1d(), mp_policy=policy)
        else:
            for module in (*model.blocks, model):
                fsdp2.fully_shard(module, mesh=ctx.mesh_1d(), mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(torch.ones(2, model.entry.in_features)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:2] == losses[2:]


def test_a_policy_that_chooses_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"chooses no module inside this Sequential, .* classes Linear, ReLU\. Choose"):
        fsdp2.auto_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ModuleWrapPolicy({nn.LayerNorm}))
    with pytest.raises(TypeError, match="the wrapping policy is a set, expected a policy"):
        fsdp2.auto_shard(nn.Sequential(nn.Linear(2, 2)), {nn.Linear})
