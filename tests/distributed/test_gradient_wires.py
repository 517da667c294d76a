"""``reduce_wire``: gradients travel in another format than that of their sum.

What each rank should get is computed by hand from the gradients that all ranks have computed unsharded, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp2 import MixedPrecisionPolicy
from fsdp2.tensors import Int8Wire, load_wire_residuals, wire_residuals
from tests.distributed.support import Scaled, seeded, shard_each
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long

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


# Formats with blocks and error feedback

INT8 = Int8Wire(block_size=16)
NUM_BACKWARDS = 8


class _ByHand:
    """Reductions of one parameter of one replica, whose ranks each keep what their payloads have lost."""

    def __init__(self) -> None:
        self.residuals: dict[int, Tensor] = {}

    def mean(self, grads: Sequence[Tensor]) -> Tensor:
        """In the rows of the owners, with padding."""
        arrived = []
        for rank, grad in enumerate(grads):
            rows = -(-grad.size(0) // len(grads))
            whole = torch.zeros(len(grads) * rows, *grad.shape[1:], device=grad.device)
            whole[: grad.size(0)] = grad
            pieces = whole.view(len(grads), -1)
            padded = nn.functional.pad(pieces, (0, -pieces.size(1) % INT8.block_size))
            sent = padded + self.residuals.get(rank, torch.zeros_like(padded, dtype=BF16))
            arrived.append(INT8.fsdp_post_reduce_scatter(INT8.fsdp_pre_reduce_scatter(sent), FP32))
            self.residuals[rank] = (sent - arrived[-1]).to(BF16)
        total = _in_order(arrived)[:, : pieces.size(1)] / len(grads)
        return total.reshape(whole.shape)[: grads[0].size(0)]


@distributed(2, 4)
def test_blocks_are_those_of_each_gradient_and_what_they_lose_is_sent_later(ctx: RankContext) -> None:
    whole = seeded(Uneven).to(ctx.mesh_1d().device_type)
    model = _shard(ctx, copy.deepcopy(whole), Case(), INT8)
    by_hand = [_ByHand() for _ in whole.parameters()]
    for seed in (0, 10):
        model.zero_grad()
        _loss(model, seed + ctx.rank).backward()
        found = _all_gradients(whole, seed, FP32)
        for index, (name, param) in enumerate(model.named_parameters()):
            if param.requires_grad and param.dim() > 0:
                expected = by_hand[index].mean([of_rank[index] for of_rank in found])
                assert torch.equal(param.grad.full_tensor().cpu(), expected.cpu()), name


def _sum_of_gradients(model: Any, rank: int) -> list[Tensor]:
    """After backwards that all reduce the gradients of the same batch."""
    model.zero_grad()
    for _ in range(NUM_BACKWARDS):
        _loss(model, rank).backward()
    return [param.grad.full_tensor().cpu() for param in model.parameters() if param.requires_grad]


def _error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The worst one of a parameter, relative to its norm."""
    return max(float((mine - other).norm() / other.norm()) for mine, other in zip(found, exact, strict=True))


@pytest.mark.parametrize("replicas", [2, *long(1, 0)])
@distributed(2, 4)
def test_feedback_makes_up_for_losses_across_replicas_checkpoints_and_moves(ctx: RankContext, replicas: int) -> None:
    """Without it, the same losses add up. The second half of the backwards runs in a model that has loaded what the
    first half still owed; and, if it can be another one, on another mesh."""
    whole = seeded(Uneven).to(ctx.mesh_1d().device_type)
    case, other = Case(replicas=replicas), Case(replicas=2 if replicas == 1 else 1)
    exact = _sum_of_gradients(_shard(ctx, copy.deepcopy(whole), case, None), ctx.rank)
    lossy = _shard(ctx, copy.deepcopy(whole), case, replace(INT8, error_feedback=False))
    model, same, moved = (_shard(ctx, copy.deepcopy(whole), each, INT8) for each in (case, case, other))
    without, first = _error(_sum_of_gradients(lossy, ctx.rank), exact), _sum_of_gradients(model, ctx.rank)
    assert _error(first, exact) < without / 4

    owed = wire_residuals(model)
    assert any(bool(each.full_tensor().any()) for each in owed.values())  # type: ignore[operator]
    load_wire_residuals(same, owed)
    into = wire_residuals(moved)
    for name, target in into.items():
        target.copy_(distribute_tensor(owed[name].full_tensor(), target.device_mesh, target.placements))  # type: ignore[operator]
    load_wire_residuals(moved, into)
    after = [_sum_of_gradients(each, ctx.rank) for each in (model, same, moved)]
    assert all(map(torch.equal, after[0], after[1]))
    doubled = [2 * each for each in exact]
    for each in (after[0], after[2]):
        assert _error([now + before for now, before in zip(each, first, strict=True)], doubled) < without / 4


@distributed(2)
def test_a_gradient_that_is_not_finite_is_seen_and_leaves_nothing_behind(ctx: RankContext) -> None:
    model = _shard(ctx, seeded(Uneven), Case(), INT8)
    (_loss(model, 0) * float("inf")).backward()
    assert not model.exit.weight.grad.full_tensor().isfinite().any()
    model.zero_grad()
    _loss(model, 0).backward()
    assert all(param.grad.full_tensor().isfinite().all() for param in model.parameters() if param.grad is not None)


@distributed(2)
def test_residuals_of_other_parameters_are_refused(ctx: RankContext) -> None:
    model = _shard(ctx, seeded(Uneven), Case(), INT8)
    residuals = wire_residuals(model)
    residuals["gone.weight"] = residuals.pop("exit.weight")
    with pytest.raises(ValueError, match=r"'exit\.weight', 'gone\.weight' are not those"):
        load_wire_residuals(model, residuals)
    assert wire_residuals(_shard(ctx, seeded(Uneven), Case())) == {}


@distributed(2)
def test_what_one_parameter_owes_is_not_sent_with_another(ctx: RankContext) -> None:
    found = []
    for trained in (["entry", "exit"], ["exit"]):  # of the same shape, one after the other
        model = _shard(ctx, seeded(Uneven), Case(), INT8)
        for name in trained:
            model.requires_grad_(False)
            getattr(model, name).weight.requires_grad_(True)
            _loss(model, ctx.rank).backward()
        found.append(model.exit.weight.grad.full_tensor().cpu())
    assert torch.equal(*found)
