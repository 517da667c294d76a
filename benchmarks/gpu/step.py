"""Claim: on a GPU, a step of Llama-8B-shaped blocks takes at most 1.02 of the time of the unsharded model, copies
nothing that travels direct, and holds at least one group less than under torch's ``fully_shard``.

One GPU is rank 0 of 8, whose collectives move nothing: what is left is what a runtime adds to compute. (torch's fake
process group copies the input once per rank, which would count as copies of the runtime.) While a case warms up, its
gathers do fill their outputs, with copies of this rank's part: how fast a GPU multiplies depends on the values. That
memory is used again, and not written by anything else, so the values stay; "values overflow" behind a case's name says
that they did not. Other cases are real NCCL with one rank, where no runtime has to communicate.

Step time: CUDA events around three steps in a row. CPU time: until a step is enqueued while the GPU is idle. Peak
memory: beyond parameters (shards, where there are any) and inputs; activations are the same for all. Copies, the
compute stream's idle time and what the CPU waits for are read out of a profiler's trace, which ``--traces`` keeps.
Position embeddings are left out, which have copies of their own. In a report, fsdp2 also notes when work starts and
stops, as inside ``fsdp2.report.report``. The last table is that of ``direct.py``, of thresholds for direct travel.

    python benchmarks/gpu/step.py [--quick] [--blocks 8] [--tokens 8192] [--traces FOLDER]
    python benchmarks/gpu/step.py --device cpu    # tries the script on a toy; the figures mean nothing
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
from benchmarks.common import Ratios, Table, medians_in_turns, publish, table
from benchmarks.gpu import direct, traces
from benchmarks.gpu.subjects import CASES, SUBJECTS, Case, Run, Shape, Stepper, StillGroup, process_group
from fsdp2.core.plan.plan import Route
from fsdp2.core.runtime.unit_tree import tree_of
from fsdp2.extras.units import sharded_unit
from fsdp2.report.call import attached
from fsdp2.report.held import HeldBytes
from fsdp2.report.recorder import DeviceClock, HostClock, Recorder

MiB = 1 << 20


@dataclass(frozen=True)
class Figures:
    """Of one subject. Times in ms, memory in bytes."""

    step_ms: float
    cpu_ms: float
    peak: int
    reserved: int
    step: traces.Step


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def step_ms(step: Stepper, device: str, count: int = 3) -> float:
    """Of each of ``count`` steps in a row, by the GPU's clock."""
    synchronize(device)
    if device != "cuda":
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    for _ in range(count):
        step()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / count


def reported_ms(step: Stepper, device: str, count: int = 3) -> float:
    """``step_ms`` of fsdp2 in a report, without what its end sends to other ranks, which are not there."""
    tree = tree_of(sharded_unit(step.model, "benchmark"))
    clock = DeviceClock(tree.root.mesh.device, tree.units) if device == "cuda" else HostClock()
    held = HeldBytes(tree, saves=False)
    with attached(Recorder(clock, count + 1, held), step.model, "stack"):
        return step_ms(step, device, count)


def report_cost(step: Stepper, run: Run) -> float:
    """A step in a report, as a multiple of one without: the median of pairs that were measured one right behind the
    other, in turns. A GPU's clock drifts by more than a report costs, but hardly within a pair."""
    clocks, ratios = (step_ms, reported_ms), []
    for index in range(2 * run.rounds + 1):
        first = index % 2
        taken = {clock: clock(step, run.device, 2) for clock in (clocks[first], clocks[1 - first])}
        ratios.append(taken[reported_ms] / taken[step_ms])
    return statistics.median(ratios)


def cpu_ms(step: Stepper, device: str) -> float:
    """Until all of a step is enqueued."""
    synchronize(device)
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def memory(subject: str, case: Case, run: Run) -> tuple[int, int]:
    """What a step holds at the peak beyond parameters and inputs, and what the allocator has reserved then, for this
    subject alone."""
    if run.device != "cuda":
        return 0, 0
    before = torch.cuda.memory_reserved()
    step = Stepper(subject, case, run)
    gc.collect()
    torch.cuda.empty_cache()  # what sharding needed
    rest = torch.cuda.memory_allocated()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() - rest, torch.cuda.max_memory_reserved() - before
    del step
    gc.collect()
    torch.cuda.empty_cache()
    return found


def traced(step: Stepper, path: Path, device: str) -> traces.Step:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        for _ in range(3):
            with record_function("step"):
                step()
            synchronize(device)
    profiler.export_chrome_trace(str(path))
    return traces.read(path, "step")[-1]


