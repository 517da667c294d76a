"""What all benchmarks share: a model's block, peers that take turns, and the one way in which results are reported.

A script makes one claim, which its first line states: ``Claim: ...``. It hands its tables to ``publish``, which prints
them. Under ``run.py`` it also writes ``benchmarks/results/<room>/<script>.json``; ``render.py`` shows those files in
the documentation, ``check.py`` compares a later run with them.

    publish("step/gloo_step", "Forward and backward, 2 gloo ranks", [Table("main", "Median ms", columns, rows)])
"""

from __future__ import annotations

import cProfile
import json
import math
import os
import platform
import pstats
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RESULTS_FOLDER_VARIABLE = "FSDP2_BENCH_RESULTS"
COMMIT_VARIABLE = "FSDP2_BENCH_COMMIT"
_START = time.perf_counter()


class Block(nn.Module):
    """Nine parameters, as a transformer's block has: two gains and seven matrices; attention itself is left out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.mlp = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layers in zip(self.norms, (self.attention, self.mlp), strict=True):
            y = norm(x)
            for layer in layers:
                y = layer(y)
            x = x + y
        return x


@dataclass(frozen=True)
class Ratios:
    """Draw a bar per row for the table's ratio to ``peer``, with a line at 1. ``aim``: a ratio, or the column that has
    one for each row."""

    aim: float | str | None = None
    peer: str = "torch's fully_shard"
    kind: str = field(default="ratios", init=False)


@dataclass(frozen=True)
class Bars:
    """Draw a panel per row, and in it a bar per column of ``columns``. ``base`` names a column that is a part of each
    of them, such as the time of the computation alone. ``unit`` is what the figures are in."""

    columns: Sequence[str]
    unit: str
    base: str | None = None
    kind: str = field(default="bars", init=False)


@dataclass(frozen=True)
class Lines:
    """Draw a line per column of ``columns`` over the first column, whose cells are numbers. ``unit``: of the lines.
    ``verdict`` names a column of text, which is written above the rows that share it."""

    columns: Sequence[str]
    unit: str
    verdict: str | None = None
    log_x: bool = False
    log_y: bool = False
    kind: str = field(default="lines", init=False)


@dataclass(frozen=True)
class Table:
    """Figures of one run. The first column names the rows, each once.

    Cells are text or numbers; floats are shown with two decimals, so whoever wants others formats them (``"757.6"``).
    None and nan are shown as "-". ``ratio`` names the column that ``check.py`` compares, lower is better, None where
    there is nothing to compare. ``noise`` is the relative change of it between two runs that means nothing, 0 for exact
    figures. ``note`` is shown below the table.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    ratio: str | None = "ratio"
    noise: float = 0.05
    note: str = ""
    plot: Ratios | Bars | Lines | None = None

    def __post_init__(self) -> None:
        names = [row[0] for row in self.rows]
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"table {self.name}: expected {len(self.columns)} cells in each row, as in columns.")
        if len(set(names)) != len(names):
            raise ValueError(f"table {self.name}: expected a name of its own in each row's first cell, got {names}.")
        for column in [self.ratio, *_drawn(self.plot)]:
            if column is not None and list(self.columns).count(column) != 1:
                raise ValueError(f"table {self.name}: expected one column {column!r} in {list(self.columns)}.")


def publish(script: str, title: str, tables: Sequence[Table]) -> None:
    """Print ``tables`` with what a reader needs to judge or repeat them. ``script``: its room and name.

    Where the environment variable ``FSDP2_BENCH_RESULTS`` names a folder, as ``run.py`` has it, write them there, too,
    to ``<script>.json``. So a run by hand leaves the committed results alone.
    """
    record = _record(script, title, tables)
    print(shown(record))
    if folder := os.environ.get(RESULTS_FOLDER_VARIABLE):
        write(record, Path(folder) / f"{script}.json")


def write(record: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_as_json(record))


def shown(record: Mapping[str, Any]) -> str:
    """A published record as text."""
    lines = [f"# {record['title']}", f"{machine(record)}, commit {record['commit']}", ""]
    for table_ in record["tables"]:
        lines += [table_["title"], table(table_["columns"], table_["rows"])]
        lines += [table_["note"], ""] if table_["note"] else []
    return "\n".join([*lines, f"{record['command']} took {record['seconds']:.0f} s", ""])


def machine(record: Mapping[str, Any]) -> str:
    """What a published record was measured with."""
    return f"{record['machine']['name']}, {record['machine']['cores']} CPU cores, torch {record['torch']}"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned text: the first column to the left, figures to the right."""
    cells = [list(map(cell, row)) for row in [columns, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]
    return "\n".join(lines) + "\n"


def cell(value: object) -> str:
    """How a table shows ``value``."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def number(value: object) -> float:
    """What a cell says, whether it is a number or text; nan where it says no number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def medians_in_turns(subjects: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Each of ``subjects`` measures once per round, so that a slow minute of the machine hits all of them."""
    taken: dict[str, list[float]] = {name: [] for name in subjects}
    for round_ in range(rounds):
        names = list(subjects)
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            taken[name].append(subjects[name]())
    return {name: statistics.median(values) for name, values in taken.items()}


def seconds_per_call(
    call: Callable[[], object], num_calls: int, clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """A subject for ``medians_in_turns``: the mean of ``num_calls`` calls in a row, on ``clock``."""

    def measure() -> float:
        start = clock()
        for _ in range(num_calls):
            call()
        return (clock() - start) / num_calls

    return measure


def print_profile(step: Callable[[], object], num_lines: int, within: str = "") -> None:
    """Where the Python of a step goes; of functions in files whose path has a match of ``within``."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(10):
        step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(within, num_lines)


def _record(script: str, title: str, tables: Sequence[Table]) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    return {
        "script": script,
        "title": title,
        "machine": {"name": name, "cores": os.cpu_count()},
        "torch": torch.__version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "commit": _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", f"benchmarks/{script}.py", *sys.argv[1:]]),
        "seconds": round(time.perf_counter() - _START),
        "tables": [{**asdict(table_), "rows": [list(map(_plain, row)) for row in table_.rows]} for table_ in tables],
    }


def _plain(value: object) -> str | int | float | None:
    """``value`` as JSON has it; six digits of a float, so that a file's changes can be read."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    raise TypeError(f"a cell of a table is {value!r}, expected text, a number or None. Convert it.")


def _as_json(record: Mapping[str, Any]) -> str:
    """A row of a table on a line of its own."""
    rows = {f"@{i}.{j}@": row for i, table_ in enumerate(record["tables"]) for j, row in enumerate(table_["rows"])}
    keys = iter(rows)
    tables = [{**table_, "rows": [next(keys) for _ in table_["rows"]]} for table_ in record["tables"]]
    text = json.dumps({**record, "tables": tables}, indent=1)
    for key, row in rows.items():
        text = text.replace(f'"{key}"', json.dumps(row))
    return text + "\n"


def _drawn(plot: Ratios | Bars | Lines | None) -> list[str | None]:
    """The columns that ``plot`` reads."""
    if plot is None:
        return []
    if isinstance(plot, Ratios):
        return [plot.aim] if isinstance(plot.aim, str) else []
    return [*plot.columns, plot.base if isinstance(plot, Bars) else plot.verdict]


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    found = [line.partition(":")[2].strip() for line in names if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


def _commit() -> str:
    """Of the code that was measured: results and documentation are written between runs, and do not make it dirty."""
    if COMMIT_VARIABLE in os.environ:  # a copy without git says itself what it is
        return os.environ[COMMIT_VARIABLE]
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "fsdp2", "benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
