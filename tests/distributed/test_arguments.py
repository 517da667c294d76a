"""Every public argument that is a number, flag, size, dtype, device, path or choice refuses wrong values, at the call.

The table is made from the signatures. A new public argument fails this test until it has a check, or a row in a table
below that says why it needs none.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import planner, tensors
from tests.distributed.support import sharded, step
from tests.harness.distributed import RankContext, distributed

NOT_BUILT = (BaseException, Enum)
# Users read these, and call their methods, but the package makes them.
MADE_BY_THE_PACKAGE = {
    "GradientReductionHandle",
    "UnshardHandle",
    "optim.Matrix",
    "optim.WholeMatrices",
    "checkpoint.AsyncSave",
    "checkpoint.BucketManifest",
    "checkpoint.CheckpointMapping",
    "checkpoint.FullParamStream",
    "checkpoint.LoadedKeys",
    "checkpoint.MergedLora",
    "checkpoint.Mirror",
    "checkpoint.Restored",
    "checkpoint.StreamedBucket",
    "checkpoint.StreamedTensor",
    "memory.ActivationOffload",
    "memory.MemoryPlan",
    "memory.OffloadChoice",
    "memory.UnitActivations",
    "memory.UnitBytes",
    "memory.UnitMemory",
    "planner.AutoShard",
    "planner.Candidate",
    "planner.Plan",
    "report.Comparison",
    "tensors.Float8Tensor",
    "fsdp1.FlatParameter",
}
# Called by the runtime, or by torch.
NOT_CALLED = re.compile(r"\.(fsdp_\w+|forward|make|check_cut_along_rows|requires_grad_|zero_grad)$")
EXCEPTIONS = {
    ("CPUOffloadPolicy", "*"): "torch's dataclass, which checks nothing; fully_shard checks it",
    ("MixedPrecisionPolicy", "*"): "torch's dataclass, which checks nothing; fully_shard checks it",
    ("DataParallelMeshDims", "*"): "torch's dataclass; fully_shard compares it with the mesh",
    ("fsdp1.ShardedGradScaler", "*"): "torch's constructor",
    ("planner.Machine.is_made_of", "device"): "text that is searched for",
    ("planner.Machine.attention_seconds", "*"): "the planner asks, for what it has observed",
    ("planner.Machine.product_seconds", "*"): "the planner asks, for what it has observed",
    ("planner.Machine.knows", "*"): "the planner asks, for what it has observed",
    ("planner.Machine.slowest_of", "*"): "the planner asks, for a number of GPUs that it has checked",
    ("planner.Workload.part_of_gpu", "*"): "the planner asks, for a workload that it has checked",
    ("planner.Workload.text", "*"): "the planner asks, for a workload that it has checked",
    ("optim.MatrixRule.boxes", "shape"): "whole_matrices calls it, and names the tensor",
    ("optim.MatrixRule", "sizes"): "rows, columns and heads make it, and check it",
    ("register_fsdp_forward_method", "method_name"): "torch ignores names of no method, and so does fsdp2",
}
# None of these kinds: checked where they are used.
OBJECTS = re.compile(
    r"$|<class 'inspect._empty'>|_\w$|T$|.*\b(Any|Module|DeviceMesh|FSDPModule|Tensor|Parameter|Callable|Iterable|"
    r"Mapping|Optimizer|\w+Policy|DataParallelMeshDims|ShardPlacementFn|Shard|Rule|Workload|Machine|Expression|Rename|"
    r"MappingLike|ProcessGroups?|SavePlanner|StateDictOptions|Transform|Weights|Cost|Make|MatrixRule|FSDPExtensions|"
    r"GradientWire|Event|Stream|DeviceId|Reached|Attention|Product|ShardingStrategy|CPUOffload|BackwardPrefetch|MixedPrecision|Link|Algorithm|"
    r"Contention|Plan|MXBlocks|Float8Scaling|ModelOrBuilder|Report|StorageReader|StateDict\w*|OptimState\w+|OptimInput|"
    r"object|dict)\b"
)
NEXT_TO_OTHERS = ("None", "Tensor", "torch.Tensor", 'Literal["inf"]', "Literal['inf']")  # what else an argument may be
CHOICES = {"ClipBy", "Copies", "Checkpointing | str"}
CHOICES_IN_TEXT = {"adjust_lr_fn", "optimizer", "precision", "kernels", "master_dtype", "experts", "shard", "replicate"}

NOT_A_NUMBER = ("x", None, [], True, math.nan, math.inf, -math.inf, -1)
NOT_BYTES = ("x", "5 parsecs", None, [], True, math.nan, math.inf, -1)
WRONG: dict[str, tuple[object, ...]] = {
    "bool": ("no", None, [], 1.0, 2, math.nan),
    "bool | int": ("no", None, [], 1.5, math.nan, -1),
    "int": (*NOT_A_NUMBER, 1.5),
    "float": NOT_A_NUMBER,
    "tuple[float, float]": ("x", None, (0.9,), (math.nan, 0.9), (0.9, 2), ("a", "b")),
    "Coefficients": ("x", None, (1.0,), (1.0, math.nan, 1.0), (1.0, "a", 1.0), (1.0, math.inf, 1.0)),
    "int | str": NOT_BYTES,
    "str | int": NOT_BYTES,
    "torch.dtype": ("bfloat16", 1, [], None, float),
    "str | os.PathLike[str]": (1, [], None, b"x", "", "a\0b"),
    "torch.device | str": ("nonsense", 1.5, []),
    "str": (None, 1, []),
    "a choice": ("nonsense", 1, [], None),
    "Sequence[int]": (1, None, ("a",), (0,), (1.5,)),
    "Sequence[tuple[int, ...]]": (1, None, ("a",), ((1.5,),)),
    "tuple[int, ...]": (1, "x", (1.5,)),
    "tuple[str, ...]": (1, (1,)),
}
RATES = (
    *("bf16_flops", "memory_nbytes", "copy_bandwidth", "watts", "host_bandwidth", "host_memory_nbytes"),
    *("bf16", "fp8", "fp32", "attention", "attention_backward"),
)
RIGHT: dict[tuple[str, str], tuple[object, ...]] = {  # of one argument, though wrong for others of its kind
    ("clip_grad_norm_", "max_norm"): (math.inf,),  # only measures
    ("clip_grad_norm_", "norm_type"): (math.inf,),
    ("FullyShardedDataParallel.clip_grad_norm_", "max_norm"): (math.inf,),
    ("FullyShardedDataParallel.clip_grad_norm_", "norm_type"): (math.inf,),
    ("optim.HostAdamW", "max_norm"): (math.inf,),
    # A machine on which something takes no time.
    **{(f"planner.{name}", rate): (math.inf,) for name in ("Machine", "Reached") for rate in RATES},
    ("planner.Machine.limited_to", "watts"): (math.inf,),
    ("planner.Machine.with_network", "gigabits"): (math.inf,),
    ("planner.Link", "bandwidth"): (math.inf,),
    ("checkpoint.Concat", "dim"): (-1,),
    ("checkpoint.Stack", "dim"): (-1,),
    ("checkpoint.Transpose", "dim0"): (-1,),
    ("checkpoint.Transpose", "dim1"): (-1,),
    ("testing.check_all_gather_extension", "dim"): (-1,),
    ("whole_init", "seed"): (-1,),  # as torch.manual_seed
}


WITH: dict[tuple[str, str], dict[str, Any]] = {  # without these, another argument would be refused first
    ("auto_shard", "budget"): {"workload": planner.Workload(1, 8)},
    ("fully_shard", "reshard_after_forward"): {"module": nn.Linear(2, 2)},
}


class Argument(NamedTuple):
    label: str
    function: Callable[..., Any]
    name: str
    values: list[object]


def functions() -> Iterator[tuple[str, Any]]:
    """Every public function, constructor and method, once, with the name by which users call it. An override of a
    method of torch has torch's arguments."""
    seen: set[int] = set()
    for room in ("", *fsdp2._ROOMS):
        module = importlib.import_module(f"fsdp2.{room}".rstrip("."))
        for name in module.__all__:
            found, label = getattr(module, name), f"{room}.{name}".lstrip(".")
            is_ours = getattr(found, "__module__", "").startswith("fsdp2.") and callable(found)
            if not is_ours or id(found) in seen or (isinstance(found, type) and issubclass(found, NOT_BUILT)):
                continue
            seen.add(id(found))
            yield label, found
            for each, method in inspect.getmembers(found, inspect.isroutine) if isinstance(found, type) else ():
                is_torchs = any(hasattr(base, each) for base in found.__mro__ if base.__module__.startswith("torch."))
                if not is_torchs and not each.startswith("_") and getattr(method, "__module__", "")[:6] == "fsdp2.":
                    yield f"{label}.{each}", method


