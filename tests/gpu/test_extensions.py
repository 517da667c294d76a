"""On CUDA, hooks run on the gather stream: values are those of a dense model that holds what travels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.core.runtime.unit import unit_of
from fsdp2.tensors import (
    BFloat16AllGatherTensor,
    Float8AllGatherTensor,
    Float8Scaling,
    Int8AllGatherTensor,
    precompute_float8_scales,
    wrap_parameters,
)
from tests.gpu.support import Stack, batch, on_gpus
from tests.harness.distributed import RankContext
from tests.unit.testing.test_check import float8_rows, int8

# The classes, and what a dense model holds in their place.
FORMATS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "bfloat16": (BFloat16AllGatherTensor, lambda weight: weight.bfloat16().float()),
    "int8": (partial(Int8AllGatherTensor, block_size=16), lambda weight: int8(weight, weight.dtype)),
    "float8": (
        partial(Float8AllGatherTensor, scaling=Float8Scaling.PER_ROW),
        lambda weight: float8_rows(weight, weight.dtype).dequantised(),
    ),
}


def _sharded(ctx: RankContext, model: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    model = copy.deepcopy(model)
    wrap_parameters(model, make)
    for block in model:  # type: ignore[attr-defined]
        fsdp2.fully_shard(block, mesh=ctx.mesh_1d())
    return fsdp2.fully_shard(model, mesh=ctx.mesh_1d())


@pytest.mark.parametrize("name", list(FORMATS))
@on_gpus
def test_gradients_are_those_of_a_model_that_holds_what_travels(ctx: RankContext, name: str) -> None:
    make, received = FORMATS[name]
    torch.manual_seed(0)
    reference = Stack(4).cuda()
    model = _sharded(ctx, reference, make)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(received(parameter))
    for _ in range(3):  # gathers overlap with compute, and released memory is used again
        for each in (model, reference):
            each.zero_grad()
            each(batch()).square().mean().backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        grad = parameter.grad.full_tensor()  # type: ignore[union-attr]
        torch.testing.assert_close(grad, expected.grad, rtol=2e-2, atol=1e-5)


@on_gpus
def test_memory_of_hooks_is_released_between_passes(ctx: RankContext) -> None:
    model = _sharded(ctx, Stack(4).cuda(), Int8AllGatherTensor)
    model(batch()).sum().backward()
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        model(batch()).sum().backward()
        model.zero_grad()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    for block in model:  # type: ignore[attr-defined]
        for group in unit_of(block).groups:  # type: ignore[union-attr]
            assert all(storage.nbytes() == 0 for param in group.params for storage, _ in param.inner)


@on_gpus
def test_float8_matmul_is_close_to_the_dense_one(ctx: RankContext) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this device multiplies no float8")
    torch.manual_seed(0)
    reference = Stack(2).cuda().bfloat16()
    model = _sharded(ctx, reference, Float8AllGatherTensor)
    precompute_float8_scales(model)
    x = batch().bfloat16()
    torch.testing.assert_close(model(x), reference(x), rtol=0.1, atol=0.1)
