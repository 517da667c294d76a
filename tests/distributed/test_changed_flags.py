"""``requires_grad`` that changes between a forward and its backward. ``tests/fuzz/passes.py`` draws more programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import fully_shard
from tests.distributed.support import DIM, batch, seeded
from tests.fuzz import passes
from tests.harness.distributed import RankContext, distributed


@pytest.mark.ci
@distributed(2)
def test_programs_with_changes_between_passes_are_those_of_the_plain_model(ctx: RankContext) -> None:
    assert passes.check(ctx, range(25)) == {}


@pytest.mark.long
@pytest.mark.parametrize("first", range(25, 325, 50))
@distributed(2, timeout_s=120)
def test_300_programs_with_changes_between_passes(ctx: RankContext, first: int) -> None:
    assert passes.check(ctx, range(first, first + 50)) == {}


class _Policy(nn.Module):
    """A base layer with an adapter, inside a root with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(DIM, DIM)
        self.base, self.adapter = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)
        self.entry.requires_grad_(False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor, uses_adapter: bool = True) -> Tensor:
        x = self.entry(x)
        return self.base(x) + self.adapter(x) if uses_adapter else self.base(x)


def _averaged(param: Tensor) -> Tensor:
    assert param.grad is not None
    dist.all_reduce(param.grad)
    return param.grad / dist.get_world_size()


@pytest.mark.parametrize("adapter_is_unit", [False, True])
@pytest.mark.parametrize("reshard", [None, True, False])
@distributed(2)
def test_reference_forward_with_the_adapter_off_keeps_the_policys_gradients(
    ctx: RankContext, reshard: bool | None, adapter_is_unit: bool
) -> None:
    """As peft's ``disable_adapter()`` does it for DPO and GRPO."""
    plain, model = seeded(_Policy), seeded(_Policy)
    if adapter_is_unit:
        fully_shard(model.adapter, mesh=ctx.mesh_1d(), reshard_after_forward=reshard)
    fully_shard(model, mesh=ctx.mesh_1d(), reshard_after_forward=reshard)
    for seed in range(3):
        losses = []
        for each in (plain, model):
            policy = each(batch(seed))
            each.adapter.requires_grad_(False)
            with torch.no_grad():
                reference = each(batch(seed), uses_adapter=False)
            each.adapter.requires_grad_(True)
            loss = (policy - reference).square().mean() + policy.mean()
            loss.backward()
            losses.append(loss.detach())
        grad: Any = model.adapter.weight.grad
        torch.testing.assert_close(losses[1], losses[0])
        torch.testing.assert_close(grad.full_tensor(), _averaged(plain.adapter.weight))
        assert model.base.weight.grad is None
        plain.zero_grad()
        model.zero_grad()


@distributed(2)
def test_parameter_frozen_between_micro_batches_is_reduced_though_one_rank_did_not_use_it(ctx: RankContext) -> None:
    """What is reduced follows from flags, which all ranks share: one rank has no gradient of the adapter."""
    plain, model = seeded(_Policy), seeded(_Policy)
    for each in (plain, model):
        each.base.requires_grad_(True)
    fully_shard(model.adapter, mesh=ctx.mesh_1d())  # a unit by itself, in which this rank may have no gradient at all
    fully_shard(model, mesh=ctx.mesh_1d())
    model.set_ranks_may_differ(True)
    model.set_requires_gradient_sync(False)
    for each in (plain, model):
        each(batch(), uses_adapter=ctx.rank == 0).square().mean().backward()
        each.adapter.requires_grad_(False)
    model.set_requires_gradient_sync(True)
    for each in (plain, model):
        each(batch(1)).square().mean().backward()
    if ctx.rank == 1:
        plain.adapter.weight.grad = torch.zeros(DIM, DIM)
    for mine, expected in zip((model.base, model.adapter), (plain.base, plain.adapter), strict=True):
        grad: Any = mine.weight.grad
        torch.testing.assert_close(grad.full_tensor(), _averaged(expected.weight))
