"""The training example does what its own text promises, with a model small enough for a test."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from tests.docs.launch import ROOT, forked_ranks, settings, torchrun
from tests.harness.patience import patient

SCRIPT = ROOT / "docs" / "examples" / "train_lm.py"
LORA = SCRIPT.with_name("lora.py")
_MODEL = "--dim 16 --num-layers 2 --num-heads 2 --hidden-dim 24 --sequence-length 16"
_RUN = "--steps 6 --lr 1e-2 --warmup-steps 1 --validate-every 2 --checkpoint-every 2 --validation-batches 2"
TINY = (*_MODEL.split(), *_RUN.split())
_Start = Callable[[Path, Sequence[str]], subprocess.CompletedProcess[str]]

# What a step measures, as opposed to what it computes.
MEASURED = {"seconds", "peak_mib_per_rank"}


def _train(folder: Path, *arguments: str, start: _Start = forked_ranks) -> subprocess.CompletedProcess[str]:
    result = start(SCRIPT, [*TINY, "--output", str(folder), *arguments])
    assert result.returncode == 0, result.stderr
    assert "warn" not in result.stderr.lower(), result.stderr
    return result


def _records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "losses.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in MEASURED} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    _train(folder, start=torchrun)
    return folder


@pytest.mark.long
def test_a_run_writes_its_losses_its_outcome_and_its_last_checkpoint(uninterrupted: Path) -> None:
    steps = [record for record in _records(uninterrupted) if "loss" in record]
    validations = [record["step"] for record in _records(uninterrupted) if "validation_loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert validations == [2, 4, 6]
    result = json.loads((uninterrupted / "result.json").read_text())
    assert result["loss"] == steps[-1]["loss"]
    assert result["validation_loss"] == _records(uninterrupted)[-1]["validation_loss"]
    assert 0 < result["unigram_entropy"] < 5.6  # 5.55 nats: all bytes equally likely
    assert result["tokens_per_second"] > 0
    assert len(result["peak_mib_per_rank"]) == 2
    assert [path.name for path in (uninterrupted / "checkpoints").iterdir()] == ["step_00000006"]
    assert ": one step</title>" in (uninterrupted / "step.html").read_text()


@pytest.mark.long  # nor do the others of this fixture: `make docs` runs them
@pytest.mark.parametrize("options", [(), ("--weights", "int8"), ("--optimizer", "muon")], ids=" ".join)
def test_a_resumed_run_has_losses_of_a_whole_one(uninterrupted: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    whole, stopped = tmp_path / "whole" if options else uninterrupted, tmp_path / "stopped"
    if options:
        printed = _train(whole, *options).stdout
        assert printed.count("Muon: 14 parameters") == ("muon" in options)
    assert "stopped after step 3 of 6" in _train(stopped, *options, "--stop-after", "3", "--no-report").stdout
    assert not (stopped / "step.html").exists()
    assert not (stopped / "result.json").exists()
    resumed = _train(stopped, *options, "--resume").stdout
    assert re.search(r"^step 6 of 6: loss [\d.]+, [\d.]+ s per step, 00:00 left$", resumed, re.MULTILINE)
    assert _records(stopped) == _records(whole)
    assert f"a page about one step: {stopped / 'step.html'}" in resumed
    assert "note:" not in resumed
    assert "step_00000006 has 6 steps, so none is left." in _train(stopped, *options, "--resume").stdout
    if "int8" in options:  # it shapes the losses
        assert json.loads((whole / "config.json").read_text())["weights"] == "int8"
        expected, found = (_records(folder)[-1]["validation_loss"] for folder in (uninterrupted, whole))
        assert found != expected
        assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.long
def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    command += [*TINY, "--steps", "100000", "--output", str(tmp_path), "--no-report"]
    environment = {**os.environ, **settings()}
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert run.stdout is not None
    assert any("step 10 of" in line for line in run.stdout)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does for Ctrl-C
    rest, errors = run.communicate(timeout=patient(120))
    assert "interrupted; the last checkpoint is" in rest
    assert "continue with --resume" in rest
    assert "[rank" not in errors, errors  # torchrun's own traceback remains
    (latest,) = (tmp_path / "checkpoints").glob("step_*")
    resumed = _train(tmp_path, "--steps", str(int(latest.name.removeprefix("step_")) + 2), "--resume")
    assert f"continues after step {int(latest.name.removeprefix('step_'))}, from {latest}" in resumed.stdout


@pytest.mark.long
def test_adapters_train_on_a_run_and_only_they_are_saved(uninterrupted: Path, tmp_path: Path) -> None:
    options = ["--base", str(uninterrupted), "--output", str(tmp_path), "--steps", "4", "--rank", "2"]
    result = forked_ranks(LORA, options)
    assert result.returncode == 0, result.stderr
    losses = dict(re.findall(r"^(quantised to 4 bits|with adapters): ([\d.]+)$", result.stdout, re.MULTILINE))
    assert float(losses["with adapters"]) < float(losses["quantised to 4 bits"])
    saved = FileSystemReader(tmp_path / "adapters").read_metadata().state_dict_metadata
    assert len(saved) == 2 * 7 * 2  # down and up of seven layers in two blocks
    assert all(name.endswith((".down", ".up")) for name in saved)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps is 0, expected 1 or more."),
        (["--dim", "10", "--num-heads", "4"], "Choose a dim divisible by 8."),
        (["--batch-size", "9999999"], "Use a smaller batch or shorter sequences."),
        (["--weights", "int4"], "--weights: invalid choice: 'int4'"),
        (["--stop", "now"], "--stop-after: invalid int value: 'now'"),
    ],
)
def test_options_that_cannot_work_are_refused_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments, "--output", str(tmp_path / "run")])
    monkeypatch.syspath_prepend(SCRIPT.parent)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code not in (0, None)
    said = capsys.readouterr().err or f"{ended.value.code}\n"  # Python prints a message that ends it
    assert said.startswith("train_lm.py: error: ")
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


# Runs the example; rank 0 kills itself once, before it records the step of the number given.
_DIES_ONCE = """
import os, runpy, signal, sys
from pathlib import Path
script, mark, step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
del sys.argv[:4]
sys.argv.insert(0, script)
sys.path.insert(0, str(Path(script).parent))
import lm_run
record_step = lm_run.Journal.add_step
def add_step(journal, record):
    if record["step"] == step and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    record_step(journal, record)
