"""``python -m fsdp2 plan``: reads the command line and prints a plan."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from fsdp2.extras.foreign_files import printable, read_json
from fsdp2.extras.sizes import nbytes_of
from fsdp2.planner.candidates import MOST_GPUS, plan
from fsdp2.planner.machine import Machine
from fsdp2.planner.machines import MACHINES, machine_by_name
from fsdp2.planner.scenario import Kernels
from fsdp2.planner.workload import MASTER_DTYPES, Workload, cause_of

_AS_BUILT = "model"
_DEFAULT = "default: %(default)s"


def add_plan(commands: Any) -> None:
    """Add the subcommand to ``commands`` of a parser."""
    parser = commands.add_parser(
        "plan",
        help="compare the ways to shard a model on so many GPUs, without a GPU",
        description="Prints memory per GPU and step time for each way to shard a model, and Python to paste for the "
        "recommended one. Nothing is allocated. Pipeline parallelism is not planned.",
    )
    add = parser.add_argument
    add("builder", nargs="?", help="module:function that builds the model, such as my_module:build_model")
    add("--hf", metavar="PATH", help="a Hugging Face config instead: its folder or config.json")
    add("--trust-remote-code", action="store_true", help="run the Python that the config of --hf names in auto_map")
    add("--gpus", type=int, required=True, help="how many GPUs")
    add("--gpu", default="H100", help=f"{', '.join(MACHINES)}, or a file of `python -m fsdp2 measure`; {_DEFAULT}")
    add("--node-size", type=int, help="GPUs per node; default: that of --gpu, which is 8 for those with a name")
    add(
        "--inputs",
        help="module:function that makes the model's inputs, for a model that does not take tokens: batch and all",
    )
    add("--loss", help="module:function that makes a loss of the model's output, if that is not logits")
    add("--batch", type=int, default=1, help=f"sequences per GPU and step; {_DEFAULT}")
    add("--sequence", type=int, default=8192, help=f"tokens per sequence; {_DEFAULT}")
    add("--optimizer", default="adamw", help=f"adamw, sgd, or 'sgd with momentum'; {_DEFAULT}")
    add(
        "--precision",
        default="bf16",
        help=f"of compute: bf16, fp32, or fp8, in which blocks multiply by their weights in fp8; {_DEFAULT}",
    )
    add("--reduce-dtype", default="fp32", help=f"in which gradients travel and are summed: fp32 or bf16; {_DEFAULT}")
    add("--micro-batches", type=int, default=1, help=f"forwards and backwards per step; {_DEFAULT}")
    add("--tensor-parallel", type=int, default=1, help=f"GPUs that share every product, and --batch; {_DEFAULT}")
    add("--context-parallel", type=int, default=1, help=f"GPUs that share every sequence; {_DEFAULT}")
    add("--network", type=float, help="Gb/s between nodes for each GPU; default: that of --gpu")
    add("--watts", type=float, help="power limit of a GPU; default: that of --gpu")
    add(
        "--master-dtype",
        default="fp32",
        help="of the shards that are trained, their gradients and the optimizer's states: fp32, bf16, or model, which "
        f"is what the model is built in, as torch_dtype of a Hugging Face config says; {_DEFAULT}",
    )
    add("--compiled", action="store_true", help="blocks run under torch.compile; default: eager")
    add("--compiled-loss", action="store_true", help="blocks and the loss run under torch.compile; default: eager")
    add("--budget", help="what may be used of a GPU's memory, such as 70GiB; default: 95%% of it")
    add("--host-memory", help="of a node, for offloading, which may use 95%% of it; default: that of --gpu, if known")
    add("--json", action="store_true", help="print all choices as JSON, and nothing else")
    parser.set_defaults(run=_print_plan)


def _print_plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Each error is one line that says what to write instead. If nothing fits, the exit code is 1."""
    try:
        if not 1 <= options.gpus <= MOST_GPUS:
            raise ValueError(f"--gpus is {options.gpus}, expected 1 to {MOST_GPUS}.")
        found = plan(
            _builder(options.builder, options.hf, trusts_code=options.trust_remote_code),
            _machine(options.gpu, options.node_size, options.host_memory, options.watts, options.network),
            _workload(options),
            num_gpus=options.gpus,
            budget=_size(options.budget),
        )
    except (ValueError, TypeError, OverflowError) as error:
        parser.exit(2, f"{parser.prog} plan: error: {_as_options(str(error).removeprefix('plan: '))}\n")
    if options.json:
        print(json.dumps(found.data, indent=2))  # ASCII
    else:
        print(printable(_as_options(str(found))))
    if found.recommended is None:
        parser.exit(1)
    if not options.json:
        print(f"\n{printable(str(found.code))}")


def _as_options(text: str) -> str:
    """``text`` with options instead of arguments."""
    text = text.replace("limited_to: watts", "--watts").replace("with_network: gigabits", "--network")
    text = re.sub(r"^Workload: (\w+) is", lambda found: f"--{found[1].replace('_', '-')} is", text)
    text = re.sub(r"\b(tensor|context)_parallel\b", r"--\1-parallel", text)
    return re.sub(r"Workload(?:\.|\()(inputs|loss)(?:=\.\.\.\))?", r"--\1", text)


