"""What a report writes: data, a page and a Chrome trace with the same numbers, the page in a browser, its colours, and
what ``docs/images/timeline.py`` draws of a report and of a profile.

Contrast: "Web Content Accessibility Guidelines" (WCAG) 2.2, 1.4.3 for text and 1.4.11 for shapes.
"""

from __future__ import annotations

import json
import operator
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fsdp2.report import compare_reports, files
from fsdp2.report.chrome_trace import chrome_trace
from fsdp2.report.data import RankRecord, report_data
from fsdp2.report.figures import Prediction, StepFigures
from tests.harness.golden import texts_beside
from tests.harness.selection import long
from tests.unit.report_support import ROOT, Tape, empty_step, info, rank_step, record, simple_step

IMAGES = Path(__file__).parents[2] / "docs" / "images"
sys.path.insert(0, str(IMAGES))
from timeline import Range, from_profiler, from_report, svg  # noqa: E402

TEXTS = texts_beside(__file__)
UNITS = ["blocks.0", "blocks.1", "</script><b>odd"]
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


PREDICTED = StepFigures(100.0, 90.0, 10.0, 5000, 2**31, 2**32)
PREDICTION = Prediction("FSDP, reshard", "H100", 8, "2 x 128 tokens", same_machine=True, figures=PREDICTED)


def _data(units: list[str] = UNITS, ranks: int = 2, prediction: Prediction | None = None) -> dict[str, Any]:
    records = [record(simple_step(units, late=0.003 + 0.001 * rank), units, rank) for rank in range(ranks)]
    infos = [info(name, 6000 if name == "blocks.1" else 1000) for name in [ROOT, *units]]
    return report_data("Model", "cpu (gloo)", infos, records, prediction)


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
def test_clocks_of_two_hosts_are_aligned_and_those_of_one_are_not(host: str, skew: float, expected: list[int]) -> None:
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


def test_page_json_and_chrome_trace_have_the_same_numbers_and_the_page_asks_no_network(tmp_path: Path) -> None:
    data = _data()
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
    data = _data(units, ranks)
    assert len(files.page(data).encode()) < 2_000_000
    assert len(data["timelines"]) == min(ranks, 3)
    assert len(data["ranks"]) == ranks


# In a browser


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


