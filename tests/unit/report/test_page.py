"""The page of a report in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp2.report import compare_reports, files
from fsdp2.report.data import report_data
from fsdp2.report.figures import ms_text
from fsdp2.report.timeline import Does
from tests.unit.report.examples import PREDICTION, example_data
from tests.unit.report.support import ROOT, info, record, simple_step

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
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
      view: [chart.view.from / chart.duration, chart.view.to / chart.duration],
      title: document.title,
      operators: [...document.querySelectorAll("#operators tbody tr")].map((e) =>
        [...e.children].map((c) => c.textContent)),
      unlabelled: [...document.querySelectorAll("input, select, button")].filter((e) =>
        !(e.labels?.length || e.ariaLabel || e.textContent)).length,
      verdict: document.getElementById("verdict")?.textContent,
      judged: [...document.querySelectorAll("td.better, td.worse")].map((e) => [e.className, e.textContent]),
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
  const [unit, kind, what] = %s, {canvas, rows} = chart;
  const row = rows.find((each) => each[what === "memory" ? what : "timeline"]);
  const spans = chart.reports[0].data.timelines[0].spans.filter((s) => s[1] === unit);
  const [, , start, duration] = spans.reduce((a, b) => (b[3] > a[3] ? b : a));
  const box = canvas.getBoundingClientRect();
  const x = chart.toX(start + duration / 2 - chart.reports[0].begin);
  const y = row.top + {memory: 100, timeline: 18, phases: 5}[what];
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
        probe = _PROBE % act
        code = probe.strip().removeprefix("<script>").removesuffix("</script>")
        allowed = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        text = text.replace("script-src ", f"script-src 'sha256-{allowed}' ", 1)  # next to the page's own
        page.write_text(text.replace("<body>", "<body>" + probe))
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,900", page.as_uri() + address]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        found = re.search(r'<pre id="probe">(.*?)</pre>', result.stdout, re.DOTALL)
        assert found is not None, result.stderr
        seen = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
        assert seen["errors"] == []
        return seen

    return show


def test_the_page_runs_its_own_script_only_and_asks_no_network() -> None:
    """By the policy, which has the hash of the script; there are no handlers in elements, which it would block."""
    page = files.page(example_data())
    policy, script = re.search(r'Policy" content="(.*?)"', page), re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert policy is not None
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert policy[1].startswith(f"default-src 'none'; script-src 'sha256-{digest}'; ")
    assert "http" not in policy[1]
    assert not re.search(r"<[^>]* on\w+=", page.replace(script[0], ""))


@pytest.mark.long
def test_no_table_of_units_with_long_names_is_cut_in_a_window_of_1280_pixels(shown: Shown) -> None:
    units = [f"model.language_model.layers.{i}.mlp.experts" for i in range(3)]
    records = [record(simple_step(units, late=0.2, compute=0.5001234), units, rank) for rank in range(2)]
    data = report_data("Model", "cpu", [info(name, 900 * 2**20) for name in (ROOT, *units)], records)
    assert shown(data)["cut"] == []


@pytest.mark.long
def test_page_opens_without_errors_and_shows_the_findings(shown: Shown) -> None:
    data = example_data()
    found = shown(data)
    assert found["unit"] is None
    assert found["prediction"] is None
    assert found["rows"] == len(data["units"])
    assert ["blocks.1"] in [each["units"] for each in data["findings"]]
    expected = [f"up to {ms_text(each['gain_ms'], data['digits'])}: {each['text']}" for each in data["findings"]]
    assert found["findings"] == [text.replace("`", "") for text in expected]
    assert found["code"] == [name for text in expected for name in text.split("`")[1::2]]
    summary = "A step of Model in 4 units, on 2 ranks of cpu (gloo), takes 123 ms."
    assert found["summary"] == summary
    assert (found["title"], found["unlabelled"]) == ("Model: one step", 0)
    assert all(does in found["legend"] for does in data["does"])
    assert all(each["what"] in found["series"] for each in data["memory"][0]["series"])
    held = re.search(r"held at most ([0-9.]+) (B|KiB|MiB|GiB)", found["memory"])
    assert held is not None
    nbytes = float(held[1]) * 2 ** (10 * ["B", "KiB", "MiB", "GiB"].index(held[2]))
    assert nbytes == pytest.approx(data["memory"][0]["peak_nbytes"], rel=0.01)
    assert found["tails"] == ["model.layers.11.mlp", "\u2026layers.11.mlp", "\u2026mlp", ""]
    assert {"launch", "held", "direct", "bucket", "other wait"} <= set(found["words"])


@pytest.mark.long
def test_pointing_says_what_a_bar_is_and_what_memory_is_for(shown: Shown) -> None:
    data = example_data()
    tip = shown(data, _AT % '[2, "point", "timeline"]')["tip"]
    assert tip.startswith("rank 0: backward blocks.1\n20.000 ms from ")
    tip = shown(data, _AT % '[2, "point", "memory"]')["tip"].splitlines()
    assert shown(data, _AT % '[2, "point", "phases"]')["tip"].startswith("rank 0: backward\n")
    time, *values = [line.split(": ") for line in tip]
    assert time[0].endswith(" ms")
    assert {name.removeprefix("\u25b8 ") for name, _ in values} <= {
        each["what"] for each in data["memory"][0]["series"]
    }
    assert len([name for name, _ in values if name.startswith("\u25b8")]) <= 1


@pytest.mark.long
def test_page_of_two_reports_opens_without_errors_and_shows_the_differences(shown: Shown, tmp_path: Path) -> None:
    reports = [example_data(), example_data(ranks=1)]
    for name, data in zip("ab", reports, strict=True):
        files.write(tmp_path / f"{name}.json", data)
    compare_reports(tmp_path / "a.json", tmp_path / "b.json", tmp_path / "both.html")
    found = shown((tmp_path / "both.html").read_text(), _AT % '[2, "click", "timeline"]')
    assert found["rows"] == len(reports[0]["units"])
    assert found["unit"] == "blocks.1"
    assert found["cut"] == []
    assert found["title"] == "a.json and b.json"
    assert " time in b.json than in a.json" in found["verdict"]
    assert found["judged"]
    assert all(text.endswith(f" {judged}") for judged, text in found["judged"])  # not by colour alone


@pytest.mark.long
def test_page_shows_what_was_predicted(shown: Shown) -> None:
    data = example_data(prediction=PREDICTION)
    found, step_ms = shown(data), data["steps_ms"][0]
    assert found["prediction"][0] == ["step", "100 ms", f"{step_ms:.0f} ms", f"{step_ms / 100:.2f}"]
    assert "It predicts the times of 8 x H100. They were measured on cpu (gloo)." in found["predictionText"]
    assert found["prediction"][-1] == ["reserved", "4.0 GiB", "not known", ""]
    found = shown(example_data(prediction=replace(PREDICTION, same_machine=False)))
    assert "on cpu (gloo), which is another machine: they are not compared." in found["predictionText"]
    assert [row[-1] for row in found["prediction"]] == [""] * 6


@pytest.mark.long
def test_a_click_on_a_unit_shows_its_numbers(shown: Shown) -> None:
    data = example_data()
    found, unit = shown(data, _AT % '[2, "click", "timeline"]'), data["units"][2]
    assert (found["unit"], found["chosenRows"]) == (unit["name"], 1)
    fields = found["fields"]
    assert set(fields) == set(unit) - {"name"}
    assert all(float(fields[key]) == float(unit[key]) for key in fields if key.endswith(("ms", "bytes")))


@pytest.mark.long
def test_the_address_chooses_a_unit_and_the_search_hides_others(shown: Shown) -> None:
    found = shown(example_data(), _SEARCH, "#unit=%3C/script%3E%3Cb%3Eodd")
    assert (found["unit"], found["rows"]) == ("</script><b>odd", 2)


_KEYS = """() => {
  for (const key of %s) chart.canvas.dispatchEvent(new KeyboardEvent("keydown", {key, cancelable: true}));
}"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("keys", "view"),
    [
        (["+"], [0.25, 0.75]),
        (["+", "ArrowRight"], [0.3, 0.8]),
        (["+", "+", "PageUp"], [0.15, 0.4]),
        (["+", "-", "+", "Home", "x"], [0, 1]),
    ],
)
def test_keys_move_and_zoom_the_timeline(shown: Shown, keys: list[str], view: list[float]) -> None:
    assert shown(example_data(), _KEYS % keys)["view"] == pytest.approx(view)