def arguments() -> Iterator[Argument]:
    """Each argument of these kinds, with its wrong values."""
    for label, function in functions():
        if label in MADE_BY_THE_PACKAGE or label.rpartition(".")[0] in MADE_BY_THE_PACKAGE or NOT_CALLED.search(label):
            continue
        for each in inspect.signature(function).parameters.values():
            if (label, each.name) in EXCEPTIONS or (label, "*") in EXCEPTIONS or each.name in ("self", "cls"):
                continue
            parts = str(each.annotation).split(" | ")
            kind = " | ".join(part for part in parts if part not in NEXT_TO_OTHERS)
            if kind.startswith("Literal") or kind in CHOICES or (kind == "str" and each.name in CHOICES_IN_TEXT):
                kind = "a choice"
            if kind not in WRONG:
                assert OBJECTS.match(kind), f"{label}: which values of {each.name}, which is {kind}, are wrong?"
                continue
            right = (*RIGHT.get((label, each.name), ()), *([None] if "None" in parts else []))
            yield Argument(label, function, each.name, [value for value in WRONG[kind] if value not in right])


def right_values(model: nn.Module) -> dict[str, Any]:
    """Right values of arguments without a default, by name; and objects that have methods."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    params, data, machine = list(model.parameters()), torch.zeros(4, 4), planner.MACHINES["H100"]
    return {
        "model": model, "module": model, "mesh": mesh, "new_mesh": mesh, "experts": "a", "shard": "b",
        "params": params, "parameters": params, "tensors": params, "max_norm": 1.0, "data": data, "inner": data,
        "weight": data, "batches": [1], "seed": 0, "optimizer": torch.optim.SGD(params, lr=0.1), "state_dict": {},
        "checkpoint_id": "saved", "checkpoint": "saved", "path_or_index": "saved", "folder": "saved",
        "device_nbytes": "1GiB", "batch": 1, "sequence": 8, "workload": planner.Workload(1, 8), "machine": machine,
        "num_gpus": 1, "every": 1, "num_shards": 2, "bandwidth": 1.0, "latency": 0.0, "name": "m", "bf16_flops": 1.0,
        "reached": machine.reached, "bf16": 1.0, "fp8": None, "fp32": None, "attention": 1.0,
        "attention_backward": 1.0, "num_processors": 1, "memory_nbytes": 1.0, "copy_bandwidth": 1.0, "node_size": 1,
        "in_node": None, "network": None, "kind": "whole", "num_heads": 1, "rows": 1, "columns": 1, "parts": ["a", "b"],
        "part": "a", "files": "a", "first": "a.json", "second": "b.json", "wire": tensors.Int8Wire(),
        "make": tensors.BFloat16AllGatherTensor, "factor": 1.0, "max_input_buffers": 1, "shape": (4, 4),
        "optim": None, "optim_state_dict": {}, "tensors.NF4Tensor": tensors.NF4Tensor.quantise(torch.zeros(4, 64)),
        "optim.MatrixRule": fsdp2.optim.MatrixRule.whole(), "planner.Machine": machine,
        "FullyShardedDataParallel": fsdp2.FullyShardedDataParallel(nn.Linear(2, 2)),
    }  # fmt: skip


def called_with(argument: Argument, value: object, model: nn.Module, right: dict[str, Any]) -> None:
    """Call the function with a wrong value, and right ones of the arguments that have no default."""
    label, function, name, _ = argument
    positional: list[object] = []
    keywords: dict[str, object] = {}
    for each in inspect.signature(function).parameters.values():
        if each.name == "self":
            positional.append(model if label.startswith("FSDPModule") else right[label.rpartition(".")[0]])
        elif each.kind is each.VAR_POSITIONAL:
            positional += [value] if each.name == name else []
        elif each.name == name:
            keywords[name] = value
        elif each.default is each.empty and each.kind is not each.VAR_KEYWORD:
            keywords[each.name] = True if str(each.annotation).startswith("bool") else right[each.name]
    if positional and function is fsdp2.report.report:
        positional.insert(0, keywords.pop("model"))
    keywords |= WITH.get((label, name), {})
    result = function(*positional, **keywords)
    if isinstance(result, AbstractContextManager):
        with result:
            pass


def state_of(model: nn.Module) -> object:
    """What a refused call must not have changed."""
    units = [module._unit() for module in model.modules() if isinstance(module, fsdp2.FSDPModule)]
    hooks = [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in model.modules()]
    values = [(id(value), value._version) for value in model.parameters()]
    return hooks, values, [(unit.config, [str(group.options) for group in unit.groups]) for unit in units]


def problem_of(argument: Argument, value: object, model: nn.Module, right: dict[str, Any]) -> str | None:
    """Why the call is not refused as it should be; None if it is."""
    try:
        called_with(argument, value, model, right)
    except (TypeError, ValueError) as error:
        function = argument.label.removeprefix("FSDPModule.").rpartition(".")[2]
        found = str(error)
        is_clear = argument.name in found and function in found and ("expected" in found or "Pass" in found)
        return None if is_clear else f"says {found}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@distributed(1)
def test_wrong_values_of_every_argument_are_refused_at_the_call(ctx: RankContext, tmp_path: Path) -> None:
    model, problems = sharded(ctx), []
    right, before, folder = right_values(model), state_of(model), Path.cwd()
    os.chdir(tmp_path)  # what an accepted value might write
    try:
        for argument in arguments():
            for value in argument.values:
                problem = problem_of(argument, value, model, right)
                is_same = state_of(model) == before
                if problem is not None or not is_same:
                    problems.append(f"{argument.label}({argument.name}={value!r}): {problem or 'changed the model'}")
                if not is_same:
                    model = sharded(ctx)
                    right, before = right_values(model), state_of(model)
    finally:
        os.chdir(folder)
    assert not problems, "\n".join(problems)


@distributed(1)
def test_values_that_programs_for_torch_pass_are_taken(ctx: RankContext) -> None:
    """Flags of comparisons and settings, numbers of numpy, and what torch's clipping documents."""
    model = sharded(ctx)
    for flag in (np.True_, np.int64(5) > 3, 1, 0):
        model.set_requires_gradient_sync(flag)
        model.set_is_last_backward(flag)
    model.set_requires_gradient_sync(True)
    model.set_gradient_divide_factor(np.float32(2))
    step(model)
    params = list(model.parameters())
    norm = fsdp2.clip_grad_norm_(params, math.inf)
    assert fsdp2.clip_grad_norm_(params, torch.tensor(np.inf), norm_type=np.int64(2), foreach=None) == norm > 0
    largest = max(float(param.grad.to_local().abs().max()) for param in params)
    assert fsdp2.clip_grad_norm_(params, 0, "inf") == largest
    assert not any(param.grad.to_local().any() for param in params)
    assert fsdp2.optim.Muon([model.blocks[0].linear.weight], lr=torch.tensor(0.1), eps=0, ns_steps=np.int64(3))


