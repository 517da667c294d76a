"""What ``acceptance.py`` measures: steps of Llama-shaped stacks as ``step.py`` has them, and what tensors cost
that travel direct, or in a bucket.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Ratios, Table
from benchmarks.gpu import direct as direct_travel
from benchmarks.gpu.step import Figures, measure
from benchmarks.gpu.subjects import CASES, Run, Shape
from benchmarks.gpu.verdicts import Report

MiB = 1 << 20
AIM = 1.02
NOISE = 1.02
REPORT_AIM = 1.01
TOY = Run("cpu", Shape(256, 4, 2, 512), num_blocks=2, tokens=32, rounds=1, traces=Path())
STACKS = {
    "1B": Run("cuda", Shape(2048, 32, 8, 8192), num_blocks=16, tokens=8192, rounds=5, traces=Path()),
    "8B": Run("cuda", Shape(), num_blocks=6, tokens=8192, rounds=5, traces=Path()),
}


def run_of(name: str, stack: str, traces: Path) -> Run:
    found = STACKS[stack] if name == "cuda" else TOY
    return Run(name, found.shape, found.num_blocks, found.tokens, found.rounds, traces)


# (6) Steps


def steps(report: Report, name: str, stack: str, index: int) -> None:
    """One case of ``step.py``: fsdp2, torch's ``fully_shard`` and the unsharded stack by turns."""
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
    ratio, limit, aim = ours["step_ms"] / none["step_ms"], AIM * none["step_ms"], f"aim {AIM}"
    if case.world_size == 1:  # it casts all that eight ranks cast together, which takes longer than the aim allows
        limit, aim = theirs["step_ms"], "aim: torch's"
    report(
        _status(ours["step_ms"] <= limit),
        f"{row}, time: {ours['step_ms']:.2f} ms, unsharded {none['step_ms']:.2f}, torch {theirs['step_ms']:.2f}; "
        f"fsdp2 / unsharded {ratio:.3f}, {aim}; the compute stream has nothing to do for {ours['idle_ms']:.2f} ms "
        f"(unsharded {none['idle_ms']:.2f}, torch {theirs['idle_ms']:.2f})",
        row=row,
        subjects=found,
    )
    report(
        _status(measured.reported <= REPORT_AIM),
        f"{row}, report: in fsdp2.report a step takes {measured.reported:.3f} of one without, aim {REPORT_AIM}",
    )
    report(
        _status(ours["peak"] <= theirs["peak"] * NOISE),
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


def direct(report: Report, name: str) -> None:
    """That a block whose large tensors travel direct takes no longer than one that is a bucket as a whole. From which
    size on they should is not decided: one GPU has no wire."""
    rounds, shape = (7, Shape()) if name == "cuda" else (1, TOY.shape)
    costs = direct_travel.measure(name, shape, rounds)
    for num_ranks, cost in costs.items():
        times = {text: direct_travel.device_ms(each) for text, each in cost.items()}
        row = f"direct from {direct_travel.OURS} on, {num_ranks} ranks"
        if name != "cuda":
            report("NOT RUN", f"{row}: needs CUDA; a toy gave {len(times)} figures")
            continue
        report(
            _status(times[direct_travel.OURS] <= NOISE * times[direct_travel.BUCKET]),
            f"{row}: a block is gathered and reduced in {times[direct_travel.OURS]:.3f} ms, as one bucket in "
            f"{times[direct_travel.BUCKET]:.3f}; {', '.join(f'{text} {ms:.3f}' for text, ms in times.items())}. "
            "Launches and copies only: for the wire, several GPUs are needed",
            costs={num_ranks: cost},
        )


# Tables of all verdicts


def tables(figures: Sequence[Mapping[str, Any]]) -> list[Table]:
    """What the parts above reported, as far as they came."""
    rows = [each for each in figures if "subjects" in each]
    costs = {num_ranks: each for found in figures for num_ranks, each in found.get("costs", {}).items()}
    return [*([_times(rows), _memory(rows)] if rows else []), *([direct_travel.table(costs)] if costs else [])]


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
