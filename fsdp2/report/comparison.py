"""Two reports side by side: ``print(fsdp2.report.compare_reports("before.json", "after.json"))``, and the command
``compare``.

Knows the data of reports, as ``data`` describes it, and nothing about how it was measured. Rule: values that one of the
reports lacks are left out or None, and never count as 0.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2.extras import sizes
from fsdp2.extras.output import check_writable
from fsdp2.report import files
from fsdp2.report.call import Report
from fsdp2.report.data import VERSION

_CALLER = "compare_reports"
_KEYS = {"version", "model", "device", "units", "timelines", "rank_totals", "memory", "steps_ms", "step"}
_SUMS = {  # sums of a unit's fields: the work that a unit takes the rank's thread for
    "compute_ms": ("forward_ms", "backward_ms"),
    "waits_ms": ("gather_wait_ms", "reduce_wait_ms"),
    "thread_ms": ("launch_ms", "copy_ms"),
}
_BYTES = ("shard", "unsharded", "gather_direct", "gather_bucket", "reduce_direct", "reduce_bucket")
_MEMORY = ("peak_nbytes", "temporary_nbytes", "allocated_nbytes", "reserved_nbytes")
_SETTINGS = ("keeps_after_forward", "replicas", "is_small", "bucket_nbytes")
_MAX_LISTED = 5


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`fsdp2.report.compare_reports`; ``str()`` shows everything except the times of most units.

    Attributes:
        data: the contents of the JSON file: ``names`` of both reports; ``tables`` of rows with ``values`` of both,
            their ``difference`` (second minus first) and ``ratio`` (second over first), None if not known; ``units``,
            the same for each unit; ``settings`` that differ; ``only``, the units that only one report has.
    """

    data: dict[str, Any]

    def __str__(self) -> str:
        """Tables of the differences."""
        names, parts = self.data["names"], []
        for table in self.data["tables"]:
            rows = [[row["what"], *_texts(row)] for row in table["rows"]]
            parts.append(_aligned([[table["title"], *names, "difference", "ratio"], *rows]))
        changed = sorted(self.data["units"], key=lambda unit: -sum(abs(p["difference"] or 0) for p in unit["pairs"]))
        rows = [
            [f"{unit['name']}, {_label(pair['field'])}", *_texts(pair)]
            for unit in changed[:_MAX_LISTED]
            for pair in unit["pairs"]
        ]
        title = "units" if len(changed) <= _MAX_LISTED else f"units ({_MAX_LISTED} of {len(changed)} that changed most)"
        parts.append(_aligned([[title, *names, "difference", "ratio"], *rows]))
        settings = [[each["what"], *map(str, each["values"])] for each in self.data["settings"]]
        parts.append(_aligned([["settings that differ", *names], *settings]) if settings else "No settings differ.")
        only = [
            f"{name} alone has {_listed(units)}." for name, units in zip(names, self.data["only"], strict=True) if units
        ]
        return "\n\n".join([*parts, *only])


def compare_reports(
    first: str | os.PathLike[str] | Report,
    second: str | os.PathLike[str] | Report,
    path: str | os.PathLike[str] | None = None,
    *,
    only_matching: bool = False,
) -> Comparison:
    """Put two reports side by side: step time, lost time by kind, times of units, memory, bytes, and settings that
    differ. No process group is needed.

    Args:
        first, second: a ``.json`` or ``.html`` file that :func:`fsdp2.report.report` wrote, or what it yielded on rank
            0.
        path: where to write: ``.html`` is one page with both timelines on the same scale; or ``.json``.
        only_matching: compare only the units that both have, if one has others. Totals are still those of all units.

    Raises:
        ValueError: a file cannot be read or is not a report; it has another format version; the units have different
            names; ``path`` has another suffix or cannot be written.
        TypeError: an argument is of the wrong type.
    """
    names, reports = _names(first, second), [_loaded(each) for each in (first, second)]
    target = None if path is None else _target(path)
    for name, report in zip(names, reports, strict=True):
        if report["version"] != VERSION:
            raise ValueError(
                f"{_CALLER}: {name} has version {report['version']} of the format, expected {VERSION}. Record it again "
                "with this version of fsdp2."
            )
    only = _only(names, reports, only_matching=only_matching)
    comparison = Comparison(_compared(names, reports, only))
    if target is not None and files.kind_of(target) == files.PAGE:
        data = {"comparison": comparison.data, "reports": reports}
        page = files.page(data, "comparison", title="fsdp2: two reports")
        files.write_whole(target, page)
    elif target is not None:
        files.write(target, comparison.data)
    return comparison


