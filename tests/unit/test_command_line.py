"""``python -m fsdp2``: what ``plan``, ``measure`` and ``run`` print and write, and the one line that bad input gets."""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import fsdp2
from fsdp2.__main__ import main
from fsdp2.planner.machines import H100, fields_of
from fsdp2.planner.workload import Workload
from fsdp2.report import comparison
from tests.harness.golden import texts_beside
from tests.harness.messages import wrapped
from tests.harness.selection import long
from tests.unit.planner.models import LanguageModel

WORKLOAD = Workload(batch=2, sequence=128)
MODULE = """
import torch
from torch import nn

def build_model():
    from tests.unit.planner.models import LanguageModel
    return LanguageModel()

def on_a_gpu():
    return nn.Linear(2, 2).to(device="nowhere")

def on_cuda():
    return nn.Linear(2, 2).cuda()

def of_a_config(config):
    return nn.Linear(2, 2)

def in_bf16():
    return build_model().bfloat16()

def no_module():
    return 3

def without_blocks():
    return nn.Linear(2, 2)

def of_floats():
    class Convert(nn.Sequential):
        def forward(self, x):
            return super().forward(x.bfloat16())
    return Convert(nn.Linear(8, 8), nn.Linear(8, 8))

def of_rows():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

def rows():
    return torch.empty(4, 8)

def wrong_rows():
    return torch.empty(4, 9)

def mean(output):
    return output.float().square().mean()

def ends():
    raise SystemExit("bye")

def is_stopped():
    raise KeyboardInterrupt
"""

# Each name in the file is what is typed behind ``plan --gpus 8``.
TEXTS = texts_beside(__file__)


@pytest.fixture
def builders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path = tmp_path_factory.mktemp("builders")
    (tmp_path / "my_builders.py").write_text(MODULE)
    (tmp_path / "my_broken.py").write_text("1 / 0")
    (tmp_path / "my_exit.py").write_text("raise SystemExit(3)")
    (tmp_path / "my_syntax.py").write_text("def f(:")
    for name in ("bf16_flops", "copy_bandwidth", "watts", "channels"):
        (tmp_path / f"{name}.json").write_text(json.dumps({**fields_of(H100), name: 0}))
    (tmp_path / "half.json").write_text('{"name": "half"}')
    (tmp_path / "alone.json").write_text(json.dumps(fields_of(replace(H100, in_node=None, network=None))))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = importlib.util.find_spec  # as if transformers were there
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "transformers" or found(name))
    monkeypatch.delitem(sys.modules, "my_builders", raising=False)


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], builders: None) -> Command:
    """Runs a command beside modules with builders; returns its code, and what it has printed and said."""

    def run(words: str, *arguments: str) -> tuple[int, str, str]:
        code: Any = 0
        try:
            main([*words.split(), *arguments])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


PLAN = "plan --sequence 64 my_builders:build_model"


def _write_bad_files(folder: Path) -> None:
    """Files of machines, reports and configs that are damaged, or not files."""
    for name in ("fifo.json", "fifo.py"):
        os.mkfifo(folder / name)
    (folder / "folder.json").mkdir()
    (folder / "loop.json").symlink_to("loop.json")
    texts = {"deep": "[" * 100_000, "surrogate": '{"name": "\\ud800"}', "number": "3", "list": "[]", "empty": ""}
    for name, text in texts.items():
        (folder / f"{name}.json").write_text(text)
    fields = fields_of(H100)
    for name, changed in {
        "nan": {"bf16_flops": math.nan},
        "text": {"memory_nbytes": "much"},
        "slow": {"copy_bandwidth": 5e-324},
        "link": {"in_node": 3},
        "extra": {"more": 1},
        "infinite": {"memory_nbytes": math.inf},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps({**fields, **changed}))
    report = dict.fromkeys(comparison._KEYS) | {"version": comparison.VERSION}
    for name, changed in {
        "units": {"units": 3},
        "names": {"units": [{}]},
        "none": {},
        "v": {"version": "\x1b"},
    }.items():
        (folder / f"report_{name}.json").write_text(json.dumps({**report, **changed}))
    configs = {"unknown": {"model_type": "\x1b[31m"}, "wrong": {"model_type": "llama", "num_attention_heads": 0}}
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))


