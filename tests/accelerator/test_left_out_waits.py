"""Each wait of the package is needed. Here is the list of all of them, with what notices that one is left out:

- ``WAITS`` and ``WAITS_OF_4``: some run on the simulated accelerator gives other values. Tests below.
- ``UNSEEN`` and ``UNSEEN_OF_4``: no value tells, but the order of accesses does: the clocks of
  ``tests/distributed/test_stream_order.py``.
- ``ELSEWHERE``: waits for gloo's messages, and those of tools. The test that is named with each.

An event that is not recorded is not waited for, so records are in the list, too. ``core/comm/streams.py`` itself is
not: all waits of the others end there.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp2
from fsdp2.core.comm.streams import AcceleratorStreams, Streams
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
        method: of ``AcceleratorStreams``; or "work", the wait for a collective on the backend's own stream. "on" waits
            twice.
        place: the function in ``fsdp2`` that waits. If it does so twice, both are left out.
        case: whose values tell.
        schedule: what notices as a rule. Orders are drawn for all streams that there are, so what ran before has a part
            in it: if this one does not notice, another must.
    """

    method: str
    place: str
    case: str
    schedule: str = ""

    def __str__(self) -> str:
        return f"{self.place}-{self.method}"


_JOBS, _GRADIENTS = "optim.host_adamw.jobs", "core.group.gradients.GroupGradients"
_TREE, _MATRICES = "core.runtime.unit_tree.UnitTree", "optim.matrices"
_ACTIVATIONS, _ON_HOST = "memory.activations.ActivationOffload", "activations on the host"
_LATE = "checkpoint.mirrored._LateCopies"
SIDE = "side streams first"
WAITS = [
    Wait("wait_here", "core.group.all_gather.Gather.wait", "plain", "late gathers"),
    Wait("gather_after_compute", "core.group.all_gather.Gather.release", "direct", SIDE),
    Wait("wait_here", "core.group.gradients.Reduction.finish", "direct", "late reductions"),
    Wait("compute_after_reduce", "core.runtime.executor.Executor.wait_for_landed", "bf16", "compute first"),
    Wait("gather_after_compute", f"{_TREE}.order_gathers", "plain", SIDE),
    Wait("gather_after_compute", f"{_TREE}._begin_backward", "reads what forward wrote", SIDE),
    Wait("gather_after_compute", "core.group.group.ParamGroup._refresh", "loaded by assignment", SIDE),
    Wait("gather_after", f"{_TREE}.order_gathers", "optimizer's event", SIDE),
    Wait("wait_here", f"{_TREE}.order_gathers", "optimizer on a stream of its own", "compute first"),
    Wait("reduce_after_compute", "core.group.reduce_scatter.Reduce.launch", "plain", SIDE),
    Wait("wait_on_cpu", "core.comm.offload.FlatStage.wait", "offloaded, evaluated", "late copies"),
    Wait("wait_on_cpu", "core.comm.offload.HostCopies.wait", "offloaded", "late copies"),
    Wait("work", "core.group.all_gather.Gather.wait", "gathered on the compute stream", "late gathers"),
    Wait("work", "extras.rank_checks.reduce", "partly used, ranks may differ", "late reductions"),
    Wait(
        "on, in front", "core.group.reduce_scatter.Reduce._run_hook", "hook on a stream of its own", "late reductions"
    ),
    Wait("on, behind", "core.group.reduce_scatter.Reduce._run_hook", "hook on a stream of its own", "compute first"),
    Wait("record", "core.group.all_gather.Gather.issue", "plain", "late gathers"),
    Wait("record", "core.comm.offload.FlatStage.fetch", "offloaded, evaluated", "late copies"),
    Wait("record", "core.comm.offload.HostCopies.__init__", "offloaded", "late copies"),
    Wait("record", f"{_JOBS}._copying_out", "stepped on the host", SIDE),
    Wait("wait_here", f"{_JOBS}._copying_out", "stepped on the host", SIDE),
    Wait("record", f"{_JOBS}.Job.__init__", "stepped on the host", "late copies"),
    Wait("wait_on_cpu", f"{_JOBS}.Job.run", "stepped on the host", "late copies"),
    Wait("record", f"{_JOBS}.Job.run", "stepped on the host", "late copies"),
    Wait("wait_here", f"{_JOBS}.HostUnit.wait", "stepped on the host", "late copies"),
    Wait("gather_after", f"{_JOBS}.HostUnit.wait_before_gather", "stepped on the host, gathered", "late copies"),
    Wait("wait_here", f"{_JOBS}.HostUnit.wait_before_gather", "stepped on the host, computed with", "late copies"),
    Wait("record", f"{_JOBS}.Factor.__init__", "stepped on the host, clipped", "late copies"),
    Wait("wait_on_cpu", f"{_JOBS}.Factor.arrived", "stepped on the host, clipped", "late copies"),
    Wait("gather_after_compute", f"{_MATRICES}.exchange.Message.start", "muon", SIDE),
    Wait("record", f"{_MATRICES}.exchange.Message.start", "muon", "late gathers and reductions"),
    Wait("wait_here", f"{_MATRICES}.exchange.Message.wait", "muon", "late gathers and reductions"),
    Wait("work", f"{_MATRICES}.circles._reduced", "muon, gradients on rank 0 alone", "late all-reduces"),
    Wait("compute_after_reduce", "tensors.wire_residuals._Residuals.collected", "gradients in int8", "late reductions"),
    Wait("record", f"{_LATE}.__init__", "mirrored", SIDE),
    Wait("wait_here", f"{_LATE}.run", "mirrored", SIDE),
    Wait("record", f"{_ACTIVATIONS}._send", _ON_HOST, SIDE),
    Wait("wait_here", f"{_ACTIVATIONS}._send", _ON_HOST, SIDE),
    Wait("wait_here", f"{_ACTIVATIONS}._free", _ON_HOST, "late copies"),
    Wait("record", f"{_ACTIVATIONS}._fetch", _ON_HOST, "late copies"),
    Wait("wait_here", f"{_ACTIVATIONS}._fetch", _ON_HOST, SIDE),
    Wait("wait_here", f"{_ACTIVATIONS}.unpack", f"{_ON_HOST}, backward from a block", "late copies"),
    Wait("wait_here", f"{_ACTIVATIONS}._settle", f"{_ON_HOST}, backward to a block", "late copies"),
]
WAITS_OF_4 = [
    Wait("reduce_after_compute", f"{_GRADIENTS}._start_landing", "replicated, sums carried on alone", SIDE),
    Wait("work", "core.group.gradients.Reduction._advance", "replicated, cast back", "late all-reduces"),
    Wait("record", "core.group.reduce_scatter.Reduce.launch", "replicated, direct", "late reductions"),
]
UNSEEN = [  # the memory that is written again too early gets the same values
    Wait("compute_after_reduce", "core.group.gradients.Reduction.finish", "on each rank alone"),
]
UNSEEN_OF_4 = [  # what would be read too late is thrown away
    Wait("wait_here", "core.group.all_gather.Gather.drop", "on a smaller mesh, gathered in vain")
]
# a program that copies the model between steps on the host
_COPIED = "programs/test_pairs.py::test_programs_of_the_array"
_REPORTED = "accelerator/test_report.py::test_steps_that_are_reported_do_not_wait_for_the_device"
_MEASURED = "distributed/test_auto_shard.py::test_collectives_are_measured_by_size_alone_and_beside_products"
_ON_STREAMS = "unit/core/comm/test_backends.py::test_collectives_on_a_stream_leave_nothing_to_the_cpu"
_PENDING = "distributed/test_model_parallel_state.py::test_gradient_whose_collective_is_pending_is_waited_for"
# on a device, too, where values tell
_JOINED = "distributed/test_joined.py::test_ranks_with_other_numbers_of_batches_train_as_one_process"
_IN_ONE_MEMORY = "distributed/test_custom_comm.py::test_messages_in_flight_may_lie_in_the_same_memory"
_UNCUT = "distributed/test_scopes.py::test_forwards_without_gradients_run_on_whole_parameters"
_WIRED = "distributed/test_gradient_wires.py::test_sums_are_those_of_cast_gradients_in_rank_order"
_OWED = "distributed/test_gradient_wires.py::test_feedback_makes_up_for_losses_across_replicas_checkpoints_and_moves"
_STOPPED = "distributed/test_stream_order.py::test_a_wait_that_is_left_out_is_noticed"
_STREAMED = "distributed/test_weights.py::test_weights_go_in_and_out_on_2_ranks"
_WHOLE = "distributed/test_whole_matrices.py::test_each_matrix_is_whole_once_and_comes_back"
_CLOCK = "accelerator/test_report.py::test_clock_starts_when_the_device_has_come_to_it"
_ASKED = "distributed/test_stream.py::test_a_transform_gets_whole_tensors_together_and_may_quantise_them"
ELSEWHERE: dict[str, str] = {
    "core.group.all_gather.Gather.drop-work": "distributed/test_messages_in_flight.py::"
    "test_reset_after_an_interrupt_waits_for_the_messages_that_are_left",
    # collectives that the CPU waits for, as gloo's; on a stream, a backend may return a work where NCCL returns none
    "core._torch.with_works.issue-work": _ON_STREAMS,
    "core.runtime.executor._run-compute_after_reduce": _STOPPED,
    "extras.peers._Messages.wait-work": "distributed/test_comm.py::test_messages_of_two_groups_are_never_mixed_up",
    "extras.exchange._reduced-work": "distributed/test_agreement.py::test_ranks_compare_once",
    "optim.clip._summed_over_ranks-work": "parity/test_clipping.py::test_gradients_are_clipped_as_torch_clips_them",
    "core.comm.custom._run-work": _IN_ONE_MEMORY,
    "extras.lending.gathered_together-work": _UNCUT,
    "extras.joined._Message.__init__-work": _JOINED,
    "extras.joined._Message.__init__-record": _JOINED,
    "extras.joined._Message.read-work": _JOINED,
    "extras.joined._Message.read-wait_on_cpu": _JOINED,
    "core._torch.arrived_local-work": _PENDING,
    "checkpoint.save_weights._sent_to-work": _STREAMED,
    "checkpoint.stream_weights._Messages.__init__-gather_after_compute": _STREAMED,
    "checkpoint.stream_weights._Messages.__init__-record": _STREAMED,
    "checkpoint.stream_weights._Messages.__init__-work": _STREAMED,  # NCCL's messages to one rank
    "checkpoint.stream_weights._Messages.finish-work": _STREAMED,
    "checkpoint.stream_weights._Messages.finish-wait_here": _STREAMED,
    "checkpoint.stream_weights._Gathering.wait-record": _ASKED,
    "checkpoint.stream_weights._Gathering.wait-wait_on_cpu": _ASKED,
    "extras.lending.take_shards-record": _COPIED,
    "extras.lending.take_shards-wait_here": _COPIED,
    "optim.matrices.exchange.Message.wait-work": _WHOLE,  # gloo's messages
    # gloo's messages
    "extras.gradient_wires._Then.wait-work": _WIRED,
    "extras.gradient_wires.Exchange.total_residual-work": _OWED,
    "tensors.wire_residuals._Residuals.collected-work": _OWED,
    "optim.adamw8bit.states.agree-work": "distributed/test_adamw8bit.py::test_every_mesh_gives_the_same_bits",
    # what measures time
    "report.recorder.DeviceClock.__init__-synchronize": _CLOCK,
    "report.recorder.DeviceClock._event-record": _REPORTED,
    "report.recorder.DeviceClock.settle-synchronize": _REPORTED,
    "planner.measure._wait-synchronize": "accelerator/test_host_syncs.py::test_host_waits_for_what_it_measures",
    "planner.measure._collectives.one.finish-work": _MEASURED,
}


