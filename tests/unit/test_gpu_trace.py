"""What ``benchmarks/gpu_trace.py`` reads out of a profiler's trace. Those here are made by hand, in torch's format."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu_trace import DeviceOp, Planned, Step, problems, read, short_name, steps_of

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


def _unsharded() -> Step:
    return Trace().step(0, 50).run(GEMM, 10, 110).run(COPY, 110, 120).only_step()


@pytest.mark.parametrize("name", [CAST, COPY, FOREACH_COPY, CAT, CHUNK_CAT, SPLIT, DTOD, UPLOAD])
def test_kernels_that_only_move_values_are_copies(name: str) -> None:
    (op,) = Trace().step(0, 50).run(name, 10, 20).only_step().ops
    assert op.is_copy
    assert not op.is_collective


@pytest.mark.parametrize("name", [GEMM, ADD, FOREACH_DIV, ALL_GATHER])
def test_what_computes_or_communicates_is_no_copy(name: str) -> None:
    (op,) = Trace().step(0, 50).run(name, 10, 20).only_step().ops
    assert not op.is_copy
    assert op.is_collective is (name == ALL_GATHER)


def test_copies_are_named_by_the_kernel_that_makes_them() -> None:
    names = "\n".join(map(short_name, [CAST, COPY, FOREACH_COPY, CAT, CHUNK_CAT, SPLIT, DTOD]))
    assert_expected_inline(
        names,
        """\
bfloat16_copy_kernel_cuda
direct_copy_kernel_cuda
CopyFunctor
CatArrayBatchedCopy_aligned16_contig
chunk_cat_cuda_kernel
split_with_sizes_copy_out_contiguous_no_cast_kernel
Memcpy DtoD (Device -> Device)""",
    )


def test_a_step_has_what_was_launched_in_it_whenever_that_ran() -> None:
    trace = Trace().step(0, 50).step(1000, 1050)
    trace.run(GEMM, 10, 400, launched_at=5)
    trace.run(ADD, 1040, 1100, launched_at=45)  # ran during the second step
    trace.run(COPY, 1200, 1300, launched_at=1005)
    trace.run(SPLIT, 600, 700, launched_at=500)  # launched in no step
    first, second = steps_of(trace.events, "step")
    assert [op.name for op in first.ops] == [GEMM, ADD]
    assert [op.name for op in second.ops] == [COPY]


def test_time_of_copies_counts_all_streams() -> None:
    trace = Trace().step(0, 50).run(GEMM, 10, 1010)
    trace.run(SPLIT, 20, 520, GATHER).run(CHUNK_CAT, 600, 850, REDUCE).run(SPLIT, 900, 1000, GATHER)
    step = trace.only_step()
    assert step.copy_ms == pytest.approx(0.85)
    assert step.kinds_of_copies() == {
        "chunk_cat_cuda_kernel": (1, pytest.approx(0.25)),
        "split_with_sizes_copy_out_contiguous_no_cast_kernel": (2, pytest.approx(0.6)),
    }


def test_compute_stream_is_the_busiest_one_whatever_copies_and_collectives_take() -> None:
    trace = Trace().step(0, 50).run(GEMM, 10, 110)
    trace.run(DTOD, 10, 900, GATHER).run(ALL_GATHER, 10, 2000, REDUCE).run(FOREACH_DIV, 2000, 2050, REDUCE)
    assert trace.only_step().compute_stream == COMPUTE


def test_idle_time_of_compute_is_between_its_kernels() -> None:
    trace = (
        Trace().step(0, 50).run(GEMM, 1000, 2000).run(GEMM, 1500, 2500).run(ADD, 3000, 4000).run(COPY, 0, 9000, GATHER)
    )
    assert trace.only_step().compute_idle_ms == pytest.approx(0.5)


def test_what_runs_beside_compute_is_hidden() -> None:
    trace = Trace().step(0, 50).run(GEMM, 100, 200).run(GEMM, 300, 400)
    trace.run(SPLIT, 150, 250, GATHER).run(CHUNK_CAT, 150, 350, REDUCE)  # 150 to 350, once; 200 to 300 is not hidden
    assert trace.only_step().hidden_share == pytest.approx(0.5)
    assert math.isnan(_unsharded().hidden_share)


def test_step_that_does_all_beside_compute_has_no_problem() -> None:
    trace = Trace().step(0, 50).run(GEMM, 10, 110).run(COPY, 110, 120)
    trace.run(ALL_GATHER, 10, 60, GATHER).run(FOREACH_COPY, 5, 10, GATHER).run(FOREACH_DIV, 60, 70, REDUCE)
    trace.call("cudaStreamWaitEvent", 20)
    trace.call("cudaEventRecord", 21)
    trace.call("cudaDeviceSynchronize", 60)  # behind the step
    trace.call("cuLaunchKernelEx", 22, "cuda_driver")
    assert problems(trace.only_step(), _unsharded(), Planned()) == []


def _packing(*also: str, stream: int = COMPUTE) -> Step:
    """A step with a bucket, its addresses, the flags of a mesh, a cast beside compute, and what is in ``also``."""
    trace = Trace().step(0, 50).run(GEMM, 10, 110).run(COPY, 110, 120)
    trace.run(UPLOAD, 120, 121).run(CHUNK_CAT, 121, 130).run(UPLOAD, 130, 131).run(CAST, 10, 20, GATHER)
    for name in also:
        trace.run(name, 140, 150, stream)
    return trace.only_step()


def test_planned_copies_are_no_problem() -> None:
    assert problems(_packing(), _unsharded(), Planned(kernels=1, uploads=2)) == []


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (_packing(CAST), "2 more copies and casts on the compute stream than without sharding, 1 planned"),
        (_packing(DTOD), "2 more copies and casts on the compute stream than without sharding, 1 planned"),
        (_packing(UPLOAD), "3 more uploads on the compute stream than without sharding, 2 planned"),
    ],
)
def test_one_more_than_the_planned_copies_is_a_problem(step: Step, found: str) -> None:
    assert problems(step, _unsharded(), Planned(kernels=1, uploads=2)) == [found]


def test_fewer_kernels_do_not_make_up_for_another_upload() -> None:
    found = problems(_packing(UPLOAD), _unsharded(), Planned(kernels=5, uploads=2))
    assert found == ["3 more uploads on the compute stream than without sharding, 2 planned"]


def test_where_all_tensors_travel_direct_copies_on_other_streams_are_problems_too() -> None:
    found = problems(_packing(UPLOAD, stream=REDUCE), _unsharded(), Planned(kernels=1, uploads=2, is_beside=False))
    assert found == [
        "1 more copies and casts on other streams than without sharding, 0 planned",
        "1 more uploads on other streams than without sharding, 0 planned",
    ]


def test_problems_say_what_is_on_the_compute_stream_and_what_the_cpu_waits_for() -> None:
    trace = Trace().step(0, 50).run(GEMM, 10, 110)
    trace.run(COPY, 110, 120).run(SPLIT, 120, 130).run(CHUNK_CAT, 130, 140).run(ALL_GATHER, 140, 150)
    trace.run("Memcpy HtoD (Pageable -> Device)", 150, 160, GATHER)
    for name in ("cudaStreamSynchronize", "cudaStreamSynchronize", "cudaMemcpy", "cudaMalloc"):
        trace.call(name, 30)
    assert_expected_inline(
        "\n".join(problems(trace.only_step(), _unsharded(), Planned())),
        """\
