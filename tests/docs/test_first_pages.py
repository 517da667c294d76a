"""The README's and the quickstart's scripts run as these pages say, and learn; the README says what it has to."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import acceptance as gpu_acceptance
from tests.docs.launch import TIMEOUT_S, free_port, settings, torchrun
from tests.docs.markdown import ROOT, read
from tests.harness.patience import patient

README, PAGE = ROOT / "README.md", ROOT / "docs" / "quickstart.md"
TEXT = README.read_text()
(EXAMPLE,) = [block.text for block in read(README).blocks if block.language == "python"]
SCRIPT, TRAINING = [block.text for block in read(PAGE).blocks if block.language == "python"]
(CHANGES,) = [block.text for block in read(PAGE).blocks if block.language == "diff"]


@pytest.mark.long
@pytest.mark.parametrize("script", [EXAMPLE, SCRIPT], ids=["README", "quickstart"])
def test_the_example_runs_on_two_ranks_and_its_loss_falls(script: str, tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(script)
    result = torchrun(file)
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert len(losses) == 5, result.stdout
    assert losses[-1] < losses[0]
    assert result.stderr == ""
    if script is SCRIPT:
        assert losses == sorted(losses, reverse=True), "the page says that they fall"
        (shown,) = re.findall(r"^    (DTensor: .*)$", PAGE.read_text(), re.MULTILINE)
        assert result.stdout.splitlines()[-1] == shown


def test_the_variant_for_gpus_replaces_lines_that_are_there() -> None:
    """No GPU runs it here: that it parses and names what torch has is all that can be tried."""
    before, after = ("\n".join(re.findall(rf"^\{sign}(.*)$", CHANGES, re.MULTILINE)) for sign in "-+")
    assert SCRIPT.count(before) == 1
    tree = ast.parse(SCRIPT.replace(before, after))
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert "nccl" in constants
    assert "gloo" not in constants


@pytest.mark.in_turns
@pytest.mark.long
def test_the_training_script_learns_resumes_and_copies_per_node(
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
    commands = [block.text for block in read(PAGE).blocks if block.language == "bash"]
    (line,) = [line for line in "".join(commands).splitlines() if "--nnodes" in line]
    assert line.endswith("--nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint node0:29400 train.py")
    arguments = line.replace(" gpu ", " 2 ").replace("node0:29400", f"127.0.0.1:{free_port()}").split()[1:-1]
    command = [sys.executable, "-m", "torch.distributed.run", *arguments, str(script)]
    environment = {**os.environ, **settings()}
    nodes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    outputs = [node.communicate(timeout=patient(TIMEOUT_S))[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    return outputs


def test_what_make_gpu_is_said_to_print_has_the_form_of_what_it_prints() -> None:
    shown = re.findall(r"^    (?:PASS|NOT RUN) (\(\d\) .*)$", PAGE.read_text(), re.MULTILINE)
    assert shown
    assert {line.partition(": ")[0] for line in shown} <= {str(part) for part in gpu_acceptance.PARTS}
    assert gpu_acceptance.LIMIT_S == 8 * 60
    assert gpu_acceptance.RESULTS == ROOT / "benchmarks" / "results" / "gpu"


def test_both_say_that_several_gpus_have_not_run_it_and_that_step_times_do_not_carry_over() -> None:
    assert "not on several yet" in PAGE.read_text()
    assert "and not yet on several" in TEXT
    assert "**Step times on gloo do not carry over to GPUs:**" in TEXT


def test_the_readme_has_20_lines_of_code_two_commands_one_picture_one_table_with_losses_and_room_for_figures() -> None:
    assert len([line for line in EXAMPLE.splitlines() if line]) == 20, "its heading says so"
    (commands,) = re.findall(r"^## Two commands\n\n```bash\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE)
    assert re.findall(r"^make (\w+)", commands, re.MULTILINE) == ["train", "test"]
    assert len(re.findall(r"^\| ---", TEXT, re.MULTILINE)) == 1
    assert len(re.findall(r"^!\[", TEXT, re.MULTILINE)) == 1
    assert sum(float(ratio) > 1 for ratio in re.findall(r"^\| .* \| ([\d.]+) \|$", TEXT, re.MULTILINE)) >= 4
    assert all(f"| {peer}" in TEXT for peer in ("torch", "FSDP1", "DeepSpeed", "DDP"))
    assert 0 < TEXT.index("<!-- measured -->") < TEXT.index("<!-- /measured -->")


def test_the_readmes_first_screen_says_what_torch_does_not_have_and_what_each_costs() -> None:
    first = TEXT.partition("## Two commands")[0]
    assert len(first.splitlines()) <= 40
    items = re.split(r"\n- ", first)[1:]
    words = ("costs", "costs", "costs", "wrong", "replaces", "dropped", "costs", "must")
    for item, word in zip(items, words, strict=True):
        assert word in item, item
