"""``python -m fsdp2``: what ``plan``, ``measure`` and ``run`` print and write, and the one line that bad input gets."""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fsdp2
from fsdp2.__main__ import main
from fsdp2.tools.planner import measure
from fsdp2.tools.planner.machines import H100, fields_of
from fsdp2.tools.planner.plan import Workload
from tests.unit.planner_models import LanguageModel

WORKLOAD = Workload(batch=2, sequence=128)
MODULE = """
from torch import nn

def build_model():
    from tests.unit.planner_models import LanguageModel
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

def ends():
    raise SystemExit("bye")

def is_stopped():
    raise KeyboardInterrupt
"""

REFUSALS = {
    "my_builders:build": "module 'my_builders' has no function 'build'; it has build_model, ends, in_bf16, ",
    "my_builders": "'my_builders' names no function, expected module:function, such as my_module:build_model.",
    ":build": "':build' names no module, expected module:function, such as my_module:build_model.",
    "my_builders:without_blocks": "found no repeated blocks in this Linear, expected an nn.ModuleList, ",
    "not_there:build": "cannot import 'not_there' (ModuleNotFoundError: No module named 'not_there'). Write it as",
    "my_broken:build": "cannot import 'my_broken' (ZeroDivisionError: division by zero, ",
    "my_builders:on_a_gpu": "on_a_gpu() failed on the meta device (RuntimeError:",
    "my_builders:on_cuda": "on_cuda() failed on the meta device (",
    "my_builders:of_a_config": "of_a_config() failed on the meta device (TypeError:",
    "my_builders:of_floats": "this Convert does not run under fake tensors (",
    "my_builders:no_module": "no_module() returned a int, expected an nn.Module.",
    "my_builders:build_model --gpu H900": "unknown machine 'H900': expected one of H100, H200, B200,",
    "my_builders:build_model --budget 70GX": "budget is '70GX', expected a number of bytes, or a number and a unit",
    "my_builders:build_model --budget lots": "budget is 'lots', expected a number of bytes, or a number and a unit",
    "my_builders:build_model --budget 70": "budget is '70', expected a number of bytes, or a number and a unit",
    "my_builders:build_model --budget 500GiB": "budget is 500.0 GiB, but a GPU of 'H100 SXM, 8 per node, 400 Gb/s "
    "each' has 74.5 GiB. Pass less, or name your machine: machine='H200' in Python, --gpu H200 on the command line.",
    "my_builders:build_model --budget 0GiB": "budget is '0GiB', expected a number of bytes, or",
    "my_builders:build_model --budget=-5GiB": "budget is '-5GiB', expected a number of bytes, or",
    "my_builders:build_model --budget -5GiB": "argument --budget: expected one argument, which must not start with",
    "my_builders:build_model --gpus 0": "--gpus is 0, expected 1 to 131072.",
    "my_builders:build_model --gpus 100000000": "--gpus is 100000000, expected 1 to 131072.",
    "my_builders:build_model --precision int4": "Workload: precision is 'int4', expected one of ['bf16', 'fp32'].",
    "my_builders:build_model --master-dtype int8": "--master-dtype is 'int8', expected fp32, bf16 or model.",
    "my_builders:build_model --node-size 0": "--node-size is 0, expected at least 1.",
    "my_builders:build_model --host-memory 70": "--host-memory is '70', expected a number of bytes, or a number and a",
    "my_builders:build_model --optimizer lion": "Workload: optimizer is 'lion', expected one of ['adamw',",
    "my_builders:build_model --batch 0": "Workload: batch is 0, expected at least 1.",
    "--hf not_there": "found no config 'not_there', expected a folder with a config.json",
    "": "pass either module:function, such as my_module:build_model, or --hf and a config's path.",
    "my_exit:build": "cannot import 'my_exit' (SystemExit: 3, ",
    "my_syntax:build": "cannot import 'my_syntax' (SyntaxError: ",
    "my_builders.py:build": "cannot import 'my_builders.py' (ModuleNotFoundError: ",
    "my_builders:ends": "ends() failed on the meta device (SystemExit: bye, ",
    "my_builders:build_model --gpus 3.5": "argument --gpus: invalid int value: '3.5'",
    "my_builders:build_model --gpu bf16_flops.json": "'bf16_flops.json' describes no machine (Machine: bf16_flops is "
    "0, expected a number above 0). Write it with `python -m fsdp2 measure`.",
    "my_builders:build_model --gpu fp32_flops.json --precision fp32": "'fp32_flops.json' describes no machine (",
    "my_builders:build_model --gpu bandwidth_efficiency.json": "'bandwidth_efficiency.json' describes no machine (",
    "my_builders:build_model --gpu channels.json": "'channels.json' describes no machine (",
    "my_builders:build_model --gpu half.json": "'half.json' describes no machine (",
    "my_builders:build_model --gpu MI300X --precision fp32": "'MI300X, 8 per node, 400 Gb/s each' has no figure for "
    "products in fp32. Use precision bf16, or a machine that `python -m fsdp2 measure` measured.",
    "my_builders:build_model --gpu alone.json": "machine 'H100 SXM, 8 per node, 400 Gb/s each' has no figures for "
    "links between GPUs. Run `torchrun --nproc-per-node 8 -m fsdp2 measure FILE` with all GPUs of a node, or ",
}


