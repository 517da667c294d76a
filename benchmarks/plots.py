"""Draws the plots of published tables: one style, legible on light and on dark backgrounds.

A picture carries the digest of the table that it shows, so that a test can tell whether it is out of date.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common import cell, number

OURS, THEIRS, LOSS, BASE = "#2f81f7", "#8c96a0", "#d9763a", "#c2a33a"
INK = "#7d8590"  # text and lines: as far from white as from black
LINES = (OURS, LOSS, "#3fa45b", "#a371f7", BASE, THEIRS)
STYLE: dict[Any, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "font.size": 9,
    "legend.frameon": False,
}
WIDTH = 7.5  # inches
BAR = 0.24


def draw(table: Mapping[str, Any], path: Path, source: str) -> None:
    """Draw ``table``, which has a plot, into the PNG at ``path``, whose metadata hold ``source``."""
    with plt.rc_context(STYLE):
        figure = {"ratios": _ratios, "bars": _bars, "lines": _lines}[table["plot"]["kind"]](table)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Source": source, "Software": None}
        figure.savefig(path, dpi=130, bbox_inches="tight", metadata=metadata)
        plt.close(figure)


def _ratios(table: Mapping[str, Any]) -> Figure:
    names, ratios = _column(table, 0), _numbers(table, table["ratio"])
    figure, axes = plt.subplots(figsize=(WIDTH, BAR * len(names) + 0.6))
    axes.barh(names, ratios, color=[OURS if ratio <= 1 else LOSS for ratio in ratios], height=0.7)
    for index, ratio in enumerate(ratios):
        axes.text(1.01, index, cell(ratio), va="center", transform=axes.get_yaxis_transform())  # a column of them
    axes.axvline(1, color=INK, linewidth=1)
    if aim := table["plot"]["aim"]:
        aims = _numbers(table, aim) if isinstance(aim, str) else [aim] * len(names)
        axes.vlines(aims, *_around(len(names)), color=LOSS, linewidth=2, label="aim")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderpad=0, handlelength=1)
    axes.set_xlabel(f"of {table['plot']['peer']} (1.0)")
    _as_list(axes, len(names))
    return figure


def _bars(table: Mapping[str, Any]) -> Figure:
    plot, names = table["plot"], _column(table, 0)
    columns = plot["columns"]
    height = BAR * len(columns) * len(names) + 0.6 * len(names)
    figure, panels = plt.subplots(len(names), 1, figsize=(WIDTH, height), squeeze=False, layout="constrained")
    values = {column: _numbers(table, column) for column in columns}
    bases = _numbers(table, plot["base"]) if plot["base"] else [0.0] * len(names)
    for index, (axes, name) in enumerate(zip(panels[:, 0], names, strict=True)):
        lengths = [values[column][index] for column in columns]
        colours = [OURS if column.startswith("fsdp2") else THEIRS for column in columns]
        within = [min(length, bases[index]) for length in lengths]
        rest = [length - part for length, part in zip(lengths, within, strict=True)]
        axes.barh(columns, within, color=colours, height=0.7, alpha=0.45)
        axes.barh(columns, rest, left=within, color=colours, height=0.7)
        for place, length in enumerate(lengths):
            axes.text(length, place, f" {_short(length)}", va="center")
        if plot["base"]:
            axes.axvline(bases[index], color=INK, linewidth=1, linestyle=(0, (4, 2)), label=plot["base"])
        axes.set_title(name)
        _as_list(axes, len(columns))
    if plot["base"]:
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper right")
    panels[-1, 0].set_xlabel(plot["unit"])
    return figure


def _lines(table: Mapping[str, Any]) -> Figure:
    plot = table["plot"]
    figure, axes = plt.subplots(figsize=(WIDTH, 3.6))
    x = _numbers(table, table["columns"][0])
    for index, column in enumerate(plot["columns"]):
        axes.plot(x, _numbers(table, column), color=LINES[index % len(LINES)], marker="o", markersize=3, label=column)
    if plot["log_x"]:
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{value:g}" for value in x], minor=False)
    if plot["log_y"]:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(table["columns"][0])
    axes.set_ylabel(plot["unit"])
    axes.grid(color=INK, alpha=0.25)
    axes.legend()
    if plot["verdict"]:
        _verdicts(axes, x, _column(table, table["columns"].index(plot["verdict"])))
    return figure


def _verdicts(axes: Axes, x: Sequence[float], verdicts: Sequence[str]) -> None:
    """Above the lines, what holds from where on; neighbours at two heights, so that they do not overlap."""
    low, high = axes.get_xlim()
    starts = [index for index, verdict in enumerate(verdicts) if index == 0 or verdict != verdicts[index - 1]]
    for count, index in enumerate(starts):
        start = (x[index - 1] * x[index]) ** 0.5 if index else low
        height = 1.02 + 0.05 * (count % 2)
        axes.text(start, height, f" {verdicts[index]}", transform=axes.get_xaxis_transform(), fontsize=8)
        if index:
            axes.axvline(start, ymax=height + 0.03, clip_on=False, color=INK, linewidth=1, linestyle=(0, (4, 2)))
    axes.set_xlim(low, high)


def _around(length: int) -> tuple[list[float], list[float]]:
    """Where the marks of a list's rows begin and end."""
    return [index - 0.45 for index in range(length)], [index + 0.45 for index in range(length)]


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _as_list(axes: Axes, length: int) -> None:
    """Rows from top to bottom, as in the table, without what a list does not need."""
    axes.set_ylim(length - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _column(table: Mapping[str, Any], index: int) -> list[Any]:
    return [row[index] for row in table["rows"]]


def _numbers(table: Mapping[str, Any], column: str) -> Sequence[float]:
    """nan where a cell has none."""
    cells = _column(table, table["columns"].index(column))
    return [number(cell) for cell in cells]
