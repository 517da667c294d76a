"""The verdicts that ``benchmarks/gpu_figures.py`` draws from figures of a GPU. The figures here are made up."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_direct
import gpu_figures
from gpu_step import Figures, Measured
from gpu_trace import DeviceOp, Planned, Step

GEMM = DeviceOp("nvjet_tst", "kernel", 7, 0.0, 900.0)
FLAGS = DeviceOp("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 7, 900.0, 901.0)
CAST = DeviceOp("bfloat16_copy_kernel_cuda", "kernel", 7, 901.0, 910.0)


def figures(step_ms: float, *ops: DeviceOp, peak: int = 1 << 30) -> Figures:
    return Figures(step_ms, cpu_ms=1.0, peak=peak, reserved=2 << 30, step=Step(ops, (), ()))


HEALTHY = Measured(
    {"unsharded": figures(100.0, GEMM), "fsdp2": figures(101.0, GEMM, FLAGS), "torch": figures(104.0, GEMM, CAST)},
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


def with_ours(ours: Figures) -> Measured:
    return replace(HEALTHY, figures={**HEALTHY.figures, "fsdp2": ours})


def test_healthy_figures_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(monkeypatch, HEALTHY)
    assert {name: status for name, (status, _) in found.items()} == dict.fromkeys(
        ["time", "report", "memory", "copies"], "PASS"
    )
    assert "0 kernels and 1 uploads are planned" in found["copies"][1]


@pytest.mark.parametrize(
    ("measured", "failed"),
    [
        (with_ours(figures(103.0, GEMM, FLAGS)), "time"),
        (replace(HEALTHY, reported=1.02), "report"),
        (with_ours(figures(101.0, GEMM, FLAGS, peak=2 << 30)), "memory"),
        (with_ours(figures(101.0, GEMM, FLAGS, CAST)), "copies"),
        (with_ours(figures(101.0, GEMM, FLAGS, replace(CAST, stream=20))), "copies"),
    ],
)
def test_each_aim_that_is_missed_fails_alone(monkeypatch: pytest.MonkeyPatch, measured: Measured, failed: str) -> None:
    found = verdicts(monkeypatch, measured)
    assert [name for name, (status, _) in found.items() if status != "PASS"] == [failed]
    assert found[failed][0] == "FAIL"


def test_trace_without_a_device_is_no_verdict_on_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(monkeypatch, with_ours(figures(101.0)))
    assert found["copies"] == ("NOT RUN", "torch's profiler has seen nothing of the device")


def test_values_that_overflow_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(monkeypatch, replace(HEALTHY, is_finite=False))
    assert [text for status, text in found.values() if status == "FAIL"] == [
        "values overflow, so the figures mean nothing"
    ]


@pytest.mark.parametrize(("ours_ms", "status"), [(0.5, "PASS"), (0.9, "FAIL")])
def test_direct_travel_passes_if_it_costs_no_more_than_one_bucket(
    monkeypatch: pytest.MonkeyPatch, ours_ms: float, status: str
) -> None:
    cost = {"num_direct": 7, "gather_ms": 0.3, "reduce_ms": 0.3, "host_ms": 0.1}
    by_threshold = dict.fromkeys(gpu_direct.THRESHOLDS, cost) | {gpu_direct.OURS: {**cost, "gather_ms": ours_ms - 0.3}}
    monkeypatch.setattr(gpu_direct, "measure", lambda *_: {"8": by_threshold, "64": dict.fromkeys(by_threshold, cost)})
    found: list[tuple[str, str]] = []
    gpu_figures.direct(lambda status, detail, **_: found.append((status, detail)), "cuda")
    assert [each for each, _ in found] == [status, "PASS"]
    assert "for the wire, several GPUs are needed" in found[0][1]