@pytest.fixture
def builders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path = tmp_path_factory.mktemp("builders")
    (tmp_path / "my_builders.py").write_text(MODULE)
    (tmp_path / "my_broken.py").write_text("1 / 0")
    (tmp_path / "my_exit.py").write_text("raise SystemExit(3)")
    (tmp_path / "my_syntax.py").write_text("def f(:")
    for name in ("bf16_flops", "fp32_flops", "bandwidth_efficiency", "channels"):
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


@pytest.mark.parametrize("arguments", REFUSALS)
def test_bad_input_gets_one_line_that_says_what_to_write(arguments: str, command: Command) -> None:
    code, _, said = command("plan --gpus 8", *arguments.split())
    (line,) = said.splitlines()
    assert line.startswith("python -m fsdp2 plan: error: " + REFUSALS[arguments])
    assert code == 2
    if arguments == "my_builders:on_cuda":
        does = "A builder takes no arguments and makes the model alone: name no device in it, load no weights, and read"
        assert line.endswith(f"{does} no values.")


def test_an_interrupted_plan_ends_without_a_traceback_and_a_script_as_it_does(
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
    assert "budget: 70.0 GiB of 74.5 GiB" in printed
    assert " fp32 " in printed
    assert " bf16 " not in printed
    code, printed, _ = command(f"{PLAN} --gpus 1 --budget 1MiB")
    assert code == 1
    assert "nothing fits into 1.0 MiB" in printed.splitlines()[-1]


@pytest.mark.ci
def test_a_measured_machine_is_written_and_planned_for(tmp_path: Path, command: Command) -> None:
    """On one rank, links are not measured, so several GPUs are refused."""
    file = tmp_path / "machine.json"
    printed = command("measure --width 32", str(file))[1]
    assert "products: " in printed
    assert "links were not measured: to plan for several GPUs, run this under torchrun" in printed
    found = fsdp2.plan(LanguageModel, str(file), WORKLOAD, num_gpus=1)
    assert found.machine.name == "measured: cpu, 1 rank, links not measured"
    assert found.machine.bf16_flops > 0
    assert json.loads(file.read_text())["in_node"] is None
    with pytest.raises(ValueError, match=r"links not measured' has no figures for links between GPUs\. Run `torchrun"):
        fsdp2.plan(LanguageModel, str(file), WORKLOAD, num_gpus=2)
    assert fsdp2.plan(LanguageModel, str(file), WORKLOAD, num_gpus=1, budget="1MiB").enough_gpus is None


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


def test_load_that_comes_and_goes_is_not_taken_for_a_cost_of_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds * (1 if now < 8 else 10)  # another process starts then

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    extra = measure._extra_seconds(lambda: work(1.5), lambda: work(1), torch.device("cpu"))
    assert extra == pytest.approx(0.5)


def test_a_full_disk_leaves_the_old_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
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
    assert set(silent) <= {"-h,", "--hf", "--gpus", "--json"}