@pytest.mark.long
def test_memory_and_operations_are_those_of_the_rank_and_of_the_unit_that_are_chosen(shown: Shown) -> None:
    units = ["blocks.0", "blocks.1"]
    ran = {
        ("blocks.0", "", Does.FORWARD, "aten::mm"): (2, 0.004),
        ("blocks.0", "", Does.BACKWARD, "aten::mm"): (4, 0.008),
        ("blocks.1", "", Does.FORWARD, "aten::silu"): (1, 0.002),
    }
    records = [record(simple_step(units), units, rank) for rank in range(2)]
    records = [replace(each, steps=[replace(each.steps[0], operators=ran)]) for each in records]
    data = report_data("Model", "cpu", [info(name) for name in (ROOT, *units)], records)
    whole = [["aten::mm", "6", "12", "4", "8", "0"], ["aten::silu", "1", "2", "2", "0", "0"]]
    assert _numbers(shown(data)["operators"]) == whole
    found = shown(data, _CHOICES)
    assert _numbers(found["operators"]) == whole[1:]
    assert found["memory"].startswith("Rank 1 held at most")


_CHOICES = """() => {
  choose("blocks.1");
  find("memory-rank").value = "1";
  find("memory-rank").dispatchEvent(new Event("change"));
}"""


def _numbers(rows: list[list[str]]) -> list[list[str]]:
    return [[f"{float(cell[:-3]):g}" if cell.endswith(" ms") else cell for cell in row] for row in rows]
