"""Claim: FSDP over all GPUs costs under 5% of a step up to 1,024 GPUs for Llama 3 8B and 4,096 for 70B, HSDP beyond.

This is predicted from fsdp2's plans and schedule, for GPUs that this machine does not have: nothing is measured. A
table says how wrong the model is, docs/scale.md what it assumes; scale_gloo.py compares it with steps on this machine.

    python benchmarks/scale/scale_model.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
from benchmarks.common import Lines, Table, publish
from benchmarks.scale import published
from benchmarks.scale.workload import LLAMA_8B, LLAMA_70B, LLAMA_405B, Batch, Checkpointing, Llama, scenario
from fsdp2.core.schedule.schedule import AfterForward
from fsdp2.memory.plan import Held
from fsdp2.planner.groups import Wire
from fsdp2.planner.machine import Algorithm, Contention, Link, Machine
from fsdp2.planner.machines import H100, H200
from fsdp2.planner.scenario import Choice, Result, simulate

NUM_GPUS = (8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384)
FSDP = Choice()
HSDP_64 = Choice(shard_size=64)
# What asks least first, in memory, settings and rounding: of those that are about as fast, the tables name the first.
CHOICES = {
    "FSDP": FSDP,
    "FSDP, own reduce group": Choice(shares_communicator=False),
    "HSDP 64": HSDP_64,
    "HSDP 512": Choice(shard_size=512),
    "HSDP 8": Choice(shard_size=8),
    "FSDP, reshard to 8": Choice(after_forward=AfterForward.RESHARD_TO_SMALLER_MESH),
    "FSDP, no reshard": Choice(after_forward=AfterForward.KEEP),
    "FSDP, fp8 gathers": Choice(wire=Wire.FP8),
}
DRAWN = ("FSDP", "FSDP, own reduce group", "HSDP 64", "HSDP 8", "FSDP, no reshard")  # the others lie beside these
ABOUT_AS_FAST = 1.02  # what the model can tell apart


@dataclass(frozen=True)
class Subject:
    key: str
    model: Llama
    machine: Machine
    checkpointing: Checkpointing


SUBJECTS = (
    Subject("8b", LLAMA_8B, H100, Checkpointing.SELECTIVE),
    Subject("70b", LLAMA_70B, H100, Checkpointing.FULL),
    Subject("405b", LLAMA_405B, H200, Checkpointing.FULL),
)


def run(subject: Subject, num_gpus: int, choice: Choice, tokens: int = 8192) -> Result | None:
    """None where the GPUs do not divide into replicas of the size that the choice asks for."""
    batch = Batch(tokens, seq_len=min(tokens, 8192), checkpointing=subject.checkpointing)
    subject_of = scenario(subject.machine, subject.model, batch, num_gpus, choice)
    total, size, node = num_gpus, choice.shard_size, subject.machine.node_size
    if choice.after_forward is AfterForward.RESHARD_TO_SMALLER_MESH and total <= node:
        return None
    return simulate(subject_of) if size is None or (total % size == 0 and total > size) else None


def best(subject: Subject, results: Sequence[Result | None]) -> tuple[str, float | None]:
    """The first choice that is about as fast as the fastest of those that fit, and its step against compute alone."""
    fitting = {
        name: result.time
        for name, result in zip(CHOICES, results, strict=True)
        if result is not None and fits(subject, result)
    }
    if not fitting:
        return "none fits", None
    fastest = min(time.step for time in fitting.values())
    name = next(name for name, time in fitting.items() if time.step <= fastest * ABOUT_AS_FAST)
    return name, fitting[name].step / fitting[name].compute


def fits(subject: Subject, result: Result) -> bool:
    return result.reserved_nbytes <= subject.machine.memory_nbytes


Figure = Callable[[Result], str]


def percent(result: Result) -> str:
    return f"{100 * result.time.compute / result.time.step:.1f}"


def exposed(result: Result) -> str:
    return f"{1e3 * result.time.exposed:.0f}"


def gib(result: Result) -> str:
    return f"{result.peak_nbytes / 2**30:.0f}"


def efficiency_table(
    name: str, title: str, first: str, subject: Subject, rows: dict[int, list[Result | None]], *, drawn: bool = True
) -> Table:
    cells = []
    for key, results in rows.items():
        shown = [percent(result) if result and fits(subject, result) else None for result in results]
        cells.append([key, *shown, *best(subject, results)])
    return Table(
        name,
        title,
        [first, *CHOICES, "choose", "step / alone"],
        cells,
        ratio="step / alone",
        noise=0.0,
        plot=Lines(DRAWN, "% of a step without communication", verdict="choose", log_x=True) if drawn else None,
    )


def plain_table(name: str, title: str, rows: dict[int, list[Result | None]], figure: Figure) -> Table:
    cells = [[key, *(figure(result) if result else None for result in results)] for key, results in rows.items()]
    return Table(name, title, ["GPUs", *CHOICES], cells, ratio=None)


def tables_of(subject: Subject) -> list[Table]:
    rows = {num_gpus: [run(subject, num_gpus, choice) for choice in CHOICES.values()] for num_gpus in NUM_GPUS}
    alone = next(result.time.compute for result in rows[NUM_GPUS[-1]] if result)
    where = f"{subject.model.name}, {subject.machine.name}, 8192 tokens per GPU"
    return [
        efficiency_table(
            f"efficiency_{subject.key}",
            f"{where}: share of a step without communication ({alone:.2f} s), in %, of what fits in memory",
            "GPUs",
            subject,
            rows,
            drawn=subject.model is not LLAMA_405B,  # one flat line
        ),
        plain_table(f"exposed_{subject.key}", f"{where}: milliseconds of a step beyond compute", rows, exposed),
        plain_table(f"memory_{subject.key}", f"{where}: GiB at the peak", rows, gib),
    ]


def parts_table() -> Table:
    """What the memory at the peak is held for."""
    columns = [
        "",
        "parameters, optimizer",
        "groups",
        "gradients in flight",
        "gradients",
        "activations",
        "GiB at the peak",
    ]
    rows = []
    for subject in SUBJECTS:
        for name, choice in CHOICES.items():
            result = run(subject, 1024, choice)
            if result is not None and choice.shares_communicator:  # else as FSDP
                held = result.memory
                in_flight = held[Held.GRADIENTS] + held[Held.REDUCTION]
                held_for = [held[Held.PARAMETERS], in_flight, held[Held.SHARD_GRADIENTS], held[Held.SAVED]]
                parts = [result.state_nbytes, *held_for, result.peak_nbytes]
                rows.append([f"{subject.model.name}, {name}", *(f"{nbytes / 2**30:.1f}" for nbytes in parts)])
    return Table("parts", "GiB at the peak on 1024 GPUs, 8192 tokens per GPU", columns, rows, ratio=None)


def tokens_table() -> Table:
    subject = SUBJECTS[0]
    counts = (512, 1024, 2048, 4096, 8192, 16384)
    rows = {tokens: [run(subject, 1024, choice, tokens) for choice in CHOICES.values()] for tokens in counts}
    title = f"{subject.model.name} on 1024 GPUs, {subject.machine.name}: share of a step without communication, in %"
    return efficiency_table("tokens_8b", title, "tokens per GPU", subject, rows)


def sensitivity_table() -> Table:
    """What the answer hangs on: from how many GPUs on replicas pay."""

    def links(machine: Machine, *, latency: float = 1.0, network: float = 1.0) -> Machine:
        in_node, between = machine.in_node, machine.network
        return replace(
            machine,
            in_node=Link(in_node.bandwidth, in_node.latency * latency),
            network=Link(between.bandwidth * network, between.latency * latency),
        )

    variations: dict[str, Callable[[Machine], Machine]] = {
        "as assumed": lambda machine: machine,
        "latency x 0.5": lambda machine: links(machine, latency=0.5),
        "latency x 2": lambda machine: links(machine, latency=2.0),
        "all-gather in a tree": lambda machine: replace(machine, algorithm=Algorithm.TREE),
        "network x 0.5": lambda machine: links(machine, network=0.5),
        "compute 10% slower beside transfers": lambda machine: replace(machine, contention=Contention(compute=0.1)),
        "products at half of the peak": lambda machine: replace(
            machine, reached=replace(machine.reached, bf16=machine.bf16_flops / 2)
        ),
    }
    rows = []
    for name, vary in variations.items():
        varied = [replace(subject, machine=vary(subject.machine)) for subject in SUBJECTS]
        rows.append([name, *(first_win(subject) for subject in varied)])
    title = "From how many GPUs on a step of HSDP 64 is over 2% shorter than one of FSDP, 8192 tokens per GPU"
    return Table("sensitivity", title, ["", *(subject.model.name for subject in SUBJECTS)], rows, ratio=None)


def first_win(subject: Subject) -> str:
    for num_gpus in (128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        ours, theirs = run(subject, num_gpus, FSDP), run(subject, num_gpus, HSDP_64)
        if ours and theirs and theirs.time.step * ABOUT_AS_FAST < ours.time.step:
            return str(num_gpus)
    return "> 16384"


def published_table() -> Table:
    rows = []
    for row, result in published.predictions():
        assert row.gib is not None
        peak, found = result.reserved_nbytes / 2**30, result.tokens_per_second
        error = _error(found, row.page)
        paper = [None, None] if row.paper is None else [f"{row.paper:.0f}", _error(found, row.paper)]
        figures = [f"{found:.0f}", f"{row.page:.0f}", error, *paper]
        rows.append([row.name, *figures, f"{peak:.1f}", f"{row.gib:.1f}", _error(peak, row.gib)])
    columns = [
        "",
        "model tokens/s",
        "page",
        "error",
        "paper",
        "error of the paper's",
        "model GiB",
        "page GiB",
        "error of GiB",
    ]
    title = "torchtitan's Llama 3.1 on H100, per GPU: its page of December 2024, and its paper (arXiv 2410.06511)"
    return Table("published", title, columns, rows, ratio=None)


def later_table() -> Table:
    rows = []
    for row, result in published.predictions(published.LATER):
        found = result.tokens_per_second
        rows.append([row.name, f"{found:.0f}", f"{row.page:.0f}", _error(found, row.page)])
    hidden = 100 * published.calibrated().hidden
    title = (
        "torchtitan's page of async TP on the same machines, June 2025, per GPU (pytorch/torchtitan#1299); the mean "
        f"gain of its async TP calibrates the share of a transfer that it hides, {hidden:.0f}%"
    )
    return Table("published_later", title, ["", "model tokens/s", "page", "error"], rows, ratio=None)


def _error(found: float, expected: float) -> str:
    return f"{100 * (found / expected - 1):+.0f}%"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    tables = [published_table(), later_table()]
    for subject in SUBJECTS:
        tables += tables_of(subject)
    publish(
        "scale/scale_model",
        "A step on N GPUs, predicted",
        [*tables, parts_table(), tokens_table(), sensitivity_table()],
    )


if __name__ == "__main__":
    main()
