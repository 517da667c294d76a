"""On CUDA: the CPU never waits for the device, gathers run beside compute, and memory does not grow with depth."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.support import BF16, Stack, batch, block_nbytes, on_gpus, run_without_syncs, sharded, traced
from tests.harness.distributed import RankContext

MiB = 1 << 20


def _step(model: Stack, x: torch.Tensor) -> None:
    model(x).float().square().mean().backward()


def _forward(model: Stack, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def _transient_nbytes(model: Stack, run: Callable[[Stack, torch.Tensor], None]) -> int:
    """The peak of one run above what is there afterwards: shards, and gradients if there are any."""
    x = batch()
    for _ in range(2):
        run(model, x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run(model, x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()


@pytest.mark.every_case
@pytest.mark.parametrize("run", [_forward, _step])
@on_gpus
def test_memory_of_a_pass_does_not_grow_with_more_blocks_and_forward_holds_two(ctx: RankContext, run: Any) -> None:
    shallow, deep = (_transient_nbytes(sharded(ctx, num_blocks=n, mp_policy=BF16), run) for n in (4, 10))
    activations = 2 * MiB  # those do grow: 16 KiB for each tensor that a block saves
    assert deep <= shallow + activations
    if run is _forward:
        assert block_nbytes() <= deep <= 2 * block_nbytes() + activations


@on_gpus
def test_nothing_stays_unsharded_after_a_step(ctx: RankContext) -> None:
    model = sharded(ctx, num_blocks=4, mp_policy=BF16)
    x = batch()
    _step(model, x)
    model.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    _step(model, x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + MiB


@on_gpus
def test_gathers_and_reductions_run_beside_compute_and_the_cpu_never_waits(ctx: RankContext, tmp_path: Path) -> None:
    """Kernels are told apart by name and by the stream they ran on, not by time."""
    model, x = sharded(ctx, num_blocks=4, mp_policy=BF16), batch()
    run_without_syncs(lambda: _step(model, x))
    events = traced(lambda: _step(model, x), tmp_path / f"trace-{ctx.rank}.json")
    kernels = [(event["name"], event["args"]["stream"]) for event in events if event["cat"] == "kernel"]
    compute = {stream for name, stream in kernels if re.search(r"gemm|cutlass|tanh|nvjet", name, re.IGNORECASE)}
    assert len(compute) == 1, kernels
    beside = {stream for _, stream in kernels} - compute
    assert len(beside) >= 2, "gathers and reductions have a stream each"
    if ctx.world_size > 1:
        collectives = {stream for name, stream in kernels if "nccl" in name.lower()}
        assert collectives
        assert not collectives & compute
