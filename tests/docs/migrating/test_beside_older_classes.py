"""Programs for DDP and FSDP1, and what the page puts in their place: the same losses, step by step.

``tests/parity/fsdp1`` runs our class beside torch's. DeepSpeed is not installed, so nothing runs beside it.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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


def _accumulate_with(no_sync: Callable[[Any], Any]) -> Step:
    def step(ctx: RankContext, module: nn.Module, index: int) -> Tensor:
        with no_sync(module):
            backward(ctx, module, 10 * index)
        return backward(ctx, module, 10 * index + 1)

    return step


ACCUMULATE = (_accumulate_with(lambda old: old.no_sync()), _accumulate_with(fsdp2.no_sync))


def _clip_with(clip: Callable[[Any], Tensor]) -> Step:
    """A step whose loss has the norm of the gradients behind it."""

    def step(ctx: RankContext, module: nn.Module, index: int) -> Tensor:
        loss = backward(ctx, module, index)
        return torch.stack([loss, clip(module)])

    return step


_clip = _clip_with(lambda module: fsdp2.clip_grad_norm_(module.parameters(), 0.1))


def _by_fsdp2(ctx: RankContext) -> Any:
    return wrap(fsdp2, ctx.mesh_1d())


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


@dataclass(frozen=True)
class Pair:
    """Ways to make the old model and the new one, and to train them."""

    old: Callable[[RankContext], Any]
    new: Callable[[RankContext], Any] = _by_fsdp2
    steps: tuple[Step, Step] = (backward, backward)
    optimizers: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (sgd, sgd)
    tolerance: dict[str, float] = field(default_factory=dict)

    def assert_alike(self, ctx: RankContext) -> None:
        programs = zip((self.old, self.new), self.steps, self.optimizers, strict=True)
        expected, found = (train(ctx, make(ctx), step, optimizer) for make, step, optimizer in programs)
        close(found, expected, **self.tolerance)


# DDP


def _ddp(ctx: RankContext, **options: Any) -> Any:
    return DistributedDataParallel(model(), **options)


def _ddp_with_hook(ctx: RankContext) -> Any:
    def halve(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        work = dist.all_reduce(bucket.buffer().div_(2 * ctx.world_size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    old = _ddp(ctx)
    old.register_comm_hook(None, halve)
    return old


def _hooked(ctx: RankContext) -> Any:
    new = _by_fsdp2(ctx)
    for unit in (new, *new.blocks):
        unit.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5))
    return new


def _zero_redundancy(parameters: Any) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, at import
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01, eps=1e-3)


BESIDE_DDP = {
    "plain": Pair(_ddp),
    "group": Pair(lambda ctx: _ddp(ctx, process_group=ctx.mesh_1d().get_group())),
    "mesh": Pair(lambda ctx: _ddp(ctx, device_mesh=ctx.mesh_1d())),
    "nothing to set": Pair(
        partial(_ddp, static_graph=True, gradient_as_bucket_view=True),
        lambda ctx: wrap(fsdp2, ctx.mesh_2d(ctx.world_size, 1)),
    ),
    "buckets": Pair(partial(_ddp, bucket_cap_mb=0.001), lambda ctx: fsdp2.fully_shard(model(), mesh=ctx.mesh_1d())),
    "accumulation": Pair(_ddp, steps=ACCUMULATE),
    "clipping": Pair(_ddp, steps=(_clip_with(lambda old: nn.utils.clip_grad_norm_(old.parameters(), 0.1)), _clip)),
    "hook": Pair(_ddp_with_hook, _hooked),
    "ZeroRedundancyOptimizer": Pair(_ddp, optimizers=(_zero_redundancy, _adamw)),
}


@pytest.mark.parametrize("name", BESIDE_DDP)
@distributed(2)
def test_trains_as_ddp(ctx: RankContext, name: str) -> None:
    BESIDE_DDP[name].assert_alike(ctx)


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
BESIDE_FSDP1 = {
    "group": Pair(lambda ctx: _old(ctx, process_group=ctx.mesh_1d().get_group())),
    "mesh": Pair(lambda ctx: _old(ctx, device_mesh=ctx.mesh_1d())),
    "SHARD_GRAD_OP": Pair(
        partial(_old, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        lambda ctx: wrap(fsdp2, ctx.mesh_1d(), reshard_after_forward=False),
    ),
    "NO_SHARD": Pair(
        partial(_old, sharding_strategy=ShardingStrategy.NO_SHARD), lambda ctx: wrap(fsdp2, ctx.mesh_2d(2, 1))
    ),
    "prefetching": Pair(partial(_old, **PREFETCH)),
    "checkpointing": Pair(
        lambda ctx: _checkpointed(_old(ctx)), lambda ctx: wrap(fsdp2, ctx.mesh_1d(), _checkpointed(model()))
    ),
    "mixed precision": Pair(
        partial(_old, mixed_precision=MixedPrecision(*BF16)),
        lambda ctx: wrap(fsdp2, ctx.mesh_1d(), mp_policy=fsdp2.MixedPrecisionPolicy(*BF16)),
        tolerance={"rtol": 2e-2, "atol": 2e-3},
    ),
    "one flat parameter per unit": Pair(
        partial(_old, use_orig_params=False),
        optimizers=(sgd, lambda params: fsdp2.optim.flatten_optimizer(sgd(params))),
    ),
    "accumulation": Pair(_old, steps=ACCUMULATE),
    "clipping": Pair(_old, steps=(_clip_with(lambda old: old.clip_grad_norm_(0.1)), _clip)),
}


@pytest.mark.parametrize("name", BESIDE_FSDP1)
@distributed(2)
def test_trains_as_fsdp1(ctx: RankContext, name: str) -> None:
    BESIDE_FSDP1[name].assert_alike(ctx)


@distributed(4)
def test_trains_as_fsdp1_with_replicas(ctx: RankContext) -> None:
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": ctx.mesh_2d(2, 2)}
    Pair(partial(_old, **hybrid), lambda ctx: wrap(fsdp2, ctx.mesh_2d(2, 2))).assert_alike(ctx)


@distributed(2)
def test_weights_that_travel_as_int8_train_nearly_alike(ctx: RankContext) -> None:
    whole = model()
    assert "blocks.0.up.weight" in wrap_parameters(whole, Int8AllGatherTensor)
    with_int8 = Pair(_by_fsdp2, lambda ctx: wrap(fsdp2, ctx.mesh_1d(), whole), tolerance={"rtol": 2e-2, "atol": 2e-3})
    with_int8.assert_alike(ctx)
