"""Two reports side by side: text, data, page, command, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fsdp2
from fsdp2.__main__ import main
from fsdp2.report import Report, compare_reports, files
from fsdp2.report.data import VERSION, report_data
from fsdp2.report.figures import Work
from tests.harness.golden import texts_beside
from tests.unit.report.support import ROOT, info, record, simple_step

TEXTS = texts_beside(__file__)


def _data(units: list[str], *, late: float, keeps: bool = False) -> dict[str, Any]:
    work = Work(tokens=1000)
    records = [replace(record(simple_step(units, late=late), units, rank), work=work) for rank in range(2)]
    infos = [replace(info(name, 2**20), keeps_after_forward=keeps) for name in (ROOT, *units)]
    return report_data("Model", "cpu (gloo)", infos, records)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    units = ["blocks.0", "blocks.1"]
    for name, data in {
        "before": _data(units, late=0.004),
        "after": _data(units, late=0.001, keeps=True),
        "other": _data(["blocks.0", "head"], late=0.001),
        "foreign": _data(["x"], late=0.001) | {"units": [{**_data(["x"], late=0.0)["units"][0], "name": "x"}]},
        "old": _data(units, late=0.001) | {"version": VERSION - 1},
    }.items():
        for suffix in (".json", ".html", ".trace.json"):
            files.write(tmp_path / f"{name}{suffix}", data)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "page.html").write_text("<html></html>")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    return tmp_path


def test_text_of_two_reports(folder: Path) -> None:
    TEXTS.check("two reports", str(compare_reports(folder / "before.json", folder / "after.html")))


def test_differences_are_those_of_the_second_from_the_first(folder: Path) -> None:
    data = fsdp2.report.compare_reports(folder / "before.html", folder / "after.json", folder / "both.json").data
    assert json.loads((folder / "both.json").read_text()) == data
    rows = {row["field"]: row for table in data["tables"] for row in table["rows"]}
    before, after = (json.loads((folder / f"{name}.json").read_text()) for name in ("before", "after"))
    first, second = (each["steps_ms"][each["step"]] for each in (before, after))
    assert rows["step_ms"]["values"] == [first, second]
    assert rows["step_ms"]["difference"] == pytest.approx(second - first)
    assert rows["step_ms"]["ratio"] == pytest.approx(second / first, abs=1e-4)
    assert rows["waits for gathers_ms"]["difference"] == pytest.approx(-6)  # 3 ms less for each of two units
    assert rows["tokens_per_s"]["ratio"] == pytest.approx(first / second, abs=1e-4)
    assert "allocated_nbytes" not in rows  # neither device says
    assert [each["what"] for each in data["settings"]] == ["stays unsharded after forward: (root) and 2 more"]
    assert data["only"] == [[], []]


def test_page_holds_both_reports_and_asks_no_network(folder: Path) -> None:
    done = compare_reports(folder / "before.json", folder / "after.json", folder / "both.html")
    page = (folder / "both.html").read_text()
    names = ("before", "after")
    reports = [json.loads((folder / f"{name}.json").read_text()) for name in names]
    assert files.data_of(page) == {"comparison": done.data, "reports": reports}
    assert "{{" not in page
    assert "https://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_report_is_compared_with_itself_also_before_it_is_written(folder: Path) -> None:
    report = Report()
    with pytest.raises(ValueError, match=r"a report has no data\. Only rank 0 has it, after the block"):
        compare_reports(report, folder / "before.json")
    report.data = json.loads((folder / "before.json").read_text())
    data = compare_reports(report, folder / "before.json").data
    assert {row["difference"] for table in data["tables"] for row in table["rows"]} <= {0, None}
    assert (data["settings"], data["names"]) == ([], ["the first", "before.json"])
    nested = folder / "run"
    nested.mkdir()
    files.write(nested / "before.json", report.data)
    names = compare_reports(folder / "before.json", nested / "before.json").data["names"]
    assert names == [str(folder / "before.json"), str(nested / "before.json")]


def _with_steps(data: dict[str, Any], *steps_ms: float, **changes: Any) -> Report:
    report = Report()
    report.data = data | {"steps_ms": list(steps_ms), "step": 1, "first_step": 0} | changes
    return report


@pytest.mark.parametrize(
    ("steps", "begin"),
    [
        ((84.0, 85.0, 86.0, 78.0, 79.0, 80.0), "A step takes 7% less time in the second than in the first: 79.0 ms"),
        ((78.0, 79.0, 80.0, 84.0, 85.0, 86.0), "A step takes 8% more time in the second than in the first: 85.0 ms"),
        ((70.0, 85.0, 86.0, 78.0, 79.0, 80.0), "Neither is clearly faster: a step takes 85.0 ms in the first and 79.0"),
    ],
)
def test_a_verdict_needs_steps_that_differ_by_more_than_they_vary(steps: tuple[float, ...], begin: str) -> None:
    units = ["blocks.0", "blocks.1"]
    reports = [_with_steps(_data(units, late=late), *steps[i : i + 3]) for i, late in ((0, 0.004), (3, 0.001))]
    done = compare_reports(*reports)
    assert str(done).startswith(begin)
    assert done.data["other_work"] == []
    (row, *_) = done.data["tables"][0]["rows"]
    assert (row["field"], row["is_better"]) == ("step_ms", {"7": True, "8": False}.get(begin[13]))


def test_other_work_is_named() -> None:
    one, other = (_data(["a"], late=0.001) for _ in range(2))
    other["speed"] = other["speed"] | {"tokens": 4000, "tokens_per_s": 1.5 * one["speed"]["tokens_per_s"]}
    other["units"] = [unit | {"dtype": "bfloat16"} for unit in other["units"]]
    changes = {"inputs": ["int64[2, 1000]"], "ranks": [0, 1, 2, 3]}
    done = compare_reports(_with_steps(one, 80.0, 81.0), _with_steps(other, 80.0, 81.0, 82.0, **changes))
    TEXTS.check("other work", " ".join(done.data["other_work"]))


@pytest.mark.parametrize(
    ("changes", "judged"), [({}, {True}), ({"inputs": ["int64[2, 1000]"]}, {None}), ({"ranks": [0, 1, 2, 3]}, {True})]
)
def test_nothing_but_a_rate_is_better_where_a_step_has_other_inputs(changes: dict[str, Any], judged: set[Any]) -> None:
    one, other = (_data(["a"], late=0.001) for _ in range(2))
    other["speed"] = other["speed"] | {"tokens_per_s": 3 * one["speed"]["tokens_per_s"]}
    done = compare_reports(_with_steps(one, 80.0, 81.0), _with_steps(other, 40.0, 40.5, **changes))
    found = {row["field"]: row["is_better"] for table in done.data["tables"] for row in table["rows"]}
    assert ({found["step_ms"]}, found["tokens_per_s"]) == (judged, True)


@pytest.mark.parametrize("is_profiled", [(False, True), (True, False)])
def test_gaps_of_a_report_without_a_profile_are_not_known(is_profiled: tuple[bool, bool]) -> None:
    kind = {"kind": "gaps between operations", "lost_ms": 2.0}
    reports = [_with_steps(_data(["a"], late=0.001), 80.0, 81.0) for _ in is_profiled]
    for report, has_profile in zip(reports, is_profiled, strict=True):
        assert report.data is not None
        if has_profile:
            lost = report.data["lost"]
            report.data |= {"operators": {"rank": 0, "rows": []}, "lost": lost | {"kinds": [*lost["kinds"], kind]}}
    done = compare_reports(*reports)
    rows = {row["field"]: row for table in done.data["tables"] for row in table["rows"]}
    row = rows["gaps between operations_ms"]
    assert row["values"] == [2.0 if each else None for each in is_profiled]
    assert (row["difference"], row["ratio"], row["is_better"]) == (None, None, None)
    assert [each["values"] for each in done.data["settings"]] == [list(is_profiled)]
    without = compare_reports(reports[is_profiled.index(False)], reports[is_profiled.index(False)])
    assert "gaps" not in str(without)


def test_units_that_one_report_alone_has_are_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="only_matching") as error:
        compare_reports(folder / "before.json", folder / "other.json")
    TEXTS.check("other units", str(error.value))
    done = compare_reports(folder / "before.json", folder / "other.json", only_matching=True)
    assert [unit["name"] for unit in done.data["units"]] == [ROOT, "blocks.0"]
    assert "before.json alone has blocks.1. other.json alone has head.\n" in str(done)


UNREADABLE = ("broken.json", "list.json", "page.html", "bytes.json", "before.trace.json", "old.json", "missing.json")
REFUSED: dict[str, tuple[Any, Any]] = {  # the second report, and where to write
    **{f"refusal of {name}": (name, "both.html") for name in (*UNREADABLE, "foreign.json")},
    "a picture": ("after.json", "both.png"),
    "a folder that is not there": ("after.json", "none/both.html"),
    "a report that is a number": (3, "both.html"),
    "a path that is a number": ("after.json", 3),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(folder: Path, case: str) -> None:
    after, page = (folder / each if isinstance(each, str) else each for each in REFUSED[case])
    with pytest.raises((ValueError, TypeError)) as error:
        compare_reports(folder / "before.json", after, page, only_matching=True)
    said = str(error.value).replace(str(folder), "folder")
    TEXTS.check(case, said, among=[*REFUSED, "two reports", "other units", "other work"])
    assert not (folder / "both.html").exists()


def test_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, page = (str(folder / name) for name in ("before.json", "after.json", "both.html"))
    main(["compare", before, after, page])
    assert capsys.readouterr().out == f"{compare_reports(before, after)}\n"
    assert Path(page).stat().st_size > 0
    with pytest.raises(SystemExit) as stop:
        main(["compare", before, str(folder / "page.html")])
    assert stop.value.code == 2
    expected = f"python -m fsdp2 compare: error: '{folder / 'page.html'}' is no report. Pass a .json or .html that"
    assert capsys.readouterr().err.startswith(expected)
