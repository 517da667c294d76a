"""What ``benchmarks/gpu/step.py`` aims at, where it does not depend on the clock: copies, waits and memory.

This process is rank 0 of 8, whose collectives move nothing.
"""

from __future__ import annotations

import pytest

from benchmarks.gpu.step import Measured, measure
from benchmarks.gpu.subjects import CASES, Case, Run, Shape
from benchmarks.gpu.traces import Planned
from tests.gpu.support import NUM_GPUS

pytestmark = [
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of what drivers and torch warn differs
]
SHAPE = Shape(dim=4096, num_heads=32, num_kv_heads=8, hidden=4096)  # all matrices are large enough to travel direct


def measured_finite(case: Case, run: Run) -> Measured:
    found = measure(case, run)
    assert found.is_finite
    return found


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Of the case that the test names; each is measured once for all tests."""
    run = Run("cuda", SHAPE, num_blocks=6, tokens=1024, rounds=1, traces=tmp_path_factory.mktemp("traces"))
    return measured_finite(request.param, run)


def of(*cases: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("measured", cases, indirect=True, ids=lambda case: case.name)


@of(CASES[0])
def test_tensors_that_travel_direct_are_never_copied(measured: Measured) -> None:
    """In bf16 throughout, and all tensors are large: nothing is packed, and nothing is cast."""
    assert measured.planned == Planned(is_beside=False)
    copies = {subject: len(each.step.copies) for subject, each in measured.figures.items()}
    assert copies["fsdp2"] <= copies["unsharded"]
    assert copies["torch"] > copies["unsharded"]  # copies would be seen


@of(*CASES)
def test_copies_are_those_of_the_plans_and_the_cpu_never_waits(measured: Measured) -> None:
    assert measured.figures["fsdp2"].step.ops
    assert measured.problems() == []


@of(*(case for case in CASES if case.world_size > 1))
def test_peak_is_not_above_that_of_torch(measured: Measured) -> None:
    assert measured.figures["fsdp2"].peak <= measured.figures["torch"].peak