Shown = Callable[..., Any]


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    """What the page of ``data``, or its text, shows after ``act``, a function in its language; without errors."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        pytest.skip(f"found no browser; looked for {', '.join(_BROWSERS)}")

    def show(data: dict[str, Any] | str, act: str = "() => {}", address: str = "") -> Any:
        page = tmp_path / "step.html"
        text = data if isinstance(data, str) else files.page(data)
        page.write_text(text.replace("<body>", "<body>" + _PROBE % act))
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,900", page.as_uri() + address]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        found = re.search(r'<pre id="probe">(.*?)</pre>', result.stdout, re.DOTALL)
        assert found is not None, result.stderr
        probe = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
        assert probe["errors"] == []
        return probe

    return show


@pytest.mark.long
def test_no_table_of_units_with_long_names_is_cut_in_a_window_of_1280_pixels(shown: Shown) -> None:
    units = [f"model.language_model.layers.{i}.mlp.experts" for i in range(3)]
    records = [record(simple_step(units, late=0.2, compute=0.5001234), units, rank) for rank in range(2)]
    data = report_data("Model", "cpu", [info(name, 900 * 2**20) for name in (ROOT, *units)], records)
    assert shown(data)["cut"] == []


@pytest.mark.long
def test_page_opens_without_errors_and_shows_the_findings(shown: Shown) -> None:
    data = _data()
    found = shown(data)
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
def test_pointing_says_what_a_bar_is_and_what_memory_is_for(shown: Shown) -> None:
    data = _data()
    tip = shown(data, _AT % '[2, "point", "timeline"]')["tip"]
    assert tip.startswith("rank 0: backward blocks.1\n20.000 ms from ")
    tip = shown(data, _AT % '[2, "point", "memory"]')["tip"].splitlines()
    time, *values = [line.split(": ") for line in tip]
    assert time[0].endswith(" ms")
    assert {name.removeprefix("\u25b8 ") for name, _ in values} <= {each["what"] for each in data["memory"]["series"]}
    assert len([name for name, _ in values if name.startswith("\u25b8")]) <= 1


@pytest.mark.long
def test_page_of_two_reports_opens_without_errors_and_shows_the_differences(shown: Shown, tmp_path: Path) -> None:
    reports = [_data(), _data(ranks=1)]
    for name, data in zip("ab", reports, strict=True):
        files.write(tmp_path / f"{name}.json", data)
    compare_reports(tmp_path / "a.json", tmp_path / "b.json", tmp_path / "both.html")
    found = shown((tmp_path / "both.html").read_text(), _AT % '[2, "click", "timeline"]')
    assert found["rows"] == len(reports[0]["units"])
    assert found["unit"] == "blocks.1"
    assert found["cut"] == []


@pytest.mark.long
def test_page_shows_what_was_predicted(shown: Shown) -> None:
    data = _data(prediction=PREDICTION)
    found, step_ms = shown(data), data["steps_ms"][0]
    assert found["prediction"][0] == ["step, ms", "100.000", f"{step_ms:.3f}", f"{step_ms / 100:.2f}"]
    assert "It predicts the times of 8 x H100. They were measured on cpu (gloo)." in found["predictionText"]
    assert found["prediction"][-1] == ["reserved", "4.0 GiB", "not known", ""]
    found = shown(_data(prediction=replace(PREDICTION, same_machine=False)))
    assert "on cpu (gloo), which is another machine: they are not compared." in found["predictionText"]
    assert [row[-1] for row in found["prediction"]] == [""] * 6


@pytest.mark.long
def test_a_click_on_a_unit_shows_its_numbers(shown: Shown) -> None:
    data = _data()
    found, unit = shown(data, _AT % '[2, "click", "timeline"]'), data["units"][2]
    assert (found["unit"], found["chosenRows"]) == (unit["name"], 1)
    fields = found["fields"]
    assert set(fields) == set(unit) - {"name"}
    assert all(float(fields[key]) == float(unit[key]) for key in fields if key.endswith(("ms", "bytes")))


@pytest.mark.long
def test_the_address_chooses_a_unit_and_the_search_hides_others(shown: Shown) -> None:
    found = shown(_data(), _SEARCH, "#unit=%3C/script%3E%3Cb%3Eodd")
    assert (found["unit"], found["rows"]) == ("</script><b>odd", 2)


# The trace that Perfetto and chrome://tracing read

DEMANDED = {  # what each phase needs besides ph, pid and tid
    "X": {"name", "ts", "dur"},
    "M": {"name", "args"},
    "C": {"name", "ts", "args"},
    "s": {"name", "cat", "id", "ts"},
    "t": {"name", "cat", "id", "ts"},
    "f": {"name", "cat", "id", "ts", "bp"},
}


def _overlapping() -> dict[str, Any]:
    """Two gathers in flight at once, the first of which is used first."""
    tape = Tape().event("pre_forward").do("unshard", takes=0.001).do("prefetch", "a", takes=0.001)
    tape.do("prefetch", "b", takes=0.001).do("wait", blocked=0.002)
    for unit in "ab":
        tape.event("pre_forward", unit).do("wait", unit, blocked=0.002).compute(0.010).event("post_forward", unit)
    return _data_of(tape, "a", "b")


def _data_of(tape: Tape, *units: str) -> dict[str, Any]:
    return report_data("Model", "cpu", [info(name) for name in (ROOT, *units)], [record(tape, units)])


def _problems(trace: dict[str, Any]) -> list[str]:
    """What a viewer would refuse, misplace or leave out."""
    found = []
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    flows: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        phase = event["ph"]
        if set(event) - {"args"} != DEMANDED[phase] - {"args"} | {"ph", "pid", "tid"}:
            found.append(f"keys of {event}")
        if not all(type(event[key]) is int for key in {"pid", "tid", "ts", "dur"} & set(event)):
            found.append(f"numbers of {event}")
        if phase == "M" and set(event["args"]) != {event["name"].removeprefix("process_").removeprefix("thread_")}:
            found.append(f"arguments of {event}")
        if phase == "C" and not all(type(value) is int for value in event["args"].values()):
            found.append(f"counters of {event}")
        if phase == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if phase in "stf":
            flows[event["cat"], event["name"], event["id"]].append(event)
    for thread, times in slices.items():
        ordered = sorted(times)
        found += [f"{one} and {other} overlap on {thread}" for one, other in pairwise(ordered) if other[0] < one[1]]
    for flow, ends in flows.items():
        if [end["ph"] for end in ends] != ["s", "t", "f"] or sorted(ends, key=lambda end: end["ts"]) != ends:
            found.append(f"order of {flow}")
        for end in ends:
            if not any(start <= end["ts"] <= stop for start, stop in slices[end["pid"], end["tid"]]):
                found.append(f"no slice around {end}")
    return found


@pytest.mark.parametrize("data", [_data(), _overlapping()], ids=["two ranks", "overlapping"])
def test_events_are_as_the_format_demands(data: dict[str, Any]) -> None:
    assert _problems(chrome_trace(data)) == []


def test_the_check_finds_what_is_wrong() -> None:
    trace = chrome_trace(_data())
    flow = next(event for event in trace["traceEvents"] if event["ph"] == "f")
    flow["ts"] += 10**9
    piece = next(event for event in trace["traceEvents"] if event["ph"] == "X")
    piece["dur"] += 10
    assert len(_problems(trace)) == 2


def test_processes_memory_and_threads_have_names_and_gathers_in_flight_at_once_lie_on_two() -> None:
    data = _data()
    events = chrome_trace(data)["traceEvents"]
    names = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert {("process_name", "rank 0 of Model"), ("process_name", "rank 1 of Model")} <= names
    assert {("thread_name", each) for each in ("compute", "all-gather", "reduce-scatter")} <= names
    counters = [event for event in events if event["ph"] == "C"]
    assert [event["ts"] for event in counters] == data["memory"]["times_us"]
    assert max(sum(event["args"].values()) for event in counters) == data["memory"]["peak_nbytes"]
    assert {event["pid"] for event in counters} == {data["memory"]["rank"]}
    events = chrome_trace(_overlapping())["traceEvents"]
    threads = {each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert threads == {"compute", "all-gather", "all-gather, also in flight"}


def _ends_of_arrows(data: dict[str, Any]) -> list[list[str]]:
    """The slices that each arrow joins."""
    events = chrome_trace(data)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]

    def around(end: dict[str, Any]) -> str:
        inside = [s for s in slices if s["tid"] == end["tid"] and s["ts"] <= end["ts"] < s["ts"] + s["dur"]]
        assert len(inside) == 1
        return str(inside[0]["name"])

    flows: dict[str, list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(around(event))
    assert len(flows) == len([s for s in slices if s["tid"] != 0])  # an arrow for each collective
    return list(flows.values())


def test_arrows_lead_from_the_launch_to_the_wait_or_the_landing() -> None:
    found = _ends_of_arrows(_data(ranks=1))
    assert ["launch blocks.0", "all-gather blocks.0", "gather wait blocks.0"] in found
    assert ["launch blocks.1", "reduce-scatter blocks.1", "reduce wait blocks.1"] in found


def test_an_arrow_passes_by_what_the_unit_computes_before_its_collective_has_arrived() -> None:
    tape = Tape().event("pre_forward").compute(0.001).event("post_forward").event("pre_backward", "a").compute(0.010)
    tape.event("post_backward", "a").do("reduce_launch", "a", takes=0.001, inside="reduce")
    tape.event("pre_forward", "a").compute(0.005).event("post_forward", "a").event("end_backward")
    tape.do("reduce_finish", "a", blocked=0.002, inside="land").do("reduce_land", "a", inside="land")
    assert _ends_of_arrows(_data_of(tape, "a")) == [["launch a", "reduce-scatter a", "reduce wait a"]]


# Colours

TEXT, SHAPE = 4.5, 3.0  # the least ratios of level AA


CHART, STYLE = ((resources.files("fsdp2.report") / name).read_text() for name in ("chart.js", "page.css"))
(_FOUND,) = re.findall(r"const PALETTE = (\{.*?\n\});", CHART, re.DOTALL)
PALETTE = json.loads(_FOUND)
VARIABLES = {name: pair for name, *pair in re.findall(r"--(\w+): light-dark\((#\w+), (#\w+)\)", STYLE)}
SCHEMES = ("light", "dark")
SOLID = [*PALETTE["units"], *PALETTE["bars"].values()]


def _linear(colour: str) -> list[float]:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def _contrast(one: str, other: str) -> float:
    weights = (0.2126, 0.7152, 0.0722)
    dark, light = sorted(sum(map(operator.mul, weights, _linear(colour))) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def test_labels_can_be_read_on_each_bar() -> None:
    assert _contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)  # just too little, say the guidelines
    assert [colour for colour in SOLID if _contrast(PALETTE["label"], colour) < TEXT] == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_can_be_read_and_stripes_of_waits_stand_out_and_no_unit_has_their_colour_or_pattern(scheme: str) -> None:
    """Also labels of waits: they lie on the page's ground."""
    of = {name: pair[SCHEMES.index(scheme)] for name, pair in VARIABLES.items()}
    pairs = [("ink", "ground"), ("faint", "ground"), ("ink", "mark")]
    assert {pair for pair in pairs if _contrast(of[pair[0]], of[pair[1]]) < TEXT} == set()
    ground, hatches = of["ground"], PALETTE["hatches"]
    assert {"gather wait", "reduce wait", "rank wait"} <= set(hatches)
    assert {name for name, each in hatches.items() if _contrast(each[scheme], ground) < SHAPE} == set()
    assert not {each[scheme] for each in hatches.values()} & set(SOLID)
    assert len({each["lines"] for each in hatches.values()}) == len(hatches)  # also told apart without colours


