"""Programs for DDP and FSDP1, and what the page puts in their place: the same losses, step by step.

``tests/parity/fsdp1`` runs our class beside torch's. DeepSpeed is not installed, so nothing runs beside it.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fsdp2
from fsdp2.tensors import Int8AllGatherTensor, wrap_parameters
from tests.docs.markdown import ROOT
from tests.docs.migrating.programs import Step, backward, close, model, sgd, train, wrap
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Block


def _accumulate_old(ctx: RankContext, old: Any, index: int) -> Tensor:
    with old.no_sync():
        backward(ctx, old, 10 * index)
    return backward(ctx, old, 10 * index + 1)


def _accumulate(ctx: RankContext, new: Any, index: int) -> Tensor:
    with fsdp2.no_sync(new):
        backward(ctx, new, 10 * index)
    return backward(ctx, new, 10 * index + 1)


def _clip_with(clip: Callable[[Any], Tensor]) -> Step:
    """A step whose loss has the norm of the gradients behind it."""

    def step(ctx: RankContext, module: nn.Module, index: int) -> Tensor:
        loss = backward(ctx, module, index)
        return torch.stack([loss, clip(module)])

    return step


_clip = _clip_with(lambda module: fsdp2.clip_grad_norm_(module.parameters(), 0.1))


# DDP


def _ddp(**options: Any) -> Callable[[RankContext], Any]:
    return lambda ctx: DistributedDataParallel(model(), **options)


def _ddp_with_hook(ctx: RankContext) -> Any:
    def halve(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        work = dist.all_reduce(bucket.buffer().div_(2 * ctx.world_size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    old = DistributedDataParallel(model())
    old.register_comm_hook(None, halve)
    return old


def _zero_redundancy(parameters: Any) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, at import
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01, eps=1e-3)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def _hooked(ctx: RankContext) -> Any:
    new = wrap(fsdp2, ctx.mesh_1d())
    for unit in (new, *new.blocks):
        unit.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5))
    return new


def _by_fsdp2(ctx: RankContext) -> Any:
    return wrap(fsdp2, ctx.mesh_1d())


# For DDP: a way to wrap, a step and an optimizer. Then the same for fsdp2.
Program = tuple[Callable[[RankContext], Any], Step, Callable[[Any], torch.optim.Optimizer]]


BESIDE_DDP: dict[str, tuple[Program, Program]] = {
    "plain": ((_ddp(), backward, sgd), (_by_fsdp2, backward, sgd)),
    "group": (
        (lambda ctx: DistributedDataParallel(model(), process_group=ctx.mesh_1d().get_group()), backward, sgd),
        (_by_fsdp2, backward, sgd),
    ),
    "mesh": (
        (lambda ctx: DistributedDataParallel(model(), device_mesh=ctx.mesh_1d()), backward, sgd),
        (_by_fsdp2, backward, sgd),
    ),
    "nothing to set": (
        (_ddp(static_graph=True, gradient_as_bucket_view=True), backward, sgd),
        (lambda ctx: wrap(fsdp2, ctx.mesh_2d(ctx.world_size, 1)), backward, sgd),
    ),
    "buckets": (
        (_ddp(bucket_cap_mb=0.001), backward, sgd),
        (lambda ctx: fsdp2.fully_shard(model(), mesh=ctx.mesh_1d()), backward, sgd),
    ),
    "accumulation": ((_ddp(), _accumulate_old, sgd), (_by_fsdp2, _accumulate, sgd)),
    "clipping": (
        (_ddp(), _clip_with(lambda old: nn.utils.clip_grad_norm_(old.parameters(), 0.1)), sgd),
        (_by_fsdp2, _clip, sgd),
    ),
    "hook": ((_ddp_with_hook, backward, sgd), (_hooked, backward, sgd)),
    "ZeroRedundancyOptimizer": ((_ddp(), backward, _zero_redundancy), (_by_fsdp2, backward, _adamw)),
}


@pytest.mark.parametrize("name", BESIDE_DDP)
@distributed(2)
def test_trains_as_ddp(ctx: RankContext, name: str) -> None:
    expected, found = (train(ctx, make(ctx), step, optimizer) for make, step, optimizer in BESIDE_DDP[name])
    close(found, expected)


class _WithBuffer(MLP):
    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("offset", torch.full((16,), float(dist.get_rank())))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.offset)


@distributed(2)
def test_buffers_are_those_of_each_rank_and_ddps_those_of_rank_0(ctx: RankContext) -> None:
    old, new = DistributedDataParallel(_WithBuffer()), wrap(fsdp2, ctx.mesh_1d(), _WithBuffer())
    for each in (old, new):
        backward(ctx, each)
    assert new.offset[0] == ctx.rank
    assert old.module.offset[0] == 0


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page was made for torch 2.13")
def test_the_page_speaks_of_every_option_of_ddp() -> None:
    options = set(inspect.signature(DistributedDataParallel).parameters) - {"module"}
    page = (ROOT / "docs" / "migrating.md").read_text()
    body = page.partition("## From DDP\n")[2].partition("\n## ")[0]
    assert options - set(re.findall(r"`(\w+)(?:=\w*)?`", body)) == set()


# FSDP1


def _old(ctx: RankContext, **options: Any) -> Any:
    given = {"use_orig_params": True, "device_id": torch.device("cpu"), **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of NO_SHARD
        return FullyShardedDataParallel(model(), auto_wrap_policy=ModuleWrapPolicy({Block}), **given)


def _checkpointed(whole: Any) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(whole, check_fn=lambda candidate: isinstance(candidate, Block))
    return whole


BF16 = (torch.bfloat16, torch.float32)
PREFETCH = {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "forward_prefetch": True, "limit_all_gathers": False}
# Ways to make the old model and the new one.
BESIDE_FSDP1: dict[str, tuple[Callable[[RankContext], Any], Callable[[RankContext], Any]]] = {
    "group": (lambda ctx: _old(ctx, process_group=ctx.mesh_1d().get_group()), _by_fsdp2),
    "mesh": (lambda ctx: _old(ctx, device_mesh=ctx.mesh_1d()), _by_fsdp2),
    "SHARD_GRAD_OP": (
        lambda ctx: _old(ctx, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        lambda ctx: wrap(fsdp2, ctx.mesh_1d(), reshard_after_forward=False),
    ),
    "NO_SHARD": (
        lambda ctx: _old(ctx, sharding_strategy=ShardingStrategy.NO_SHARD),
        lambda ctx: wrap(fsdp2, ctx.mesh_2d(2, 1)),
    ),
    "prefetching": (lambda ctx: _old(ctx, **PREFETCH), _by_fsdp2),
    "checkpointing": (
        lambda ctx: _checkpointed(_old(ctx)),
        lambda ctx: wrap(fsdp2, ctx.mesh_1d(), _checkpointed(model())),
    ),
}


@pytest.mark.parametrize("name", BESIDE_FSDP1)
@distributed(2)
def test_trains_as_fsdp1(ctx: RankContext, name: str) -> None:
    old, new = (make(ctx) for make in BESIDE_FSDP1[name])
    close(train(ctx, new), train(ctx, old))


@distributed(4)
def test_trains_as_fsdp1_with_replicas(ctx: RankContext) -> None:
    mesh = ctx.mesh_2d(2, 2)
    old = _old(ctx, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    close(train(ctx, wrap(fsdp2, mesh)), train(ctx, old))


@distributed(2)
def test_steps_of_fsdp1_are_taken_over(ctx: RankContext) -> None:
    old_clip = _clip_with(lambda old: old.clip_grad_norm_(0.1))
    for old_step, new_step in ((_accumulate_old, _accumulate), (old_clip, _clip)):
        close(train(ctx, _by_fsdp2(ctx), new_step), train(ctx, _old(ctx), old_step))


@distributed(2)
def test_mixed_precision_of_fsdp1(ctx: RankContext) -> None:
    old = _old(ctx, mixed_precision=MixedPrecision(*BF16))
    new = wrap(fsdp2, ctx.mesh_1d(), mp_policy=fsdp2.MixedPrecisionPolicy(*BF16))
    torch.testing.assert_close(train(ctx, new), train(ctx, old), rtol=2e-2, atol=2e-3)


@distributed(2)
def test_optimizer_steps_one_flat_parameter_per_unit(ctx: RankContext) -> None:
    old = _old(ctx, use_orig_params=False)
    assert len(list(old.parameters())) == 3  # of two blocks and the root
    found = train(ctx, _by_fsdp2(ctx), make_optimizer=lambda params: fsdp2.flatten_optimizer(sgd(params)))
    close(found, train(ctx, old))


# DeepSpeed


@distributed(2)
def test_weights_that_travel_as_int8_train_nearly_alike(ctx: RankContext) -> None:
    whole = model()
    assert "blocks.0.up.weight" in wrap_parameters(whole, Int8AllGatherTensor)
    found = train(ctx, wrap(fsdp2, ctx.mesh_1d(), whole))
    torch.testing.assert_close(found, train(ctx, _by_fsdp2(ctx)), rtol=2e-2, atol=2e-3)
