"""Two reports side by side: ``print(fsdp2.report.compare_reports("before.json", "after.json"))``, and the command
``compare``.

Knows the data of reports, as ``data`` describes it, and nothing about how it was measured. Rule: values that one of the
reports lacks are left out or None, and never count as 0.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fsdp2.extras import sizes
from fsdp2.extras.checked import checked
from fsdp2.extras.foreign_files import json_of, printable, read_text
from fsdp2.extras.output import aligned, listed
from fsdp2.report import files
from fsdp2.report.call import Report
from fsdp2.report.data import VERSION
from fsdp2.report.figures import ms_text, spread_of
from fsdp2.report.lost import Lost

_CALLER = "compare_reports"
_KEYS = {"version", "model", "device", "units", "timelines", "rank_totals", "memory", "steps_ms", "step"}
_SUMS = {  # of a unit's fields: the work that a unit takes the rank's thread for
    "compute_ms": ("forward_ms", "backward_ms"),
    "waits_ms": ("gather_wait_ms", "reduce_wait_ms"),
    "thread_ms": ("launch_ms", "copy_ms"),
}
_BYTES = ("shard", "unsharded", "gather_direct", "gather_bucket", "reduce_direct", "reduce_bucket")
_MEMORY = ("peak_nbytes", "temporary_nbytes", "allocated_nbytes", "reserved_nbytes")
_COMPUTE = ("forward_ms", "backward_ms", "other_ms")
_SETTINGS = ("keeps_after_forward", "replicas", "is_small", "bucket_nbytes")
_MAX_LISTED = 5
_MORE_IS_BETTER = ("tokens_per_s", "mfu")


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`fsdp2.report.compare_reports`; ``str()`` shows everything except the times of most units.

    Attributes:
        data: the contents of the JSON file: ``names`` of both reports; ``verdict``, which of them is faster, and by
            what; ``other_work``, in which ways they do not measure the same work; ``tables`` of rows with ``values`` of
            both, their ``difference`` (second minus first) and ``ratio`` (second over first), None if not known, and
            ``is_better``, None if nobody can tell; ``units``, the same for each unit; ``settings`` that differ;
            ``only``, the units that only one report has; ``digits`` of a time that are known.
    """

    data: dict[str, Any]

    def __str__(self) -> str:
        """The verdict, and tables of the differences."""
        names, units, digits = self.data["names"], self.data["units"], self.data["digits"]
        columns = [*names, "difference", "ratio", ""]
        parts = [self._lead()]
        parts += [
            aligned([[table["title"], *columns], *([row["what"], *_texts(row, digits)] for row in table["rows"])])
            for table in self.data["tables"]
        ]
        changed = sorted(units, key=lambda unit: -sum(abs(pair["difference"] or 0) for pair in unit["pairs"]))
        rows = [
            [f"{unit['name']}, {pair['what']}", *_texts(pair, digits)]
            for unit in changed[:_MAX_LISTED]
            for pair in unit["pairs"]
        ]
        title = "units" if len(units) <= _MAX_LISTED else f"units ({_MAX_LISTED} of {len(units)} that changed most)"
        parts.append(aligned([[title, *columns], *rows]))
        settings = [[each["what"], *map(_setting, each["values"])] for each in self.data["settings"]]
        parts.append(aligned([["settings that differ", *names], *settings]) if settings else "No settings differ.")
        return "\n\n".join(parts)

    def _lead(self) -> str:
        """What to know before anything else."""
        alone = (f"{each}." for each in _alone(self.data["names"], self.data["only"]))
        return " ".join([*self.data["other_work"], self.data["verdict"], *alone])


@checked()
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
    given = (first, second)
    for each in given:
        if not isinstance(each, (str, os.PathLike, Report)):
            raise TypeError(
                f"{_CALLER}: a report is of type {type(each).__name__}, expected a path, or what fsdp2.report yielded."
            )
    names, reports = _names(given), [_loaded(each) for each in given]
    target = None if path is None else _target(path)
    for name, report in zip(names, reports, strict=True):
        if report["version"] != VERSION:
            raise ValueError(
                f"{_CALLER}: {name} has version {report['version']} of the format, expected {VERSION}. Record it again "
                "with this version of fsdp2."
            )
    units = [_units(name, report) for name, report in zip(names, reports, strict=True)]
    _check_names(names, units, only_matching=only_matching)
    try:
        comparison = Comparison(_compared(names, reports, units))
        str(comparison)  # every value is of a type that can be shown
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{_CALLER}: {' or '.join(names)} is damaged: it lacks what a report has ({type(error).__name__}: "
            f"{error}). Record it again."
        ) from error
    if target is not None and files.kind_of(target) == files.PAGE:
        data = {"comparison": comparison.data, "reports": reports}
        setups = " ".join(f"{name}: {files.setup_of(each)[:-1]}." for name, each in zip(names, reports, strict=True))
        texts = {"title": " and ".join(names), "summary": setups, "lead": comparison._lead()}
        files.write_whole(target, files.page(data, "comparison", **texts))
    elif target is not None:
        files.write(target, comparison.data)
    return comparison


