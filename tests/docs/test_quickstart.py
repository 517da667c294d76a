"""The quickstart's script runs as the page says; its variant for GPUs is the same script but for three lines."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.launch import torchrun
from tests.docs.markdown import ROOT, read

PAGE = ROOT / "docs" / "quickstart.md"
(SCRIPT,) = [block.text for block in read(PAGE).blocks if block.language == "python"]
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


def test_the_page_says_that_no_gpu_has_run_it() -> None:
    assert "No GPU has run this script" in PAGE.read_text()