def _names(*reports: object) -> list[str]:
    """Names for the reports: their file names, with as many folders as needed to distinguish them."""
    titles = ("the first", "the second")
    paths = [None if isinstance(each, Report) else Path(os.fspath(each)) for each in map(_checked, reports)]
    if None not in paths and len({path.name for path in paths if path}) == 1:
        return [str(path) for path in paths]
    return [title if path is None else path.name for title, path in zip(titles, paths, strict=True)]


def _checked(report: Any) -> Any:
    if not isinstance(report, (str, os.PathLike, Report)):
        raise TypeError(
            f"{_CALLER}: a report is a {type(report).__name__}, expected a path, or what fsdp2.report yielded."
        )
    return report


def _loaded(report: str | os.PathLike[str] | Report) -> dict[str, Any]:
    if isinstance(report, Report):
        if report.data is None:
            raise ValueError(f"{_CALLER}: a report has no data. Only rank 0 has it, after the block.")
        return report.data
    name = os.fspath(report)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        text = ""
    except OSError as error:
        raise ValueError(f"{_CALLER}: cannot read '{name}': {error.strerror or error}.") from error
    try:
        data = files.data_of(text) if name.endswith(files.PAGE) else json.loads(text)
    except ValueError:
        data = None
    if isinstance(data, dict) and "traceEvents" in data:
        raise ValueError(f"{_CALLER}: '{name}' is a trace. Pass the .json or the .html of that report.")
    if not isinstance(data, dict) or not data.keys() >= _KEYS:
        raise ValueError(f"{_CALLER}: '{name}' is no report. Pass a .json or .html that fsdp2.report wrote.")
    return data


