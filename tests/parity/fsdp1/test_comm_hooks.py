"""``register_comm_hook``: torch's hooks and a user's own, as with torch's class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import LOW_PRECISION_HOOKS, default_hooks
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

import fsdp2.fsdp1
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import Front, as_torchs, batch, same, train
from tests.parity.fsdp1.test_training import FULL, NO_SHARD, wrapped_mlp

OURS = functools.partial(Front, names=fsdp2.fsdp1)
both_modes = pytest.mark.parametrize("use_orig_params", [True, False])


def plain_sum(state: list[str], gradients: torch.Tensor, shard: torch.Tensor | None = None) -> None:
    """A user's hook: the sum, not the mean."""
    assert gradients.shape == ((0 if shard is None else shard.numel() * dist.get_world_size()) or gradients.numel(),)
    state.append(str(gradients.dtype))
    dist.all_reduce(gradients)
    if shard is not None:
        shard.copy_(gradients.chunk(dist.get_world_size())[dist.get_rank()])


def without_streams(scenario: Callable[[Front], Any]) -> Callable[[Front], Any]:
    """Torch's hooks that compress call ``record_stream``, which fails on the CPU. Let torch's class use them anyway."""

    def run(front: Front) -> Any:
        with mock.patch.object(torch.Tensor, "record_stream") if not front.is_ours else nullcontext():
            return scenario(front)

    return run


@both_modes
@pytest.mark.parametrize("strategy", [FULL, NO_SHARD])
@distributed(2, 4)
def test_trains_with_each_hook(ctx: RankContext, strategy, use_orig_params) -> None:
    @without_streams
    def scenario(front: Front):
        found = []
        group = dist.group.WORLD
        own = default_hooks.allreduce_hook if strategy is NO_SHARD else default_hooks.reduce_scatter_hook
        low, calls = default_hooks.LowPrecisionState(group), []
        hooks = [(default_hooks.DefaultState(group), own), (calls, plain_sum)]
        hooks += [(low, hook) for hook in LOW_PRECISION_HOOKS if ctx.world_size == 2]  # of four, the order counts
        for state, hook in hooks:
            torch.manual_seed(1)
            model = wrapped_mlp(front, sharding_strategy=strategy, use_orig_params=use_orig_params)
            model.register_comm_hook(state, hook)
            found += train(ctx, model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with model.no_sync():
                model(batch(ctx, 3, 8, seed=8)).square().mean().backward()
            model(batch(ctx, 3, 8, seed=9)).square().mean().backward()
            optimizer.step()
            found.append(model(batch(ctx, 3, 8)).detach())
        return [*found, calls]

    same(ctx, scenario, exact=ctx.world_size == 2)


@pytest.mark.parametrize("reduce", [torch.float32, *long(torch.bfloat16, None)])
@pytest.mark.parametrize("strategy", [FULL, NO_SHARD])
@distributed(2)
def test_hooks_get_what_mixed_precision_reduces(ctx: RankContext, strategy, reduce) -> None:
    @without_streams
    def scenario(front: Front):
        found, group = [], dist.group.WORLD
        own = default_hooks.allreduce_hook if strategy is NO_SHARD else default_hooks.reduce_scatter_hook
        hooks = [(default_hooks.DefaultState(group), own), ([], plain_sum)]
        hooks += [(default_hooks.LowPrecisionState(group), hook) for hook in LOW_PRECISION_HOOKS]
        for state, hook in hooks:
            torch.manual_seed(1)
            precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce)
            model = wrapped_mlp(front, sharding_strategy=strategy, use_orig_params=True, mixed_precision=precision)
            model.register_comm_hook(state, hook)
            found += train(ctx, model)
        return found + [state for state, hook in hooks if hook is plain_sum]

    same(ctx, scenario)


@as_torchs(2)
def test_refused_hooks_change_nothing(front: Front) -> Any:
    model = wrapped_mlp(front, use_orig_params=True)
    state = default_hooks.DefaultState(dist.group.WORLD)
    model(batch(front.ctx, 3, 8)).sum().backward()
    for module, hook in ((model.module[0], default_hooks.reduce_scatter_hook), (model, None), (model, "hook")):
        with pytest.raises((RuntimeError, AssertionError, ValueError)) as error:
            module.register_comm_hook(state, hook)
        assert (error.type is ValueError) == (module is model)
    model.register_comm_hook(state, default_hooks.reduce_scatter_hook)
    with pytest.raises((RuntimeError, AssertionError)):
        model.register_comm_hook(state, default_hooks.reduce_scatter_hook)
    return train(front.ctx, model)


@distributed(2)
def test_a_hook_on_a_hybrid_wrapper_is_refused(ctx: RankContext) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 2))
    model = OURS(ctx).wrap(
        torch.nn.Linear(4, 4), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD, use_orig_params=True
    )
    with pytest.raises(RuntimeError, match="HYBRID_SHARD"):
        model.register_comm_hook([], plain_sum)
    model(batch(ctx, 3, 4)).sum().backward()
