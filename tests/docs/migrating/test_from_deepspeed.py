"""Each row of the table for DeepSpeed, which is not installed: our side has the effect that the row claims."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.tools import trace
from tests.docs.migrating.rows import (
    Rows,
    adamw,
    backward,
    batch,
    by_fsdp2,
    close,
    forward,
    gradients,
    model,
    parameters,
    sgd,
    train,
    unsharded,
    wrap,
)
from tests.harness.distributed import RankContext
from tests.harness.models import MLP, Block

ROWS = Rows("From DeepSpeed", omits_some=True)


@pytest.mark.parametrize("cell", ROWS)
def test_row(cell: str) -> None:
    ROWS.run(cell)


def test_every_row_is_tried() -> None:
    ROWS.check()


# Starting


@ROWS("`deepspeed.initialize(model=..., optimizer=...)`")
def initialize(ctx: RankContext) -> None:
    wrapped = by_fsdp2(ctx)
    assert isinstance(wrapped, MLP)
    close(train(ctx, wrapped), unsharded(ctx))


@ROWS("`engine.backward(loss)`, `engine.step()`")
def engine_step(ctx: RankContext) -> None:
    wrapped = by_fsdp2(ctx)
    optimizer, before = sgd(wrapped), parameters(wrapped)
    forward(ctx, wrapped).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(not torch.equal(value, before[name]) for name, value in parameters(wrapped).items())


@ROWS("`zero.Init()`")
def zero_init(ctx: RankContext) -> None:
    with torch.device("meta"):
        whole = MLP(2)
    wrapped = by_fsdp2(ctx, whole)
    assert all(parameter.is_meta for parameter in wrapped.parameters())
    wrapped.to_empty(device="cpu")
    assert wrapped.entry.weight.to_local().untyped_storage().nbytes() == 8 * 16 * 4
    for parameter in wrapped.parameters():
        nn.init.constant_(parameter.to_local(), 0.25)
    assert backward(ctx, wrapped).isfinite()


@ROWS("`GatheredParameters(params)`")
def gathered_parameters(ctx: RankContext) -> None:
    wrapped, expected = by_fsdp2(ctx), model()
    wrapped.blocks[0].unshard()
    assert torch.equal(wrapped.blocks[0].up.weight, expected.blocks[0].up.weight)
    wrapped.blocks[0].reshard()
    assert isinstance(wrapped.blocks[0].up.weight, DTensor)


@ROWS("`GatheredParameters(params, modifier_rank=0)`")
def modifier_rank(ctx: RankContext) -> None:
    wrapped = by_fsdp2(ctx)
    changed = {"exit.bias": torch.full((8,), 7.0)} if ctx.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(wrapped, changed, options=options)
    assert torch.equal(parameters(wrapped)["exit.bias"], torch.full((8,), 7.0))
    close(parameters(wrapped)["exit.weight"], model().exit.weight.detach())


# The step


@ROWS("`gradient_accumulation_steps`")
def gradient_accumulation(ctx: RankContext) -> None:
    def accumulated(ctx: RankContext, module: Any, index: int) -> Tensor:
        losses = []
        for micro in range(3):
            if isinstance(module, fsdp2.FSDPModule):
                module.set_requires_gradient_sync(micro == 2)
            loss = forward(ctx, module, 10 * index + micro) / 3
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    close(train(ctx, by_fsdp2(ctx), accumulated), unsharded(ctx, accumulated))


@ROWS("`gradient_clipping`")
def gradient_clipping(ctx: RankContext) -> None:
    def clipped(ctx: RankContext, module: nn.Module, index: int) -> Tensor:
        backward(ctx, module, index)
        if not isinstance(module, fsdp2.FSDPModule):
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= ctx.world_size
        return fsdp2.clip_grad_norm_(module.parameters(), 0.1)

    close(train(ctx, by_fsdp2(ctx), clipped), train(ctx, model(), clipped))


@ROWS("`bf16.enabled`")
def bf16(ctx: RankContext) -> None:
    wrapped = by_fsdp2(ctx, mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = adamw(wrapped)
    output = wrapped(batch(ctx))
    assert output.dtype is torch.bfloat16
    output.float().square().mean().backward()
    optimizer.step()
    assert optimizer.state[wrapped.entry.weight]["exp_avg"].dtype is torch.float32
    assert wrapped.entry.weight.dtype is torch.float32


@ROWS("`fp16.enabled`, `loss_scale`")
def fp16(ctx: RankContext) -> None:
    """A step with an overflow on one rank is skipped on all."""
    wrapped = by_fsdp2(ctx, mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.float16))
    optimizer, scaler = sgd(wrapped), torch.amp.GradScaler("cpu", init_scale=64.0)
    for overflows in (False, True):
        before = parameters(wrapped)
        loss = forward(ctx, wrapped) * (float("inf") if overflows and ctx.rank == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = parameters(wrapped)
        assert torch.equal(after["exit.weight"], before["exit.weight"]) == overflows
    assert scaler.get_scale() == 32.0


@ROWS("`communication_data_type`")
def communication_data_type(ctx: RankContext) -> None:
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapped, reference = by_fsdp2(ctx, mp_policy=policy), model().bfloat16()
    backward(ctx, wrapped)
    reference(batch(ctx).bfloat16()).float().square().mean().backward()
    for name, found in gradients(wrapped).items():
        expected = reference.get_parameter(name).grad.float()
        dist.all_reduce(expected)
        close(found, expected / ctx.world_size)


@ROWS("`prescale_gradients`, `gradient_predivide_factor`")
def predivide(ctx: RankContext) -> None:
    wrapped, plain = by_fsdp2(ctx), by_fsdp2(ctx)
    for unit in (wrapped, *wrapped.blocks):
        unit.set_gradient_divide_factor(4.0)
    backward(ctx, wrapped)
    backward(ctx, plain)
    close({name: grad * 2 for name, grad in gradients(wrapped).items() if grad is not None}, gradients(plain))


@ROWS("`deepspeed.checkpointing.checkpoint`")
def activation_checkpointing(ctx: RankContext) -> None:
    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    whole = model()
    for block in whole.blocks:
        block.__class__ = Checkpointed
    close(train(ctx, by_fsdp2(ctx, whole)), unsharded(ctx))


# Saving


def _shared_folder() -> str:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    return folder[0]


def _save(ctx: RankContext, wrapped: nn.Module) -> str:
    """A checkpoint behind a step; its folder."""
    optimizer, folder = adamw(wrapped), _shared_folder()
    backward(ctx, wrapped)
    optimizer.step()
    states = get_state_dict(wrapped, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    return folder


def _load(wrapped: nn.Module, folder: str) -> torch.optim.Optimizer:
    optimizer = adamw(wrapped)
    states = get_state_dict(wrapped, optimizer)
    loaded: Any = {"model": states[0], "optimizer": states[1]}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(wrapped, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    return optimizer


@ROWS("`engine.save_checkpoint`, `engine.load_checkpoint`")
def save_checkpoint(ctx: RankContext) -> None:
    saved, other = by_fsdp2(ctx), by_fsdp2(ctx)
    optimizer = _load(other, _save(ctx, saved))
    close(parameters(other), parameters(saved))
    assert optimizer.state[other.entry.weight]["step"] == 1


@ROWS("universal checkpoints", world_size=4)
def universal_checkpoint(ctx: RankContext) -> None:
    saved: Any = by_fsdp2(ctx)
    other: Any = wrap(fsdp2, ctx.mesh_2d(2, 2))
    _load(other, _save(ctx, saved))
    assert saved.entry.weight.to_local().shape != other.entry.weight.to_local().shape
    close(parameters(other), parameters(saved))


@ROWS("`zero_to_fp32.py`, `stage3_gather_16bit_weights_on_model_save`")
def zero_to_fp32(ctx: RankContext) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(by_fsdp2(ctx), options=options)
    if ctx.rank == 0:
        close(found, dict(model().state_dict()))
    else:
        assert found == {}


@contextmanager
def _nbytes(wrapped: nn.Module) -> Iterator[dict[str, int]]:
    """The bytes gathered per unit while the block runs."""
    found: dict[str, int] = {}
    with trace.record(wrapped) as recorded:
        yield found
    for entry in recorded.entries:
        if entry.name in ("unshard", "prefetch"):
            found[entry.unit] = entry.nbytes


@ROWS("`comms_logger`, `wall_clock_breakdown`")
def comms_logger(ctx: RankContext) -> None:
    wrapped = by_fsdp2(ctx)
    with _nbytes(wrapped) as found:
        backward(ctx, wrapped)
    nbytes = sum(parameter.numel() * 4 for parameter in wrapped.blocks[0].parameters())
    assert nbytes <= found["blocks.0"] < 1.1 * nbytes  # with what pads it