@pytest.mark.parametrize("wait", [*WAITS[:3], *long(*WAITS[3:])], ids=str)
@on_device(2)
def test_wait_that_is_left_out_is_noticed(ctx: RankContext, wait: Wait) -> None:
    check(ctx, wait)


@pytest.mark.parametrize("wait", WAITS_OF_4, ids=str)
@on_device(4)
def test_wait_that_is_left_out_is_noticed_on_4_ranks(ctx: RankContext, wait: Wait) -> None:
    check(ctx, wait)


@pytest.mark.ci
def test_list_has_all_waits_of_the_package() -> None:
    places = {str(wait).partition(",")[0] for wait in (*WAITS, *WAITS_OF_4, *UNSEEN, *UNSEEN_OF_4)}
    assert sorted([*places, *ELSEWHERE]) == sorted(set(_waits_in_source()))


def test_tests_that_notice_other_waits_exist() -> None:
    for path, _, name in (test.partition("::") for test in ELSEWHERE.values()):
        assert f"def {name}(" in (_TESTS / path).read_text(), (path, name)


_TESTS = Path(__file__).parents[1]
_METHODS = {name for name in vars(Streams) if "wait" in name or "after" in name or name in ("record", "on")}


def _waits_in_source() -> Iterator[str]:
    package = Path(fsdp2.__file__).parent
    for path in package.rglob("*.py"):
        module = ".".join(path.relative_to(package).with_suffix("").parts)
        if module != "core.comm.streams":
            yield from _waits_in(ast.parse(path.read_text()), module)