def _target(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{_CALLER}: path is {path!r}, expected where to write, such as 'both.html'.")
    target = Path(path)
    if files.kind_of(target) not in (files.PAGE, files.JSON):
        raise ValueError(f"{_CALLER}: '{target}' has the suffix '{target.suffix}'. Use .html or .json.")
    try:
        check_writable(target)
    except OSError as error:
        raise ValueError(f"{_CALLER}: cannot write '{target}': {error.strerror or error}. Use another path.") from error
    return target


def _only(names: Sequence[str], reports: Sequence[dict[str, Any]], *, only_matching: bool) -> list[list[str]]:
    """The units that only one report has."""
    units = [[unit["name"] for unit in report["units"]] for report in reports]
    only = [[name for name in units[i] if name not in set(units[1 - i])] for i in (0, 1)]
    num_matching = len(units[0]) - len(only[0])
    if any(only) and not (only_matching and num_matching):
        alone = "; ".join(f"{name} alone has {_listed(own)}" for name, own in zip(names, only, strict=True) if own)
        remedy = "Pass only_matching=True (on the command line: --only-matching) to compare those that match."
        raise ValueError(
            f"{_CALLER}: the units have other names: {num_matching} match ({_listed(_both(units)) or 'none'}); {alone}."
            + (f" {remedy}" if num_matching else " Compare reports on one model.")
        )
    return only


def _both(units: Sequence[Sequence[str]]) -> list[str]:
    return [name for name in units[0] if name in set(units[1])]


def _compared(names: Sequence[str], reports: Sequence[dict[str, Any]], only: Sequence[Sequence[str]]) -> dict[str, Any]:
    rows = [{unit["name"]: unit for unit in report["units"]} for report in reports]
    matching = [name for name in rows[0] if name in rows[1]]
    tables = {
        "step": _pairs(_step(report) for report in reports),
        "lost time": _pairs(_lost(report) for report in reports),
        "most of all ranks": _pairs(_most(report) for report in reports),
        "memory": _pairs({key: report["memory"][key] for key in _MEMORY} for report in reports),
        "bytes of all units": _pairs(_travelling(report) for report in reports),
    }
    return {
        "version": VERSION,
        "names": list(names),
        "tables": [{"title": title, "rows": found} for title, found in tables.items() if found],
        "unit_fields": list(_SUMS),
        "units": [
            {"name": name, "pairs": [_pair(field, [_sum(unit[name], field) for unit in rows]) for field in _SUMS]}
            for name in matching
        ],
        "settings": _settings(reports, matching, rows),
        "only": [list(each) for each in only],
    }


def _step(report: dict[str, Any]) -> dict[str, Any]:
    speed = report["speed"]
    step = report["steps_ms"][report["step"]]
    return {"step_ms": step, "tokens_per_s": speed["tokens_per_s"], "mfu": speed["mfu"]}


def _lost(report: dict[str, Any]) -> dict[str, Any]:
    """The lost time of the rank that loses most. A kind to which nothing was lost is 0."""
    lost = report["lost"]
    return {"lost_ms": lost["lost_ms"]} | {f"{each['kind']}_ms": each["lost_ms"] for each in lost["kinds"]}


def _most(report: dict[str, Any]) -> dict[str, Any]:
    return {
        field: max(rank[field] for rank in report["rank_totals"])
        for field in report["rank_totals"][0]
        if field.endswith("_ms")
    }


def _travelling(report: dict[str, Any]) -> dict[str, Any]:
    sums = {f"{each}_nbytes": sum(unit[f"{each}_nbytes"] for unit in report["units"]) for each in _BYTES}
    gathered = [
        unit["gathers"] * (unit["gather_direct_nbytes"] + unit["gather_bucket_nbytes"]) for unit in report["units"]
    ]
    return sums | {"gathered_in_the_step_nbytes": sum(gathered)}


def _sum(unit: dict[str, Any], field: str) -> float:
    return float(sum(unit[each] for each in _SUMS[field]))


def _pairs(reports: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each field for which at least one report has a value. A kind of lost time that a report does not list
    is 0 there."""
    first, second = reports
    fields = dict.fromkeys([*first, *second])
    values = {field: [each.get(field, 0) for each in (first, second)] for field in fields}
    return [_pair(field, pair) for field, pair in values.items() if pair != [None, None]]


def _pair(field: str, values: Sequence[Any]) -> dict[str, Any]:
    first, second = values
    is_known = first is not None and second is not None
    return {
        "field": field,
        "what": _label(field),
        "values": list(values),
        "difference": round(second - first, 6) if is_known else None,
        "ratio": round(second / first, 4) if is_known and first else None,
    }


def _settings(
    reports: Sequence[dict[str, Any]], matching: Sequence[str], rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The settings, which are chosen and not measured, in which the reports differ."""
    first, second = reports
    found = [(key, [first[key], second[key]]) for key in ("model", "device")]
    found.append(("ranks", [len(first["ranks"]), len(second["ranks"])]))
    found.append(("units", [len(first["units"]), len(second["units"])]))
    differing = [{"what": what, "units": [], "values": values} for what, values in found if values[0] != values[1]]
    for setting in _SETTINGS:
        by_values: dict[tuple[Any, Any], list[str]] = {}
        for name in matching:
            by_values.setdefault((rows[0][name][setting], rows[1][name][setting]), []).append(name)
        for values, units in by_values.items():
            if values[0] != values[1]:
                more = f" and {len(units) - 1} more" if len(units) > 1 else ""
                what = f"{_label(setting)} of {units[0]}{more}"
                differing.append({"what": what, "units": units, "values": list(values)})
    return differing


# Text


def _label(field: str) -> str:
    return field.removesuffix("_ms").removesuffix("_nbytes").replace("_", " ")


def _texts(row: dict[str, Any]) -> list[str]:
    field, difference, ratio = row["field"], row["difference"], row["ratio"]
    values = ["not known" if value is None else _text(field, value) for value in row["values"]]
    sign = "+" if difference and difference > 0 else ""
    by = "" if difference is None else f"{sign}{_text(field, difference)}"
    return [*values, by, "" if ratio is None else f"{ratio:.2f}"]


def _text(field: str, value: float) -> str:
    if field.endswith("_ms"):
        return f"{value:.1f} ms"
    if field.endswith("_nbytes") and not value:
        return "0 B"
    if field.endswith("_nbytes"):
        return f"{'-' if value < 0 else ''}{sizes.text_of(abs(value))}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
    return "\n".join(map(str.rstrip, lines))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_LISTED])
    return shown if len(names) <= _MAX_LISTED else f"{shown} and {len(names) - _MAX_LISTED} more"


# The command


def add_compare(commands: Any) -> None:
    """Add the subcommand to ``commands`` of a parser."""
    parser = commands.add_parser(
        "compare",
        help="put two reports of fsdp2.report side by side",
        description="Prints what differs between two reports that fsdp2.report wrote as .json or .html.",
    )
    parser.add_argument("first", help="a report: .json or .html")
    parser.add_argument("second", help="another one")
    parser.add_argument("path", nargs="?", help="also write a page (.html) or the differences (.json) there")
    parser.add_argument("--only-matching", action="store_true", help="compare the units that both have")
    parser.set_defaults(run=_print_comparison)


def _print_comparison(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    try:
        print(compare_reports(options.first, options.second, options.path, only_matching=options.only_matching))
    except ValueError as error:
        parser.exit(2, f"{parser.prog} compare: error: {str(error).removeprefix(f'{_CALLER}: ')}\n")