def planned_copies(model: nn.Module) -> traces.Planned:
    """What fsdp2's plans copy in a step of ``model``. Without strided buckets, which no case has.

    On the compute stream, so that gradients are freed at once: a kernel for each bucket of gradients, and the addresses
    that it reads from the host; casts of direct ones that are reduced in another dtype.
    """
    groups = [group for unit in tree_of(sharded_unit(model, "benchmark")).units for group in unit.groups]
    gathers = [group.unsharded.plan() for group in groups]
    is_beside = any(plan.buckets or any(step.is_copied_in for step in plan.steps) for plan in gathers)
    num_buckets = num_casts = 0
    for group in groups:
        plans, _ = group.gradients.plans(group.unsharded.trainable)
        for plan in plans:
            dtypes, is_sent = plan.dtypes, group.mesh.data_parallel_size > 1  # else gradients land as they are
            num_buckets += is_sent and any(step.route is Route.ROWS for step in plan.steps)
            direct = [step.layout.numel for step in plan.steps if step.route is Route.DIRECT]
            is_cast = dtypes.param is not dtypes.reduce
            num_casts += (is_cast and plan.casts_first) * _num_kernels(direct)
            is_beside |= is_cast or dtypes.reduce is not dtypes.grad
    return traces.Planned(num_buckets + num_casts, num_buckets, is_beside)


def _num_kernels(numels: list[int]) -> int:
    """How many kernels copy a list of tensors: torch's ``multi_tensor_apply`` gives one 320 chunks of 65536 elements.
    It would start another one after 64 tensors, too; no block has as many."""
    return math.ceil(sum(math.ceil(numel / 65536) for numel in numels) / 320)


def in_turns(clock: Callable[[Stepper, str], float], steppers: dict[str, Stepper], run: Run) -> dict[str, float]:
    return medians_in_turns({name: partial(clock, step, run.device) for name, step in steppers.items()}, run.rounds)


@dataclass(frozen=True)
class Measured:
    """Of one case. ``planned``: the copies that fsdp2 makes by design. ``reported``: its step in a report, as a
    multiple of one without. ``is_finite``: all values were finite to the end."""

    figures: dict[str, Figures]
    planned: traces.Planned
    reported: float
    is_finite: bool

    def problems(self) -> list[str]:
        """What fsdp2's trace shows that should not be."""
        return traces.problems(self.figures["fsdp2"].step, self.figures["unsharded"].step, self.planned)


def measure(case: Case, run: Run) -> Measured:
    """Runs in a process of its own."""
    torch.set_num_threads(1)
    with process_group(case, run.device):
        memory("unsharded", case, run)  # the first one that multiplies pays for memory that cuBLAS keeps
        held = {subject: memory(subject, case, run) for subject in SUBJECTS}
        steppers = {subject: Stepper(subject, case, run) for subject in SUBJECTS}
        StillGroup.fills = True
        for _ in range(3):
            for step in steppers.values():
                step()
        StillGroup.fills = False
        times = in_turns(step_ms, steppers, run)
        cpu_times = in_turns(cpu_ms, steppers, run)
        planned, reported = planned_copies(steppers["fsdp2"].model), report_cost(steppers["fsdp2"], run)
        name = case.name.replace(",", "").replace(" ", "_")
        paths = {subject: run.traces / f"{name}.{subject}.json" for subject in SUBJECTS}
        steps = {subject: traced(step, paths[subject], run.device) for subject, step in steppers.items()}
        is_finite = run.device != "cuda" or all(step.is_finite() for step in steppers.values())
        figures = {s: Figures(times[s], cpu_times[s], *held[s], steps[s]) for s in SUBJECTS}
        steppers.clear()
    return Measured(figures, planned, reported, is_finite)


# What is reported


@dataclass(frozen=True)
class Result:
    """Of one case."""

    name: str
    group_nbytes: int
    measured: Measured

    @property
    def figures(self) -> dict[str, Figures]:
        return self.measured.figures

    def of_all(self, value: Callable[[Figures], float]) -> list[float]:
        return [value(self.figures[subject]) for subject in SUBJECTS]


def tables(results: list[Result]) -> list[Table]:
    return [times(results), cpu_times(results), peaks(results), copies(results), kinds(results), checks(results)]


def times(results: list[Result]) -> Table:
    rows: list[list[object]] = []
    for result in results:
        unsharded, ours, theirs = result.of_all(lambda each: each.step_ms)
        rows.append([result.name, unsharded, ours, theirs, ours / unsharded, theirs / unsharded, ours / theirs])
    columns = ["", "unsharded", "fsdp2", "torch", "fsdp2 / unsharded", "torch / unsharded", "ratio"]
    slowest = max(ours / unsharded for unsharded, ours, _ in (r.of_all(lambda each: each.step_ms) for r in results))
    reported = max(result.measured.reported for result in results)
    note = f"Aim: fsdp2 / unsharded at most 1.02. Largest: {slowest:.3f}."
    note += f" A step in a report takes {reported:.3f} of one without; aim: 1.01."
    return Table("time", "Median ms per step", columns, rows, noise=0.02, note=note, plot=Ratios())


def cpu_times(results: list[Result]) -> Table:
    rows: list[list[object]] = []
    for result in results:
        unsharded, ours, theirs = result.of_all(lambda each: each.cpu_ms)
        rows.append([result.name, unsharded, ours, theirs, (ours - unsharded) / (theirs - unsharded)])
    columns = ["", "unsharded", "fsdp2", "torch", "ratio"]
    note = "The ratio is that of what is added to the unsharded model."
    return Table("cpu", "Median ms of CPU until a step is enqueued", columns, rows, noise=0.2, note=note)


