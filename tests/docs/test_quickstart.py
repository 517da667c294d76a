"""The quickstart's scripts run as the page says; the first one's variant for GPUs is the same but for three lines."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_acceptance

from tests.docs.launch import TIMEOUT_S, free_port, settings, torchrun
from tests.docs.markdown import ROOT, read

PAGE = ROOT / "docs" / "quickstart.md"
SCRIPT, TRAINING = [block.text for block in read(PAGE).blocks if block.language == "python"]
(CHANGES,) = [block.text for block in read(PAGE).blocks if block.language == "diff"]


@pytest.mark.long
def test_the_script_runs_on_two_ranks_and_prints_what_the_page_says(tmp_path: Path) -> None:
    script = tmp_path / "quickstart.py"
    script.write_text(SCRIPT)
    result = torchrun(script)
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True), "the page says that they fall"
    (shown,) = re.findall(r"^    (DTensor: .*)$", PAGE.read_text(), re.MULTILINE)
    assert result.stdout.splitlines()[-1] == shown
    assert result.stderr == ""


def test_the_variant_for_gpus_replaces_lines_that_are_there() -> None:
    """No GPU runs it here: that it parses and names what torch has is all that can be tried."""
    removed = [line[1:] for line in CHANGES.splitlines() if line.startswith("-")]
    added = [line[1:] for line in CHANGES.splitlines() if line.startswith("+")]
    before = "\n".join(removed)
    assert SCRIPT.count(before) == 1
    tree = ast.parse(SCRIPT.replace(before, "\n".join(added)))
    assert "nccl" in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert "gloo" not in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


@pytest.mark.long
def test_the_training_script_learns_goes_on_from_its_checkpoint_and_takes_the_nodes_for_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    monkeypatch.chdir(tmp_path)
    outputs = _on_two_nodes(script)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+), mesh \(2, 2\)", "".join(outputs))]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert torchrun(script).stdout == ""  # all epochs are done
    script.write_text(TRAINING.replace("range(first, 3)", "range(first, 4)"))
    assert torchrun(script).stdout.startswith("epoch 3: ")  # on another number of ranks


def _on_two_nodes(script: Path) -> list[str]:
    """What the page's command prints on each of two nodes with two ranks, both of which are here."""
    (line,) = [line for line in _commands() if "--nnodes" in line]
    assert line.endswith("--nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint node0:29400 train.py")
    arguments = line.replace(" gpu ", " 2 ").replace("node0:29400", f"127.0.0.1:{free_port()}").split()[1:-1]
    command = [sys.executable, "-m", "torch.distributed.run", *arguments, str(script)]
    environment = {**os.environ, **settings()}
    nodes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    outputs = [node.communicate(timeout=TIMEOUT_S)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    return outputs


def _commands() -> list[str]:
    return [line for block in read(PAGE).blocks if block.language == "bash" for line in block.text.splitlines()]


def test_what_make_gpu_is_said_to_print_has_the_form_of_what_it_prints() -> None:
    shown = re.findall(r"^    ((?:PASS|NOT RUN) \(\d\) .*)$", PAGE.read_text(), re.MULTILINE)
    titles = {str(part) for part in gpu_acceptance.PARTS}
    assert shown
    assert all(line.partition(" (")[2].partition(": ")[0] in {title[1:] for title in titles} for line in shown)
    assert gpu_acceptance.LIMIT_S == 8 * 60
    assert gpu_acceptance.RESULTS == ROOT / "benchmarks" / "results" / "gpu"


def test_the_page_says_that_no_gpu_has_run_it() -> None:
    assert "No GPU has run fsdp2 yet" in PAGE.read_text()
