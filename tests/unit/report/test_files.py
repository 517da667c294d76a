"""What a report writes: data, a page and a Chrome trace with the same numbers; and what ``print(report)`` shows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp2.planner.machines import MACHINES
from fsdp2.report import files
from fsdp2.report.data import RankRecord, report_data
from fsdp2.report.figures import Prediction, StepFigures, Work
from fsdp2.report.files import text_of
from tests.harness.golden import texts_beside
from tests.harness.messages import wrapped
from tests.harness.selection import long
from tests.unit.report.examples import UNITS as EXAMPLE_UNITS, example_data
from tests.unit.report.support import ROOT, empty_step, info, record, simple_step


def test_page_json_and_chrome_trace_have_the_same_numbers_and_the_page_asks_no_network(tmp_path: Path) -> None:
    data = example_data()
    for name in ("step.html", "step.json", "step.trace.json"):
        files.write(tmp_path / name, data)
    assert json.loads((tmp_path / "step.json").read_text()) == data
    assert files.data_of((tmp_path / "step.html").read_text()) == data
    events = json.loads((tmp_path / "step.trace.json").read_text())["traceEvents"]
    for timeline in data["timelines"]:
        mine = [event for event in events if event["pid"] == timeline["rank"] and event["ph"] == "X"]
        assert [[each["ts"], each["dur"]] for each in mine if each["tid"] == 0] == [s[2:4] for s in timeline["spans"]]
        gathers = {each["name"] for each in mine if each["name"].startswith("all-gather")}
        assert gathers == {f"all-gather {name}" for name in (ROOT, *EXAMPLE_UNITS)}
    page = files.page(data)
    assert "{{" not in page
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|https?://(?!www\.w3\.org/2000/svg)", page)


@pytest.mark.ci
@pytest.mark.parametrize("ranks", [1, *long(8)])
def test_page_of_1000_units_is_smaller_than_2_mb(ranks: int) -> None:
    units = [f"model.language_model.layers.{i}.mlp.experts" for i in range(1000)]
    data = example_data(units, ranks)
    assert len(files.page(data).encode()) < 2_000_000
    assert len(data["timelines"]) == min(ranks, 3)
    assert len(data["ranks"]) == ranks


TEXTS = texts_beside(__file__)
UNITS = ["a", "b", "c"]
WORK = Work(tokens=4096, flops=2e13)
PREDICTION = Prediction(
    "FSDP", "H100", 8, "tokens", same_machine=False, figures=StepFigures(100.0, 90.0, 10.0, 5000, None, None)
)


def _records(work: Work = WORK, ranks: int = 2) -> list[RankRecord]:
    found = [record(simple_step(UNITS, late=0.003 + 0.001 * rank), UNITS, rank) for rank in range(ranks)]
    return [replace(each, work=work) for each in found]


def _data(records: list[RankRecord], **options: Any) -> dict[str, Any]:
    return report_data("Model", "cpu (gloo)", [info(name) for name in (ROOT, *UNITS)], records, **options)


CASES: dict[str, dict[str, Any]] = {
    "two ranks, with tokens and FLOPs": _data(_records(), machine=MACHINES["H100"]),
    "on a device whose peak is not known": _data(_records()),
    "a prediction for another machine": _data(_records(Work()), prediction=PREDICTION),
    "a step that loses nothing": _data([RankRecord(0, "host", 0.0, False, [empty_step(1.0)], knows_activations=False)]),
}


@pytest.mark.parametrize("case", CASES)
def test_text_accounts_for_the_step(case: str) -> None:
    TEXTS.check(case, wrapped(text_of(CASES[case])), among=CASES)