def peaks(results: list[Result]) -> Table:
    rows: list[list[object]] = []
    for result in results:
        peak, reserved = result.of_all(lambda each: each.peak), result.of_all(lambda each: each.reserved)
        saved = (peak[2] - peak[1]) / result.group_nbytes
        shown = [f"{nbytes / MiB:.0f}" for nbytes in (result.group_nbytes, *peak, *reserved[1:])]
        rows.append([result.name, *shown, saved, peak[1] / peak[2] if peak[2] else None])
    columns = [
        "",
        "one group",
        "unsharded",
        "fsdp2",
        "torch",
        "fsdp2 reserved",
        "torch reserved",
        "groups less",
        "ratio",
    ]
    least = min(float(str(row[-2])) for row in rows)
    note = f"Aim: at least one group less than torch, on 8 ranks. Least: {least:.2f} groups."
    return Table("memory", "MiB at the peak of a step, beyond parameters and inputs", columns, rows, note=note)


def copies(results: list[Result]) -> Table:
    rows: list[list[object]] = []
    for result in results:
        unsharded, ours, theirs = (result.figures[subject].step for subject in SUBJECTS)
        counts = [len(ours.copies) - len(unsharded.copies), len(theirs.copies) - len(unsharded.copies)]
        ms = [ours.copy_ms - unsharded.copy_ms, theirs.copy_ms - unsharded.copy_ms]
        idle = [step.compute_idle_ms for step in (unsharded, ours, theirs)]
        rows.append([result.name, *counts, *ms, *idle, ms[0] / ms[1] if ms[1] > 0 else None])
    columns = ["", "fsdp2 copies", "torch copies", "fsdp2 ms", "torch ms"]
    columns += ["unsharded idle", "fsdp2 idle", "torch idle", "ratio"]
    note = (
        "Copies and casts, beyond those of the unsharded model; idle is ms in which the compute stream has nothing to "
        "run. Aim: in bf16 throughout without gains, where all tensors travel direct, one copy of a byte per parameter "
        "from the host. Else gains of norms share a bucket, and other dtypes are cast."
    )
    return Table("copies", "Kernels of a step that copy or cast, and what they take", columns, rows, note=note)


def kinds(results: list[Result]) -> Table:
    rows: list[list[object]] = []
    for result in results:
        for subject in SUBJECTS:
            for name, (count, ms) in result.figures[subject].step.kinds_of_copies().items():
                rows.append([f"{result.name}: {subject}, {name}", count, ms])
    return Table("kinds", "The same by kernel", ["", "number", "ms"], rows or [["none", 0, 0.0]], ratio=None)


def checks(results: list[Result]) -> Table:
    rows: list[list[object]] = []
    for result in results:
        step = result.figures["fsdp2"].step
        found = "; ".join(result.measured.problems()) if step.ops else "no device in this trace"
        rows.append([result.name, len(step.waits), step.hidden_share, found or "nothing"])
    title = "What fsdp2's trace shows that should not be: copies that were not planned, waits of the CPU"
    return Table("checks", title, ["", "CPU waits", "hidden share", "found"], rows, ratio=None)


def results_of(run: Run, cases: list[Case]) -> list[Result]:
    results = []
    for case in cases:
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # its memory and process group are gone afterwards
            found = pool.apply(measure, (case, run))
        name = case.name if found.is_finite else f"{case.name} (values overflow)"
        results.append(Result(name, run.shape.block_nbytes, found))
    return results


def thresholds(device: str, shape: Shape, rounds: int) -> Table:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return direct.table(pool.apply(direct.measure, (device, shape, rounds)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--blocks", type=int, help="8 by default, of 416 MiB in bf16 each")
    parser.add_argument("--tokens", type=int, help="of the one sequence; 8192 by default")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="some cases, four blocks, 2048 tokens, three rounds")
    parser.add_argument("--traces", type=Path, help="keep the profiler's traces in this folder")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu/step: this machine has no CUDA device, so nothing is measured.")
        return
    is_toy = options.device == "cpu"
    shape = Shape(256, 4, 2, 512) if is_toy else Shape()
    blocks = options.blocks or (2 if is_toy else 4 if options.quick else 8)
    tokens = options.tokens or (32 if is_toy else 2048 if options.quick else 8192)
    cases = [case for case in CASES if case.is_quick] if options.quick or is_toy else CASES
    rounds = 3 if options.quick or is_toy else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        traces = options.traces or Path(folder)
        traces.mkdir(parents=True, exist_ok=True)
        results = results_of(Run(options.device, shape, blocks, tokens, rounds, traces), cases)
    found = [*tables(results), thresholds(options.device, shape, rounds)]
    if is_toy:
        print("A toy on the CPU, to try the script: these figures mean nothing.\n")
        for each in found:
            print(f"{each.title}\n{table(each.columns, each.rows)}")
        return
    publish("gpu/step", f"{blocks} blocks of Llama 3 8B's shape, {tokens} tokens, forward and backward", found)


if __name__ == "__main__":
    main()