_PLAN, _HF = "plan my_builders:build_model --sequence 64 --gpus 8", "plan --sequence 64 --gpus 8"
_BAD = "fifo.json folder.json loop.json deep.json surrogate.json number.json list.json empty.json /dev/zero a\0b \x1b["
_MACHINES = f"{_BAD} nan.json text.json slow.json link.json extra.json infinite.json"
_REPORTS = f"{_BAD} report_units.json report_names.json report_none.json report_v.json"
_NUMBERS = ("0", "-1", "x", "nan", "9" * 30)
WRONG = [
    *(f"{_PLAN} --gpu {each}" for each in _MACHINES.split(" ")),
    *(f"compare {each} {each}" for each in _REPORTS.split(" ")),
    *(
        f"measure --width 4 {each}"
        for each in ("fifo.json", "folder.json", "loop.json", "a\0b", "\x1b[/x", "/dev/full")
    ),
    *(f"measure o.json --width {each}" for each in (*_NUMBERS, "99999999999")),
    *(f"run {each}" for each in ("fifo.py", "folder.json", "loop.json", "a\0b", "\x1b[", "-m \x1b[", "-m ..x")),
    *(f"{_PLAN} {each}" for each in (f"--batch {'9' * 20}", "--budget nan", "--budget \x1b[", "--node-size 0")),
    *(f"plan my_builders:build_model --gpus {each}" for each in _NUMBERS),
]
# These run transformers, if it is there.
WRONG_CONFIGS = [f"{_HF} --hf {each}" for each in f"{_BAD} unknown wrong".split(" ")]


@pytest.mark.parametrize("words", WRONG, ids=ascii)
def test_wrong_command_lines_and_files_get_one_line_without_control_characters(words: str, command: Command) -> None:
    _check_refused(words, command)


@pytest.mark.parametrize("words", long(*WRONG_CONFIGS), ids=ascii)
def test_wrong_configs_get_one_line_without_control_characters(words: str, command: Command) -> None:
    pytest.importorskip("transformers")
    _check_refused(words, command)


def test_a_command_line_without_a_command_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert (ended.value.code, capsys.readouterr().err) == (
        2,
        "python -m fsdp2: error: no command was given, expected one of run, plan, measure, compare. --help says what "
        "they do.\n",
    )


def _check_refused(words: str, command: Command) -> None:
    _write_bad_files(Path.cwd())
    code, printed, said = command("", *words.split(" "))
    assert (code, printed) == (2, "")
    (line,) = said.splitlines()
    assert line.isprintable()
    assert len(line) < 1200


@pytest.mark.parametrize("model_type", long("my_own", "llama"))
def test_code_that_a_config_names_runs_only_with_the_flag(model_type: str, command: Command) -> None:
    """Without it, a config that transformers knows is planned for by its own class; nobody is asked."""
    pytest.importorskip("transformers")
    Path("own").mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = {**sizes, "vocab_size": 64, "model_type": model_type, "auto_map": {"AutoConfig": "own_config.Config"}}
    Path("own/config.json").write_text(json.dumps(config))
    Path("own/own_config.py").write_text(f"open({os.path.abspath('has_run')!r}, 'w').close()\n1 / 0\n")
    code, _, said = command(f"{_HF} --hf own")
    assert not Path("has_run").exists()
    assert (code, "--trust-remote-code" in said) == ((2, True) if model_type == "my_own" else (0, False))
    code, _, said = command(f"{_HF} --hf own --trust-remote-code")
    assert Path("has_run").exists()
    assert (code, len(said.splitlines())) == (2, 1)