def _seen_without(cone: str, colour: str) -> list[float]:
    """How ``colour`` looks to readers without that cone, in linear RGB.

    Source: Vienot, Brettel and Mollon, "Digital video colourmaps for checking the legibility of displays by
    dichromats", 1999.
    """
    r, g, b = _linear(colour)
    mixed = 0.11238 * r + 0.88762 * g if cone == "L" else 0.29275 * r + 0.70725 * g
    return [mixed, mixed, 0.00401 * (r - g) + b if cone == "L" else -0.02234 * (r - g) + b]


@pytest.mark.parametrize("cone", ["L", "M"])
@pytest.mark.parametrize("colours", [PALETTE["units"], PALETTE["series"]], ids=["units", "series"])
def test_neighbours_differ_for_readers_who_lack_a_cone(cone: str, colours: list[str]) -> None:
    seen = [_seen_without(cone, colour) for colour in colours]
    gaps = [max(abs(a - b) for a, b in zip(one, other, strict=True)) for one, other in pairwise(seen)]
    assert min(gaps) > 0.08


# docs/images/timeline.py


def _ranges() -> list[Range]:
    """A forward, and a backward that reduces, of one block ``a`` and the root, in milliseconds."""
    return [
        Range(1, "whole step", 0.0, 100.0),
        Range(1, "FSDP::pre_forward (a)", 10.0, 20.0),
        Range(1, "FSDP::all_gather (a)", 11.0, 18.0),
        Range(1, "c10d::_allgather_base_", 12.0, 13.0),
        Range(2, "gloo:all_gather", 13.0, 17.0),
        Range(1, "FSDP::all_gather_copy_out (a)", 18.0, 20.0),
        Range(1, "FSDP::post_forward (a)", 40.0, 41.0),
        Range(1, "FSDP::pre_backward (a)", 45.0, 46.0),
        Range(1, "FSDP::post_backward_reduce (a)", 70.0, 80.0),
        Range(1, "c10d::_reduce_scatter_base_", 72.0, 73.0),
        Range(2, "gloo:all_reduce", 73.0, 78.0),
        Range(1, "FSDP::root_post_backward_callback", 85.0, 86.0),
    ]


