"""What benchmarks report, and what a later run is told about it; nothing here is measured."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import check, common, run as run_module
from benchmarks.check import Verdict, compare
from benchmarks.common import ROOT, Bars, Ratios, Table, publish
from benchmarks.render import PARTS, Part, digest, markers, part, pictures, read_results, render, tables
from benchmarks.run import benchmarks, name_of, named, run
from tests.harness.golden import texts_beside
from tests.harness.selection import long

TEXTS = texts_beside(__file__)
ROWS = [["plain", "12.5", 25.0, 0.5], ["mixed", "3.0", None, math.nan]]
COLUMNS = ["", "fsdp2 ms", "torch ms", "ratio"]
RESULTS = read_results()
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
PAGES = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}


@pytest.fixture
def _run_of_a_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/example.py"])
    monkeypatch.setenv("FSDP2_BENCH_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("FSDP2_BENCH_COMMIT", "abc1234")


def _table(*rows: list[Any], name: str = "main", **options: Any) -> Table:
    return Table(name, "Milliseconds", ["", "ours", "ratio"], rows, **options)


def _record(*published: Table) -> dict[str, Any]:
    return json.loads(json.dumps(common._record("example", "An example", published)))


class TestPublish:
    @pytest.mark.usefixtures("_run_of_a_script")
    def test_it_writes_what_it_prints(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        publish("example", "An example", [Table("main", "Milliseconds", COLUMNS, ROWS, note="Two rows.")])
        record = json.loads((tmp_path / "results" / "example.json").read_text())
        printed = capsys.readouterr().out
        assert printed == common.shown(record) + "\n"
        below_machine = printed.split("\n", maxsplit=2)[2].rpartition(" took ")[0]
        TEXTS.check("printed", below_machine.strip("\n"))
        assert record["tables"][0]["rows"] == [["plain", "12.5", 25.0, 0.5], ["mixed", "3.0", None, None]]
        assert record["commit"] == "abc1234"
        assert {"machine", "torch", "date", "command", "seconds"} <= set(record)

    @pytest.mark.usefixtures("_run_of_a_script")
    def test_it_says_options_and_run_by_hand_writes_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["benchmarks/example.py", "--case", "7"])
        publish("example", "An example", [_table(["plain", 1, 0.5])])
        record = json.loads((tmp_path / "results" / "example.json").read_text())
        assert record["command"] == "python benchmarks/example.py --case 7"
        monkeypatch.delenv("FSDP2_BENCH_RESULTS")
        monkeypatch.setattr(common, "RESULTS", tmp_path / "committed")
        publish("example", "An example", [_table(["plain", 1, 0.5])])
        assert [path.name for path in tmp_path.iterdir()] == ["results"]

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: _table(["plain", 1]), "expected 3 cells in each row"),
            (lambda: _table(["plain", 1, 0.5], ["plain", 2, 0.5]), "a name of its own in each row's first cell"),
            (lambda: _table(["plain", 1, 0.5], ratio="of torch"), "expected one column 'of torch'"),
            (lambda: _table(["plain", 1, 0.5], plot=Ratios(aim="aim")), "expected one column 'aim'"),
            (lambda: _table(["plain", 1, 0.5], plot=Bars(["theirs"], "ms")), "expected one column 'theirs'"),
        ],
    )
    def test_a_table_that_nobody_could_read_is_refused(self, make: Callable[[], Table], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make()


class TestCheck:
    @pytest.mark.parametrize(
        ("before", "after", "options", "verdicts"),
        [
            (0.5, 0.6, {}, [Verdict.WORSE]),
            (0.5, 0.4, {}, [Verdict.BETTER]),
            (0.5, 0.52, {}, [Verdict.SAME]),
            (0.5, 0.48, {}, [Verdict.SAME]),
            (0, 0, {}, [Verdict.SAME]),
            (0.9155, 0.9156, {"noise": 0}, [Verdict.WORSE]),
            (0.9155, 0.9155, {"noise": 0}, [Verdict.SAME]),
            (0.5, 0.6, {"ratio": None}, []),  # no ratio: left out
        ],
    )
    def test_it_tells_worse_and_better_from_noise(
        self, before: float, after: float, options: dict[str, Any], verdicts: list[Verdict]
    ) -> None:
        records = (_record(_table(["plain", 1, ratio], **options)) for ratio in (before, after))
        assert [each.verdict for each in compare(*records)] == verdicts

    def test_its_report_lists_what_differs_with_the_worst_first(self) -> None:
        before = _record(
            _table(["slower", 1, 0.5], ["slowest", 1, 0.5], ["faster", 1, 0.5], ["gone", 1, 0.5], ["same", 1, 0.5]),
            _table(["all of it", 1, "0.90"], name="old"),
        )
        after = _record(
            _table(["slower", 1, 0.6], ["slowest", 1, 0.7], ["faster", 1, 0.3], ["new", 1, 0.5], ["same", 1, 0.51]),
            _table(["refused", "no", ""], name="other"),
        )
        TEXTS.check("report of a check", check.report(list(compare(before, after))))

    def test_it_says_where_the_machine_or_torch_is_another_one(self) -> None:
        before, after = (_record(_table(["plain", 1, 0.5])) for _ in range(2))
        assert not check.differences(before, after)
        before["machine"] = {"name": "A processor", "cores": 4}
        before["torch"], after["torch"] = "2.11.0", "2.13.0"
        after["machine"] = {"name": "A processor", "cores": 2}
        TEXTS.check("another machine", "\n".join(check.differences(before, after)))

    def test_only_a_script_that_fails_is_a_failure(self, tmp_path: Path) -> None:
        (tmp_path / "well.py").write_text("")
        (tmp_path / "ill.py").write_text("raise SystemExit(3)")
        assert run([tmp_path / "well.py"])
        assert not run([tmp_path / "ill.py", tmp_path / "well.py"])


class TestRun:
    @pytest.mark.ci
    @pytest.mark.parametrize(
        "case", [([], "", ["committed"]), *long((["--", "--case"], "", []), ([], "other", ["other"]))]
    )
    def test_it_writes_the_committed_results_where_no_argument_and_no_folder_is_given(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[list[str], str, list[str]]
    ) -> None:
        arguments, variable, written = case
        script = tmp_path / "example.py"
        script.write_text(
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
            "from benchmarks.common import Table, publish\n"
            "publish('example', 'An example', [Table('main', 'Milliseconds', ['', 'ratio'], [['plain', 0.5]])])\n"
        )
        monkeypatch.setattr(sys, "argv", ["benchmarks/run.py", str(script), *arguments])
        monkeypatch.setattr(run_module, "RESULTS", tmp_path / "committed")
        monkeypatch.delenv("FSDP2_BENCH_RESULTS", raising=False)
        if variable:
            monkeypatch.setenv("FSDP2_BENCH_RESULTS", str(tmp_path / variable))
        assert run_module.main() == 0
        assert [path.parent.name for path in tmp_path.rglob("example.json")] == written

    @pytest.mark.parametrize("text", ["benchmarks/memory/peak_memory.py", "memory/peak_memory", "peak_memory"])
    def test_a_script_is_found_by_its_path_its_room_and_its_name(
        self, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(ROOT)
        assert named(text).resolve() == ROOT / "benchmarks" / "memory" / "peak_memory.py"

    def test_a_name_means_one_script(self) -> None:
        names = [script.stem for script in benchmarks()]
        assert len(set(names)) == len(names)


class TestPages:
    @pytest.mark.parametrize("name", sorted(PAGES))
    def test_a_page_shows_what_the_results_say(self, name: str) -> None:
        text = PAGES[name].read_text()
        rendered = render(text, RESULTS)
        assert rendered == text, f"{name} is out of date: run `python benchmarks/render.py`"

    def test_every_script_is_shown_with_what_it_was_run_with_and_its_plots(self) -> None:
        shown = {marker for path in PAGES.values() for marker in markers(path.read_text())}
        names = {name for kind, name in shown if kind == "table"}
        assert {name for kind, name in shown if kind == "run"} == {*RESULTS, "machine"}
        assert {name.partition(".")[0] for name in names} == {*RESULTS, "summary"}
        assert names - {"summary"} <= set(tables(RESULTS))
        assert set(PARTS) <= names
        assert set(RESULTS) - {"gpu/acceptance"} <= set(map(name_of, benchmarks()))  # `make gpu` runs that one
        images = ROOT / "docs" / "images"
        assert {path.relative_to(images).as_posix() for path in images.rglob("*.*.png")} == {
            f"{name}.png" for name in pictures()
        }
        for name in pictures():
            picture = (images / f"{name}.png").read_bytes()
            assert digest(tables(RESULTS)[name]).encode() in picture, f"{name}: run `python benchmarks/render.py`"

    def test_a_part_of_a_table_has_the_named_rows_and_columns(self) -> None:
        table = _record(_table(["a", 1, 0.5], ["b", 2, 0.25], note="of all"))["tables"][0]
        shown = part(table, Part(("ratio",), ("b",), note="of one"), "PARTS")
        assert (shown["columns"], shown["rows"], shown["note"]) == (["", "ratio"], [["b", 0.25]], "of one")
        whole = part(table, Part(), "PARTS")
        assert all(whole[key] == table[key] for key in whole)
        for missing, of_it in (("theirs", Part(columns=("theirs",))), ("c", Part(rows=("c",)))):
            with pytest.raises(KeyError, match=f"PARTS: there is no '{missing}' in the results"):
                part(table, of_it, "PARTS")

    def test_a_run_names_its_machine_where_most_runs_have_another(self) -> None:
        results = {name: _record(_table(["a", 1, 0.5])) for name in ("first", "second", "other")}
        for name, record in results.items():
            record["machine"] = {"name": "Other" if name == "other" else "Usual", "cores": 4}
            record["torch"] = "2.13.0"
        shown = render("".join(f"<!-- run {name} -->\n<!-- /run -->\n" for name in ("machine", *results)), results)
        usual, first, second, other = (line for line in shown.splitlines() if not line.startswith("<"))
        assert usual == "Usual, 4 CPU cores, torch 2.13.0"
        assert "Usual" not in first + second
        assert "Other, 4 CPU cores, torch 2.13.0, commit" in other

    def test_rendering_replaces_what_is_between_markers_and_nothing_else(self) -> None:
        results = {"example": {**_record(_table(["a|b", "12", 0.25], note="Of two\nlines."))}}
        text = "above\n<!-- table example.main -->\n<!-- /table -->\nbelow\n"
        rendered = render(text, results)
        TEXTS.check("rendered", rendered.rstrip("\n"))
        assert render(rendered, results) == rendered
        results["example"]["tables"][0]["rows"][0][2] = 0.75
        assert render(rendered, results) == rendered.replace("0.25", "0.75")

    def test_a_marker_that_cannot_be_filled_is_an_error(self) -> None:
        with pytest.raises(KeyError, match=r"table example\.main: there is no 'example\.main' in the results"):
            render("<!-- table example.main -->\n<!-- /table -->\n", {})
        with pytest.raises(ValueError, match=r"^0 of .* end with <!-- /table -->"):
            render("<!-- table example.main -->\n", {})


# Counts, which are the same on every machine


def _with(name: str) -> Any:
    """Skips where what ``name`` counts was counted with other versions."""
    other = RESULTS[name]["torch"] != torch.__version__ or RESULTS[name].get("python", PYTHON) != PYTHON
    return pytest.mark.skipif(other, reason="counted with other versions")


def _tables_of_this_commit(name: str, folder: Path) -> list[dict[str, Any]]:
    environment = {**os.environ, common.RESULTS_FOLDER_VARIABLE: str(folder)}
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py")]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=800)
    return json.loads((folder / f"{name}.json").read_text())["tables"]


@pytest.mark.parametrize("script", sorted((ROOT / "benchmarks").rglob("*.py")), ids=name_of)
def test_names_of_the_package_that_a_benchmark_imports_exist(script: Path) -> None:
    """Most are run by hand only."""
    imports = [each for each in ast.walk(ast.parse(script.read_text())) if isinstance(each, ast.ImportFrom)]
    names = [(each.module, alias.name) for each in imports for alias in each.names]
    for module, name in names:
        if module is not None and module.partition(".")[0] == "fsdp2":
            exec(f"from {module} import {name}", {})


@pytest.mark.ci
@_with("step/call_counts")
def test_the_table_of_python_calls_is_that_of_this_commit(tmp_path: Path) -> None:
    """It was two days old once, and twenty calls too low."""
    found = _tables_of_this_commit("step/call_counts", tmp_path)
    published = RESULTS["step/call_counts"]["tables"][: len(found)]  # without transformers, there is no Llama
    for table, expected in zip(found, published, strict=True):
        # a call more or less in a whole step changes the last digits of a ratio only
        counts, wanted = ({name: [*map(float, each)] for name, *each, _ in of["rows"]} for of in (table, expected))
        assert counts == {name: pytest.approx(each, abs=1) for name, each in wanted.items()}


@pytest.mark.long
@pytest.mark.in_turns
@pytest.mark.timeout(900)
@_with("scale/scale_model")
def test_the_tables_of_the_scale_model_are_those_of_this_commit(tmp_path: Path) -> None:
    """All choices on 8 to many GPUs: times and memory. Rows that others have published are within a tenth of theirs."""
    found, published = _tables_of_this_commit("scale/scale_model", tmp_path), RESULTS["scale/scale_model"]["tables"]
    assert {table["name"]: table["rows"] for table in found} == {table["name"]: table["rows"] for table in published}
    for table, num_rows, columns in zip(published, (10, 4), (["error", "error of GiB"], ["error"]), strict=False):
        assert len(table["rows"]) == num_rows
        for row in table["rows"]:
            shown = dict(zip(table["columns"], row, strict=True))
            assert all(abs(int(shown[column].rstrip("%") if "%" in shown[column] else 0)) <= 10 for column in columns)
