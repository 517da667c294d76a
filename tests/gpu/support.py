"""``@on_gpus``: a body that runs with one NCCL rank per GPU, on two GPUs where there are two.

On one GPU the shard axis has one rank: nothing travels, but with ``BF16`` parameters are still cast into memory that
comes and goes, on the gather stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fsdp2
from fsdp2.tensors import wrap_parameters
from tests.harness.distributed import RankContext, distributed

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
BF16 = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def on_gpus(body: Callable[..., Any]) -> Any:
    """Run ``body(ctx, ...)`` on the ranks of a CUDA pool; skipped without a GPU."""
    test = distributed(max(1, min(2, NUM_GPUS)), timeout_s=180, device_type="cuda")(body)
    return pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device")(test)


class Block(nn.Module):
    """Two square layers: with ``dim=1024`` 4 MiB of bf16 parameters, enough to travel directly."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, dim, bias=False)
        self.down = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Sequential):
    """Blocks only, so that the root has no parameters of its own."""

    def __init__(self, num_blocks: int, dim: int = 1024) -> None:
        super().__init__(*(Block(dim) for _ in range(num_blocks)))


def block_nbytes(dim: int = 1024, itemsize: int = 2) -> int:
    """Unsharded bytes of one block."""
    return 2 * dim * dim * itemsize


def sharded(ctx: RankContext, num_blocks: int, dim: int = 1024, make: Any = None, **kwargs: Any) -> Stack:
    """Every block on its own, then all. ``make``: the class of tensors whose hooks gather the parameters."""
    torch.manual_seed(0)
    model = Stack(num_blocks, dim)
    if make is not None:
        wrap_parameters(model, make)
    for block in model:
        fsdp2.fully_shard(block, mesh=ctx.mesh_1d(), **kwargs)
    return fsdp2.fully_shard(model, mesh=ctx.mesh_1d(), **kwargs)  # type: ignore[return-value]


def batch(dim: int = 1024) -> Tensor:
    return torch.randn(8, dim, device="cuda", generator=torch.Generator("cuda").manual_seed(1))


def traced(step: Callable[[], object], path: Path) -> list[dict[str, Any]]:
    """The kernels and the copies in torch.profiler's trace of the third of three steps."""
    for _ in range(2):
        step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]


def run_without_syncs(step: Callable[[], object]) -> None:
    """Raises if the third step makes the CPU wait for the device, other than by events."""
    for _ in range(2):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
