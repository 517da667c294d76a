"""``benchmarks/gpu_step.py`` on a toy and on the CPU, so that it runs when a GPU is there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp2.comm.backends import CollectiveComm

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_step
from gpu_step import Result, planned_copies, report_cost, tables
from gpu_subjects import BF16, CASES, SUBJECTS, Block, Case, Run, Shape, Stepper, StillGroup, process_group
from gpu_trace import Planned

from tests.gpu import test_gpu_step as on_gpu


@pytest.fixture
def toy(tmp_path: Path) -> Run:
    return Run("cpu", Shape(64, 2, 1, 128), num_blocks=2, tokens=8, rounds=1, traces=tmp_path)


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


# By hand, of two blocks of seven matrices. With gains, or with a cast, a block has a bucket; its kernel reads addresses
# from the host.
@pytest.mark.parametrize(
    ("case", "planned"),
    [
        (CASES[0], Planned(kernels=0, uploads=0, is_beside=False)),
        (CASES[1], Planned(kernels=2, uploads=2)),
        (CASES[2], Planned(kernels=2, uploads=2)),
        (CASES[3], Planned(kernels=2, uploads=2)),
        (CASES[4], Planned(kernels=0, uploads=0)),
        (CASES[5], Planned(kernels=2 * 9, uploads=0)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_planned_copies_are_those_of_buckets_and_casts(
    toy: Run, monkeypatch: pytest.MonkeyPatch, case: Case, planned: Planned
) -> None:
    # A gain has 16 bytes per shard, k and v have 512.
    monkeypatch.setattr(CollectiveComm, "routing", replace(CollectiveComm.routing, direct_min_nbytes=128))
    with process_group(case, "cpu"):
        step = Stepper("fsdp2", case, toy)
        step()
        assert planned_copies(step.model) == planned


@pytest.mark.parametrize("slowdown", [1.0, 3.0])
def test_cost_of_a_report_is_that_of_pairs_whatever_the_gpu_does_between_them(
    toy: Run, monkeypatch: pytest.MonkeyPatch, slowdown: float
) -> None:
    calls: list[str] = []

    def clock(name: str, ms: float) -> Callable[..., float]:
        def measured(*_: object) -> float:
            calls.append(name)
            return ms * (slowdown if len(calls) > 4 else 1.0)

        return measured

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
    block = Stepper("unsharded", CASES[0], toy).model[0]
    with_gains = Stepper("unsharded", CASES[1], toy).model[0]
    nbytes = [sum(p.numel() * p.itemsize for p in each.parameters()) for each in (block, with_gains)]
    assert nbytes[1] == toy.shape.block_nbytes
    assert nbytes[0] == nbytes[1] - 2 * 2 * toy.shape.dim


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
