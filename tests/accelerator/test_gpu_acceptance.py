"""``benchmarks/gpu/acceptance.py`` before a GPU runs it: on the simulated accelerator, and where parts go wrong."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import acceptance as gpu_acceptance, direct as gpu_direct
from benchmarks.gpu.acceptance import FAIL, MARGIN_S, NOT_RUN, PASS, Part, Verdict, run_all, run_part
from benchmarks.gpu.device import Cuda
from fsdp2.core.comm.backends import CollectiveComm

pytestmark = pytest.mark.long

SCRIPT = Path(gpu_acceptance.__file__)


def script(out: Path, *arguments: str, timeout_s: float = 280) -> tuple[int, list[dict[str, Any]]]:
    """The exit status, and the verdicts that were left."""
    command = [sys.executable, str(SCRIPT), *arguments, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    verdicts = json.loads((out / "verdicts.json").read_text())["verdicts"]
    for each in verdicts:
        assert f"{each['status']} {each['part']}: {each['detail']}" in done.stdout
    return done.returncode, verdicts


# On the simulated accelerator


@pytest.mark.parametrize(
    ("parts", "passed"),
    [
        (["1"], {"contract": 8, "forced": 3}),
        (["2", "4"], {"late": 11, "ranks 2": 7, "ranks 4": 7}),
        (["8", "9"], {"graph nccl": 1, "graph late": 1, "features": 4}),
    ],
    ids=[
        "contract and training through it",
        "late collectives and shared devices",
        "steps in a graph, wires and activations",
    ],
)
def test_parts_hold_on_the_simulated_accelerator(parts: list[str], passed: dict[str, int], tmp_path: Path) -> None:
    status, verdicts = script(tmp_path, "--device", "sim", "--only", *parts)
    failed = [f"{each['status']} {each['part']}: {each['detail']}" for each in verdicts if each["status"] != PASS]
    assert status == 0, "\n".join(failed)
    for name, number in passed.items():
        assert [each["status"] for each in verdicts if each["name"] == name] == [PASS] * number


# Parts that go wrong, and time that runs out


def part_of(code: str, limit_s: float = 30) -> list[Verdict]:
    """The verdicts of a part that runs ``code``, where ``say(status, detail)`` writes one."""
    say = "import json, os, subprocess, sys, time\n"
    say += "def say(status, detail):\n"
    say += "    line = json.dumps({'status': status, 'detail': detail, 'figures': {}})\n"
    say += "    open(sys.argv[1], 'a').write(line + chr(10))\n"
    shown: list[Verdict] = []
    found = run_part("a part", lambda path: [sys.executable, "-c", say + code, str(path)], limit_s, {}, shown.append)
    assert shown == found
    return found


@pytest.mark.parametrize(
    ("code", "verdicts"),
    [
        ("say('PASS', 'one'); say('FAIL', 'two'); say('NOT RUN', 'three')", ["PASS one", "FAIL two", "NOT RUN three"]),
        ("sys.exit(3)", ["FAIL exit status 3"]),
        ("print('the last line'); sys.stdout.flush(); os.abort()", ["FAIL killed by SIGABRT; the last line"]),
        ("raise ValueError('of the test')", ["FAIL exit status 1; ValueError: of the test"]),
        ("pass", ["FAIL ended without a verdict"]),
    ],
)
def test_part_has_the_verdicts_that_it_wrote_and_one_of_its_crash(code: str, verdicts: list[str]) -> None:
    assert [str(each).replace("a part: ", "") for each in part_of(code)] == verdicts


def test_part_that_hangs_is_a_verdict_and_all_that_it_started_ends(tmp_path: Path) -> None:
    beat, start = tmp_path / "beat", time.monotonic()
    child = f"import time\nwhile True: open({str(beat)!r}, 'a').write('x'); time.sleep(0.05)"
    code = f"say('PASS', 'before')\nsubprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(600)"
    assert [str(each) for each in part_of(code, limit_s=9)] == ["PASS a part: before", "FAIL a part: time limit of 9 s"]
    assert time.monotonic() - start < 20
    size = beat.stat().st_size
    assert size > 0
    time.sleep(0.5)
    assert beat.stat().st_size == size


def test_parts_for_which_no_time_is_left_are_not_run() -> None:
    kept: list[int] = []
    parts = [Part(1, "first", "nonsense", 1, 30, ("cpu",)), Part(2, "second", "nonsense", 1, 30, ("cuda", "sim"))]
    found = run_all(parts, "cpu", MARGIN_S + 4, lambda verdict: None, lambda found: kept.append(len(found)))
    assert [(each["status"], each["detail"]) for each in found] == [
        (NOT_RUN, "nonsense: 4 s are left"),
        (NOT_RUN, "nonsense: needs CUDA or sim"),
    ]
    assert kept == [1, 2]


@pytest.mark.parametrize(("device", "status"), [("cpu", 1), ("sim", 0)])
def test_exit_status_tells_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, status: int
) -> None:
    monkeypatch.setattr(gpu_acceptance, "PARTS", [Part(1, "a part", "nonsense", 1, 60, ("cpu",))])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["acceptance.py", "--device", device, "--out", str(tmp_path)])
    assert gpu_acceptance.main() == status
    (verdict,) = json.loads((tmp_path / "verdicts.json").read_text())["verdicts"]
    assert verdict["status"] == (FAIL if status else NOT_RUN)
    assert ("KeyError: 'nonsense'" in verdict["detail"]) == bool(status)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_run_and_nothing_fails(tmp_path: Path) -> None:
    status, verdicts = script(tmp_path)
    assert status == 0
    assert {each["status"] for each in verdicts} == {NOT_RUN}
    assert all("torch sees no GPU" in each["detail"] for each in verdicts)


# What is read and shown


def test_capture_that_fails_is_told_of_by_what_failed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def capture(graph: object, stream: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("the capture was invalidated")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    on = Cuda.__new__(Cuda)
    with pytest.raises(RuntimeError, match=r"^the capture failed: ZeroDivisionError: division by zero$"):
        on.captured(lambda: 1 / 0 and None)
    with pytest.raises(RuntimeError, match=r"^the capture failed: RuntimeError: the capture was invalidated$"):
        on.captured(lambda: None)


def test_outcomes_of_pytest_are_counted() -> None:
    text = (
        "tests/gpu/test_a.py::test_one[8 ranks, bf16] PASSED   [ 10%]\n"
        "tests/gpu/test_a.py::test_two[1ranks] FAILED          [ 20%]\n"
        "tests/gpu/test_a.py::test_three[8 ranks, bf16] ERROR  [ 30%]\n"
        "tests/gpu/test_a.py::test_four SKIPPED (needs a GPU)  [ 40%]\n"
        "tests/gpu/test_a.py::test_five \n"
        "FAILED tests/gpu/test_a.py::test_two[1ranks] - ValueError\n"
    )
    failed = ["tests/gpu/test_a.py::test_two[1ranks]", "tests/gpu/test_a.py::test_three[8 ranks, bf16]"]
    assert gpu_acceptance.outcomes(text) == (1, 1, failed)


def test_thresholds_have_that_of_the_package() -> None:
    assert gpu_direct.THRESHOLDS[gpu_direct.OURS] == CollectiveComm.routing.direct_min_nbytes


def test_parts_fit_into_the_time_with_steps_of_both_stacks_before_pytest() -> None:
    assert sum(part.lasts_s for part in gpu_acceptance.PARTS) <= gpu_acceptance.LIMIT_S - MARGIN_S
    names = [part.name for part in gpu_acceptance.PARTS]
    before = names[: names.index("pytest")]
    assert {"steps 8B 0", "steps 1B 1"} <= set(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tests_of_a_gpu_are_collected_without_numpy_whose_absence_torch_warns_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('no numpy', name='numpy')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{SCRIPT.parents[1]}")
    found: list[str] = []
    gpu_acceptance.run_tests(lambda status, detail, **_: found.append(detail), 120)
    assert "0 failed" in found[0]
    assert "exit status 0" in found[0]


def test_missing_pytest_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    found: list[tuple[str, str]] = []
    gpu_acceptance.run_tests(lambda status, detail, **_: found.append((status, detail)), 5)
    assert found == [(NOT_RUN, "none of these tests has run, since pytest is not installed")]


def test_figures_become_tables_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP2_BENCH_RESULTS", "")  # is set to the folder
    one = {"step_ms": 1.0, "peak": 1 << 20, "reserved": 2 << 20, "copies": 3, "copy_ms": 0.5, "idle_ms": 0.1}
    subjects = {"unsharded": one, "fsdp2": {**one, "step_ms": 1.01}, "torch": {**one, "step_ms": 1.2}}
    cost = {"num_direct": 7, "gather_ms": 2.0, "reduce_ms": 3.0, "host_ms": 1.0}
    figures: list[dict[str, Any]] = [{}, {"row": "8B, a case", "subjects": subjects}]
    figures += [{"costs": {num_ranks: dict.fromkeys(gpu_direct.THRESHOLDS, cost)}} for num_ranks in ("8", "64")]
    verdicts = [{"figures": each} for each in figures]
    problems = gpu_acceptance.write_results(tmp_path, "cpu", verdicts, 1.0)
    tables = {each["name"]: each for each in json.loads((tmp_path / "acceptance.json").read_text())["tables"]}
    assert tables["time"]["rows"][0][:5] == ["8B, a case", 1.0, 1.01, 1.2, 1.01]
    assert [row[0] for row in tables["thresholds"]["rows"]] == list(gpu_direct.THRESHOLDS)
    assert tables["thresholds"]["rows"][0][1:] == [7, 2.0, 3.0, 1.0] * 2
    if importlib.util.find_spec("matplotlib") is None:
        assert problems == ["no plots, since matplotlib is not installed; verdicts and figures are complete"]
    else:
        assert problems == []
        assert {path.name for path in tmp_path.glob("*.png")} == {"time.png", "thresholds.png"}