lm_run.Journal.add_step = add_step
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.in_turns
@pytest.mark.long
@pytest.mark.parametrize("step", [2, 5], ids=["before the first checkpoint", "after a checkpoint"])
def test_torchrun_restarts_a_run_whose_rank_died_to_the_same_losses(
    uninterrupted: Path, tmp_path: Path, step: int
) -> None:
    """A rank dies once, in the step of that number."""
    script, mark, output = tmp_path / "dies_once.py", tmp_path / "has died", tmp_path / "run"
    script.write_text(_DIES_ONCE)
    arguments = [str(SCRIPT), str(mark), str(step), *TINY, "--output", str(output), "--resume"]
    result = torchrun(script, arguments, options=["--max-restarts", "2"])
    assert result.returncode == 0, result.stderr
    assert mark.exists()
    assert _records(output) == _records(uninterrupted)
    assert json.loads((output / "result.json").read_text())["loss"] == _records(uninterrupted)[-2]["loss"]


@pytest.mark.in_turns
@pytest.mark.long
def test_a_run_may_train_on_when_its_disk_is_full(uninterrupted: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.touch()  # a file in the place of the folder: no checkpoint can be written
    failed = forked_ranks(SCRIPT, [*TINY, "--output", str(tmp_path)])
    assert failed.returncode != 0
    assert f"checkpoint {checkpoints / 'step_00000002'} could not be written" in failed.stderr
    went_on = forked_ranks(SCRIPT, [*TINY, "--output", str(tmp_path), "--keep-going"])
    assert went_on.returncode == 0, went_on.stderr
    assert "could not be written" in went_on.stdout + went_on.stderr
    assert _records(tmp_path) == _records(uninterrupted)
