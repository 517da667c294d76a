"""Reports on the simulated accelerator: times come from its streams, and no step waits for the device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp2
from fsdp2.report.recorder import DeviceClock
from tests.accelerator import device
from tests.accelerator.support import on_device
from tests.distributed.support import DIM, Stack, seeded, shard
from tests.harness.distributed import RankContext
from tests.harness.selection import long


def _steps(model: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        model(torch.ones(4, DIM, device=device.DEVICE)).square().mean().backward()


def _report(ctx: RankContext, mesh: Any, late: list[str], **options: Any) -> Any:
    """The data; None but on rank 0. Unless shards are offloaded, nothing makes the host wait inside the steps."""
    model = shard(ctx, seeded(Stack), mesh=mesh, **options)
    model.to("cpu" if options else device.DEVICE)
    _steps(model, 1)  # makes plans
    device.schedule(3, late=late)
    with fsdp2.report.report(model) as report, device.counted_syncs() as syncs:
        _steps(model, 3)
    assert options or syncs == [], syncs
    assert (report.data is None) == (ctx.rank > 0)
    return report.data


@pytest.mark.parametrize("late", [["all-gather"], *long(["reduce-scatter", "all-reduce"])])
@on_device(2)
def test_steps_that_are_reported_do_not_wait_for_the_device(ctx: RankContext, late: list[str]) -> None:
    data = _report(ctx, ctx.mesh_1d(), late)
    if data is None:
        return
    assert len(data["steps_ms"]) == 3
    assert len(data["collectives"]["rows"]) == 11
    for totals, timeline in zip(data["rank_totals"], data["timelines"], strict=True):
        lasted_ms = (timeline["stop_us"] - timeline["start_us"]) / 1e3
        assert sum(value for name, value in totals.items() if name != "rank") == pytest.approx(lasted_ms, abs=0.1)
        assert all(duration >= 0 for *_, duration, _ in timeline["transfers"])
        kinds = ("gathers" if late == ["all-gather"] else "reductions", "other_ranks")
        # The device has one clock, and does what is late when nothing else is left.
        assert sum(totals[f"waits_for_{kind}_ms"] for kind in kinds) > 0


@on_device(2)
def test_clock_starts_when_the_device_has_come_to_it(ctx: RankContext) -> None:
    torch.ones(4, device=device.DEVICE)
    DeviceClock(torch.device(device.DEVICE), [])
    assert torch.accelerator.current_stream().query()


@pytest.mark.ci
@on_device(2)
def test_nothing_is_idle_on_a_device_that_the_profiler_does_not_see(ctx: RankContext) -> None:
    model = shard(ctx, seeded(Stack), mesh=ctx.mesh_1d())
    with (
        pytest.warns(UserWarning, match=r"torch\.profiler saw no operations on this rank's device"),
        fsdp2.report.report(model, profile=True) as report,
    ):
        _steps(model, 2)
    assert ctx.rank > 0 or "idle" not in report.data["does"]


@pytest.mark.parametrize("late", [["copy"], *long(["all-gather"])])
@on_device(2)
def test_copies_of_offloaded_shards_come_before_gathers_and_those_of_gradients_behind_reductions(
    ctx: RankContext, late: list[str]
) -> None:
    data = _report(ctx, ctx.mesh_1d(), late, offload_policy=fsdp2.CPUOffloadPolicy())
    if data is not None:
        assert len(data["collectives"]["rows"]) == 11  # copies are none
        _check_copies(data, behind="reduce-scatter")


def _check_copies(data: dict[str, Any], behind: str) -> None:
    """Gathers come after copies of their units to the device, and copies to the host after reductions, ``behind``."""
    for timeline in data["timelines"]:
        spans: dict[str, list[tuple[int, int, int]]] = {kind: [] for kind in data["kinds"]}
        for kind, unit, start, duration, _ in timeline["transfers"]:
            spans[data["kinds"][kind]].append((unit, start, start + duration))
        for before, after in (("copy to device", "all-gather"), (behind, "copy to host")):
            assert len(spans[before]) > 0
            for (unit, _, stop), (other, start, _) in zip(spans[before], spans[after], strict=True):
                assert unit == other
                assert stop <= start


@on_device(4)
def test_gradients_of_replicated_units_go_to_the_host_behind_their_all_reduces(ctx: RankContext) -> None:
    data = _report(ctx, ctx.mesh_2d(2, 2), ["all-reduce"], offload_policy=fsdp2.CPUOffloadPolicy())
    if data is not None:
        _check_copies(data, behind="all-reduce")


@on_device(2)
def test_memory_of_a_device_is_what_its_allocator_says_and_no_step_waits(ctx: RankContext) -> None:
    """Modules around units have names there, too."""
    model = shard(ctx, seeded(Stack), mesh=ctx.mesh_1d())
    model.to(device.DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = torch.ones(4, DIM, device=device.DEVICE)
    model(inputs).square().mean().backward()  # makes plans
    optimizer.step()
    torch.get_device_module(device.DEVICE).reset_peak_memory_stats()
    with fsdp2.report.report(model, steps=2) as report, device.counted_syncs() as syncs:
        for _ in range(2):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    assert syncs == [], syncs
    data = report.data
    if data is None:
        return
    assert {"entry", "exit", "blocks.0", "optimizer"} <= {row["name"] for row in data["compute"]}
    series = {each["what"]: each["nbytes"] for each in data["memory"][0]["series"]}
    shards = sum(unit["shard_nbytes"] for unit in data["units"])
    assert set(series["optimizer states"]) == {2 * shards}  # from the start; the host counts steps
    saved = (5 + 3) * 4 * DIM * 4  # inputs of five linear layers, outputs of three tanh
    assert saved <= max(series["activations, gradients before reduction, and other"])
    assert not {"saved by forward for backward", "gradients and their copies"} & set(series)
    peak, allocated = data["memory"][0]["peak_nbytes"], data["memory"][0]["allocated_nbytes"]
    assert 0.9 * allocated < peak <= allocated  # asked for at events only


@pytest.mark.in_turns
@pytest.mark.long
def test_the_benchmark_of_what_a_report_costs_runs() -> None:
    """It runs on ranks that are not there, whose group overrides a private method of this device's."""
    script = Path(__file__).parents[2] / "benchmarks" / "step" / "report_cost.py"
    done = subprocess.run([sys.executable, str(script), "--rounds", "1"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Per block and step" in done.stdout
