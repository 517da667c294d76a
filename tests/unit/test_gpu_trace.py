"""What ``benchmarks/gpu_trace.py`` reads out of a profiler's trace. Those here are made by hand, in torch's format."""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu_trace import DeviceOp, Planned, Step, problems, read, short_name, steps_of

from tests.harness.golden import texts_beside

TEXTS = texts_beside(__file__)
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


PLANNED = Planned(kernels=1, uploads=2)
EMPTY = _step().only_step()  # without a device


CASES = {
    "not: all beside compute": (_beside_compute(), UNSHARDED, Planned()),
    "not: what is planned": (_packing(), UNSHARDED, PLANNED),
    "not: waits of the model itself": (_waiting(1), _waiting(1), Planned()),
    "not: without a device": (EMPTY, EMPTY, Planned()),
    "one more cast": (_packing(CAST), UNSHARDED, PLANNED),
    "one more copy": (_packing(DTOD), UNSHARDED, PLANNED),
    "one more upload": (_packing(UPLOAD), UNSHARDED, PLANNED),
    "fewer kernels do not make up for another upload": (_packing(UPLOAD), UNSHARDED, Planned(5, 2)),
    "one more wait": (_waiting(2), _waiting(1), Planned()),
    "all tensors travel direct": (_packing(UPLOAD, stream=REDUCE), UNSHARDED, replace(PLANNED, is_beside=False)),
    "all on the compute stream": (_on_compute(), UNSHARDED, Planned()),
}


@pytest.mark.parametrize("case", CASES)
def test_problems_are_what_a_step_does_more_than_planned(case: str) -> None:
    found = problems(*CASES[case])
    assert (found == []) is case.startswith("not")
    TEXTS.check(case, "\n".join(found) or "no problem")


def test_every_text_has_a_case() -> None:
    TEXTS.check_names(["kernels", *CASES])


def test_trace_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": _step().run(GEMM, 10, 20).events}))
    assert read(path, "step") == [Step((DeviceOp(GEMM, "kernel", COMPUTE, 10.0, 20.0),), (), ())]
    with pytest.raises(ValueError, match="no step 'other'"):
        read(path, "other")
    assert (EMPTY.ops, EMPTY.compute_stream, EMPTY.copy_ms, EMPTY.compute_idle_ms) == ((), None, 0, 0)
