"""Each stream wait of the package is needed: without it, some run on the simulated accelerator gives other values.

But one: when a gather is dropped, compute waits for the gather stream before it frees what that one reads
(``Gather.drop``). What would be read too late is thrown away, so no value can tell. Clocks can: see
``tests/distributed/test_stream_order.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2.comm.streams import AcceleratorStreams
from tests.accelerator import group
from tests.accelerator.cases import CASES, SCHEDULES, differences, mesh_of, reference, run
from tests.accelerator.support import on_device
from tests.harness.distributed import RankContext
from tests.harness.runtimes import subject
from tests.harness.selection import long


@dataclass(frozen=True)
class Wait:
    """A wait to leave out.

    Attributes:
        method: of ``AcceleratorStreams``; or "work", the wait for a collective on the backend's own stream.
        place: the function in ``fsdp2`` that waits.
        case: whose values tell.
        schedule: what notices as a rule. Orders are drawn for all streams that there are, so what ran before has a part
            in it: if this one does not notice, another must.
    """

    method: str
    place: str
    case: str
    schedule: str

    def __str__(self) -> str:
        return f"{self.place}-{self.method}"


WAITS = [
    Wait("wait_here", "group.all_gather.Gather.wait", "plain", "late gathers"),
    Wait("gather_after_compute", "group.all_gather.release", "direct", "side streams first"),
    Wait("wait_here", "group.gradients.Reduction.finish", "direct", "late reductions"),
    Wait("wait_here", "group.gradients.Reduction.wait", "bf16", "compute first"),
    Wait("gather_after_compute", "runtime.root.Root.order_gathers", "plain", "side streams first"),
    Wait("gather_after_compute", "runtime.root.Root._begin_backward", "reads what forward wrote", "side streams first"),
    Wait("gather_after_compute", "group.group.ParamGroup._refresh", "loaded by assignment", "side streams first"),
    Wait("gather_after", "runtime.root.Root.order_gathers", "optimizer's event", "side streams first"),
    Wait("reduce_after_compute", "group.reduce_scatter.Reduce.launch", "plain", "side streams first"),
    Wait("wait_on_cpu", "comm.offload.FlatStage.wait", "offloaded, evaluated", "late copies"),
    Wait("wait_on_cpu", "comm.offload.HostCopies.wait", "offloaded", "late copies"),
    Wait("work", "group.all_gather.Gather._wait_for_works", "gathered on the compute stream", "late gathers"),
    Wait("work", "runtime.rank_checks._reduce", "partly used", "late reductions"),
    Wait("on, in front", "group.reduce_scatter.Reduce._run_hook", "hook on a stream of its own", "late reductions"),
    Wait("on, behind", "group.reduce_scatter.Reduce._run_hook", "hook on a stream of its own", "compute first"),
]
WAITS_OF_4 = [
    Wait(
        "reduce_after_compute",
        "group.gradients.GroupGradients._start_landing",
        "replicated, sums carried on alone",
        "side streams first",
    ),
    Wait("work", "group.gradients.Reduction._advance", "replicated, cast back", "late all-reduces"),
]


@pytest.mark.parametrize("wait", [*WAITS[:3], *long(*WAITS[3:])], ids=str)
@on_device(2)
def test_wait_that_is_left_out_is_noticed(ctx: RankContext, wait: Wait) -> None:
    check(ctx, wait)


@pytest.mark.parametrize("wait", WAITS_OF_4, ids=str)
@on_device(4)
def test_wait_that_is_left_out_is_noticed_on_4_ranks(ctx: RankContext, wait: Wait) -> None:
    check(ctx, wait)


def check(ctx: RankContext, wait: Wait) -> None:
    expected = reference(ctx, wait.case)
    times: list[None] = []
    noticed: list[bool] = []
    others = [SCHEDULES[other] for other in SCHEDULES if other != wait.schedule]
    # On a busy machine messages come late, and an order is not what it was: so more seeds follow.
    seeds = [{**SCHEDULES[wait.schedule], "seed": seed} for seed in range(100, 112)]
    for schedule in [SCHEDULES[wait.schedule], *seeds[:4], *others, *seeds[4:]]:
        with leaving_out(wait, times):
            values = run(CASES[wait.case], mesh_of(ctx, wait.case), subject(), **schedule)
        by_rank: list[Any] = [None] * ctx.world_size
        dist.all_gather_object(by_rank, bool(differences(values, expected)))
        noticed += by_rank
        if any(by_rank):
            break
    assert times, f"{wait.case} never comes to {wait}"
    assert any(noticed), f"nobody notices that {wait} is left out of {wait.case}"


@contextmanager
def leaving_out(wait: Wait, times: list[None]) -> Iterator[None]:
    """Without ``wait``. Adds to ``times`` whenever it was left out."""
    patch = pytest.MonkeyPatch()
    try:
        if wait.method == "work":
            patch.setattr(group.Work, "wait", _unless_at(wait.place, group.Work.wait, times, depth=2))
        elif wait.method.startswith("on, "):
            patch.setattr(AcceleratorStreams, "on", _half(wait.method, times))
        else:
            left_out = _unless_at(wait.place, getattr(AcceleratorStreams, wait.method), times, depth=1)
            patch.setattr(AcceleratorStreams, wait.method, left_out)
        yield
    finally:
        patch.undo()


def _unless_at(place: str, method: Callable[..., Any], times: list[None], *, depth: int) -> Callable[..., Any]:
    """``method``, which does nothing if the function ``depth`` calls above is ``place``."""

    def wait(self: Any, *args: Any) -> Any:
        frame = sys._getframe(depth)
        names = [type(frame.f_locals["self"]).__qualname__] if "self" in frame.f_locals else []
        if ".".join([frame.f_globals["__name__"], *names, frame.f_code.co_name]) == f"fsdp2.{place}":
            times.append(None)
            return None
        return method(self, *args)

    return wait


def _half(which: str, times: list[None]) -> Any:
    """``AcceleratorStreams.on`` with one of its two waits."""

    @contextmanager
    def on(self: Any, stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        times.append(None)
        current = self._module.current_stream()
        if which != "on, in front":
            stream.wait_stream(current)
        with self._module.stream(stream):
            yield
        if which != "on, behind":
            current.wait_stream(stream)

    return on
