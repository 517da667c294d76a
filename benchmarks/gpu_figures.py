"""What ``gpu_acceptance.py`` measures: steps of Llama-shaped stacks as ``gpu_step.py`` has them, and from which size
on tensors should travel direct.

The sweep runs fsdp2 alone. On ranks that are not there, it has what copies of a bucket cost and nothing of the wire; on
NCCL with one rank, what launches of many small tensors cost.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Bars, Ratios, Table, medians_in_turns
from gpu_checks import Report, collectives_of_one_rank
from gpu_device import device
from gpu_step import Figures, measure, step_ms
from gpu_subjects import CASES, Case, Run, Shape, Stepper, StillGroup, process_group

from fsdp2.comm.backends import CollectiveComm

MiB = 1 << 20
AIM = 1.02
NOISE = 1.02
REPORT_AIM = 1.01
TOY = Run("cpu", Shape(256, 4, 2, 512), num_blocks=2, tokens=32, rounds=1, traces=Path())
STACKS = {
    "1B": Run("cuda", Shape(2048, 32, 8, 8192), num_blocks=16, tokens=8192, rounds=5, traces=Path()),
    "8B": Run("cuda", Shape(), num_blocks=6, tokens=8192, rounds=5, traces=Path()),
    "1B, short": Run("cuda", Shape(2048, 32, 8, 8192), num_blocks=16, tokens=2048, rounds=7, traces=Path()),
}
THRESHOLDS = {"16 KiB": 16 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20, "infinite": 1 << 62}
OURS = "1 MiB"  # CollectiveComm.direct_min_nbytes; a test holds the two together
STILL, NCCL = "8 ranks", "NCCL, 1 rank"


def run_of(name: str, stack: str, traces: Path) -> Run:
    found = STACKS[stack] if name == "cuda" else TOY
    return Run(name, found.shape, found.num_blocks, found.tokens, found.rounds, traces)


# (6) Steps


def steps(report: Report, name: str, stack: str, index: int) -> None:
    """One case of ``gpu_step.py``: fsdp2, torch's ``fully_shard`` and the unsharded stack by turns."""
    case = CASES[index]
    with tempfile.TemporaryDirectory() as folder:
        run = run_of(name, stack, Path(folder))
        measured = measure(case, run)
    figures = measured.figures
    found = {subject: plain(each) for subject, each in figures.items()}
    row = f"{stack}, {case.name}"
    if name != "cuda":
        report("NOT RUN", f"{row}: needs CUDA; a toy on the CPU gave figures of {', '.join(found)}")
        return
    if not measured.is_finite:
        report("FAIL", f"{row}: values overflow, so the figures mean nothing")
    none, ours, theirs = (found[subject] for subject in ("unsharded", "fsdp2", "torch"))
    ratio = ours["step_ms"] / none["step_ms"]
    report(
        _status(ratio <= AIM),
        f"{row}, time: {ours['step_ms']:.2f} ms, unsharded {none['step_ms']:.2f}, torch {theirs['step_ms']:.2f}; "
        f"fsdp2 / unsharded {ratio:.3f}, aim {AIM}; the compute stream has nothing to do for {ours['idle_ms']:.2f} ms "
        f"(unsharded {none['idle_ms']:.2f}, torch {theirs['idle_ms']:.2f})",
        row=row,
        subjects=found,
    )
    report(
        _status(measured.reported <= REPORT_AIM),
        f"{row}, report: in fsdp2.report a step takes {measured.reported:.3f} of one without, aim {REPORT_AIM}",
    )
    is_less = case.world_size == 1 or ours["peak"] <= theirs["peak"]
    report(
        _status(is_less),
        f"{row}, memory: {_mib(ours, 'peak')} allocated, torch {_mib(theirs, 'peak')}, unsharded "
        f"{_mib(none, 'peak')}; {_mib(ours, 'reserved')} reserved, torch {_mib(theirs, 'reserved')}; one group is "
        f"{run.shape.block_nbytes / MiB:.0f} MiB",
    )
    more = ours["copies"] - none["copies"]
    if not figures["fsdp2"].step.ops:
        report("NOT RUN", f"{row}, copies: torch's profiler has seen nothing of the device")
        return
    wrong, planned = measured.problems(), measured.planned
    report(
        _status(not wrong),
        f"{row}, copies: {more} more than unsharded ({ours['copy_ms'] - none['copy_ms']:.2f} ms), torch "
        f"{theirs['copies'] - none['copies']} ({theirs['copy_ms'] - none['copy_ms']:.2f} ms); on the compute stream, "
        f"{planned.kernels} kernels and {planned.uploads} uploads are planned; "
        f"{'; '.join(wrong) or 'no others there, and the CPU never waits'}",
        kinds={subject: each.step.kinds_of_copies() for subject, each in figures.items()},
    )


def plain(figures: Figures) -> dict[str, float]:
    """``figures`` as numbers."""
    step = figures.step
    return {
        "step_ms": figures.step_ms,
        "cpu_ms": figures.cpu_ms,
        "peak": figures.peak,
        "reserved": figures.reserved,
        "copies": len(step.copies),
        "copy_ms": step.copy_ms,
        "idle_ms": step.compute_idle_ms,
        "cpu_waits": len(step.waits),
    }


def _status(is_so: bool) -> str:
    return "PASS" if is_so else "FAIL"


