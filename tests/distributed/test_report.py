"""``fsdp2.report.report`` around real steps: what it finds, what it refuses, and that it leaves the step as it was."""

from __future__ import annotations

import errno
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.core import _torch
from fsdp2.core.comm import streams
from fsdp2.core.comm.offload import StagedOffloadPolicy
from fsdp2.extras.peers import PeerComm
from fsdp2.report.figures import ms_text
from tests.distributed.support import DIM, InjectedError, Stack, batch, seeded, shard, shard_each, sharded, step, train
from tests.harness.distributed import RankContext, distributed
from tests.harness.pool import WorkerPool

ORDER_OF_A_STEP = [
    "all-gather (root)",
    *(f"all-gather blocks.{i}" for i in (0, 1, 2)),
    "all-gather blocks.2",
    "all-gather blocks.1",
    "reduce-scatter blocks.2",
    "all-gather blocks.0",
    "reduce-scatter blocks.1",
    "reduce-scatter blocks.0",
    "reduce-scatter (root)",
]


def _order(data: dict[str, Any]) -> list[str]:
    names = [unit["name"] for unit in data["units"]]
    return [f"{data['kinds'][kind]} {names[unit]}" for kind, unit, *_ in data["collectives"]["rows"]]


def _trained(model: Any, num_steps: int) -> None:
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=range(num_steps))


def _is_watched(model: Any) -> bool:
    units = model._unit().tree.units
    watched = {bool(unit.observers) for unit in units} | {streams._Process.on_activity is not None}
    watched |= {group.on_transition is not None for unit in units for group in unit.groups}
    assert len(watched) == 1, "watched in part"
    return watched.pop()


def _reported_step(model: Any, *paths: Path, fails: bool = False) -> None:
    with fsdp2.report.report(model, *paths):
        step(model)
        if fails:
            raise InjectedError


def _told(report: Any) -> Any:
    """The data of the report, which is there on rank 0 only."""
    assert (report.data is not None) is (dist.get_rank() == 0)
    told = [report.data]
    dist.broadcast_object_list(told)
    return told[0]


def _reported(model: Any, *paths: Path, num_steps: int = 2, **options: Any) -> Any:
    """What the report of some steps tells."""
    with fsdp2.report.report(model, *paths, **options) as report:
        _trained(model, num_steps)
    return _told(report)


def _assert_times_add_up(data: Any) -> None:
    for totals, timeline in zip(data["rank_totals"], data["timelines"], strict=True):
        lasted_ms = (timeline["stop_us"] - timeline["start_us"]) / 1e3
        assert sum(value for name, value in totals.items() if name != "rank") == pytest.approx(lasted_ms, abs=0.1)


@distributed(2)
def test_rank_0_has_the_collectives_bytes_and_memory_of_a_step(ctx: RankContext, tmp_path: Path) -> None:
    model = sharded(ctx)
    with fsdp2.report.report(model, tmp_path / "step.html", tmp_path / "step.json") as report:
        _trained(model, 3)
        assert _is_watched(model)
        _trained(model, 1)
        assert not _is_watched(model)  # the fourth step runs as without a report
        _trained(model, 1)
    data = _told(report)
    assert json.loads((tmp_path / "step.json").read_text()) == data
    assert (tmp_path / "step.html").stat().st_size > 0
    assert data["ranks"] == [0, 1]
    assert len(data["steps_ms"]) == 3  # of five
    assert data["step"] > 0  # the first one made plans
    if ctx.rank == 0:
        step_ms = ms_text(data["steps_ms"][data["step"]], data["digits"])
        begin = f"A step of Stack in 4 units, with inputs float32[4, {DIM}], on 2 ranks of cpu (gloo), takes {step_ms}"
        assert str(report).startswith(f"{begin}, the median of 2 steps after the first")
        assert all(each["text"] in str(report) for each in data["findings"])
    assert _order(data) == ORDER_OF_A_STEP
    assert data["collectives"]["first_difference"] is None
    _assert_times_add_up(data)
    plan = fsdp2.memory.memory_plan(model)
    for unit, expected in zip(data["units"], plan.units, strict=True):
        assert (unit["name"], unit["shard_nbytes"]) == (expected.name, expected.shards)
        assert unit["unsharded_nbytes"] == expected.bytes.unsharded
        assert unit["gather_bucket_nbytes"] == expected.bytes.unsharded  # all are small
        assert unit["gather_direct_nbytes"] == 0
        assert (unit["is_small"], unit["bucket_nbytes"]) == (True, 2 * PeerComm.routing.direct_min_nbytes)
    assert data["memory"][0]["temporary_nbytes"] == plan.peak
    assert sum(owner["nbytes"] for owner in data["memory"][0]["owners"]) == data["memory"][0]["peak_nbytes"]


