"""``reduce_wire``: gradients travel in another format than that of their sum.

What each rank should get is computed by hand from the gradients that all ranks have computed unsharded, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fsdp2 import MixedPrecisionPolicy
from tests.distributed.support import Scaled, seeded, shard_each
from tests.harness.distributed import RankContext, distributed

BF16, FP32 = torch.bfloat16, torch.float32


class Uneven(Scaled):
    """Rows that no number of ranks divides, fewer rows than ranks, a frozen weight, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Sequential(nn.Linear(32, 7), nn.Linear(7, 3), nn.Linear(3, 32))
        self.middle[1].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.middle(x)


def _loss(model: nn.Module, seed: int) -> Tensor:
    device, dtype = next(model.parameters()).device, torch.get_default_dtype()
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return model(x).float().square().mean()


def _all_gradients(model: nn.Module, seed: int, compute: torch.dtype) -> list[list[Tensor | None]]:
    """The gradients of every rank's own batch, by rank, as autograd leaves them."""
    found = []
    for rank in range(dist.get_world_size()):
        alone = copy.deepcopy(model).to(compute)
        device = next(model.parameters()).device
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed + rank)).to(device, compute)
        alone(x).float().square().mean().backward()
        found.append([param.grad for param in alone.parameters()])
    return found


def _cast(values: Tensor) -> Tensor:
    return values.to(BF16).to(FP32)


def _in_order(values: Sequence[Tensor]) -> Tensor:
    total = values[0].clone()
    for each in values[1:]:
        total += each
    return total


def _expected(grads: Sequence[Tensor], replicas: int) -> Tensor:
    """The mean over ``grads``, of all ranks, that travel in bfloat16; first inside each of the ``replicas``."""
    size = len(grads) // replicas
    sums = [grads[start : start + size] for start in range(0, len(grads), size)]
    if size > 1:
        sums = [[_cast(each) for each in inside] for inside in sums]
    totals = [_in_order([each.to(FP32) for each in inside]) for inside in sums]
    total = totals[0] if replicas == 1 else _cast(_in_order([_cast(each) for each in totals]))
    return total / len(grads)


@dataclass(frozen=True)
class Case:
    """``replicas``: of how many; 0 for one per rank. ``seeds``: of a backward each. ``keeps``: the first ones without
    communication."""

    replicas: int = 1
    compute: torch.dtype = FP32
    dim: int = 0
    seeds: tuple[int, ...] = (0,)
    keeps: bool = False


CASES = {
    "fp32": Case(),
    "bf16": Case(compute=BF16),
    "hsdp": Case(replicas=2),
    "hsdp bf16": Case(replicas=2, compute=BF16),
    "replicas only": Case(replicas=0),
    "columns": Case(dim=1),
    "reduced twice": Case(seeds=(0, 10)),
    "kept, reduced once": Case(seeds=(0, 10), keeps=True),
}


def _shard(ctx: RankContext, model: Any, case: Case, wire: Any = BF16) -> Any:
    replicas = case.replicas or ctx.world_size
    mesh = ctx.mesh_1d() if case.replicas == 1 else ctx.mesh_2d(replicas, ctx.world_size // replicas)
    policy = MixedPrecisionPolicy(case.compute, FP32, reduce_wire=wire)
    place = lambda param: Shard(case.dim % max(param.dim(), 1))  # noqa: E731
    return shard_each(*model.blocks, model, mesh=mesh, mp_policy=policy, shard_placement_fn=place)


@pytest.mark.parametrize("case", CASES)
@distributed(2, 4)
def test_sums_are_those_of_cast_gradients_in_rank_order(ctx: RankContext, case: str) -> None:
    asked = CASES[case]
    whole = seeded(Uneven).to(ctx.mesh_1d().device_type)
    model = _shard(ctx, copy.deepcopy(whole), asked)
    for seed in asked.seeds:
        model.set_requires_gradient_sync(not asked.keeps or seed == asked.seeds[-1])
        _loss(model, seed + ctx.rank).backward()
    by_pass = [_all_gradients(whole, seed, asked.compute) for seed in asked.seeds]
    for index, (name, param) in enumerate(model.named_parameters()):
        if not param.requires_grad:
            assert param.grad is None
            continue
        replicas = ctx.world_size if param.dim() == 0 else asked.replicas or ctx.world_size
        each = [[of_rank[index] for of_rank in of_all] for of_all in by_pass]
        if asked.keeps:  # autograd adds in fp32, since that is the dtype of the reduction
            each = [[_in_order([grad.to(FP32) for grad in of_rank]) for of_rank in zip(*each, strict=True)]]
        expected = _in_order([_expected(grads, replicas) for grads in each])
        assert torch.equal(param.grad.full_tensor().cpu(), expected.cpu()), name


@distributed(1)
def test_one_rank_sends_and_rounds_nothing(ctx: RankContext) -> None:
    whole = seeded(Uneven)
    model = _shard(ctx, copy.deepcopy(whole), Case())
    _loss(model, 0).backward()
    _loss(whole, 0).backward()
    for found, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None)
        assert found.grad is None or torch.equal(found.grad.full_tensor(), expected.grad)
