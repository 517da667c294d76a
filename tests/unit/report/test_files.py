"""What a report writes: data, a page and a Chrome trace with the same numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fsdp2.report import files
from tests.harness.selection import long
from tests.unit.report.examples import UNITS, example_data
from tests.unit.report.support import ROOT


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
        assert gathers == {f"all-gather {name}" for name in (ROOT, *UNITS)}
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