@distributed(2)
def test_what_the_plan_predicted_stands_beside_what_happened(ctx: RankContext) -> None:
    workload = fsdp2.planner.Workload(4, 1, precision="fp32", inputs=lambda: torch.empty(4, DIM), loss=torch.mean)
    done = fsdp2.auto_shard(seeded(Stack), budget="1GiB", workload=workload, mesh=ctx.mesh_1d())
    with fsdp2.report.report(done.model, plan=done) as report:
        _trained(done.model, 2)
    data = _told(report)
    with pytest.raises(ValueError, match="recommends nothing"):
        _reported(done.model, plan=replace(done.plan, recommended=None))
    with pytest.raises(TypeError, match="plan is a str, expected"):
        _reported(done.model, plan="H100")
    assert data["prediction"]["choice"] == done.applied.choice.name
    assert (data["prediction"]["machine"], data["prediction"]["num_gpus"]) == (done.plan.machine.name, 2)
    rows = {row["figure"]: row for row in data["prediction"]["rows"]}
    result = done.applied.result
    assert rows["step_ms"]["predicted"] == pytest.approx(1e3 * result.time.step)
    assert rows["step_ms"]["measured"] == data["steps_ms"][data["step"]]
    assert rows["exposed_ms"]["predicted"] == pytest.approx(1e3 * result.time.exposed)
    assert rows["reserved_nbytes"]["predicted"] == int(result.reserved_nbytes)
    assert rows["temporary_nbytes"]["measured"] == fsdp2.memory.memory_plan(done.model).peak
    predicted = f"The plan predicts {ms_text(rows['step_ms']['predicted'], 3)} for 2 x {done.plan.machine.name}"
    assert ctx.rank > 0 or f"{predicted}, which is another machine" in str(report)
    assert [row["ratio"] for row in data["prediction"]["rows"]] == [None] * 6