def _names(reports: Sequence[str | os.PathLike[str] | Report]) -> list[str]:
    """Names for the reports: their file names, with as many folders as needed to distinguish them."""
    paths = [Path(each) for each in reports if not isinstance(each, Report)]
    if len(paths) == 2 and paths[0].name == paths[1].name:
        return [str(path) for path in paths]
    titles = ("the first", "the second")
    return [t if isinstance(each, Report) else Path(each).name for t, each in zip(titles, reports, strict=True)]


def _loaded(report: str | os.PathLike[str] | Report) -> dict[str, Any]:
    if isinstance(report, Report):
        if report.data is None:
            raise ValueError(f"{_CALLER}: a report has no data. Only rank 0 has it, after the block.")
        return report.data
    name = os.fspath(report)
    try:
        text = read_text(name)
        data = files.data_of(text) if name.endswith(files.PAGE) else json_of(text)
    except OSError as error:
        raise ValueError(f"{_CALLER}: cannot read '{name}': {error.strerror or error}.") from error
    except ValueError:
        data = None
    if isinstance(data, dict) and "traceEvents" in data:
        raise ValueError(f"{_CALLER}: '{name}' is a trace. Pass the .json or the .html of that report.")
    if not isinstance(data, dict) or not data.keys() >= _KEYS:
        raise ValueError(f"{_CALLER}: '{name}' is no report. Pass a .json or .html that fsdp2.report wrote.")
    return data


Units = dict[str, dict[str, Any]]  # of one report, by name


def _units(name: str, report: dict[str, Any]) -> Units:
    try:
        return {str(unit["name"]): unit for unit in report["units"]}
    except (LookupError, TypeError) as error:
        raise ValueError(f"{_CALLER}: {name} is damaged: its units have no names. Record it again.") from error


