"""The scripts of ``benchmarks/gpu`` on toys, on the CPU and on figures that are made up, so that they run when a GPU
is there: what they measure and plan, which verdicts they draw, what they must not take for a defect, and what they read
out of a profiler's trace. Traces are made by hand, in torch's format."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu import contract as gpu_contract, direct as gpu_direct, figures as gpu_figures, step as gpu_step
from benchmarks.gpu.device import device
from benchmarks.gpu.direct import OneBlock, inputs_of
from benchmarks.gpu.groups import real_group
from benchmarks.gpu.step import Figures, Measured, Result, planned_copies, report_cost, tables
from benchmarks.gpu.subjects import BF16, CASES, SUBJECTS, Block, Case, Run, Shape, Stepper, StillGroup, process_group
from benchmarks.gpu.traces import DeviceOp, Planned, Step, problems, read, short_name, steps_of
from fsdp2.core.comm.backends import CollectiveComm
from fsdp2.core.plan.plan import Route, compile_gather
from tests.gpu import test_gpu_step as on_gpu
from tests.harness.golden import texts_beside

TEXTS = texts_beside(__file__)

TOY = Shape(64, 2, 1, 128)


@pytest.fixture
def toy(tmp_path: Path) -> Run:
    return Run("cpu", TOY, num_blocks=2, tokens=8, rounds=1, traces=tmp_path)


# torch's profiler prints where it starts and stops, and its collectives warn of their old names
@pytest.mark.filterwarnings("ignore")
def test_a_case_gives_figures_of_all_subjects(toy: Run) -> None:
    measured = on_gpu.measured_finite(CASES[-3], toy)
    assert measured.reported > 0
    figures = measured.figures
    assert list(figures) == list(SUBJECTS)
    assert all(each.step_ms > 0 and each.cpu_ms > 0 for each in figures.values())
    assert len(list(toy.traces.iterdir())) == 3
    assert measured.problems() == []
    found = tables([Result("a case", toy.shape.block_nbytes, replace(measured, reported=1.004))])
    assert found[0].note.endswith("A step in a report takes 1.004 of one without; aim: 1.01.")
    assert [each.name for each in found] == ["time", "cpu", "memory", "copies", "kinds", "checks"]
    assert found[-1].rows[0][0] == "a case"


@pytest.mark.parametrize("shape", [Shape(), on_gpu.SHAPE], ids=["8B", "tests on a GPU"])
def test_all_matrices_travel_direct_where_the_gpu_expects_that(shape: Shape) -> None:
    with torch.device("meta"):
        block = Block(shape, has_gains=CASES[0].has_gains)
    sizes = [parameter.numel() * BF16.itemsize // CASES[0].world_size for parameter in block.parameters()]
    assert min(sizes) >= CollectiveComm.routing.direct_min_nbytes


# By hand, of two blocks of seven matrices. With gains, a block has a bucket; its kernel reads addresses from the host.
# Matrices are cast in one launch; with one rank, the copy into the gradient casts.
PLANNED = [Planned(0, 0, is_beside=False), *[Planned(2, 2)] * 2, Planned(4, 2), *[Planned(0, 0)] * 2]


@pytest.mark.parametrize(("case", "planned"), [*zip(CASES, PLANNED, strict=True)])
def test_buckets_and_casts_are_planned(toy: Run, monkeypatch: pytest.MonkeyPatch, case: Case, planned: Planned) -> None:
    # A gain has 16 bytes per shard, k and v have 512.
    monkeypatch.setattr(CollectiveComm, "routing", replace(CollectiveComm.routing, direct_min_nbytes=128))
    with process_group(case, "cpu"):
        step = Stepper("fsdp2", case, toy)
        step()
        assert planned_copies(step.model) == planned


@pytest.mark.parametrize("slowdown", [1.0, 3.0])
def test_cost_of_a_report_is_that_of_pairs(toy: Run, monkeypatch: pytest.MonkeyPatch, slowdown: float) -> None:
    calls: list[str] = []

    def clock(name: str, ms: float) -> Callable[..., float]:
        return lambda *_: ms * (slowdown if calls.append(name) or len(calls) > 4 else 1.0)  # type: ignore[func-returns-value]

    monkeypatch.setattr(gpu_step, "step_ms", clock("plain", 100.0))
    monkeypatch.setattr(gpu_step, "reported_ms", clock("reported", 100.4))
    assert report_cost(None, toy) == pytest.approx(1.004)  # type: ignore[arg-type]
    assert calls == ["plain", "reported", "reported", "plain", "plain", "reported"]


def test_case_that_fails_leaves_no_process_group_behind() -> None:
    def run_out_of_memory() -> None:
        with process_group(CASES[0], "cpu"):
            StillGroup.fills = True
            raise torch.OutOfMemoryError

    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            run_out_of_memory()
        assert not dist.is_initialized()
        assert not StillGroup.fills


def test_bytes_of_a_block_are_those_of_its_parameters(toy: Run) -> None:
    blocks = [Stepper("unsharded", case, toy).model[0] for case in CASES[:2]]
    without, with_gains = (sum(p.numel() * p.itemsize for p in each.parameters()) for each in blocks)
    assert with_gains == toy.shape.block_nbytes == without + 2 * 2 * toy.shape.dim


def test_ranks_that_are_not_there_move_nothing_unless_told_to() -> None:
    with process_group(CASES[0], "cpu"):
        gathered, mine = torch.zeros(16), torch.tensor([1.0, 2.0])
        group = dist.group.WORLD
        assert isinstance(group, StillGroup)
        group._allgather_base(gathered, mine).wait()
        assert not gathered.any()
        reduced = torch.zeros(2)
        group._reduce_scatter_base(reduced, torch.ones(16)).wait()
        assert not reduced.any()
        StillGroup.fills = True
        group.allgather_into_tensor_coalesced([gathered], [mine]).wait()
        StillGroup.fills = False
        assert torch.equal(gathered, mine.repeat(8))


def test_thresholds_differ_in_what_travels_direct() -> None:
    """Of nine tensors of 8B's block. On 64 ranks, shards are as small as 128 KiB."""

    def num_direct(num_ranks: int, nbytes: int) -> int:
        routing = replace(CollectiveComm.routing, direct_min_nbytes=nbytes)
        return len(compile_gather(dict(enumerate(inputs_of(Shape(), num_ranks))), routing).on_route(Route.DIRECT))

    found = [[num_direct(ranks, nbytes) for nbytes in gpu_direct.THRESHOLDS.values()] for ranks in gpu_direct.RANKS]
    assert found == [[7, 7, 7, 5, 0], [7, 5, 3, 0, 0]]


