"""Each row of the table for DDP: the old program runs under DDP, the new one under fsdp2."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fsdp2
from tests.docs.migrating.rows import (
    Rows,
    adamw,
    backward,
    by_fsdp2,
    close,
    forward,
    gathers,
    gradients,
    model,
    parameters,
    train,
    unsharded,
    wrap,
)
from tests.harness.distributed import RankContext
from tests.harness.models import MLP

ROWS = Rows("From DDP", omits_some=True)


@pytest.mark.parametrize("cell", ROWS)
def test_row(cell: str) -> None:
    ROWS.run(cell)


def test_every_row_is_tried() -> None:
    ROWS.check()


def _old(whole: MLP | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(whole or model(), **options)


def _trained(ctx: RankContext, old: DistributedDataParallel, **options: Any) -> list[Any]:
    """As ``train`` does, under the names of the model inside."""
    losses, grads, params = train(ctx, old, **options)
    return [losses, *({name.removeprefix("module."): value for name, value in d.items()} for d in (grads, params))]


@ROWS("`DistributedDataParallel(model)`")
def wrapping(ctx: RankContext) -> None:
    expected = _trained(ctx, _old())
    close(train(ctx, by_fsdp2(ctx)), expected)
    close(unsharded(ctx), expected)


@ROWS("rank 0's values are broadcast when it wraps")
def broadcast(ctx: RankContext) -> None:
    def differing() -> MLP:
        whole = model()
        with torch.no_grad():
            whole.exit.weight += ctx.rank
        return whole

    old, new = _old(differing()), by_fsdp2(ctx, differing())
    values = differing().state_dict() if ctx.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(new, values, options=options)
    close(parameters(new), parameters(old.module))


@ROWS("`model.module`")
def module(ctx: RankContext) -> None:
    new = by_fsdp2(ctx)
    assert isinstance(new, MLP)
    assert list(dict(new.named_parameters())) == list(dict(_old().module.named_parameters()))


@ROWS("`process_group=`")
def process_group(ctx: RankContext) -> None:
    close(train(ctx, by_fsdp2(ctx)), _trained(ctx, _old(process_group=ctx.mesh_1d().get_group())))


@ROWS("`with model.no_sync():`")
def no_sync(ctx: RankContext) -> None:
    def old_step(ctx: RankContext, old: Any, index: int) -> Tensor:
        with old.no_sync():
            backward(ctx, old, 10 * index)
        return backward(ctx, old, 10 * index + 1)

    def new_step(ctx: RankContext, new: Any, index: int) -> Tensor:
        with fsdp2.no_sync(new):
            backward(ctx, new, 10 * index)
            assert all(parameter.grad is None for parameter in new.parameters())
        return backward(ctx, new, 10 * index + 1)

    close(train(ctx, by_fsdp2(ctx), new_step), _trained(ctx, _old(), step=old_step))


@ROWS("`model.module.state_dict()`")
def state_dict(ctx: RankContext) -> None:
    whole = get_model_state_dict(by_fsdp2(ctx), options=StateDictOptions(full_state_dict=True))
    close(whole, dict(_old().module.state_dict()))
    assert all(isinstance(shard, DTensor) for shard in by_fsdp2(ctx).state_dict().values())


class _WithBuffer(MLP):
    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("offset", torch.full((16,), float(dist.get_rank())))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.offset)


@ROWS("`broadcast_buffers=True`")
def broadcast_buffers(ctx: RankContext) -> None:
    old, new = _old(_WithBuffer()), by_fsdp2(ctx, _WithBuffer())
    forward(ctx, old)
    forward(ctx, new)
    assert new.offset[0] == ctx.rank
    for buffer in new.buffers():
        dist.broadcast(buffer, 0)
    close(new.offset, old.module.offset)


class _Partly(MLP):
    """The exit is not used."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@ROWS("`find_unused_parameters=True`")
def find_unused_parameters(ctx: RankContext) -> None:
    old = _old(_Partly(2), find_unused_parameters=True)
    torch.manual_seed(0)
    new = by_fsdp2(ctx, _Partly(2))
    for copied, parameter in zip(old.module.parameters(), parameters(new).values(), strict=True):
        copied.data.copy_(parameter)
    new.set_reduce_scatter_unused_params(True)
    backward(ctx, old)
    backward(ctx, new)
    for name, gradient in gradients(new).items():
        expected = old.module.get_parameter(name).grad
        assert gradient is not None
        close(gradient, torch.zeros_like(gradient) if expected is None else expected)


@ROWS("`static_graph`, `gradient_as_bucket_view`")
def nothing_to_set(ctx: RankContext) -> None:
    close(train(ctx, by_fsdp2(ctx)), _trained(ctx, _old(static_graph=True, gradient_as_bucket_view=True)))


@ROWS("`bucket_cap_mb=`")
def bucket_cap(ctx: RankContext) -> None:
    expected = _trained(ctx, _old(bucket_cap_mb=0.001))
    close(train(ctx, by_fsdp2(ctx)), expected)
    as_one: Any = fsdp2.fully_shard(model(), mesh=ctx.mesh_1d())
    close(train(ctx, as_one), expected)
    assert gathers(as_one, lambda: backward(ctx, as_one)) == ["(root)"]


@ROWS("`register_comm_hook(None, fp16_compress_hook)`")
def compress(ctx: RankContext) -> None:
    old = _old()
    old.register_comm_hook(None, fp16_compress_hook)
    new = by_fsdp2(ctx, mp_policy=fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float16))
    backward(ctx, old)
    backward(ctx, new)
    expected = {name: parameter.grad for name, parameter in old.module.named_parameters()}
    torch.testing.assert_close(gradients(new), expected, rtol=1e-2, atol=1e-4)


@ROWS("`register_comm_hook(state, hook)`")
def comm_hook(ctx: RankContext) -> None:
    def halve(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        work = dist.all_reduce(bucket.buffer().div_(2 * ctx.world_size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    old = _old()
    old.register_comm_hook(None, halve)
    new = by_fsdp2(ctx)
    for unit in (new, *new.blocks):
        unit.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5))
    close(train(ctx, new), _trained(ctx, old))


@ROWS("`ZeroRedundancyOptimizer(parameters, AdamW)`")
def zero_redundancy(ctx: RankContext) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, at import
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def old_adamw(module: nn.Module) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.01, eps=1e-3)

    new = by_fsdp2(ctx)
    optimizer = adamw(new)
    close(train(ctx, new, make_optimizer=lambda _: optimizer), _trained(ctx, _old(), make_optimizer=old_adamw))
    assert optimizer.state[new.entry.weight]["exp_avg"].to_local().shape == (8, 16)


@ROWS("`clip_grad_norm_(model.parameters(), 1.0)`")
def clipping(ctx: RankContext) -> None:
    norms = []

    def clipped(ctx: RankContext, module: nn.Module, index: int) -> Tensor:
        loss = backward(ctx, module, index)
        clip = nn.utils.clip_grad_norm_ if isinstance(module, DistributedDataParallel) else fsdp2.clip_grad_norm_
        norms.append(clip(module.parameters(), 0.1))
        return loss

    close(train(ctx, by_fsdp2(ctx), clipped), _trained(ctx, _old(), step=clipped))
    close(norms[:2], norms[2:])


@ROWS("whole parameters on every rank, as in DDP")
def replicated(ctx: RankContext) -> None:
    new: Any = wrap(fsdp2, ctx.mesh_2d(ctx.world_size, 1))
    close(train(ctx, new), _trained(ctx, _old()))
    assert new.entry.weight.to_local().shape == (16, 16)
