"""Gradients are the same objects in every step, and yet nobody sees one change that he holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.runtime.root import units_under
from tests.distributed.support import Stack, seeded, sharded, step
from tests.harness.distributed import RankContext, distributed


def _grads(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def _clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _gradient_nbytes(model: nn.Module) -> list[int]:
    """Bytes of the memory under each gradient."""
    return [grad._local_tensor.untyped_storage().nbytes() for grad in _grads(model)]


@distributed(2)
def test_gradients_are_the_same_objects_on_memory_that_comes_and_goes(ctx: RankContext) -> None:
    model = sharded(ctx)
    step(model, 0)
    first = _grads(model)
    ids, storages = list(map(id, first)), [grad._local_tensor.untyped_storage() for grad in first]
    _clear(model)
    del first
    with torch.no_grad():
        model(torch.zeros(4, 32))
    assert all(storage.nbytes() == 0 for storage in storages)
    del storages
    step(model, 1)
    assert list(map(id, _grads(model))) == ids
    assert all(_gradient_nbytes(model))


Hold = Callable[[nn.Parameter], Tensor]
HOLDS: dict[str, Hold] = {
    "the gradient": lambda p: p.grad,
    "its local tensor": lambda p: p.grad._local_tensor,
    "to_local()": lambda p: p.grad.to_local(),
    "a view of it": lambda p: p.grad.to_local().view(-1)[:1],
    "detach()": lambda p: p.grad.detach(),
    "an array": lambda p: p.grad.to_local().numpy(),
    "what autograd saved": lambda p: p.grad.to_local() * torch.ones(1, requires_grad=True),
}


@distributed(2)
@pytest.mark.parametrize("held", HOLDS)
def test_what_a_user_holds_keeps_its_values(ctx: RankContext, held: str) -> None:
    model, fresh = sharded(ctx), sharded(ctx)
    for seed in (0, 1):
        _clear(model)
        step(model, seed)
    holders = [HOLDS[held](parameter) for parameter in model.parameters()]
    before = [torch.as_tensor(each.full_tensor() if hasattr(each, "full_tensor") else each).clone() for each in holders]
    for seed in (2, 3):
        _clear(model)
        step(model, seed)
    after = [torch.as_tensor(each.full_tensor() if hasattr(each, "full_tensor") else each) for each in holders]
    assert all(map(torch.equal, before, after))
    step(fresh, 3)
    assert all(torch.equal(a._local_tensor, b._local_tensor) for a, b in zip(_grads(model), _grads(fresh), strict=True))


@distributed(2)
def test_saved_gradients_reach_a_backward_behind_the_next_step(ctx: RankContext) -> None:
    model = sharded(ctx)
    step(model, 0)
    scale = torch.ones(1, requires_grad=True)
    expected = sum(grad._local_tensor.sum() for grad in _grads(model))
    products = [(grad._local_tensor * scale).sum() for grad in _grads(model)]
    _clear(model)
    step(model, 1)
    sum(products).backward()
    torch.testing.assert_close(scale.grad, expected.reshape(1))


@distributed(2)
def test_gradients_dropped_in_a_hook_are_freed_inside_the_backward(ctx: RankContext) -> None:
    model = sharded(ctx)
    alive: list[int] = []

    def drop(parameter: Tensor) -> None:
        parameter.grad = None
        kept = [each for group in _kept(model) for each in group if each.flat is not None]
        alive.append(sum(each.flat.untyped_storage().nbytes() > 0 for each in kept))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    for _ in range(2):
        step(model)
    assert max(alive) <= 2  # what has just landed, and a reduction in flight
    assert all(each.flat.untyped_storage().nbytes() == 0 for group in _kept(model) for each in group)


def _kept(model: nn.Module) -> list[list[Any]]:
    bounds = [bound for _, unit in units_under(model) for g in unit.groups for bound in g.gradients._bound.values()]
    return [[part.kept for part in bound.reduce.parts] for bound in bounds]


@distributed(2)
def test_accumulation_adds_to_what_is_kept(ctx: RankContext) -> None:
    model, plain = sharded(ctx), seeded(Stack)
    for _ in range(2):
        _clear(model)
        _clear(plain)
        for seed in (0, 1):
            step(model, seed)
            step(plain, seed)
        for ours, parameter in zip(_grads(model), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), parameter.grad)


@distributed(2)
def test_a_gradient_that_the_user_replaced_stays_his(ctx: RankContext) -> None:
    model, reference = sharded(ctx), sharded(ctx)
    step(model, 0)
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 2
    mine = _grads(model)
    step(model, 1)
    assert all(map(lambda a, b: a is b, mine, _grads(model)))
    step(reference, 0)
    doubled = [grad._local_tensor * 2 for grad in _grads(reference)]
    _clear(reference)
    step(reference, 1)
    for ours, twice, added in zip(mine, doubled, _grads(reference), strict=True):
        assert torch.equal(ours._local_tensor, twice + added._local_tensor)


@distributed(4)
def test_partial_sums_and_kept_gradients_do_not_share_memory(ctx: RankContext) -> None:
    mesh = ctx.mesh(replicate=2, shard=2)
    models = [seeded(Stack) for _ in range(2)]
    for model in models:
        for block in model.blocks:
            fsdp2.fully_shard(block, mesh=mesh)
        fsdp2.fully_shard(model, mesh=mesh)
    ours, reference = models
    for _ in range(2):
        _clear(ours)
        _clear(reference)
        for seed in (0, 1, 2):
            ours.set_requires_all_reduce(seed == 2)
            step(ours, seed)
            step(reference, seed)
        for a, b in zip(_grads(ours), _grads(reference), strict=True):
            torch.testing.assert_close(a._local_tensor, b._local_tensor)