def test_each_launch_sends_one_chunk_of_each_tensor_and_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[tuple[int, int]]] = []

    def note(outputs: list[Tensor], inputs: list[Tensor]) -> list[Any]:
        sent.append([(a.numel(), b.numel()) for a, b in zip(outputs, inputs, strict=True)])
        return []

    monkeypatch.setattr(CollectiveComm, "all_gather", lambda _, *tensors: note(*tensors))
    monkeypatch.setattr(CollectiveComm, "reduce_scatter", lambda _, **__: note)
    with real_group(device("cpu")):
        OneBlock(TOY, torch.device("cpu"), 8, direct_min_nbytes=1024).reduce()
    matrices = [64 * 64, 64 * 64, 128 * 64, 128 * 64, 64 * 128]  # q, out, gate, up, down; k and v have 512 bytes
    bucket = 2 * 64 + 2 * 32 * 64
    gathered, reduced = ([numel for numel, _ in each] for each in sent)
    assert gathered == [*(numel // 8 for numel in matrices), bucket // 8]
    assert reduced == [bucket // 8, *(numel // 8 for numel in matrices)]
    assert all(a == b for each in sent for a, b in each)


def test_costs_become_a_table() -> None:
    costs = gpu_direct.measure("cpu", TOY, rounds=1)
    assert list(costs) == ["8", "64"]
    assert all(cost["gather_ms"] > 0 and cost["reduce_ms"] > 0 for each in costs.values() for cost in each.values())
    table = gpu_direct.table(costs)
    assert [row[0] for row in table.rows] == list(gpu_direct.THRESHOLDS)
    assert "takes several GPUs" in table.note


GEMM_RAN = DeviceOp("nvjet_tst", "kernel", 7, 0.0, 900.0)
FLAGS_SENT = DeviceOp("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 7, 900.0, 901.0)
CAST_RAN = DeviceOp("bfloat16_copy_kernel_cuda", "kernel", 7, 901.0, 910.0)


def figures(step_ms: float, *ops: DeviceOp, peak: int = 1 << 30) -> Figures:
    return Figures(step_ms, cpu_ms=1.0, peak=peak, reserved=2 << 30, step=Step(ops, (), ()))


HEALTHY = Measured(
    {
        "unsharded": figures(100.0, GEMM_RAN),
        "fsdp2": figures(101.0, GEMM_RAN, FLAGS_SENT),
        "torch": figures(104.0, GEMM_RAN, CAST_RAN),
    },
    Planned(uploads=1, is_beside=False),
    reported=1.004,
    is_finite=True,
)


def verdicts(monkeypatch: pytest.MonkeyPatch, measured: Measured) -> dict[str, tuple[str, str]]:
    """Status and text by what the verdict is on."""
    found: dict[str, tuple[str, str]] = {}

    def report(status: str, detail: str, **_: Any) -> None:
        head, _, rest = detail.partition(": ")
        found[head.rpartition(", ")[2]] = status, rest

    monkeypatch.setattr(gpu_figures, "measure", lambda case, run: measured)
    gpu_figures.steps(report, "cuda", "8B", 0)
    return found


def with_ours(step_ms: float, *ops: DeviceOp, peak: int = 1 << 30) -> Measured:
    return replace(HEALTHY, figures={**HEALTHY.figures, "fsdp2": figures(step_ms, *ops, peak=peak)})


PASSES = dict.fromkeys(["time", "report", "memory", "copies"], "PASS")


@pytest.mark.parametrize(
    ("measured", "others", "said"),
    [
        (HEALTHY, {}, "0 kernels and 1 uploads are planned"),
        (with_ours(103.0, GEMM_RAN, FLAGS_SENT), {"time": "FAIL"}, ""),
        (replace(HEALTHY, reported=1.02), {"report": "FAIL"}, ""),
        (with_ours(101.0, GEMM_RAN, FLAGS_SENT, peak=2 << 30), {"memory": "FAIL"}, ""),
        (with_ours(101.0, GEMM_RAN, FLAGS_SENT, CAST_RAN), {"copies": "FAIL"}, ""),
        (with_ours(101.0, GEMM_RAN, FLAGS_SENT, replace(CAST_RAN, stream=20)), {"copies": "FAIL"}, ""),
        (with_ours(101.0), {"copies": "NOT RUN"}, "torch's profiler has seen nothing of the device"),
    ],
)
def test_each_aim_that_is_missed_fails_alone(
    monkeypatch: pytest.MonkeyPatch, measured: Measured, others: dict[str, str], said: str
) -> None:
    found = verdicts(monkeypatch, measured)
    assert {name: status for name, (status, _) in found.items()} == PASSES | others
    assert said in found["copies"][1]


def test_values_that_overflow_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(monkeypatch, replace(HEALTHY, is_finite=False)).values()
    assert [text for status, text in found if status == "FAIL"] == ["values overflow, so the figures mean nothing"]


@pytest.mark.parametrize(("ours_ms", "status"), [(0.5, "PASS"), (0.9, "FAIL")])
def test_direct_travel_may_cost_a_bucket(monkeypatch: pytest.MonkeyPatch, ours_ms: float, status: str) -> None:
    cost = {"num_direct": 7, "gather_ms": 0.3, "reduce_ms": 0.3, "host_ms": 0.1}
    by_threshold = dict.fromkeys(gpu_direct.THRESHOLDS, cost) | {gpu_direct.OURS: {**cost, "gather_ms": ours_ms - 0.3}}
    monkeypatch.setattr(gpu_direct, "measure", lambda *_: {"8": by_threshold, "64": dict.fromkeys(by_threshold, cost)})
    found: list[tuple[str, str]] = []
    gpu_figures.direct(lambda status, detail, **_: found.append((status, detail)), "cuda")
    assert [each for each, _ in found] == [status, "PASS"]
    assert "for the wire, several GPUs are needed" in found[0][1]


def lazy_device(*, always_waits: bool) -> Any:
    """The host waits for it where a kernel is launched for the first time, as CUDA's lazy loading may make it do. It is
    torch's module of a device, a stream, an event and a work, too."""
    device, loaded = mock.MagicMock(type="cpu", is_busy=False), set()

    def launch(_group: object, outputs: list[Tensor], inputs: list[Tensor], *, on_stream: bool) -> Any:
        if always_waits or on_stream not in loaded:
            device.finish()
        loaded.add(on_stream)
        outputs[0].copy_(inputs[0])
        return device

    for name in ("Stream", "current_stream", "record_event"):
        getattr(device, name).return_value = device
    device.keep_busy = functools.partial(setattr, device, "is_busy", True)
    device.finish = functools.partial(setattr, device, "is_busy", False)
    device.query = lambda: not device.is_busy
    device.launch = launch
    return device


@pytest.mark.parametrize("always_waits", [False, True])
@pytest.mark.parametrize(
    "check", [gpu_contract._runs_in_the_order_of_its_stream, gpu_contract._asynchronous_makes_the_stream_wait]
)
def test_only_a_launch_that_always_waits_fails(check: Any, always_waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one whose kernel is loaded when first launched."""
    device = lazy_device(always_waits=always_waits)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    for name in ("_gather", "_reduce"):
        monkeypatch.setattr(gpu_contract, name, device.launch)
    if always_waits:
        with pytest.raises(AssertionError, match="the host has waited"):
            check(device, None)
    else:
        assert "the host went on" in check(device, None)


# Traces

COMPUTE, GATHER, REDUCE = 7, 20, 24
GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN"
CAST = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda("
    "at::TensorIteratorBase&)::{lambda(float)#1}, std::array<char*, 2ul> >(int, ...)"
)
COPY = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const> >(int, ...)"
)
FOREACH_COPY = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "TensorListMetadata<2>, at::native::(anonymous namespace)::CopyFunctor<c10::BFloat16, float, 2, 1, 1>, "
    "at::native::Copy<c10::BFloat16, float> >(...)"
)
CAT = "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<...>(...)"
CHUNK_CAT = "void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>(...)"
SPLIT = "at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(...)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, ...>(...)"
FOREACH_DIV = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "TensorListMetadata<1>, at::native::(anonymous namespace)::BinaryOpScalarFunctor<...>, std::divides<float> >(...)"
)
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
DTOD, UPLOAD = "Memcpy DtoD (Device -> Device)", "Memcpy HtoD (Pinned -> Device)"


class Trace:
    """Events as ``export_chrome_trace`` writes them. Times are microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
        self._correlations = itertools.count(1)

    def step(self, start: float, stop: float, name: str = "step") -> Trace:
        self._add("user_annotation", name, start, stop)
        self._add("gpu_user_annotation", name, start, stop + 500, stream=COMPUTE)
        return self

    def call(self, name: str, at: float, category: str = "cuda_runtime") -> int:
        correlation = next(self._correlations)
        self._add(category, name, at, at + 1, correlation=correlation)
        return correlation

    def run(self, name: str, start: float, stop: float, stream: int = COMPUTE, *, launched_at: float = 5) -> Trace:
        is_memory = name.startswith("Mem")
        correlation = self.call("cudaMemcpyAsync" if is_memory else "cudaLaunchKernel", launched_at)
        category = "gpu_memcpy" if is_memory else "kernel"
        self._add(category, name, start, stop, stream=stream, correlation=correlation, device=0)
        return self

    def _add(self, category: str, name: str, start: float, stop: float, **args: Any) -> None:
        event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": stop - start, "pid": 1, "tid": 1}
        self.events.append({**event, "args": args})

    def only_step(self) -> Step:
        (step,) = steps_of(self.events, "step")
        return step


def _step() -> Trace:
    return Trace().step(0, 50)


UNSHARDED = _step().run(GEMM, 10, 110).run(COPY, 110, 120).only_step()


def test_kernels_that_only_move_values_are_copies_and_are_named_by_what_makes_them() -> None:
    said = []
    for name in (CAST, COPY, FOREACH_COPY, CAT, CHUNK_CAT, SPLIT, DTOD, UPLOAD, GEMM, ADD, FOREACH_DIV, ALL_GATHER):
        (op,) = _step().run(name, 10, 20).only_step().ops
        kinds = {"copy": op.is_copy, "collective": op.is_collective}
        said.append(f"{short_name(name)}: {[kind for kind, holds in kinds.items() if holds]}")
    TEXTS.check("kernels", "\n".join(said))


def test_a_step_has_what_was_launched_in_it_whenever_that_ran() -> None:
    trace = _step().step(1000, 1050)
    trace.run(GEMM, 10, 400, launched_at=5)
    trace.run(ADD, 1040, 1100, launched_at=45)  # ran during the second step
    trace.run(COPY, 1200, 1300, launched_at=1005)
    trace.run(SPLIT, 600, 700, launched_at=500)  # launched in no step
    assert [[op.name for op in step.ops] for step in steps_of(trace.events, "step")] == [[GEMM, ADD], [COPY]]


def test_time_of_copies_counts_all_streams() -> None:
    trace = _step().run(GEMM, 10, 1010)
    trace.run(SPLIT, 20, 520, GATHER).run(CHUNK_CAT, 600, 850, REDUCE).run(SPLIT, 900, 1000, GATHER)
    step = trace.only_step()
    assert step.copy_ms == pytest.approx(0.85)
    assert step.kinds_of_copies() == {
        "chunk_cat_cuda_kernel": (1, pytest.approx(0.25)),
        "split_with_sizes_copy_out_contiguous_no_cast_kernel": (2, pytest.approx(0.6)),
    }


def test_compute_stream_is_the_busiest_one_whatever_copies_and_collectives_take() -> None:
    trace = _step().run(GEMM, 10, 110).run(DTOD, 10, 900, GATHER)
    trace.run(ALL_GATHER, 10, 2000, REDUCE).run(FOREACH_DIV, 2000, 2050, REDUCE)
    assert trace.only_step().compute_stream == COMPUTE


def test_idle_time_of_compute_is_between_its_kernels_and_what_runs_beside_it_is_hidden() -> None:
    trace = _step().run(GEMM, 1000, 2000).run(GEMM, 1500, 2500).run(ADD, 3000, 4000).run(COPY, 0, 9000, GATHER)
    assert trace.only_step().compute_idle_ms == pytest.approx(0.5)
    trace = _step().run(GEMM, 100, 200).run(GEMM, 300, 400)
    trace.run(SPLIT, 150, 250, GATHER).run(CHUNK_CAT, 150, 350, REDUCE)  # 150 to 350, once; 200 to 300 is not hidden
    assert trace.only_step().hidden_share == pytest.approx(0.5)
    assert math.isnan(UNSHARDED.hidden_share)


def _packing(*also: str, stream: int = COMPUTE) -> Step:
    """A step with a bucket, its addresses, the flags of a mesh, a cast beside compute, and what is in ``also``."""
    trace = _step().run(GEMM, 10, 110).run(COPY, 110, 120)
    trace.run(UPLOAD, 120, 121).run(CHUNK_CAT, 121, 130).run(UPLOAD, 130, 131).run(CAST, 10, 20, GATHER)
    for name in also:
        trace.run(name, 140, 150, stream)
    return trace.only_step()


def _beside_compute() -> Step:
    trace = _step().run(GEMM, 10, 110).run(COPY, 110, 120)
    trace.run(ALL_GATHER, 10, 60, GATHER).run(FOREACH_COPY, 5, 10, GATHER).run(FOREACH_DIV, 60, 70, REDUCE)
    for name, at in (("cudaStreamWaitEvent", 20), ("cudaEventRecord", 21), ("cudaDeviceSynchronize", 60)):
        trace.call(name, at)  # the last one behind the step
    trace.call("cuLaunchKernelEx", 22, "cuda_driver")
    return trace.only_step()


def _on_compute() -> Step:
    trace = _step().run(GEMM, 10, 110).run(COPY, 110, 120).run(SPLIT, 120, 130).run(CHUNK_CAT, 130, 140)
    trace.run(ALL_GATHER, 140, 150).run("Memcpy HtoD (Pageable -> Device)", 150, 160, GATHER)
    for name in ("cudaStreamSynchronize", "cudaStreamSynchronize", "cudaMemcpy", "cudaMalloc"):
        trace.call(name, 30)
    return trace.only_step()


def _waiting(times: int) -> Step:
    trace = _step().run(GEMM, 10, 110)
    for _ in range(times):
        trace.call("cudaStreamSynchronize", 30)
    return trace.only_step()


PACKING = Planned(kernels=1, uploads=2)
EMPTY = _step().only_step()  # without a device


STEPS = {
    "not: all beside compute": (_beside_compute(), UNSHARDED, Planned()),
    "not: what is planned": (_packing(), UNSHARDED, PACKING),
    "not: waits of the model itself": (_waiting(1), _waiting(1), Planned()),
    "not: without a device": (EMPTY, EMPTY, Planned()),
    "one more cast": (_packing(CAST), UNSHARDED, PACKING),
    "one more copy": (_packing(DTOD), UNSHARDED, PACKING),
    "one more upload": (_packing(UPLOAD), UNSHARDED, PACKING),
    "fewer kernels do not make up for another upload": (_packing(UPLOAD), UNSHARDED, Planned(5, 2)),
    "one more wait": (_waiting(2), _waiting(1), Planned()),
    "all tensors travel direct": (_packing(UPLOAD, stream=REDUCE), UNSHARDED, replace(PACKING, is_beside=False)),
    "all on the compute stream": (_on_compute(), UNSHARDED, Planned()),
}


@pytest.mark.parametrize("case", STEPS)
def test_problems_are_what_a_step_does_more_than_planned(case: str) -> None:
    found = problems(*STEPS[case])
    assert (found == []) is case.startswith("not")
    TEXTS.check(case, "\n".join(found) or "no problem", among=["kernels", *STEPS])


def test_trace_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": _step().run(GEMM, 10, 20).events}))
    assert read(path, "step") == [Step((DeviceOp(GEMM, "kernel", COMPUTE, 10.0, 20.0),), (), ())]
    with pytest.raises(ValueError, match="no step 'other'"):
        read(path, "other")
    assert (EMPTY.ops, EMPTY.compute_stream, EMPTY.copy_ms, EMPTY.compute_idle_ms) == ((), None, 0, 0)
