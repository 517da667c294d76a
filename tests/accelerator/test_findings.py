"""What the simulated accelerator has shown of the package's defects. Each test fails until its defect is mended."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp2
from tests.accelerator import device, group
from tests.accelerator.cases import (
    WIDE,
    Trained,
    bf16_fp32,
    differences,
    gather_on_compute_stream,
    nothing,
    placed,
    run,
    sharded,
    step_on_a_side_stream,
)
from tests.accelerator.support import cpu_mesh, on_device
from tests.harness.distributed import RankContext
from tests.harness.models import MLP
from tests.harness.runtimes import Runtime, oracle, subject

SIM: Any = device.DEVICE


def losses(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if "loss" in name}


def check_event(mesh: Any, like: Any, runtime: Runtime, **options: Any) -> None:
    case = Trained(step=step_on_a_side_stream, optimizer=nothing, options=options)
    expected = losses(run(case, like, subject()))
    found = losses(run(case, mesh, runtime, first="compute"))
    assert not differences(found, expected), (found, expected)


@on_device(2)
def test_forward_waits_for_the_event_of_the_optimizer(ctx: RankContext) -> None:
    check_event(ctx.mesh_1d(), cpu_mesh(2), subject())


@on_device(2)
def test_forward_waits_for_the_event_of_the_optimizer_on_a_shard_axis_of_one(ctx: RankContext) -> None:
    check_event(ctx.mesh_2d(2, 1), cpu_mesh(2, 1), subject())


@on_device(2)
def test_forward_that_gathers_on_the_compute_stream_waits_for_the_event_of_the_optimizer(ctx: RankContext) -> None:
    check_event(ctx.mesh_1d(), cpu_mesh(2), subject(), then=gather_on_compute_stream)


def launches_of_a_step(ctx: RankContext, runtime: Runtime) -> list[str]:
    """Reduce-scatters and all-reduces in the order in which the device came to them, all-reduces being slow."""
    case = Trained(shape=(2, 2), num_steps=1, model=partial(MLP, num_blocks=4))
    group.launches.clear()
    run(case, ctx.mesh_2d(2, 2), runtime, late=["all-reduce"])
    return [each for each in group.launches if "reduce" in each]


def assert_overlap(found: list[str]) -> None:
    """The slow all-reduce of the first unit holds up no reduce-scatter."""
    found = found[found.index("reduce-scatter starts") :]  # before, ranks compare their models
    assert found[: found.index("all-reduce ends")].count("reduce-scatter ends") > 1, found


@on_device(4)
def test_reduce_scatter_overlaps_with_the_all_reduce_of_the_unit_before(ctx: RankContext) -> None:
    assert_overlap(launches_of_a_step(ctx, subject()))


@on_device(4)
def test_torch_overlaps_reduce_scatter_and_all_reduce(ctx: RankContext) -> None:
    assert_overlap(launches_of_a_step(ctx, oracle()))


def built(runtime: Runtime, mesh: Any, make: Any = WIDE, **options: Any) -> Any:
    torch.manual_seed(0)
    model = placed(make, SIM)
    sharded(runtime, model, mesh, **options)
    return model


@on_device(2)
def test_gather_that_finds_no_memory_keeps_none(ctx: RankContext) -> None:
    model = built(subject(), ctx.mesh_1d())
    extension = device.load()
    block = model.blocks[0]
    block.unshard()
    block.reshard()
    torch.accelerator.synchronize()
    model(*model.batch(torch.Generator().manual_seed(0)))  # carries out deferred releases
    model.reshard()
    before = extension.memory_allocated()
    whole = 2 * 128 * 256 * 4 + 128 * 4 + 256 * 4
    extension.set_memory_limit(before + whole + 512)  # no place for the bucket
    try:
        with pytest.raises(torch.OutOfMemoryError):
            block.unshard()
    finally:
        extension.set_memory_limit(0)
    assert extension.memory_allocated() == before, extension.memory_allocated() - before


def peak_of_a_step(ctx: RankContext, runtime: Runtime, **options: Any) -> int:
    """Bytes above what is there before a step, at its highest."""
    model = built(runtime, ctx.mesh_1d(), partial(MLP, num_blocks=4, dim=128), **options)
    for _ in range(2):
        batch = model.batch(torch.Generator().manual_seed(ctx.rank))
        loss = model.loss(model(*batch), batch)
        del batch
        torch.accelerator.synchronize()
        before = device.load().memory_allocated()
        device.load().reset_peak_memory()
        loss.backward()
        del loss
        peak = device.load().max_memory_allocated() - before
        for parameter in model.parameters():
            parameter.grad = None
        torch.accelerator.synchronize()
    return peak


@pytest.mark.parametrize("policy", ["fp32", "bf16, fp32"])
@on_device(2)
def test_peak_of_backward_is_not_above_that_of_torch(ctx: RankContext, policy: str) -> None:
    options = {} if policy == "fp32" else {"policy": bf16_fp32}
    ours, theirs = peak_of_a_step(ctx, subject(), **options), peak_of_a_step(ctx, oracle(), **options)
    assert ours <= theirs, (ours, theirs)


@on_device(2)
def test_parameters_and_buffers_move_to_the_device_of_the_mesh(ctx: RankContext) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    fsdp2.fully_shard(model, mesh=ctx.mesh_1d())
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {device.DEVICE}