def _target(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{_CALLER}: path is {path!r}, expected where to write, such as 'both.html'.")
    problem = files.problem(Path(path), files.PAGE, files.JSON)
    if problem is not None:
        raise ValueError(f"{_CALLER}: {problem}")
    return Path(path)


def _check_names(names: Sequence[str], units: Sequence[Units], *, only_matching: bool) -> None:
    """Refuse reports of which only one has some unit, unless those that match are to be compared."""
    matching, alone = _matching(units), _alone(names, _only(units))
    if alone and not (only_matching and matching):
        remedy = "Compare reports on one model."
        if matching:
            remedy = "Pass only_matching=True (on the command line: --only-matching) to compare those that match."
        raise ValueError(
            f"{_CALLER}: the units have other names: {len(matching)} match "
            f"({listed(matching, _MAX_LISTED) or 'none'}); {'; '.join(alone)}. {remedy}"
        )


def _matching(units: Sequence[Units]) -> list[str]:
    return [name for name in units[0] if name in units[1]]


def _only(units: Sequence[Units]) -> list[list[str]]:
    """The units that only one report has."""
    first, second = units
    return [[name for name in first if name not in second], [name for name in second if name not in first]]


def _alone(names: Sequence[str], only: Sequence[Sequence[str]]) -> list[str]:
    return [f"{name} alone has {listed(units, _MAX_LISTED)}" for name, units in zip(names, only, strict=True) if units]


def _compared(names: Sequence[str], reports: Sequence[dict[str, Any]], units: Sequence[Units]) -> dict[str, Any]:
    matching = _matching(units)
    first, second = map(_figures, reports)
    # A step with other batches says nothing about what is better; a rate does.
    is_same = all(_amounts(reports[0])[what] == _amounts(reports[1])[what] for what in ("tokens in a step", "inputs"))
    noise = max(spread_of(_usual(report)) for report in reports)
    pairs = partial(_pairs, noise=noise, only_rates=not is_same)
    tables = [{"title": title, "rows": pairs(first[title], second[title])} for title in first]
    return {
        "version": VERSION,
        "names": list(names),
        "digits": min(report["digits"] for report in reports),
        "verdict": _verdict(names, reports, matching, units),
        "other_work": _other_work(names, reports, units),
        "tables": [table for table in tables if table["rows"]],
        "unit_fields": list(_SUMS),
        "units": [{"name": name, "pairs": pairs(_times(units[0][name]), _times(units[1][name]))} for name in matching],
        "settings": _settings(reports, matching, units),
        "only": _only(units),
    }


def _figures(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is compared, by the title of its table. A kind of lost time that the report does not list is 0, but for
    what only a profile tells."""
    speed, lost, totals, units = report["speed"], report["lost"], report["rank_totals"], report["units"]
    gathered = sum(u["gathers"] * (u["gather_direct_nbytes"] + u["gather_bucket_nbytes"]) for u in units)
    return {
        "step": {
            "step_ms": report["steps_ms"][report["step"]],
            "tokens_per_s": speed["tokens_per_s"],
            "mfu": speed["mfu"],
        },
        "lost by the rank that loses most": {"lost_ms": lost["lost_ms"]}
        | {f"{each['kind']}_ms": each["lost_ms"] for each in lost["kinds"]}
        | ({} if _has_profile(report) else {f"{Lost.IDLE.value}_ms": None}),
        "compute, most of all ranks": {field: max(rank[field] for rank in totals) for field in _COMPUTE},
        "memory of the fullest rank": {field: report["memory"][0][field] for field in _MEMORY},
        "bytes of all units": {f"{each}_nbytes": sum(unit[f"{each}_nbytes"] for unit in units) for each in _BYTES}
        | {"gathered_in_the_step_nbytes": gathered},
    }


def _has_profile(report: dict[str, Any]) -> bool:
    return report["operators"] is not None


def _times(unit: dict[str, Any]) -> dict[str, float]:
    return {field: float(sum(unit[each] for each in parts)) for field, parts in _SUMS.items()}


def _pairs(first: dict[str, Any], second: dict[str, Any], *, noise: float, only_rates: bool) -> list[dict[str, Any]]:
    """A row for each field for which at least one report has a value. Times that differ by less than the share
    ``noise`` are neither better nor worse; with ``only_rates``, nothing is that is not per second."""
    pairs = {field: [each.get(field, 0) for each in (first, second)] for field in {**first, **second}}
    known = {field: values for field, values in pairs.items() if any(each is not None for each in values)}
    return [
        _pair(field, values, noise, is_judged=field in _MORE_IS_BETTER or not only_rates)
        for field, values in known.items()
        if values != [0, None] and values != [None, 0]
    ]


def _pair(field: str, values: Sequence[Any], noise: float, *, is_judged: bool) -> dict[str, Any]:
    first, second = values
    is_known = first is not None and second is not None
    least = 0.0 if field.endswith("_nbytes") else max(noise, 0.01)
    is_better = None
    if is_judged and is_known and abs(second - first) > least * max(first, second):
        is_better = (second > first) is (field in _MORE_IS_BETTER)
    return {
        "field": field,
        "what": _label(field),
        "values": list(values),
        "difference": round(second - first, 6) if is_known else None,
        "ratio": round(second / first, 4) if is_known and first else None,
        "is_better": is_better,
    }


def _usual(report: dict[str, Any]) -> list[float]:
    return list(report["steps_ms"][report["first_step"] :])


def _verdict(
    names: Sequence[str], reports: Sequence[dict[str, Any]], matching: Sequence[str], units: Sequence[Units]
) -> str:
    """One sentence: which report has the shorter step, by how much, and what makes most of the difference."""
    first, second = (report["steps_ms"][report["step"]] for report in reports)
    digits = min(report["digits"] for report in reports)
    before, after = (ms_text(each, digits) for each in (first, second))
    usual = [_usual(report) for report in reports]
    is_apart = max(usual[0]) < min(usual[1]) or max(usual[1]) < min(usual[0])
    if first == second or not is_apart:
        ranges = [f"{ms_text(min(each), digits)} to {ms_text(max(each), digits)}" for each in usual]
        steps = "" if first == second else f", but steps vary, from {ranges[0]} and from {ranges[1]}"
        return f"Neither is clearly faster: a step takes {before} in {names[0]} and {after} in {names[1]}{steps}."
    less, share = "less" if second < first else "more", abs(second - first) / first
    text = f"A step takes {share:.0%} {less} time in {names[1]} than in {names[0]}: {after} instead of {before}"
    spent = [_spent(report) for report in reports]
    change = {what: spent[1].get(what, 0.0) - spent[0].get(what, 0.0) for what in {**spent[0], **spent[1]}}
    most = max(change, key=lambda what: change[what] * (second - first))
    if change[most] * (second - first) > 0:
        text += f", with {ms_text(abs(change[most]), digits)} {less} in {most}{_where(most, less, matching, units)}"
    return f"{text}."


def _spent(report: dict[str, Any]) -> dict[str, float]:
    """What the rank that loses most spends the step on, in milliseconds."""
    lost = report["lost"]
    return {"compute": lost["compute_ms"]} | {each["kind"]: each["lost_ms"] for each in lost["kinds"]}


_OF_UNITS = {  # the fields of units that make up a kind of lost time
    Lost.GATHERS.value: ("gather_exposed_ms",),
    Lost.REDUCTIONS.value: ("reduce_exposed_ms",),
    Lost.LAUNCHES.value: ("launch_ms",),
    Lost.COPIES.value: ("copy_ms",),
}


def _where(what: str, less: str, matching: Sequence[str], units: Sequence[Units]) -> str:
    """The units that changed in that way, the one that changed most first."""
    changed = {}
    for name in matching:
        before, after = (sum(each[name][field] for field in _OF_UNITS.get(what, ())) for each in units)
        by = before - after if less == "less" else after - before
        if by > 0:
            changed[name] = by
    ordered = sorted(changed, key=lambda name: -changed[name])
    return f" ({listed(ordered, 2)})" if ordered else ""


def _other_work(names: Sequence[str], reports: Sequence[dict[str, Any]], units: Sequence[Units]) -> list[str]:
    """Sentences that say in which ways the reports do not measure the same work."""
    found = []
    first, second = map(_amounts, reports)
    for what in first:
        if first[what] != second[what]:
            values = ("not known" if each in (None, "") else each for each in (first[what], second[what]))
            found.append("{} ({} and {})".format(what, *values))
    if not found:
        return []
    speeds = [report["speed"]["tokens_per_s"] for report in reports]
    rate = ""
    if None not in speeds and reports[0]["speed"]["tokens"] != reports[1]["speed"]["tokens"]:
        rate = f" Per second, {names[1]} trains on {speeds[1] / speeds[0]:.2f} times as many tokens."
    return [f"The two reports are not of the same work. They differ in: {'; '.join(found)}.{rate}"]


def _amounts(report: dict[str, Any]) -> dict[str, Any]:
    """What work a report measured."""
    return {
        "tokens in a step": report["speed"]["tokens"],
        "inputs": ", ".join(report["inputs"]),
        "dtype of compute": ", ".join(sorted({unit["dtype"] for unit in report["units"]} - {""})),
        "ranks": len(report["ranks"]),
        "recorded steps": len(report["steps_ms"]),
    }


def _settings(
    reports: Sequence[dict[str, Any]], matching: Sequence[str], units: Sequence[Units]
) -> list[dict[str, Any]]:
    """The settings, which are chosen and not measured, in which the reports differ."""
    first, second = reports
    found = [{"what": key, "units": [], "values": [first[key], second[key]]} for key in ("model", "device")]
    for key in ("ranks", "units"):
        found.append({"what": key, "units": [], "values": [len(first[key]), len(second[key])]})
    profiles = [_has_profile(report) for report in reports]
    found.append({"what": "profile, which makes steps longer", "units": [], "values": profiles})
    for setting in _SETTINGS:
        by_values: dict[tuple[Any, Any], list[str]] = defaultdict(list)
        for name in matching:
            by_values[units[0][name][setting], units[1][name][setting]].append(name)
        for values, named in by_values.items():
            found.append({"what": f"{_label(setting)}: {listed(named, 1)}", "units": named, "values": list(values)})
    return [each for each in found if each["values"][0] != each["values"][1]]


# Text


_LABELS = {
    "is_small": "sent in one bucket",
    "keeps_after_forward": "stays unsharded after forward",
    "bucket_nbytes": "in one bucket below",
    "thread_ms": "launches and copies",
}


def _label(field: str) -> str:
    return _LABELS.get(field) or field.removesuffix("_ms").removesuffix("_nbytes").replace("_", " ")


def _setting(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _texts(row: dict[str, Any], digits: int) -> list[str]:
    field, difference, ratio = row["field"], row["difference"], row["ratio"]
    values = ["not known" if value is None else _text(field, value, digits) for value in row["values"]]
    sign = "+" if difference and difference > 0 else ""
    by = "" if difference is None else f"{sign}{_text(field, difference, digits)}"
    judged = {True: "better", False: "worse", None: ""}[row["is_better"]]
    return [*values, by, "" if ratio is None else f"{ratio:.2f}", judged]


def _text(field: str, value: float, digits: int) -> str:
    if field.endswith("_ms"):
        return ms_text(value, digits)
    if field.endswith("_nbytes") and not value:
        return "0 B"
    if field.endswith("_nbytes"):
        return f"{'-' if value < 0 else ''}{sizes.text_of(abs(value))}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


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
        found = compare_reports(options.first, options.second, options.path, only_matching=options.only_matching)
        print(printable(str(found)))
    except ValueError as error:
        parser.exit(2, f"{parser.prog} compare: error: {str(error).removeprefix(f'{_CALLER}: ')}\n")
