"""Generates the Python code for a choice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2.core.schedule.schedule import AfterForward
from fsdp2.planner.blocks import Stack, Units
from fsdp2.planner.groups import Wire
from fsdp2.planner.machine import Machine
from fsdp2.planner.scenario import Choice, Precision
from fsdp2.planner.work import Checkpointing


def code_for(
    units: Units,
    choice: Choice,
    machine: Machine,
    precision: Precision,
    *,
    cuts_other_dims: bool = False,
    caches: Sequence[str] = (),
    has_initializer: bool = False,
    master_dtype: torch.dtype | None = None,
) -> str:
    """Functions ``shard(model, device_type)`` and ``load(model, folder, device_type)``, and their imports.

    ``cuts_other_dims``: some parameter is sharded along a dim other than 0. ``caches``: paths of modules whose config
    enables a cache of keys and values, which recomputation would fill twice. ``has_initializer``: the model can fill
    buffers that no checkpoint has. ``master_dtype``: trained parameters are cast to it; None leaves them as built."""
    function = _function(units, choice, machine, precision, cuts_other_dims)
    if master_dtype is not None:
        function[1:1] = _master_weights(master_dtype)
    function[1:1] = [
        f"    {_at(path)}.config.use_cache = False  # training needs no cache of keys and values" for path in caches
    ]
    loads = _load(choice, has_initializer=has_initializer)
    return "\n".join([*_imports(choice, cuts_other_dims), "", "", *function, "", "", *loads, ""])


def _master_weights(dtype: torch.dtype) -> list[str]:
    name = str(dtype).removeprefix("torch.")
    return [
        "    for param in model.parameters():",
        "        if param.requires_grad:",
        f"            param.data = param.data.{'float' if dtype is torch.float32 else name}()  # master weights",
    ]


def _load(choice: Choice, *, has_initializer: bool) -> list[str]:
    device = '"cpu"' if choice.offloads else "device_type"
    buffers = ["    model.initialize_weights()  # fills the buffers that no file has"] * has_initializer
    return [
        'def load(model: nn.Module, folder: str, device_type: str = "cuda") -> None:',
        '    """Safetensors in ``folder``, for a model that was built under ``torch.device("meta")``, then sharded."""',
        f"    model.to_empty(device={device})",
        *buffers,
        "    fsdp2.checkpoint.load_safetensors(model, folder)  # names the buffers that are still empty",
    ]


def _imports(choice: Choice, cuts_other_dims: bool) -> list[str]:
    lines = ["import fsdp2"]
    if choice.wire is Wire.FP8:
        lines.append("from fsdp2.tensors import Float8AllGatherTensor, wrap_parameters")
    helpers = ["placement_for"] * cuts_other_dims
    if choice.checkpointing is not Checkpointing.NONE:
        helpers.append("recompute")
    if helpers:
        lines.append(f"from fsdp2.planner import {', '.join(helpers)}")
    return [
        "import torch",
        "import torch.distributed as dist",
        "from torch import nn",
        "from torch.distributed.device_mesh import init_device_mesh",
        "",
        *lines,
    ]


def _function(units: Units, choice: Choice, machine: Machine, precision: Precision, cuts_other_dims: bool) -> list[str]:
    body = [
        *_options(choice, precision, cuts_other_dims),
        *_node(choice, machine),
        f"blocks = [{', '.join(_blocks(stack) for stack in units.stacks)}]",
        *_per_block(choice, machine),
        *(f"fsdp2.fully_shard({_at(path)}, {_after_forward(choice, machine)}**options)" for path in units.large),
        "return fsdp2.fully_shard(model, **options)",
    ]
    head = 'def shard(model: nn.Module, device_type: str = "cuda") -> nn.Module:'
    return [head, *(f"    {line}" for line in body)]


def _options(choice: Choice, precision: Precision, cuts_other_dims: bool) -> list[str]:
    size = choice.shard_size
    shape, names = "(dist.get_world_size(),)", '("shard",)'
    if size:
        shape, names = f"(dist.get_world_size() // {size}, {size})", '("replicate", "shard")'
    lines = []
    if size:
        lines.append(f"if dist.get_world_size() % {size}:")
        lines.append(f'    raise ValueError("expected a multiple of {size} ranks: each replica is on {size}.")')
    lines += [f"mesh = init_device_mesh(device_type, {shape}, mesh_dim_names={names})"]
    dtypes = f"param_dtype={precision.policy.param_dtype}, reduce_dtype={precision.policy.reduce_dtype}"
    lines.append(f"policy = fsdp2.MixedPrecisionPolicy({dtypes})")
    policies = ["mesh=mesh", "mp_policy=policy"]
    if cuts_other_dims:
        policies.append('shard_placement_fn=placement_for(mesh["shard"].size())')
    if choice.offloads:
        policies.append("offload_policy=fsdp2.CPUOffloadPolicy()")
    return [*lines, f"options = dict({', '.join(policies)})"]


def _node(choice: Choice, machine: Machine) -> list[str]:
    """With HSDP, a replica consists of whole nodes. FSDP may be tried on fewer ranks than a node has."""
    if choice.shard_size or choice.after_forward is not AfterForward.RESHARD_TO_SMALLER_MESH:
        return []
    size = machine.node_size
    return [f"node = {size} if dist.get_world_size() % {size} == 0 else True  # True: reshard over all ranks"]


def _after_forward(choice: Choice, machine: Machine) -> str:
    """The argument of ``fully_shard``; "" for the default."""
    return {
        AfterForward.RESHARD: "",
        AfterForward.KEEP: "reshard_after_forward=False, ",
        AfterForward.RESHARD_TO_SMALLER_MESH: f"reshard_after_forward={machine.node_size}, "
        if choice.shard_size
        else "reshard_after_forward=node, ",
    }[choice.after_forward]


def _per_block(choice: Choice, machine: Machine) -> list[str]:
    reshard = _after_forward(choice, machine)
    if choice.num_kept:
        reshard = f"reshard_after_forward=index < len(blocks) - {choice.num_kept}, "
    lines = ["for index, block in enumerate(blocks):" if choice.num_kept else "for block in blocks:"]
    if choice.checkpointing is not Checkpointing.NONE:
        lines.append(f'    recompute(block, "{choice.checkpointing.value}")')
    if choice.wire is Wire.FP8:
        lines.append("    wrap_parameters(block, Float8AllGatherTensor)")
    return [*lines, f"    fsdp2.fully_shard(block, {reshard}**options)"]


def _blocks(stack: Stack) -> str:
    container = _at(stack.path)
    if stack.is_whole:
        return f"*{container}.values()" if stack.is_mapping else f"*{container}"
    first = stack.names[0]
    if not stack.is_mapping and stack.names == tuple(str(int(first) + i) for i in range(len(stack.names))):
        return f"*{container}[{first}:{int(first) + len(stack.names)}]"
    return f"*map(model.get_submodule, {[*stack.block_paths]})"


def _at(path: str) -> str:
    """The module at ``path``; "" is the model."""
    names = path.split(".") if path else []
    return ".".join(["model", *names]) if all(map(str.isidentifier, names)) else f'model.get_submodule("{path}")'
