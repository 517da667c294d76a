"""On CUDA: a report's times add up to the step, from events alone and with torch.profiler; and a rank whose device does
not get on says what it did last, while this thread waits for the device."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.core.runtime.unit_tree import tree_of
from fsdp2.extras.alike import Alike
from fsdp2.extras.stalls import StallWatch
from fsdp2.extras.standings import Board
from tests.gpu.support import BF16, Stack, batch, on_gpus, sharded
from tests.harness.distributed import RankContext
from tests.harness.messages import Heard

TIMEOUT_S = 4


class _LateHost(nn.Module):
    """The device has nothing to do while the host sleeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        time.sleep(0.02)
        return x


@pytest.mark.parametrize("profile", [False, True])
@on_gpus
def test_a_reports_times_add_up_and_the_profiler_sees_a_late_host(ctx: RankContext, profile: bool) -> None:
    model: Any = Stack(3)
    model[1].up = nn.Sequential(_LateHost(), model[1].up)
    for module in [*model, model]:
        fsdp2.fully_shard(module, mesh=ctx.mesh_1d(), mp_policy=BF16)
    with fsdp2.report.report(model, profile=profile) as report:
        for _ in range(3):
            model(batch()).float().square().mean().backward()
    if ctx.rank > 0:
        return
    data = report.data
    assert data is not None
    for totals, timeline in zip(data["rank_totals"], data["timelines"], strict=True):
        lasted_ms = (timeline["stop_us"] - timeline["start_us"]) / 1e3
        assert sum(value for name, value in totals.items() if name != "rank") == pytest.approx(lasted_ms, abs=0.2)
        assert totals["forward_ms"] > 0
        assert totals["backward_ms"] > 0
    block = data["units"][2]
    assert block["name"] == "1"
    if profile:
        assert block["idle_ms"] >= 19  # 20, less what the clocks differ by
    else:
        assert block["forward_ms"] >= 19


@on_gpus
def test_device_that_does_not_get_on_is_told_of_before_the_timeout(ctx: RankContext) -> None:
    model = sharded(ctx, num_blocks=2)
    model(batch())
    tree = tree_of(model._unit())  # type: ignore[attr-defined]
    checks = Alike(tree)
    checks.board, checks.timeout_s = Board(dist.HashStore(), ctx.rank), TIMEOUT_S
    with Heard() as heard:
        watch = StallWatch()
        watch.add(checks)
        threading.Thread(target=watch.run, daemon=True).start()
        with tree.executor.streams.on_gather:
            torch.cuda._sleep(10_000_000_000)  # cycles: about 5 s, in the place of a collective that waits
        torch.cuda.synchronize()
    assert len(heard.messages) == 1
    assert f"The backend gives up after {TIMEOUT_S} s." in heard.messages[0]
    assert f"Last events on rank {ctx.rank}: {tree.executor.story()}." in heard.messages[0]
