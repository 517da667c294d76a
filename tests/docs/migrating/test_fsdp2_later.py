"""What torch 2.15 adds does here what the page says; torch 2.15 is not installed, so only ours runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from tests.docs.migrating.rows import Rows, backward, batch, gradients, model, parameters, wrap
from tests.harness.distributed import RankContext

LATER = Rows("What torch 2.15 adds")


@pytest.mark.parametrize("cell", LATER)
def test_row(cell: str) -> None:
    LATER.run(cell)


def test_every_row_is_tried() -> None:
    LATER.check()


@LATER("`set_manual_backward_finalization(bool)`, `finalize_backward(async_op)`")
def manual_finalization(ctx: RankContext) -> None:
    wrapped, plain = (wrap(fsdp2, ctx.mesh_1d()) for _ in range(2))
    by_hand: Any = wrapped
    by_hand.set_manual_backward_finalization(True)
    for micro in range(2):
        backward(ctx, by_hand, micro)
        backward(ctx, plain, micro)
    by_hand.finalize_backward(async_op=True).wait()
    torch.testing.assert_close(gradients(by_hand), gradients(plain))


@LATER("`set_keep_unsharded_storage(bool, recurse)`")
def set_keep_unsharded_storage(ctx: RankContext) -> None:
    wrapped = wrap(fsdp2, ctx.mesh_1d())
    wrapped.set_keep_unsharded_storage(True)
    places = []
    for _ in range(2):
        wrapped.unshard()
        weight = wrapped.entry.weight
        places.append(weight.data_ptr())
        wrapped.reshard()
        assert weight.untyped_storage().nbytes() > 0
    assert places[0] == places[1]


@LATER("`MixedPrecisionPolicy.param_dtype_override_fn`")
def param_dtype_override_fn(ctx: RankContext) -> None:
    whole = model()

    def keep_biases(parameter: nn.Parameter) -> torch.dtype | None:
        return torch.float32 if parameter.dim() == 1 else None

    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, param_dtype_override_fn=keep_biases)
    block: Any = fsdp2.fully_shard(whole.blocks[0], mesh=ctx.mesh_1d(), mp_policy=policy)
    block.unshard()
    assert {name: parameter.dtype for name, parameter in block.up.named_parameters()} == {
        "weight": torch.bfloat16,
        "bias": torch.float32,
    }


@LATER("`grad_dtype` of a parameter")
def grad_dtype(ctx: RankContext) -> None:
    whole = model()
    whole.exit.weight.grad_dtype = torch.bfloat16
    wrapped = wrap(fsdp2, ctx.mesh_1d(), whole)
    wrapped(batch(ctx)).square().mean().backward()
    found = {name: gradient.dtype for name, gradient in gradients(wrapped).items() if gradient is not None}
    assert found["exit.weight"] is torch.bfloat16
    assert found["exit.bias"] is torch.float32
    assert parameters(wrapped)["exit.weight"].dtype is torch.float32


@LATER("without `reduce_dtype`, gradients are reduced in the dtype of the shards")
def dtype_of_reductions(ctx: RankContext) -> None:
    seen = []
    wrapped = wrap(fsdp2, ctx.mesh_1d(), mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    wrapped.set_all_reduce_hook(lambda gradient: seen.append(gradient.dtype))
    backward(ctx, wrapped)
    assert set(seen) == {torch.float32 if torch.__version__ >= "2.15" else torch.bfloat16}


@LATER("`reset_iter_state(keep_unreduced=)`")
def keep_unreduced(ctx: RankContext) -> None:
    wrapped, plain = (wrap(fsdp2, ctx.mesh_1d()) for _ in range(2))
    for each in (wrapped, plain):
        each.set_requires_gradient_sync(False)
        backward(ctx, each)
        each.set_requires_gradient_sync(True)
    wrapped.reset_iter_state(keep_unreduced=True)
    backward(ctx, wrapped, 1)
    backward(ctx, plain, 1)
    torch.testing.assert_close(gradients(wrapped), gradients(plain))


@LATER("`GradientReductionHandle`")
def handle_of_reductions(ctx: RankContext) -> None:
    wrapped: Any = wrap(fsdp2, ctx.mesh_1d())
    wrapped.set_manual_backward_finalization(True)
    backward(ctx, wrapped)
    handle = wrapped.finalize_backward(async_op=True)
    assert isinstance(handle, fsdp2.GradientReductionHandle)
    handle.wait()
