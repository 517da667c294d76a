"""``HostAdamW`` on the simulated accelerator: what its memory holds, and what overlaps."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import optim

import fsdp2
from fsdp2.optim.host_adamw import jobs
from tests.accelerator import device
from tests.accelerator.support import on_device
from tests.distributed.support import DIM, Stack, seeded, shard
from tests.harness.distributed import RankContext


def _model(ctx: RankContext, where: str = "device") -> Any:
    policy = fsdp2.CPUOffloadPolicy() if where == "host" else fsdp2.OffloadPolicy()
    model = shard(ctx, seeded(Stack), mesh=ctx.mesh_1d(), offload_policy=policy)
    model.to("cpu" if where == "host" else device.DEVICE)
    return model


def _step(model: Any, optimizer: optim.Optimizer) -> None:
    model(torch.ones(4, DIM, device=device.DEVICE)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("where", ["device", "host"])
@on_device(2)
def test_report_shows_copies_and_steps_of_the_host_while_backward_goes_on(ctx: RankContext, where: str) -> None:
    """``where``: the shards live."""
    model = _model(ctx, where)
    optimizer = fsdp2.optim.HostAdamW(model.parameters())
    _step(model, optimizer)
    device.schedule(3, late=["copy"])
    with fsdp2.report.report(model) as report:
        for _ in range(3):
            _step(model, optimizer)
    data = report.data or {"timelines": []}  # rank 0 has it
    assert len(data["timelines"]) == (0 if ctx.rank else 2)
    for timeline in data["timelines"]:
        spans: dict[str, list[tuple[int, int]]] = {kind: [] for kind in data["kinds"]}
        for kind, unit, start, *_ in timeline["transfers"]:
            spans[data["kinds"][kind]].append((unit, start))
        in_order = [unit for unit, _ in spans["reduce-scatter"]]
        assert len(in_order) == 4
        for kind in ("copy to host", "step on host"):
            assert [unit for unit, _ in spans[kind]] == in_order
        copied = [unit for unit, _ in spans["copy to device"]]
        assert copied == ([unit for unit, _ in spans["all-gather"]] if where == "host" else [])
        assert spans["copy to host"][0][1] < spans["reduce-scatter"][-1][1]


@pytest.mark.parametrize("where", ["device", "host"])
@on_device(2)
def test_host_steps_the_last_unit_before_the_device_has_come_to_the_first(ctx: RankContext, where: str) -> None:
    """The thread that trains waits for nothing meanwhile. ``where``: the shards live."""
    model = _model(ctx, where)
    optimizer = fsdp2.optim.HostAdamW(model.parameters(), overlap_forward=True)
    _step(model, optimizer)
    optimizer.wait()
    x = torch.ones(4, DIM, device=device.DEVICE).requires_grad_()
    last = optimizer._unit_of[model.blocks[2].linear.weight]
    seen: list[bool] = []

    def at_the_first(_: Any) -> None:
        assert isinstance(last, jobs.HostUnit)
        last._running.result(timeout=30)
        seen.append(True)

    waited: list[str] = []
    x.register_hook(at_the_first)
    x.register_hook(lambda _: waited.extend(device.host_syncs))
    loss = model(x).square().mean()
    device.host_syncs.clear()
    loss.backward()
    assert seen == [True]
    if where == "device":
        waited = device.host_syncs
    assert all(each.endswith(device.IN_HOST_THREAD) for each in waited), waited
    optimizer.wait()


def _peak_of_a_step(model: Any, made: list[optim.Optimizer]) -> int:
    """The most that the second step holds on the device."""
    for _ in range(2):
        device.load().drain()
        device.load().reset_peak_memory()
        model(torch.ones(4, DIM, device=device.DEVICE)).square().mean().backward()
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
        device.load().drain()
    return int(device.load().max_memory_allocated())


@pytest.mark.ci
@on_device(2)
def test_peak_falls_by_what_a_budget_moves(ctx: RankContext) -> None:
    """States on the host take no memory of the device."""
    peaks, nbytes = [], []
    for is_tight in (False, True):
        model = _model(ctx)
        choice = fsdp2.memory.offload_by_budget(model, 1 << 30)
        if is_tight:
            choice = fsdp2.memory.offload_by_budget(
                model, choice.nbytes - sum(unit.device for unit in choice.units) // 2 - 1
            )
            assert choice.params_on_host
        made: list[optim.Optimizer] = [optim.AdamW(choice.device_params, foreach=False)] if choice.device_params else []
        made += [fsdp2.optim.HostAdamW(choice.host_params)] if choice.host_params else []
        gc.collect()
        device.load().drain()
        peaks.append(_peak_of_a_step(model, made))
        nbytes.append(choice.nbytes)
        del model, made, choice
        gc.collect()
        device.load().drain()
    assert peaks[0] - peaks[1] >= 0.8 * (nbytes[0] - nbytes[1]), (peaks, nbytes)