2 more copies and casts on the compute stream than without sharding, 0 planned
1 collectives on the compute stream
the CPU waits: Memcpy HtoD (Pageable -> Device) x1
the CPU waits: cudaMemcpy x1
the CPU waits: cudaStreamSynchronize x2
the driver allocates: cudaMalloc x1""",
    )


def test_waits_of_the_model_itself_are_no_problem_of_the_runtime() -> None:
    once, twice = Trace().step(0, 50).run(GEMM, 10, 110), Trace().step(0, 50).run(GEMM, 10, 110)
    for trace in (once, twice, twice):
        trace.call("cudaStreamSynchronize", 30)
    assert problems(once.only_step(), once.only_step(), Planned()) == []
    assert problems(twice.only_step(), once.only_step(), Planned()) == ["the CPU waits: cudaStreamSynchronize x1"]


def test_trace_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": Trace().step(0, 50).run(GEMM, 10, 20).events}))
    assert read(path, "step") == [Step((DeviceOp(GEMM, "kernel", COMPUTE, 10.0, 20.0),), (), ())]
    with pytest.raises(ValueError, match="no step 'other'"):
        read(path, "other")


def test_without_a_device_nothing_ran() -> None:
    step = Trace().step(0, 50).only_step()
    assert (step.ops, step.compute_stream, step.copy_ms, step.compute_idle_ms) == ((), None, 0, 0)
    assert problems(step, step, Planned()) == []