def _waits_in(node: ast.AST, place: str) -> Iterator[str]:
    """Where something in ``node`` waits, and by which method, as ``str`` of a ``Wait``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from _waits_in(child, f"{place}.{child.name}")
            continue
        if isinstance(child, ast.Call):
            called, _, method = ast.unparse(child.func).rpartition(".")
            if method == "wait_for" or (method == "wait" and ("work" in called or called == "local")):
                yield f"{place}-work"
            elif method in _METHODS or method == "synchronize":
                yield f"{place}-{method}"
        yield from _waits_in(child, place)


def check(ctx: RankContext, wait: Wait) -> None:
    expected = reference(ctx, wait.case)
    others = [SCHEDULES[other] for other in SCHEDULES if other != wait.schedule]
    # On a busy machine messages come late, and an order is not what it was: so more seeds follow.
    seeds = [{**SCHEDULES[wait.schedule], "seed": seed} for seed in range(100, 112)]

    def differs(**schedule: Any) -> bool:
        found = run(CASES[wait.case], mesh_of(ctx, wait.case), subject(), **schedule)
        return bool(differences(found, expected))

    assert_noticed(ctx, wait, [SCHEDULES[wait.schedule], *seeds[:4], *others, *seeds[4:]], differs)


def assert_noticed(ctx: RankContext, wait: Wait, schedules: list[dict[str, Any]], differs: Callable[..., bool]) -> None:
    """Under one of ``schedules``, some rank ``differs`` when ``wait`` is left out."""
    times: list[None] = []
    by_rank: list[Any] = [None] * ctx.world_size
    for schedule in schedules:
        with leaving_out(wait, times):
            is_other = differs(**schedule)
        dist.all_gather_object(by_rank, is_other)
        if any(by_rank):
            break
    assert times, f"{wait.case} never comes to {wait}"
    assert any(by_rank), f"nobody notices that {wait} is left out of {wait.case}"


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