class _Sleeps(torch.autograd.Function):
    """The identity, whose backward takes 50 ms."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(0.05)
        return grad


def _decoder_model() -> Any:
    """As in a library: the blocks are below an inner model, and the head is beside it."""
    model = nn.Sequential(OrderedDict(model=Stack(2), lm_head=nn.Linear(DIM, DIM)))
    head = model.lm_head.forward
    model.lm_head.forward = lambda x: _Sleeps.apply(head(x))
    return model


HEADS: dict[str, Callable[[Any], list[Any]]] = {  # the units besides blocks, by the one whose head it is
    "(root)": lambda model: [model],
    "lm_head": lambda model: [[model.model.entry, model.model.exit], model.lm_head, model],
    "model.exit": lambda model: [[model.model.exit, model.lm_head], model],
}


@pytest.mark.parametrize("owner", HEADS)
@distributed(2)
def test_compute_belongs_to_the_module_whose_work_it_is(ctx: RankContext, owner: str) -> None:
    model = seeded(_decoder_model)
    shard_each(*model.model.blocks, *HEADS[owner](model), mesh=ctx.mesh_1d())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: time.sleep(0.02))
    with fsdp2.report.report(model, tokens_per_rank=4, flops_per_rank=1e6) as report:
        for seed in range(2):
            loss = model(batch(seed)).square().mean()
            time.sleep(0.03)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
    data = _told(report)
    rows = {row["name"]: row for row in data["compute"]}
    head = rows["lm_head"]
    assert (head["unit"], head["backward_ms"] >= 50, head["forward_ms"] > 0) == (owner, True, True)
    assert rows["loss and other code after forward"]["other_ms"] >= 30
    assert rows["other code outside of units"]["other_ms"] >= 10
    assert rows["optimizer"]["other_ms"] >= 20
    assert {"model.blocks.0", "model.blocks.1", "model.entry", "model.exit"} <= set(rows)
    drawn = {data["places"][place] for line in data["timelines"] for *_, place in line["spans"] if place >= 0}
    assert "lm_head" in drawn
    _assert_losses_add_up(data)
    speed, seconds = data["speed"], data["steps_ms"][data["step"]] / 1e3
    assert speed["tokens_per_s"] == pytest.approx(8 / seconds, rel=0.01)
    assert (speed["mfu"], speed["flops"]) == (None, 2e6)
    assert ctx.rank > 0 or "the peak of" in str(report)


def _assert_losses_add_up(data: Any) -> None:
    lost = data["lost"]
    totals = next(each for each in data["rank_totals"] if each["rank"] == lost["rank"])
    computed = totals["forward_ms"] + totals["backward_ms"] + totals["other_ms"]
    assert lost["compute_ms"] == pytest.approx(computed, abs=0.1)
    assert lost["step_ms"] == pytest.approx(lost["compute_ms"] + lost["lost_ms"], abs=0.1)
    assert sum(each["lost_ms"] for each in lost["kinds"]) == pytest.approx(lost["lost_ms"], abs=0.1)
    assert lost["explained_ms"] == pytest.approx(sum(each["gain_ms"] for each in data["findings"]), abs=0.1)
    assert lost["explained_ms"] <= lost["lost_ms"] + 0.1


def _series(data: Any) -> dict[str, list[int]]:
    return {each["what"]: each["nbytes"] for each in data["memory"][0]["series"]}


@distributed(2)
def test_memory_counts_activations_and_optimizer_states(ctx: RankContext) -> None:
    model = sharded(ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with fsdp2.report.report(model, steps=2) as report:
        train(model, optimizer, steps=range(2))
    without = _reported(sharded(ctx), activations=False)
    plain = seeded(Stack)
    data = _told(report)
    series = _series(data)
    assert all(len(values) == len(data["memory"][0]["times_us"]) for values in series.values())
    shards = sum(unit["shard_nbytes"] for unit in data["units"])
    parameters = list(plain.parameters())
    assert max(series["shards of parameters"]) == shards == sum(each.nbytes for each in parameters) // 2
    assert max(series["gradients of shards"]) == shards
    assert series["optimizer states"][-1] == 2 * shards + 4 * len(parameters)  # two moments; each counts its steps
    # The inputs of five linear layers, and the outputs of three tanh: each is 4 x DIM floats.
    assert max(series["saved by forward for backward"]) == (5 + 3) * 4 * DIM * 4
    assert series["saved by forward for backward"][-1] == 0
    assert data["memory"][0]["notes"] == []
    assert "saved by forward for backward" not in _series(without)
    assert without["memory"][0]["notes"] == ["Activations were not counted."]


@pytest.mark.ci
@distributed(4)
def test_units_with_replicas_are_also_all_reduced(ctx: RankContext) -> None:
    """And have the gradients that they have without a report."""
    model, plain = (sharded(ctx, mesh=ctx.mesh_2d(2, 2)) for _ in range(2))
    data = _reported(model, num_steps=3)
    _trained(plain, 3)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())
    _assert_times_add_up(data)
    assert data["ranks"] == [0, 1, 2, 3]
    assert len(data["timelines"]) == 4
    order = _order(data)
    assert [name for name in order if "all-reduce" not in name] == ORDER_OF_A_STEP
    for unit in ("blocks.2", "blocks.1", "blocks.0", "(root)"):
        assert order.index(f"all-reduce {unit}") > order.index(f"reduce-scatter {unit}")
    assert {unit["replicas"] for unit in data["units"]} == {2}


@distributed(2)
def test_a_rank_that_shards_alone_has_no_collectives(ctx: RankContext) -> None:
    data = _reported(sharded(ctx, mesh=ctx.mesh_of_one()))
    assert (data["ranks"], _order(data)) == ([0], [])


@distributed(2)
def test_steps_of_the_host_for_offloaded_units_are_shown_beside_backward(ctx: RankContext) -> None:
    """Backward waits at the model's input, until the host has stepped the unit whose backward came first."""
    model = shard(ctx, seeded(Stack), offload_policy=StagedOffloadPolicy())
    optimizer = fsdp2.optim.HostAdamW(model.parameters())
    step(model)
    optimizer.step()
    x = batch().requires_grad_()
    x.register_hook(lambda _: optimizer._unit_of[model.blocks[2].linear.weight]._running.result(timeout=30))
    with fsdp2.report.report(model) as report:
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
    data = _told(report)
    names = [unit["name"] for unit in data["units"]]
    for timeline in data["timelines"]:
        times: dict[str, dict[str, tuple[int, int]]] = {kind: {} for kind in data["kinds"]}
        for kind, unit, start, lasted, _ in timeline["transfers"]:
            times[data["kinds"][kind]][names[unit]] = (start, start + lasted)
        steps, copies, reductions = (times[kind] for kind in ("step on host", "copy to host", "reduce-scatter"))
        assert list(steps) == list(copies) == list(reductions) == ["blocks.2", "blocks.1", "blocks.0", "(root)"]
        assert copies["blocks.2"][1] <= steps["blocks.2"][0]
        assert steps["blocks.2"][1] <= copies["(root)"][0]