def test_a_profile_shows_compute_waits_copies_and_collectives_in_flight() -> None:
    found = from_profiler(_ranges(), _ranges()[0])
    assert (found.name, found.step_ms) == ("torch", 100.0)
    # Collectives that are waited for: from their launch to the end of their range.
    said = (f"row {each.row}: {each.what} {each.unit} from {each.start:g} for {each.length:g}" for each in found.bars)
    TEXTS.check("bars of a profile", "\n".join(said))


def test_both_timelines_are_drawn_on_one_axis() -> None:
    data = _data()
    ours, torchs = from_report(data), from_profiler(_ranges(), _ranges()[0])
    assert ours.step_ms == data["timelines"][0]["stop_us"] / 1e3
    assert len(ours.bars) == len(data["timelines"][0]["spans"]) + len(data["timelines"][0]["transfers"])
    drawn = svg([ours, torchs], "a note")
    widths = [float(each.get("width", "")) for each in ET.fromstring(drawn).iter() if each.tag.endswith("rect")]
    scale = (1000 - 62 - 10) / max(ours.step_ms, torchs.step_ms)
    assert round(24.0 * scale, 1) in widths
    assert "a note" in drawn


def test_the_committed_picture_is_small_and_whole() -> None:
    text = (IMAGES / "timeline.svg").read_text()
    assert len(text) < 100_000
    assert [each.text for each in ET.fromstring(text).iter() if each.get("font-weight")] == ["fsdp2", "torch"]