@pytest.mark.parametrize("name", ["Muon", "HostAdamW", "AdamW8bit"])
@distributed(1)
def test_options_of_param_groups_are_checked_as_those_of_the_constructor(ctx: RankContext, name: str) -> None:
    """torch checks neither: AdamW steps with an infinite ``eps``, and writes NaN for a ``beta`` of NaN."""
    params = list(sharded(ctx).parameters())
    of_adamw = {"use_muon": False} if name == "Muon" else {}
    for key, values in {"lr": (math.inf, math.nan, -1.0, "1"), "eps": (math.inf, -1.0, None)}.items():
        for value in values:
            with pytest.raises((TypeError, ValueError), match=f"^{name}: {key}|Invalid"):
                getattr(fsdp2.optim, name)([{"params": params, key: value, **of_adamw}])
    for beta in (math.nan, 1.0, -0.5, "0.9"):
        with pytest.raises((TypeError, ValueError), match=f"^{name}: betas: a number is|Invalid|'<=' not"):
            getattr(fsdp2.optim, name)([{"params": params, "betas": (0.9, beta), **of_adamw}])
    with pytest.raises(ValueError, match=f"^{name}: eps is inf, expected a finite number of at least 0"):
        getattr(fsdp2.optim, name)([{"params": params, "eps": math.inf, **of_adamw}])