def _workload(options: argparse.Namespace) -> Workload:
    master = options.master_dtype
    if master not in (*MASTER_DTYPES, _AS_BUILT):
        raise ValueError(f"--master-dtype is '{master}', expected {', '.join(MASTER_DTYPES)} or {_AS_BUILT}.")
    return Workload(
        options.batch,
        options.sequence,
        options.optimizer,
        options.precision,
        _kernels(options).value,
        master_dtype=None if master == _AS_BUILT else master,
        reduce_dtype=options.reduce_dtype,
        micro_batches=options.micro_batches,
        tensor_parallel=options.tensor_parallel,
        context_parallel=options.context_parallel,
        inputs=options.inputs and _imported(options.inputs, "--inputs: ", "make_inputs"),
        loss=options.loss and _imported(options.loss, "--loss: ", "loss"),
    )


def _kernels(options: argparse.Namespace) -> Kernels:
    if options.compiled_loss:
        return Kernels.COMPILED_LOSS
    return Kernels.COMPILED if options.compiled else Kernels.EAGER


def _machine(
    name: str, node_size: int | None, host_memory: str | None, watts: float | None, network: float | None
) -> Machine:
    """The machine called ``name``, optionally with another node size, host memory, power limit or network."""
    machine = machine_by_name(name)
    if node_size is not None and node_size != machine.node_size:
        if node_size < 1:
            raise ValueError(f"--node-size is {node_size}, expected at least 1.")
        machine = replace(machine, name=f"{machine.name}, but {node_size} per node", node_size=node_size)
    if network is not None:
        machine = machine.with_network(network)
    if watts is not None:
        machine = machine.limited_to(watts)
    if host_memory is not None:
        size = _size(host_memory) or host_memory
        machine = replace(machine, host_memory_nbytes=nbytes_of(size, "--host-memory", "1TiB"))
    return machine


def _size(text: str | None) -> str | int | None:
    """Digits alone are bytes, unless they are so few that the unit must have been forgotten."""
    return int(text) if text and text.isdecimal() and len(text) > 6 else text


def _builder(name: str | None, config: str | None, *, trusts_code: bool) -> Callable[[], nn.Module]:
    if (name is None) == (config is None):
        raise ValueError("pass either module:function, such as my_module:build_model, or --hf and a config's path.")
    return _imported(name) if name is not None else _of_hugging_face(str(config), trusts_code=trusts_code)


def _imported(name: str, option: str = "", example: str = "build_model") -> Callable[..., Any]:
    """``option`` begins errors."""
    module_name, _, function = name.partition(":")
    if not module_name or not function:
        missing = "function" if module_name else "module"
        raise ValueError(f"{option}'{name}' names no {missing}, expected module:function, such as my_module:{example}.")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module does
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        advice = " Write it as in an import statement, seen from this folder." * is_missing
        if is_missing and module_name.endswith(".py"):
            advice = f" Write {module_name.removesuffix('.py')}:{function}."
        cause = f"{type(error).__name__}: {error}" if is_missing else cause_of(error)
        raise ValueError(f"{option}cannot import '{module_name}' ({cause}).{advice}") from error
    builder = getattr(module, function, None)
    if not callable(builder):
        functions = ", ".join(sorted(key for key, value in vars(module).items() if callable(value))[:10])
        raise ValueError(f"{option}module '{module_name}' has no function '{function}'; it has {functions or 'none'}.")
    return builder


def _of_hugging_face(path: str, *, trusts_code: bool) -> Callable[[], nn.Module]:
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("--hf needs transformers. Run: pip install transformers, or pass module:function.")
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    if not os.path.exists(file):
        raise ValueError(f"found no config '{path}', expected a folder with a config.json, or the path of one.")
    try:
        has_code = "auto_map" in read_json(file)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"'{path}' is no Hugging Face config ({str(error).rstrip('.')}).") from error
    remote = {"trust_remote_code": trusts_code, "local_files_only": True}  # without an answer, it asks on stdin
    transformers: Any = importlib.import_module("transformers")  # takes seconds
    try:
        config = transformers.AutoConfig.from_pretrained(path, **remote)
    except Exception as error:  # its checks are of many types
        if has_code and not trusts_code:
            raise ValueError(
                f"the model of '{path}' is not in transformers, only in Python code that auto_map names. Read that "
                "code, and if you trust it, add --trust-remote-code."
            ) from error
        raise ValueError(f"'{path}' is no Hugging Face config ({' '.join(str(error).split())[:200]}).") from error
    is_own = trusts_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or ())
    if not is_own and type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"--hf takes only causal language models, '{path}' is a {config.model_type}. Pass module:function."
        )

    def build_model() -> nn.Module:
        made = transformers.AutoModelForCausalLM.from_config  # in its torch_dtype
        model: Any = made(config, trust_remote_code=trusts_code)
        model.config.use_cache = False  # training needs no cache of keys and values
        return model

    return build_model
