"""The README's example is run as the README says, and learns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.launch import torchrun
from tests.docs.markdown import ROOT, read


@pytest.mark.long
def test_the_example_runs_on_two_ranks_and_its_loss_falls(tmp_path: Path) -> None:
    (example,) = [block for block in read(ROOT / "README.md").blocks if block.language == "python"]
    assert len([line for line in example.text.splitlines() if line]) == 20, "its heading says so"
    script = tmp_path / "example.py"
    script.write_text(example.text)
    result = torchrun(script)
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert len(losses) == 5, result.stdout
    assert losses[-1] < losses[0]
    assert result.stderr == ""


def test_it_has_two_commands_one_table_one_picture_and_says_that_no_gpu_has_run_it() -> None:
    text = (ROOT / "README.md").read_text()
    (commands,) = re.findall(r"^## Two commands\n\n```bash\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    assert re.findall(r"^make (\w+)", commands, re.MULTILINE) == ["train", "test"]
    assert len(re.findall(r"^\| ---", text, re.MULTILINE)) == 1
    assert len(re.findall(r"^!\[", text, re.MULTILINE)) == 1
    assert "has not yet run on a GPU" in text


def test_its_table_shows_losses_and_it_says_what_does_not_carry_over() -> None:
    text = (ROOT / "README.md").read_text()
    ratios = [float(line.split("|")[-2]) for line in text.splitlines() if re.match(r"^\| .* \| [\d.]+ \|$", line)]
    assert sum(ratio > 1 for ratio in ratios) >= 4
    for peer in ("torch", "FSDP1", "DeepSpeed", "DDP"):
        assert f"| {peer}" in text
    assert "**The step times do not carry over to GPUs:**" in text


def test_its_first_screen_says_what_torch_does_not_have_and_what_each_costs() -> None:
    first = (ROOT / "README.md").read_text().partition("## Two commands")[0]
    assert len(first.splitlines()) <= 40
    items = re.split(r"\n- ", first)[1:]
    assert len(items) == 6
    for item, word in zip(items, ("Costs", "Costs", "wrong", "Replaces", "Drops", "Needs"), strict=True):
        assert word in item, item


def test_it_keeps_a_place_for_measured_figures() -> None:
    text = (ROOT / "README.md").read_text()
    assert 0 < text.index("<!-- measured -->") < text.index("<!-- /measured -->")