@distributed(2)
def test_micro_batches_without_communication_belong_to_the_step_that_reduces(ctx: RankContext) -> None:
    model = sharded(ctx)
    with fsdp2.report.report(model) as report:
        for _ in range(2):
            with fsdp2.no_sync(model):
                step(model)
            step(model)
    data = _told(report)
    assert len(data["steps_ms"]) == 2
    assert sum(name.startswith("reduce-scatter") for name in _order(data)) == 4


@distributed(2)
def test_what_cannot_work_is_refused_on_all_ranks(ctx: RankContext, tmp_path: Path) -> None:
    model: Any = sharded(ctx)
    folder, missing = tmp_path / "folder.html", tmp_path / "none" / "step.html"
    folder.mkdir(exist_ok=True)
    for kind, arguments, options, said in (
        (ValueError, [model, missing], {}, f"cannot write '{missing}': there is no folder '{missing.parent}'. Create"),
        (ValueError, [model, folder], {}, "it is no file. Use another path."),
        (ValueError, [model, tmp_path / "step.txt"], {}, "the suffix '.txt'. Use .html, .json or .trace.json."),
        (ValueError, [Stack()], {}, "this Stack was not given to fully_shard"),
        (ValueError, [model], {"steps": 0}, "steps is 0, expected an int of at least 1"),
        (TypeError, [3], {}, "model is 3, of type int, expected the root of a sharded model"),
        (TypeError, [model, None], {}, "paths is None, of type NoneType, expected a path"),
        (TypeError, [model], {"steps": 2.5}, "steps is 2.5, of type float, expected an int of at least 1"),
        (TypeError, [model], {"steps": "3"}, "steps is '3', of type str, expected an int of at least 1"),
        (
            TypeError,
            [model],
            {"tokens_per_rank": "3"},
            "tokens_per_rank is '3', of type str, expected an int",
        ),
        (ValueError, [model], {"flops_per_rank": 0}, "flops_per_rank is 0, expected a finite number of at least 1"),
    ):
        with pytest.raises(kind, match=r"fsdp2\.report: ") as refused, fsdp2.report.report(*arguments, **options):
            raise AssertionError("the block ran")
        assert said in str(refused.value)
    with fsdp2.report.report(model):
        step(model)
        with pytest.raises(fsdp2.ScheduleError, match="a report on FSDPStack is being recorded"):
            _reported_step(model)


