"""What every benchmark prints, and how it compares: peers take turns in one process, medians, ratios.

A script makes one claim. It prints the machine, torch, the commit and one table whose last column is the ratio of ours
to torch's, so that below 1 is a win.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn


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


def header(title: str) -> str:
    """``title``, and what a reader needs to judge or repeat the figures below it."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    return f"# {title}\n{device}, {os.cpu_count()} CPU cores; torch {torch.__version__}; commit {_commit()}\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned text: the first column to the left, figures to the right."""
    cells = [list(map(_cell, row)) for row in [columns, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]
    return "\n".join(lines) + "\n"


def medians_in_turns(subjects: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Each of ``subjects`` measures once per round, so that a slow minute of the machine hits all of them."""
    taken: dict[str, list[float]] = {name: [] for name in subjects}
    for round_ in range(rounds):
        names = list(subjects)
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            taken[name].append(subjects[name]())
    return {name: statistics.median(values) for name, values in taken.items()}


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    found = [line.partition(":")[2].strip() for line in names if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
