"""``register_comm_hook``: torch's hooks and a user's own, as with torch's class."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import LOW_PRECISION_HOOKS, default_hooks
from torch.distributed.fsdp import MixedPrecision

from tests.harness.selection import long
from tests.parity.fsdp1.fronts import (
    FULL_SHARD,
    HYBRID,
    NO_SHARD,
    ON_TWO_RANKS,
    Front,
    as_torchs,
    with_ours,
    wrapped_mlp,
)


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
    return front.train(model)


@with_ours(2)
def test_a_hook_on_a_hybrid_wrapper_is_refused(front: Front) -> None:
    options = {"device_mesh": front.ctx.mesh_2d(1, 2), "sharding_strategy": HYBRID, "use_orig_params": True}
    model = front.wrap(torch.nn.Linear(4, 4), **options)
    with pytest.raises(RuntimeError, match="HYBRID_SHARD"):
        model.register_comm_hook([], plain_sum)
    model(front.batch(3, 4)).sum().backward()
