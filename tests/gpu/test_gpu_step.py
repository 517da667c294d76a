"""What ``benchmarks/gpu_step.py`` aims at, where it does not depend on the clock: copies, waits and memory.

This process is rank 0 of 8, whose collectives move nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.gpu.support import NUM_GPUS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu_step import Figures, measure
from gpu_subjects import CASES, Case, Run, Shape
from gpu_trace import problems

pytestmark = [
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of what drivers and torch warn differs
]
SHAPE = Shape(dim=2048, num_heads=16, num_kv_heads=8, hidden=4096)


def _measured(case: Case, traces: Path) -> dict[str, Figures]:
    figures, is_finite = measure(case, Run("cuda", SHAPE, num_blocks=6, tokens=1024, rounds=1, traces=traces))
    assert is_finite
    return figures


def test_tensors_that_travel_direct_are_never_copied(tmp_path: Path) -> None:
    """In bf16 throughout, and all tensors are large: nothing is packed, and nothing is cast."""
    figures = _measured(CASES[0], tmp_path)
    steps = {subject: each.step for subject, each in figures.items()}
    assert steps["fsdp2"].kinds_of_copies().keys() <= steps["unsharded"].kinds_of_copies().keys()
    assert len(steps["fsdp2"].copies) <= len(steps["unsharded"].copies)
    assert len(steps["torch"].copies) > len(steps["unsharded"].copies)  # copies would be seen


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_copies_are_beside_compute_and_the_cpu_never_waits(case: Case, tmp_path: Path) -> None:
    figures = _measured(case, tmp_path)
    assert figures["fsdp2"].step.ops
    assert problems(figures["fsdp2"].step, figures["unsharded"].step) == []


@pytest.mark.parametrize("case", [case for case in CASES if case.world_size > 1], ids=lambda case: case.name)
def test_peak_is_not_above_that_of_torch(case: Case, tmp_path: Path) -> None:
    figures = _measured(case, tmp_path)
    assert figures["fsdp2"].peak <= figures["torch"].peak
