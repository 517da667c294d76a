"""Gradients on their way to the optimizer: communication hooks, clipping and the scaler, as with torch's class."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp.sharded_grad_scaler
from torch import nn
from torch.distributed.algorithms._comm_hooks import LOW_PRECISION_HOOKS, default_hooks
from torch.distributed.fsdp import MixedPrecision

import fsdp2
import fsdp2.fsdp1
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import ON_TWO_RANKS, Front, as_torchs, mlp, with_ours, wrapped_mlp
from tests.parity.fsdp1.kinds import FULL_SHARD, HYBRID, NO_SHARD


def plain_sum(state: list[str], gradients: torch.Tensor, shard: torch.Tensor | None = None) -> None:
    """A user's hook: the sum, not the mean."""
    assert gradients.shape == ((0 if shard is None else shard.numel() * dist.get_world_size()) or gradients.numel(),)
    state.append(str(gradients.dtype))
    dist.all_reduce(gradients)
    if shard is not None:
        shard.copy_(gradients.chunk(dist.get_world_size())[dist.get_rank()])


def with_each_hook(front: Front, strategy: Any, use: Any = Front.train, *, has_low: bool = True, **options: Any) -> Any:
    """Torch's hooks that compress call ``record_stream``, which fails on the CPU. Let torch's class use them anyway."""
    calls: list[str] = []
    own = default_hooks.allreduce_hook if strategy is NO_SHARD else default_hooks.reduce_scatter_hook
    hooks: list[Any] = [(default_hooks.DefaultState(dist.group.WORLD), own), (calls, plain_sum)]
    hooks += [(default_hooks.LowPrecisionState(dist.group.WORLD), hook) for hook in LOW_PRECISION_HOOKS if has_low]
    found = []
    with nullcontext() if front.is_ours else mock.patch.object(torch.Tensor, "record_stream"):
        for state, hook in hooks:
            torch.manual_seed(1)
            model = wrapped_mlp(front, sharding_strategy=strategy, **options)
            model.register_comm_hook(state, hook)
            found += use(front, model)
    return [*found, calls]


def train_and_accumulate(front: Front, model: Any) -> list[Any]:
    found = front.train(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        model(front.batch(3, 8, seed=8)).square().mean().backward()
    model(front.batch(3, 8, seed=9)).square().mean().backward()
    optimizer.step()
    return [*found, model(front.batch(3, 8)).detach()]


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@as_torchs(2, 4, exact=ON_TWO_RANKS, both_modes=True)
def test_trains_with_each_hook(front: Front, strategy: Any) -> Any:
    has_low = front.ctx.world_size == 2  # of four, the order counts
    return with_each_hook(front, strategy, train_and_accumulate, has_low=has_low)


@pytest.mark.parametrize("reduce", [torch.float32, *long(torch.bfloat16, None)])
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@as_torchs(2)
def test_hooks_get_what_mixed_precision_reduces(front: Front, strategy: Any, reduce: torch.dtype | None) -> Any:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    return with_each_hook(front, strategy, use_orig_params=True, mixed_precision=precision)


@as_torchs(2)
def test_refused_hooks_change_nothing(front: Front) -> Any:
    model = wrapped_mlp(front, use_orig_params=True)
    state = default_hooks.DefaultState(dist.group.WORLD)
    model(front.batch(3, 8)).sum().backward()
    for module, hook in ((model.module[0], default_hooks.reduce_scatter_hook), (model, None), (model, "hook")):
        with pytest.raises((RuntimeError, AssertionError, ValueError)) as error:
            module.register_comm_hook(state, hook)
        assert (error.type is ValueError) == (module is model)
    model.register_comm_hook(state, default_hooks.reduce_scatter_hook)
    with pytest.raises((RuntimeError, AssertionError)):
        model.register_comm_hook(state, default_hooks.reduce_scatter_hook)
    if front.is_ours:
        options = {"device_mesh": front.ctx.mesh_2d(1, 2), "sharding_strategy": HYBRID, "use_orig_params": True}
        hybrid = front.wrap(nn.Linear(4, 4), **options)
        with pytest.raises(RuntimeError, match="HYBRID_SHARD"):
            hybrid.register_comm_hook([], plain_sum)
        hybrid(front.batch(3, 4)).sum().backward()
    return front.train(model)


class Sum(nn.Module):
    """The sum of the outputs of three parts, the first in its own dtype."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.third = parts

    def forward(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.first(x.to(dtype)).float().sum() + self.second(x).sum() + self.third(x).sum()


CLIPS: list[tuple[float, float]] = [(0.1, 2), (0.1, math.inf), (0.5, 1), (100, 3.0), (0, 2.0)]


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@as_torchs(2, 4, exact=False, both_modes=True)
def test_clipping_by_all_norms(front: Front, strategy: Any) -> Any:
    model = wrapped_mlp(front, sharding_strategy=strategy)
    made = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    return front.train(model, made, num_steps=5, before_step=lambda step: [model.clip_grad_norm_(*CLIPS[step])])


@as_torchs(2, exact=False, both_modes=True)
def test_a_mix_of_strategies_and_dtypes_no_gradients_and_not_the_root(front: Front) -> Any:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(1)
        inner, other = nn.Linear(8, 6).to(dtype), front.wrap(nn.Linear(8, 6), sharding_strategy=NO_SHARD)
        model = front.wrap(Sum(front.wrap(inner), other, nn.Linear(8, 6)))
        model(front.batch(3, 8), dtype).backward()
        found.append(model.clip_grad_norm_(0.5))
    with pytest.raises(RuntimeError, match=r"root|outermost"):
        model.first.clip_grad_norm_(1.0)
    model.zero_grad()
    with pytest.warns(UserWarning, match="gradients"):
        found.append(model.clip_grad_norm_(1.0))
    low = front.wrap(nn.Linear(8, 6).to(torch.bfloat16))
    low(front.batch(3, 8).bfloat16()).sum().backward()
    return [*found, low.clip_grad_norm_(0.5)]


@with_ours(2, both_modes=True)
def test_gradients_that_the_user_made_are_clipped(front: Front) -> None:
    # A flat parameter's gradient may be the user's own tensor, whose parts become the shards' gradients.
    model = wrapped_mlp(front)
    model(front.batch(3, 8)).sum().backward()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    numel = sum(param.numel() for param in mlp().parameters())
    norm = model.clip_grad_norm_(1.0)
    torch.testing.assert_close(norm, torch.tensor(float(numel)).sqrt())
    for param in model.parameters():
        parts = [grad for _, grad in param.parts(param.grad)] if not front.use_orig_params else [param.grad.to_local()]
        for grad in parts:
            torch.testing.assert_close(grad, torch.full_like(grad, 1 / math.sqrt(numel)))


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@with_ours(2)
def test_the_function_takes_flat_parameters_for_their_shards(front: Front, strategy: Any) -> None:
    found = []
    for by_function in (True, False):
        torch.manual_seed(0)
        model = wrapped_mlp(front, sharding_strategy=strategy)
        model(front.batch(3, 8)).sum().backward()
        norm = fsdp2.clip_grad_norm_(model.parameters(), 0.5) if by_function else model.clip_grad_norm_(0.5)
        found.append([norm, *(param.grad for param in model.parameters())])
    assert all(map(torch.equal, *found))


def scaler_of(front: Front, **options: Any) -> Any:
    names = fsdp2.fsdp1 if front.is_ours else torch.distributed.fsdp.sharded_grad_scaler
    return names.ShardedGradScaler("cpu", init_scale=8.0, growth_interval=2, **options)


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
