"""What the simulated accelerator has shown of the package's defects. Each test fails until its defect is mended."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch

import fsdp2
from tests.accelerator import device, group
from tests.accelerator.cases import Trained, bf16_fp32, default, placed, run
from tests.accelerator.support import on_device
from tests.harness.distributed import RankContext
from tests.harness.models import MLP
from tests.harness.runtimes import Runtime, oracle, subject
from tests.harness.training import shard_units_and_root

SIM: Any = device.DEVICE


@pytest.mark.parametrize("runtime", [subject, oracle])
@on_device(4)
def test_reduce_scatters_overlap_with_the_slow_all_reduce_of_the_first_unit(ctx: RankContext, runtime: Any) -> None:
    case = Trained(shape=(2, 2), num_steps=1, model=partial(MLP, num_blocks=4))
    group.launches.clear()
    run(case, ctx.mesh_2d(2, 2), runtime(), late=["all-reduce"])
    found = [each for each in group.launches if "reduce" in each]
    found = found[found.index("reduce-scatter starts") :]  # before, ranks compare their models
    assert found[: found.index("all-reduce ends")].count("reduce-scatter ends") > 1, found


def peak_of_a_step(ctx: RankContext, runtime: Runtime, policy: Any) -> int:
    """Bytes above what is there before a step, at its highest."""
    model: Any = placed(partial(MLP, num_blocks=4, dim=128), SIM)
    shard_units_and_root(runtime, model, ctx.mesh_1d(), **policy(runtime))
    for _ in range(2):
        batch = model.batch(torch.Generator().manual_seed(ctx.rank))
        loss = model.loss(model(*batch), batch)
        del batch
        gc.collect()  # of earlier tests, which else may go in the midst of a step
        torch.accelerator.synchronize()
        before = device.load().memory_allocated()
        device.load().reset_peak_memory()
        loss.backward()
        del loss
        peak = device.load().max_memory_allocated() - before
        model.zero_grad()
        torch.accelerator.synchronize()
    return peak


@pytest.mark.parametrize("policy", [default, bf16_fp32], ids=["fp32", "bf16, fp32"])
@on_device(2)
def test_peak_of_backward_is_not_above_that_of_torch(ctx: RankContext, policy: Any) -> None:
    ours, theirs = (peak_of_a_step(ctx, runtime, policy) for runtime in (subject(), oracle()))
    assert ours <= theirs, (ours, theirs)


@on_device(2)
def test_parameters_and_buffers_move_to_the_device_of_the_mesh(ctx: RankContext) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    fsdp2.fully_shard(model, mesh=ctx.mesh_1d())
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {device.DEVICE}
