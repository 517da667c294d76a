"""``python -m fsdp2 plan``: reads the command line, and prints a plan."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from fsdp2.tools.planner.machines import MACHINES
from fsdp2.tools.planner.plan import MOST_GPUS, Workload, cause_of, plan


def add_plan(commands: Any) -> None:
    """Add the subcommand to ``commands`` of a parser."""
    parser = commands.add_parser(
        "plan",
        help="compare the ways to shard a model on so many GPUs, without a GPU",
        description="Prints memory per GPU and step time for each way to shard a model, and Python to paste for the "
        "recommended one. Nothing is allocated.",
    )
    parser.add_argument(
        "builder", nargs="?", help="module:function that builds the model, such as my_module:build_model"
    )
    parser.add_argument("--hf", metavar="PATH", help="a Hugging Face config instead: its folder or config.json")
    parser.add_argument("--gpus", type=int, required=True, help="how many GPUs")
    parser.add_argument("--gpu", default="H100", help=f"{', '.join(MACHINES)}, or a file of `python -m fsdp2 measure`")
    parser.add_argument("--batch", type=int, default=1, help="sequences per GPU and step")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens per sequence")
    parser.add_argument("--optimizer", default="adamw", help="adamw, sgd, or 'sgd with momentum'")
    parser.add_argument("--precision", default="bf16", help="bf16 or fp32")
    parser.add_argument("--compiled", action="store_true", help="blocks run under torch.compile")
    parser.add_argument("--budget", help="what may be used of a GPU's memory, such as 70GiB; default: 95%%")
    parser.set_defaults(run=_print_plan)


def _print_plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Every refusal is one line that says what to write instead. If nothing fits, the exit code is 1."""
    try:
        if not 1 <= options.gpus <= MOST_GPUS:
            raise ValueError(f"--gpus is {options.gpus}, expected 1 to {MOST_GPUS}.")
        workload = Workload(
            options.batch,
            options.sequence,
            options.optimizer,
            options.precision,
            "compiled" if options.compiled else "eager",
        )
        found = plan(
            _builder(options.builder, options.hf),
            options.gpu,
            workload,
            num_gpus=options.gpus,
            budget=_budget(options.budget),
        )
    except (ValueError, TypeError) as error:
        parser.exit(2, f"{parser.prog} plan: error: {str(error).removeprefix('plan: ')}\n")
    if found.num_gpus > found.machine.node_size and found.machine.in_node == found.machine.network:
        print(f"warning: '{options.gpu}' has one rate for links in a node and between nodes.", file=sys.stderr)
    print(found)
    if found.recommended is None:
        parser.exit(1)
    print(f"\n{found.code}")


def _budget(text: str | None) -> str | int | None:
    """Digits alone are bytes, unless there are so few that a unit was forgotten."""
    return int(text) if text and text.isdecimal() and len(text) > 6 else text


def _builder(name: str | None, config: str | None) -> Callable[[], nn.Module]:
    if (name is None) == (config is None):
        raise ValueError("pass either module:function, such as my_module:build_model, or --hf and a config's path.")
    return _imported(name) if name is not None else _of_hugging_face(str(config))


def _imported(name: str) -> Callable[[], nn.Module]:
    module_name, _, function = name.partition(":")
    if not module_name or not function:
        missing = "function" if module_name else "module"
        raise ValueError(f"'{name}' names no {missing}, expected module:function, such as my_module:build_model.")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module does
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        advice = " Write it as in an import statement, seen from this folder." * is_missing
        if is_missing and module_name.endswith(".py"):
            advice = f" Write {module_name.removesuffix('.py')}:{function}."
        cause = f"{type(error).__name__}: {error}" if is_missing else cause_of(error)
        raise ValueError(f"cannot import '{module_name}' ({cause}).{advice}") from error
    builder = getattr(module, function, None)
    if not callable(builder):
        functions = ", ".join(sorted(key for key, value in vars(module).items() if callable(value))[:10])
        raise ValueError(f"module '{module_name}' has no function '{function}'; it has {functions or 'none'}.")
    return builder


def _of_hugging_face(path: str) -> Callable[[], nn.Module]:
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("--hf needs transformers. Run: pip install 'fsdp2[plan]', or pass module:function.")
    if not Path(path).exists():
        raise ValueError(f"found no config '{path}', expected a folder with a config.json, or the path of one.")
    transformers: Any = importlib.import_module("transformers")  # takes seconds
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except Exception as error:  # its checks are of many types
        raise ValueError(f"'{path}' is no Hugging Face config ({' '.join(str(error).split())[:200]}).") from error
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"--hf takes only causal language models, '{path}' is a {config.model_type}. Pass module:function."
        )

    def build_model() -> nn.Module:
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
        model.config.use_cache = False  # training needs no cache of keys and values
        return model

    return build_model