@pytest.mark.ci
@distributed(2)
def test_the_profiler_tells_compute_from_what_a_slow_host_loses(ctx: RankContext, tmp_path: Path) -> None:
    model: Any = sharded(ctx)
    model.blocks[1].linear.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    with fsdp2.report.report(model, tmp_path / "step.html", profile=True) as report:
        _trained(model, 2)
        assert _torch.is_profiling()
        _trained(model, 2)
        assert not _torch.is_profiling()
    without = _reported(model, num_steps=1)
    data = _told(report)
    idle_ms = {unit["name"]: unit["idle_ms"] for unit in data["units"]}
    assert idle_ms["blocks.1"] >= 20
    assert all(each["forward_ms"] > 0 and each["backward_ms"] > 0 for each in data["rank_totals"])
    _assert_times_add_up(data)
    assert "late host" in [each["rule"] for each in data["findings"]]
    assert "idle" not in without["does"]
    assert "idle_ms" not in without["units"][0]


@distributed(2)
def test_nobody_watches_what_autograd_saves_after_the_last_step_that_is_recorded(ctx: RankContext) -> None:
    """It ends in the forward of the next step. Transforms of torch.func refuse hooks on what is saved."""
    model = sharded(ctx)
    with fsdp2.report.report(model, steps=1):
        _trained(model, 3)
        assert float(torch.func.grad(torch.sin)(torch.zeros(()))) == 1.0


@distributed(2)
def test_all_ranks_raise_if_rank_0_cannot_write(ctx: RankContext, tmp_path: Path) -> None:
    """A name with a NUL on rank 0 only, and a disk that is full at the end."""
    model, path = sharded(ctx), tmp_path / "step.json"
    name = "a\0b.json" if ctx.rank == 0 else "b.json"
    with pytest.raises(ValueError, match="expected a path"), fsdp2.report.report(model, name):
        raise AssertionError("the block ran")
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with mock.patch.object(os, "fsync", full), pytest.raises(OSError, match="No space left on device"):
        _reported_step(model, path)
    assert not path.exists()
    _reported(model)


@distributed(2)
def test_a_report_that_fails_writes_nothing_and_leaves_nothing_behind(ctx: RankContext, tmp_path: Path) -> None:
    """A profiler that runs already, a block in which no step ran, an exception in the block."""
    model, other, path = sharded(ctx), sharded(ctx), tmp_path / "step.html"
    with (
        torch.profiler.profile(acc_events=True),
        pytest.raises(fsdp2.ScheduleError, match=r"torch\.profiler runs already\. End it before the block"),
    ):
        _reported(model, path, profile=True)
    with (
        pytest.raises(fsdp2.ScheduleError, match=r"as the root ran inside the block on ranks \[0, 1\]"),
        fsdp2.report.report(model, path),
    ):
        step(other)
    with pytest.raises(InjectedError):
        _reported_step(model, path, fails=True)
    assert not path.exists()
    _reported(model)
    assert not _is_watched(model)


def _raise_on_rank_1(ctx: RankContext) -> str:
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=4)), "cpu")
    model = shard(ctx, seeded(Stack), mesh=mesh)
    expected = InjectedError if ctx.rank == 1 else fsdp2.CommunicationError
    with pytest.raises(expected) as raised:
        _reported_step(model, fails=ctx.rank == 1)
    return str(raised.value)


@pytest.mark.long
def test_a_rank_that_raises_alone_is_named_as_the_likely_cause_on_the_others() -> None:
    pool = WorkerPool(2)  # of its own: what is lost does not come back
    try:
        said, _ = pool.run(_raise_on_rank_1)
    finally:
        pool.close(kill=True)
    assert said.startswith("fsdp2.report: rank 0 waited for the other ranks in vain")
    assert said.endswith("Look for an exception on another rank.")
