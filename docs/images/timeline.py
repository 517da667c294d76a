"""Draws ``timeline.svg``: one step of the model of ``make train`` under fsdp2, and under torch's ``fully_shard``.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 docs/images/timeline.py [--rounds 30]

Both train in the same processes, in turns, and the fastest step of each is drawn, as rank 0 saw it. Ours comes from
``fsdp2.report.report``. torch's comes from ``torch.profiler``: what its runtime does stands in ranges named
``FSDP::...``, and gloo's threads say when a collective ran. The profiler slows a step down, so torch's is also timed
without it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import nn

import fsdp2

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))
from lm_run import Config  # noqa: E402
from lm_task import Transformer  # noqa: E402

WIDTH, LABEL, COMPUTE, LANE, GAP, AXIS = 1000, 62, 22, 8, 26, 20  # pixels
COLOURS = {
    "other": "#bbb",
    "gather wait": "#d62728",
    "reduce wait": "#ff7f0e",
    "other wait": "#e377c2",
    "copy": "#7f7f7f",
    "launch": "#444",
}
ROOT = "(root)"


@dataclass(frozen=True)
class Bar:
    """From ``start`` for ``length`` milliseconds; ``row`` 0 is the thread, 1 gathers, 2 reductions. Later bars cover
    earlier ones."""

    row: int
    what: str
    unit: str
    start: float
    length: float


@dataclass(frozen=True)
class Timeline:
    """One step of one runtime."""

    name: str
    step_ms: float
    bars: Sequence[Bar]


# Ours


def from_report(data: dict[str, Any]) -> Timeline:
    """The step that rank 0 reported."""
    timeline, names = data["timelines"][0], [unit["name"] for unit in data["units"]] + [""]
    begin = timeline["start_us"]
    bars = [
        Bar(0, data["does"][does], names[unit], (start - begin) / 1e3, length / 1e3)
        for does, unit, start, length, _ in timeline["spans"]
    ]
    bars += [
        Bar(1 if kind == 0 else 2, data["kinds"][kind], names[unit], (start - begin) / 1e3, length / 1e3)
        for kind, unit, start, length, _ in timeline["transfers"]
    ]
    return Timeline("fsdp2", (timeline["stop_us"] - begin) / 1e3, bars)


# torch's


@dataclass(frozen=True)
class Range:
    """What the profiler recorded."""

    thread: int
    name: str
    start: float
    stop: float

    @property
    def unit(self) -> str:
        """The one in its name: ``FSDP::pre_forward (blocks.0)``; the root has none."""
        return self.name.partition("(")[2].rstrip(")") or ROOT

    @property
    def kind(self) -> str:
        return self.name.removeprefix("FSDP::").partition(" ")[0]


def from_profiler(ranges: Sequence[Range], step: Range) -> Timeline:
    """``step``: the range around the whole step. First compute is drawn, then what the runtime does over it."""
    runtime = [each for each in ranges if each.thread == step.thread and each.name.startswith("FSDP::")]
    bars = [
        *_compute(runtime, step),
        *_of_runtime(runtime, [each for each in ranges if each.name.startswith("c10d::")]),
    ]
    for each in ranges:
        if each.name.startswith("gloo:"):
            bars.append(_bar(1 if "gather" in each.name else 2, each.name, _launched_for(each, runtime), each))
    moved = [Bar(b.row, b.what, b.unit, b.start - step.start, b.length) for b in bars]
    return Timeline("torch", step.stop - step.start, moved)


def _compute(runtime: Sequence[Range], step: Range) -> list[Bar]:
    """What runs between the hooks."""
    bars, at, now = [], step.start, ("other", "")
    callback = max(each.start for each in runtime if each.kind == "root_post_backward_callback")  # the backward's end
    for each in runtime:
        if each.start > at:
            bars.append(Bar(0, *now, at, each.start - at))
        at = max(at, each.stop)
        if each.kind in ("pre_forward", "pre_backward"):
            now = each.kind.removeprefix("pre_"), each.unit
        elif each.kind == "post_forward":
            now = "forward" if each.unit != ROOT else "other", ROOT
        elif each.kind == "post_backward_reduce":
            now = "backward", ROOT
        if each.start >= callback:
            now = "other", ""
    return [*bars, Bar(0, *now, at, step.stop - at)]


def _of_runtime(runtime: Sequence[Range], collectives: Sequence[Range]) -> list[Bar]:
    """A collective starts inside its range, and the thread waits from there to the end of the range: on gloo, torch's
    collectives are not asynchronous."""
    waits = {"all_gather": "gather wait", "post_backward_reduce": "reduce wait"}
    bars = []
    for each in runtime:
        is_copy = each.kind in waits or each.kind == "all_gather_copy_out"
        bars.append(_bar(0, "copy" if is_copy else "launch", each.unit, each))
        inside = [other for other in collectives if each.start <= other.start < each.stop]
        if each.kind in waits and inside:
            bars.append(_bar(0, waits[each.kind], each.unit, Range(0, "", inside[0].start, each.stop)))
    return bars


def _launched_for(collective: Range, runtime: Sequence[Range]) -> str:
    around = [each for each in runtime if each.start <= collective.start < each.stop]
    return next((each.unit for each in reversed(around) if each.kind in ("all_gather", "post_backward_reduce")), ROOT)


def _bar(row: int, what: str, unit: str, of: Range) -> Bar:
    return Bar(row, what, unit, of.start, of.stop - of.start)


# The picture


def svg(timelines: Sequence[Timeline], note: str) -> str:
    """All on one axis, one below the other."""
    longest = max(each.step_ms for each in timelines)
    scale = (WIDTH - LABEL - 10) / longest
    units = sorted({bar.unit for each in timelines for bar in each.bars if bar.unit})
    height_of_one = COMPUTE + 2 * LANE + GAP
    lines, top = [], AXIS
    for each in timelines:
        lines.append(f'<text x="2" y="{top + 14}" font-weight="bold">{each.name}</text>')
        lines.append(f'<text x="2" y="{top + COMPUTE + 7}" font-size="8">gather</text>')
        lines.append(f'<text x="2" y="{top + COMPUTE + LANE + 7}" font-size="8">reduce</text>')
        for bar in each.bars:
            if bar.length * scale >= 0.25:
                y = top if bar.row == 0 else top + COMPUTE + (bar.row - 1) * LANE + 1
                size = f'width="{bar.length * scale:.1f}" height="{COMPUTE if bar.row == 0 else LANE - 2}"'
                colour = _colour(bar, units)
                lines.append(f'<rect x="{LABEL + bar.start * scale:.1f}" y="{y}" {size} fill="{colour}"/>')
        lines.append(f'<text x="{LABEL + each.step_ms * scale - 4:.0f}" y="{top - 3}" text-anchor="end">')
        lines.append(f"{each.step_ms:.0f} ms</text>")
        top += height_of_one
    for name, colour in COLOURS.items():
        x = LABEL + list(COLOURS).index(name) * 90
        lines.append(f'<rect x="{x}" y="{top}" width="10" height="10" fill="{colour}"/>')
        lines.append(f'<text x="{x + 14}" y="{top + 9}">{name}</text>')
    forward = f"forward (light) and backward (dark) have a colour per unit; {note}"
    lines.append(f'<text x="{LABEL}" y="{top + 28}">{forward}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 36}" font-family="sans-serif"'
    ground = f'<rect width="{WIDTH}" height="{top + 36}" fill="#fff"/>'
    return "\n".join([f'{head} font-size="11">', ground, *lines, "</svg>", ""])


def _colour(bar: Bar, units: Sequence[str]) -> str:
    if bar.row == 0 and bar.what in COLOURS:
        return COLOURS[bar.what]
    hue = 80 + units.index(bar.unit) * 97 % 230  # no red or orange, which are waits
    return f"hsl({hue} 60% {62 if bar.what == 'forward' else 45}%)"


# The runs


def stepper(model: nn.Module, config: Config, fully_shard: Callable[..., Any]) -> Callable[[], None]:
    """A training step of ``model`` under a runtime."""
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    tokens = torch.randint(256, (config.batch_size, config.sequence_length + 1))

    def step() -> None:
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(model: nn.Module, step: Callable[[], None]) -> Timeline | None:
    dist.barrier()
    with fsdp2.report.report(model, steps=1) as report:
        step()
    return None if report.data is None else from_report(report.data)


def profiled_step(step: Callable[[], None]) -> Timeline:
    dist.barrier()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler, torch.profiler.record_function("whole step"):
        step()
    events = profiler.events() or []
    ranges = [Range(e.thread, e.name, e.time_range.start / 1e3, e.time_range.end / 1e3) for e in events]
    ranges.sort(key=lambda each: (each.start, -each.stop))
    return from_profiler(ranges, next(each for each in ranges if each.name == "whole step"))


def seconds(step: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="steps of each")
    rounds = parser.parse_args().rounds
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    config = Config()
    torch.manual_seed(0)
    models = [Transformer(config.model) for _ in range(2)]
    ours = stepper(models[0], config, fsdp2.fully_shard)
    torchs = stepper(models[1], config, torch.distributed.fsdp.fully_shard)
    for step in (ours, torchs) * 2:  # makes plans, and the state of the optimizer
        step()
    found: list[Timeline | None] = []
    profiled, plain = [], []
    for _ in range(rounds):
        found.append(our_step(models[0], ours))
        profiled.append(profiled_step(torchs))
        plain.append(1e3 * seconds(torchs))
    if dist.get_rank() == 0:
        reported = [each for each in found if each is not None]
        best = [min(each, key=lambda timeline: timeline.step_ms) for each in (reported, profiled)]
        note = f"torch's step takes {min(plain):.0f} ms without the profiler"
        (HERE / "timeline.svg").write_text(svg(best, note), encoding="utf-8")
        print(*(f"{each.name}: {each.step_ms:.1f} ms" for each in best), note, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
