"""``CommDebugMode`` and torch's profiler see of our runtime what they see of torch's.

In the first pass of a model, ranks compare it once: ``CommDebugMode`` does not count that, so that what users assert
holds. It counts whatever a feature adds to every step.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

from tests.harness.compare import as_torchs, hsdp
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, ParityModel
from tests.harness.runtimes import Runtime, subject
from tests.harness.training import Step, one_backward, shard_units_and_root

c10d = torch.ops.c10d


def _model(runtime: Runtime, mesh: Any) -> ParityModel:
    torch.manual_seed(0)
    model = MLP()
    shard_units_and_root(runtime, model, mesh)
    return model


@pytest.mark.parametrize("axes", [1, 2])
@as_torchs(2, 4)
def test_comm_debug_mode_counts_the_same(ctx: RankContext, runtime: Runtime, axes: int) -> Any:
    if axes == 2 and ctx.world_size == 2:
        return None  # a shard axis of one rank: nothing is gathered
    model = _model(runtime, ctx.mesh_1d() if axes == 1 else hsdp(ctx))
    counts: list[Any] = []
    for index in range(2):
        with CommDebugMode() as mode, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the views and hooks that the mode makes
            one_backward(Step(index, ctx.rank, runtime), model)
        counts.append(sorted((str(op), count) for op, count in mode.get_comm_counts().items()))
    assert mode.get_comm_counts()[c10d._allgather_base_] > 0
    return counts


@pytest.mark.parametrize("adds", [0, 1])
@distributed(2)
def test_comm_debug_mode_counts_what_a_feature_adds_to_every_step(ctx: RankContext, adds: int) -> None:
    model: Any = _model(subject(), ctx.mesh_1d())
    if adds:
        model.set_ranks_may_differ(True)
    for index in range(2):
        with CommDebugMode() as mode, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one_backward(Step(index, ctx.rank, None), model)
        assert mode.get_comm_counts()[c10d.allreduce_] == adds


RANGES = ("FSDP::all_gather", "FSDP::all_gather_copy_out", "FSDP::post_backward_reduce")


@pytest.mark.ci
@as_torchs(2)
def test_profiler_shows_the_same_ranges(ctx: RankContext, runtime: Runtime) -> Any:
    model = _model(runtime, ctx.mesh_1d())
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        one_backward(Step(0, ctx.rank, runtime), model)
    found = Counter(event.name for event in profiler.events() if event.name.split(" ")[0] in RANGES)
    assert found["FSDP::all_gather (blocks.1)"] == 2  # in forward and in backward
    return sorted(found.items())
