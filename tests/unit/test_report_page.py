"""What a report writes: data, a page and a Chrome trace with the same numbers, and the page in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp2.tools.report import compare_reports, files
from fsdp2.tools.report.data import RankRecord, report_data
from fsdp2.tools.report.prediction import Prediction, StepFigures
from tests.harness.golden import texts_beside
from tests.harness.selection import long
from tests.unit.report_support import ROOT, Tape, empty_step, info, rank_step, record, simple_step

TEXTS = texts_beside(__file__)
UNITS = ["blocks.0", "blocks.1", "</script><b>odd"]
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


PREDICTED = StepFigures(100.0, 90.0, 10.0, 5000, 2**31, 2**32)
PREDICTION = Prediction("FSDP, reshard", "H100", 8, "2 x 128 tokens", same_machine=True, figures=PREDICTED)


def _data(units: list[str] = UNITS, ranks: int = 2, prediction: Prediction | None = None) -> dict[str, Any]:
    records = [record(simple_step(units, late=0.003 + 0.001 * rank), units, rank) for rank in range(ranks)]
    infos = [info(name, 6000 if name == "blocks.1" else 1000) for name in [ROOT, *units]]
    return report_data("Model", "cpu (gloo)", infos, records, prediction)


def _embedded(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


# Data


def test_data_of_two_ranks() -> None:
    """A unit has the most of all ranks, and is exposed by the least; the second rank is 1 ms later. A finding rests on
    the shortest wait of all ranks. Of collectives: kind, unit, how much later which rank starts, and each start."""
    data = _data()
    said = [json.dumps(each) for key in ("units", "rank_totals", "findings") for each in data[key]]
    collectives = data["collectives"]
    said += [*map(json.dumps, collectives["rows"]), f"the first difference: {collectives['first_difference']}"]
    TEXTS.check("data of two ranks", "\n".join([*said, json.dumps(data["memory"])]))


@pytest.mark.parametrize(("first_use", "named"), [(False, []), (True, ["late rank"])])
def test_a_late_rank_is_the_slowest_in_every_step_but_the_first(first_use: bool, named: list[str]) -> None:
    computes = [[0.010, *[0.020] * 5], [0.030, *[0.010] * 5]]
    records = []
    for rank, seconds in enumerate(computes):
        steps = [rank_step(simple_step(["a"], late=0.05 - 2 * each, compute=each), ["a"]) for each in seconds]
        records.append(RankRecord(rank, "host", 0.0, first_use, steps))
    data = report_data("Model", "cpu", [info(ROOT), info("a")], records)
    assert [each["rule"] for each in data["findings"] if each["rule"] == "late rank"] == named


@pytest.mark.parametrize(("action", "proposed"), [("unshard", ["a"]), ("prefetch", [])])
def test_a_gather_that_starts_when_compute_needs_it_should_be_prefetched(action: str, proposed: list[str]) -> None:
    tape = Tape().event("pre_forward").do("unshard", takes=0.001).do("wait").compute(0.010)
    tape.event("pre_forward", "a").do(action, "a").do("wait", "a", blocked=0.004).compute(0.010)
    data = report_data("Model", "cpu", [info(ROOT), info("a")], [record(tape, ["a"])])
    assert [name for each in data["findings"] if each["rule"] == "prefetch" for name in each["units"]] == proposed


@pytest.mark.parametrize(("is_first_use", "expected"), [(False, 0), (True, 2)])
def test_the_typical_step_is_the_median_and_not_the_first_one_of_a_model(is_first_use: bool, expected: int) -> None:
    one = RankRecord(0, "host", 0.0, is_first_use, [empty_step(seconds) for seconds in (3.0, 9.0, 1.0)])
    assert report_data("Model", "cpu", [info(ROOT)], [one])["step"] == expected


@pytest.mark.parametrize(("host", "skew", "expected"), [("host", 0.0, [0, 0]), ("other", 700.0, [700_000_000, 0])])
def test_clocks_of_two_hosts_are_aligned_and_those_of_one_host_are_not_touched(
    host: str, skew: float, expected: list[int]
) -> None:
    steps = record(simple_step(["a"]), ["a"]).steps
    records = [RankRecord(0, "host", 100.0, False, steps), RankRecord(1, host, 100.0 + skew, False, steps)]
    assert [each["start_us"] for each in report_data("M", "cpu", [info(ROOT)], records)["timelines"]] == expected


def test_the_first_collective_that_is_not_the_same_on_all_ranks_is_named() -> None:
    records = [record(simple_step(units), units, rank) for rank, units in enumerate((["a", "b"], ["a", "c"]))]
    collectives = report_data("Model", "cpu", [info(name) for name in (ROOT, "a", "b", "c")], records)["collectives"]
    assert len(collectives["rows"]) == 2
    named = {"0": "all-gather b", "1": "all-gather c"}
    assert collectives["first_difference"] == {"position": 2, "by_rank": named}


def test_what_was_predicted_stands_beside_what_the_longest_and_the_fullest_rank_measured() -> None:
    data = _data(prediction=PREDICTION)
    assert (data["prediction"]["choice"], data["prediction"]["num_gpus"]) == ("FSDP, reshard", 8)
    rows = {row["figure"]: (row["predicted"], row["measured"]) for row in data["prediction"]["rows"]}
    assert {figure: predicted for figure, (predicted, _) in rows.items()} == vars(PREDICTED)
    last = data["rank_totals"][1]  # waits longer for each gather
    assert rows["step_ms"][1] == data["steps_ms"][0]
    assert rows["compute_ms"][1] == pytest.approx(last["forward_ms"] + last["backward_ms"] + last["other_ms"])
    assert rows["exposed_ms"][1] == pytest.approx(rows["step_ms"][1] - rows["compute_ms"][1])
    assert rows["temporary_nbytes"][1] == data["memory"]["temporary_nbytes"]
    assert rows["allocated_nbytes"][1] is None  # the CPU does not say
    ratios = {row["figure"]: row["ratio"] for row in data["prediction"]["rows"]}
    assert ratios["step_ms"] == rows["step_ms"][1] / 100.0
    assert ratios["allocated_nbytes"] is None
    elsewhere = _data(prediction=replace(PREDICTION, same_machine=False))["prediction"]
    assert [row["ratio"] for row in elsewhere["rows"]] == [None] * 6
    assert _data()["prediction"] is None


# Files


def test_page_json_and_chrome_trace_have_the_same_numbers(tmp_path: Path) -> None:
    data = _data()
    for name in ("step.html", "step.json", "step.trace.json"):
        files.write(tmp_path / name, data)
    assert json.loads((tmp_path / "step.json").read_text()) == data
    assert _embedded((tmp_path / "step.html").read_text()) == data
    events = json.loads((tmp_path / "step.trace.json").read_text())["traceEvents"]
    for timeline in data["timelines"]:
        mine = [event for event in events if event["pid"] == timeline["rank"] and event["ph"] == "X"]
        assert [[each["ts"], each["dur"]] for each in mine if each["tid"] == 0] == [s[2:4] for s in timeline["spans"]]
        assert {each["name"] for each in mine if each["name"].startswith("all-gather")} == {
            f"all-gather {name}" for name in (ROOT, *UNITS)
        }


def test_page_is_whole_and_asks_no_network(tmp_path: Path) -> None:
    page = files.page(_data())
    assert "{{" not in page
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|https?://(?!www\.w3\.org/2000/svg)", page)


@pytest.mark.ci
@pytest.mark.parametrize("ranks", [1, *long(8)])
def test_page_of_1000_units_is_smaller_than_2_mb(ranks: int) -> None:
    units = [f"model.language_model.layers.{i}.mlp.experts" for i in range(1000)]
    data = _data(units, ranks)
    assert len(files.page(data).encode()) < 2_000_000
    assert len(data["timelines"]) == min(ranks, 3)
    assert len(data["ranks"]) == ranks


# In a browser


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        pytest.skip(f"found no browser; looked for {', '.join(_BROWSERS)}")
    return found


_PROBE = """
<script>
window.errors = [];
window.onerror = (message) => { window.errors.push(message); };
window.addEventListener("load", () => {
  const act = %s;
  act();
  document.body.append(Object.assign(document.createElement("pre"), {
    id: "probe", textContent: JSON.stringify({
      errors: window.errors,
      unit: document.querySelector("#chosen b")?.dataset.name ?? null,
      fields: Object.fromEntries(
        [...document.querySelectorAll("#chosen dd")].map((e) => [e.dataset.field, e.dataset.value])),
      rows: document.querySelectorAll("#units tbody tr:not([hidden])").length,
      chosenRows: document.querySelectorAll("#units tr.chosen").length,
      prediction: document.getElementById("predicted")?.hidden ?? true ? null :
        [...document.querySelectorAll("#prediction tbody tr")].map((e) => [...e.children].map((c) => c.textContent)),
      predictionText: document.getElementById("prediction-text")?.textContent,
      summary: document.getElementById("summary").textContent,
      legend: document.getElementById("legend").textContent,
      series: document.getElementById("series").textContent,
      memory: document.getElementById("memory-text")?.textContent,
      tip: document.getElementById("tip").textContent,
      cut: [...document.querySelectorAll("th")].filter((e) => e.getBoundingClientRect().right >
        e.closest("table").parentElement.getBoundingClientRect().right + 1).map((e) => e.textContent),
      words: [...document.querySelectorAll("#words dt")].map((e) => e.textContent),
      tails: [19, 15, 5, 3].map((most) => tail("model.layers.11.mlp", (text) => text.length <= most)),
      code: [...document.querySelectorAll("#findings code")].map((e) => e.textContent),
      findings: [...document.querySelectorAll("#findings li")].map((e) => e.textContent),
    }),
  }));
});
</script>
"""

# Points at, or clicks, the middle of the widest span of the first rank with this unit; or the memory at that time.
_AT = """() => {
  const [unit, kind, what] = %s, {canvas, rows} = chart, row = rows.find((each) => each[what]);
  const spans = chart.reports[0].data.timelines[0].spans.filter((s) => s[1] === unit);
  const [, , start, duration] = spans.reduce((a, b) => (b[3] > a[3] ? b : a));
  const box = canvas.getBoundingClientRect();
  const x = chart.toX(start + duration / 2 - chart.reports[0].begin), y = row.top + (what === "memory" ? 100 : 5);
  const where = {clientX: box.left + x, clientY: box.top + y, bubbles: true};
  if (kind === "point") { canvas.dispatchEvent(new PointerEvent("pointermove", where)); return; }
  canvas.dispatchEvent(new PointerEvent("pointerdown", where));
  canvas.dispatchEvent(new PointerEvent("pointerup", where));
  canvas.dispatchEvent(new MouseEvent("click", where));
}"""
_SEARCH = """() => {
  const box = document.getElementById("search");
  box.value = "blocks";
  box.dispatchEvent(new Event("input"));
}"""


def _opened(browser: str, folder: Path, data: dict[str, Any], act: str = "() => {}", address: str = "") -> Any:
    """What the page shows after ``act``, a function in its language."""
    return _shown(browser, folder, files.page(data), act, address)


def _shown(browser: str, folder: Path, text: str, act: str = "() => {}", address: str = "") -> Any:
    page = folder / "step.html"
    page.write_text(text.replace("<body>", "<body>" + _PROBE % act))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1280,900", page.as_uri() + address]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="probe">(.*?)</pre>', result.stdout, re.DOTALL)
    assert found is not None, result.stderr
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.mark.long
def test_no_table_of_units_with_long_names_is_cut_in_a_window_of_1280_pixels(browser: str, tmp_path: Path) -> None:
    units = [f"model.language_model.layers.{i}.mlp.experts" for i in range(3)]
    records = [record(simple_step(units, late=0.2, compute=0.5001234), units, rank) for rank in range(2)]
    data = report_data("Model", "cpu", [info(name, 900 * 2**20) for name in (ROOT, *units)], records)
    assert _opened(browser, tmp_path, data)["cut"] == []


@pytest.mark.long
def test_page_opens_without_errors_and_shows_the_findings(browser: str, tmp_path: Path) -> None:
    data = _data()
    found = _opened(browser, tmp_path, data)
    assert found["errors"] == []
    assert found["unit"] is None
    assert found["prediction"] is None
    assert found["rows"] == len(data["units"])
    assert ["blocks.1"] in [each["units"] for each in data["findings"]]
    expected = [f"up to {each['gain_ms']:.1f} ms: {each['text']}" for each in data["findings"]]
    assert found["findings"] == [text.replace("`", "") for text in expected]
    assert found["code"] == [name for text in expected for name in text.split("`")[1::2]]
    assert f"of which step {data['step']} is shown, counted from 0:" in found["summary"]
    assert all(does in found["legend"] for does in data["does"])
    assert all(each["what"] in found["series"] for each in data["memory"]["series"])
    held = re.search(r"held at most ([0-9.]+) (B|KiB|MiB|GiB)", found["memory"])
    assert held is not None
    nbytes = float(held[1]) * 2 ** (10 * ["B", "KiB", "MiB", "GiB"].index(held[2]))
    assert nbytes == pytest.approx(data["memory"]["peak_nbytes"], rel=0.01)
    assert found["tails"] == ["model.layers.11.mlp", "\u2026layers.11.mlp", "\u2026mlp", ""]
    assert {"launch", "held", "direct", "bucket", "rank wait"} <= set(found["words"])


@pytest.mark.long
def test_pointing_says_what_a_bar_is_and_what_memory_is_for(browser: str, tmp_path: Path) -> None:
    data = _data()
    found = _opened(browser, tmp_path, data, _AT % '[2, "point", "timeline"]')
    assert found["errors"] == []
    assert found["tip"].startswith("rank 0: backward blocks.1\n20.000 ms from ")
    tip = _opened(browser, tmp_path, data, _AT % '[2, "point", "memory"]')["tip"].splitlines()
    time, *values = [line.split(": ") for line in tip]
    assert time[0].endswith(" ms")
    assert {name.removeprefix("\u25b8 ") for name, _ in values} <= {each["what"] for each in data["memory"]["series"]}
    assert len([name for name, _ in values if name.startswith("\u25b8")]) <= 1


@pytest.mark.long
def test_page_of_two_reports_opens_without_errors_and_shows_the_differences(browser: str, tmp_path: Path) -> None:
    reports = [_data(), _data(ranks=1)]
    for name, data in zip("ab", reports, strict=True):
        files.write(tmp_path / f"{name}.json", data)
    compare_reports(tmp_path / "a.json", tmp_path / "b.json", tmp_path / "both.html")
    found = _shown(browser, tmp_path, (tmp_path / "both.html").read_text(), _AT % '[2, "click", "timeline"]')
    assert found["errors"] == []
    assert found["rows"] == len(reports[0]["units"])
    assert found["unit"] == "blocks.1"
    assert found["cut"] == []


@pytest.mark.long
def test_page_shows_what_was_predicted(browser: str, tmp_path: Path) -> None:
    data = _data(prediction=PREDICTION)
    found = _opened(browser, tmp_path, data)
    assert found["errors"] == []
    step_ms = data["steps_ms"][0]
    assert found["prediction"][0] == ["step, ms", "100.000", f"{step_ms:.3f}", f"{step_ms / 100:.2f}"]
    assert "It predicts the times of 8 x H100. They were measured on cpu (gloo)." in found["predictionText"]
    assert found["prediction"][-1] == ["reserved", "4.0 GiB", "not known", ""]
    found = _opened(browser, tmp_path, _data(prediction=replace(PREDICTION, same_machine=False)))
    assert "on cpu (gloo), which is another machine: they are not compared." in found["predictionText"]
    assert [row[-1] for row in found["prediction"]] == [""] * 6


@pytest.mark.long
def test_a_click_on_a_unit_shows_its_numbers(browser: str, tmp_path: Path) -> None:
    data = _data()
    found = _opened(browser, tmp_path, data, _AT % '[2, "click", "timeline"]')
    assert found["errors"] == []
    assert found["unit"] == data["units"][2]["name"]
    shown, unit = found["fields"], data["units"][2]
    assert set(shown) == set(unit) - {"name"}
    assert all(float(shown[key]) == float(unit[key]) for key in shown if key.endswith(("ms", "bytes")))
    assert found["chosenRows"] == 1


@pytest.mark.long
def test_the_address_chooses_a_unit_and_the_search_hides_others(browser: str, tmp_path: Path) -> None:
    data = _data()
    found = _opened(browser, tmp_path, data, _SEARCH, "#unit=%3C/script%3E%3Cb%3Eodd")
    assert found["errors"] == []
    assert found["unit"] == "</script><b>odd"
    assert found["rows"] == 2