@pytest.mark.parametrize("arguments", TEXTS.names())
def test_bad_input_gets_one_line_that_says_what_to_write(arguments: str, command: Command) -> None:
    code, _, said = command("plan --gpus 8", *arguments.removeprefix("(nothing)").split())
    (line,) = said.splitlines()
    line = re.sub(r"/\S*/(\w+\.py):\d+", r"\1", line)
    of_others = r"(?:(RuntimeError|SyntaxError)|AssertionError|NotImplementedError): .*?(, \w+\.py(?=\))|(?=\)\. ))"
    line = re.sub(of_others, r"\1: what others say", line)
    TEXTS.check(arguments, wrapped(line.removeprefix("python -m fsdp2 plan: error: ")))
    assert code == 2


def test_interrupted_plans_end_in_one_line_and_scripts_as_they_do(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    assert command("plan --gpus 8 my_builders:is_stopped") == (130, "", "\npython -m fsdp2 plan: interrupted\n")
    Path("script.py").write_text("raise KeyboardInterrupt")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(fsdp2, "install", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        main(["run", "script.py"])


def test_torch_logs_no_traceback_above_the_line(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    logged: list[logging.LogRecord] = []
    log = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(log, "handlers", [logging.Handler()])
    monkeypatch.setattr(log.handlers[0], "emit", logged.append)
    command("plan --gpus 8 my_builders:of_floats")
    assert not logged
    assert not log.disabled


def test_the_extra_for_configs_of_hugging_face_is_named(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    says = "--hf needs transformers. Run: pip install transformers, or pass module:function.\n"
    assert command("plan --gpus 8 --hf config.json") == (2, "", f"python -m fsdp2 plan: error: {says}")


@pytest.mark.ci
def test_the_command_prints_a_table_and_python_to_paste(command: Command) -> None:
    """With a budget in bytes, and the precision."""
    printed = command(f"{PLAN} --gpus 8 --batch 2")[1]
    assert "* FSDP" in printed
    compile(printed[printed.index("import torch") :], "pasted", "exec")
    printed = command(f"{PLAN} --gpus 8 --budget 75161927680 --precision fp32")[1]
    assert "budget: 70.0 GiB of 79.1 GiB" in printed
    assert " fp32 " in printed
    assert " bf16 " not in printed
    code, printed, _ = command(f"{PLAN} --gpus 1 --budget 1MiB")
    assert code == 1
    assert "nothing fits into 1.0 MiB" in printed.splitlines()[-1]


def test_a_model_without_tokens_gets_its_inputs_and_loss_by_name(command: Command) -> None:
    words = "plan --gpus 8 my_builders:of_rows --inputs my_builders:rows --loss my_builders:mean"
    assert "* FSDP" in command(words)[1]


@pytest.mark.ci
def test_a_measured_machine_is_written_and_planned_for(tmp_path: Path, command: Command) -> None:
    """On one rank, links are not measured, so several GPUs are refused."""
    file = tmp_path / "machine.json"
    printed = command("measure --width 32", str(file))[1]
    assert "products: " in printed
    assert "links were not measured: to plan for several GPUs, run this under torchrun" in printed
    found = fsdp2.planner.plan(LanguageModel, str(file), WORKLOAD, num_gpus=1)
    assert found.machine.name == "measured: cpu, 1 rank, links not measured"
    assert found.machine.bf16_flops == found.machine.reached.bf16 > 0
    assert json.loads(file.read_text())["in_node"] is None
    with pytest.raises(ValueError, match=r"links not measured' has no figures for links between GPUs\. Run `torchrun"):
        fsdp2.planner.plan(LanguageModel, str(file), WORKLOAD, num_gpus=2)
    assert fsdp2.planner.plan(LanguageModel, str(file), WORKLOAD, num_gpus=1, budget="1MiB").enough_gpus is None


@pytest.mark.parametrize(
    "arguments",
    [
        *("{0} --width 4", "{0}/no/m.json --width 4", "{0}/m.json --width 0", "/dev/null --width 4"),
        *(f"{{0}}/m.json --sizes {sizes}" for sizes in ("64", "64,1", "4,4", "0,1", "one", "1,inf")),
    ],
)
def test_measure_checks_its_arguments_first(arguments: str, tmp_path: Path, command: Command) -> None:
    code, _, said = command(f"measure {arguments.format(tmp_path)}")
    assert (code, len(said.splitlines())) == (2, 1)
    sizes = f"--sizes is '{arguments.split()[-1]}', expected at least two sizes in MiB, ascending"
    assert said.startswith(f"python -m fsdp2 measure: error: {sizes if '--sizes' in arguments else ''}")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_old_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    file = tmp_path / "machine.json"
    file.write_text("old")
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert f"cannot write '{file}' (No space left on device)" in command("measure --width 32", str(file))[2]
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


def test_a_machine_with_one_rate_for_both_links_is_warned_about(command: Command) -> None:
    Path("flat.json").write_text(json.dumps(fields_of(replace(H100, network=H100.in_node))))
    said = f"warning: '{H100.name}' has one rate for links in a node and between nodes. Measure on two nodes: torchrun "
    for num_gpus in (8, 16):
        assert (said in command(f"{PLAN} --gpu flat.json --gpus {num_gpus}")[1]) is (num_gpus == 16)


def test_nodes_of_another_size_and_a_host_with_other_memory_are_planned_for(command: Command) -> None:
    printed = command(f"{PLAN} --gpus 12 --node-size 4 --host-memory 1TiB")[1]
    assert "12 x H100 SXM, 8 per node, 400 Gb/s each, but 4 per node; " in printed
    assert "972.8 GiB of a node's host" in printed
    assert "warning" not in printed
    assert "warning: 12 GPUs are no whole number of nodes of 8: " in command(f"{PLAN} --gpus 12")[1]


def test_json_is_all_that_is_printed_and_has_all_choices(command: Command) -> None:
    found = json.loads(command(f"{PLAN} --gpus 8 --json")[1])
    chosen = next(each for each in found["choices"] if each["name"] == found["recommended"])
    assert chosen["fits"]
    assert chosen["step_s"] > chosen["exposed_s"] > 0
    assert chosen["reserved_nbytes"] > chosen["params_nbytes"] > 0
    assert chosen["host_nbytes"] == 0
    assert (found["workload"]["master_dtype"], found["sharded_in"]) == ("fp32", "fp32")
    compile(found["code"], "pasted", "exec")
    code, printed, _ = command(f"{PLAN} --gpus 1 --budget 1MiB --json")
    nothing = json.loads(printed)
    assert (code, nothing["recommended"], nothing["code"]) == (1, None, None)
    assert nothing["why_nothing_fits"].startswith("nothing fits into 1.0 MiB")


def test_a_model_in_bf16_is_sized_with_masters_in_fp32_unless_asked_otherwise(command: Command) -> None:
    of_bf16 = "plan --sequence 64 my_builders:in_bf16 --gpus 8"
    fp32, bf16, model = (command(f"{of_bf16} --master-dtype {name}")[1] for name in ("fp32", "bf16", "model"))
    assert command(of_bf16)[1] == fp32
    assert "shards, gradients and optimizer in fp32; the model is built in bf16\n" in fp32
    assert "param.data = param.data.float()  # master weights" in fp32
    assert bf16 == model
    assert "shards, gradients and optimizer in bf16\n" in bf16
    assert "warning: shards, gradients and the optimizer's states are in bf16" in bf16
    assert "param.data" not in bf16


@pytest.mark.parametrize("name", ["plan", "measure"])
def test_help_says_all_defaults(name: str, command: Command) -> None:
    options = re.split(r"\n  (?=-)", command(f"{name} --help")[1].partition("options:")[2])
    silent = [each.split()[0] for each in options[1:] if "default: " not in " ".join(each.split())]
    assert set(silent) <= {"-h,", "--hf", "--gpus", "--inputs", "--json", "--loss", "--trust-remote-code"}