def _mib(figures: Mapping[str, float], name: str) -> str:
    return f"{figures[name] / MiB:.0f} MiB"


# (6) From which size on tensors should travel direct


def sweep(report: Report, name: str, comm: str) -> None:
    """Step time and memory of fsdp2 with each threshold. ``comm``: ``STILL`` or ``NCCL``."""
    case = CASES[1] if comm == STILL else CASES[5]
    run = run_of(name, "1B, short", Path())
    before = CollectiveComm.direct_min_nbytes
    torch.set_num_threads(1)
    with process_group(case, name), _through_process_group(name, comm):
        peaks = {}
        steppers = {}
        try:
            for text, nbytes in THRESHOLDS.items():
                CollectiveComm.direct_min_nbytes = nbytes
                steppers[text], peaks[text] = _warm(case, run)
        finally:
            CollectiveComm.direct_min_nbytes = before
        times = medians_in_turns({t: partial(step_ms, each, name) for t, each in steppers.items()}, run.rounds)
        steppers.clear()
    figures = {text: {"step_ms": times[text], "peak": peaks[text]} for text in THRESHOLDS}
    fastest = min(times, key=lambda text: times[text])
    shown = ", ".join(f"{text} {times[text]:.2f} ms" for text in times)
    if name != "cuda":
        report("NOT RUN", f"threshold, {comm}: needs CUDA; a toy on the CPU gave {len(times)} figures")
        return
    report(
        _status(times[OURS] <= NOISE * times[fastest]),
        f"threshold, {comm}: {OURS} takes {times[OURS] / times[fastest]:.3f} of the fastest, {fastest}; {shown}",
        comm=comm,
        thresholds=figures,
    )


@contextmanager
def _through_process_group(name: str, comm: str) -> Iterator[None]:
    if comm == STILL:
        yield
        return
    with collectives_of_one_rank(device(name)):
        yield


def _warm(case: Case, run: Run) -> tuple[Stepper, int]:
    """A model whose plans are compiled, and what its step holds at the peak beyond its shards."""
    step = Stepper("fsdp2", case, run)
    StillGroup.fills = True  # how fast a GPU multiplies depends on the values
    for _ in range(3):
        step()
    StillGroup.fills = False
    if run.device != "cuda":
        return step, 0
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return step, torch.cuda.max_memory_allocated() - before


# Tables of all verdicts


def tables(figures: Sequence[Mapping[str, Any]]) -> list[Table]:
    """What the parts above reported, as far as they came."""
    rows = [each for each in figures if "subjects" in each]
    swept = {each["comm"]: each["thresholds"] for each in figures if "thresholds" in each}
    return [*([_times(rows), _memory(rows)] if rows else []), *([_thresholds(swept)] if swept else [])]


def _times(rows: Sequence[Mapping[str, Any]]) -> Table:
    cells: list[list[object]] = []
    for row in rows:
        none, ours, theirs = (row["subjects"][subject] for subject in ("unsharded", "fsdp2", "torch"))
        ms = [each["step_ms"] for each in (none, ours, theirs)]
        idle = [each["idle_ms"] for each in (none, ours, theirs)]
        more = [each["copies"] - none["copies"] for each in (ours, theirs)]
        cells.append([row["row"], *ms, ms[1] / ms[0], ms[1] / ms[2], *idle, *more])
    columns = ["", "unsharded", "fsdp2", "torch", "fsdp2 / unsharded", "ratio"]
    columns += ["unsharded idle", "fsdp2 idle", "torch idle", "fsdp2 copies", "torch copies"]
    note = "idle: ms in which the compute stream has nothing to run. copies: beyond those of the unsharded model."
    return Table("time", "Median ms per step", columns, cells, noise=0.02, note=note, plot=Ratios())


def _memory(rows: Sequence[Mapping[str, Any]]) -> Table:
    cells: list[list[object]] = []
    for row in rows:
        each = [row["subjects"][subject] for subject in ("unsharded", "fsdp2", "torch")]
        shown = [f"{subject[key] / MiB:.0f}" for key in ("peak", "reserved") for subject in each]
        cells.append([row["row"], *shown, each[1]["peak"] / each[2]["peak"] if each[2]["peak"] else None])
    columns = ["", *(f"{s} {what}" for what in ("allocated", "reserved") for s in ("unsharded", "fsdp2", "torch"))]
    title = "MiB at the peak of a step, beyond parameters and inputs"
    return Table("memory", title, [*columns, "ratio"], cells)


def _thresholds(swept: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    cells: list[list[object]] = []
    for text in THRESHOLDS:
        row: list[object] = [text]
        for comm in (STILL, NCCL):
            found = swept.get(comm, {}).get(text)
            row += [found["step_ms"], f"{found['peak'] / MiB:.0f}"] if found else [None, None]
        cells.append(row)
    columns = ["direct from", *(f"{comm}, {unit}" for comm in (STILL, NCCL) for unit in ("ms", "MiB"))]
    title = "CollectiveComm.direct_min_nbytes: median ms per step, and MiB at its peak, 1B stack, 2048 tokens"
    note = (
        "8 ranks that are not there: copies, and nothing of the wire. NCCL, 1 rank: launches, and nothing of the wire."
    )
    plot = Bars([f"{comm}, ms" for comm in (STILL, NCCL) if comm in swept], "ms per step")
    return Table("thresholds", title, columns, cells, ratio=None, note=note, plot=plot)
