"""``CommDebugMode`` and torch's profiler see of our runtime what they see of torch's.

fsdp2 also exchanges a few flags between ranks: ``CommDebugMode`` does not count these, so that what users assert holds.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, ParityModel
from tests.harness.runtimes import Runtime, oracle, subject
from tests.harness.training import Step, one_backward, shard_units_and_root

c10d = torch.ops.c10d


def _model(runtime: Runtime, mesh: Any) -> ParityModel:
    torch.manual_seed(0)
    model = MLP()
    shard_units_and_root(runtime, model, mesh)
    return model


@pytest.mark.parametrize("axes", [1, 2])
@distributed(2, 4)
def test_comm_debug_mode_counts_the_same(ctx: RankContext, axes: int) -> None:
    mesh = ctx.mesh_1d() if axes == 1 else ctx.mesh_2d(2, ctx.world_size // 2)
    if axes == 2 and ctx.world_size == 2:
        return  # a shard axis of one rank: nothing is gathered
    found = []
    for runtime in (oracle(), subject()):
        model = _model(runtime, mesh)
        counts = []
        for index in range(2):
            with CommDebugMode() as mode, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the views and hooks that the mode makes
                one_backward(Step(index, ctx.rank, runtime), model)
            counts.append(dict(mode.get_comm_counts()))
        found.append(counts)
    assert found[0] == found[1]
    assert found[0][0][c10d._allgather_base_] > 0


RANGES = ("FSDP::all_gather", "FSDP::all_gather_copy_out", "FSDP::post_backward_reduce")


@pytest.mark.ci
@distributed(2)
def test_profiler_shows_the_same_ranges(ctx: RankContext) -> None:
    found = []
    for runtime in (oracle(), subject()):
        model = _model(runtime, ctx.mesh_1d())
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            one_backward(Step(0, ctx.rank, runtime), model)
        names = Counter(event.name for event in profiler.events())
        found.append({name: count for name, count in names.items() if name.split(" ")[0] in RANGES})
    assert found[0] == found[1]
    assert found[0]["FSDP::all_gather (blocks.1)"] == 2  # in forward and in backward
