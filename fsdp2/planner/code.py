"""Generates the Python code for a choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fsdp2.core import AfterForward
from fsdp2.planner.blocks import Stack, Units
from fsdp2.planner.groups import Wire
from fsdp2.planner.machine import Machine
from fsdp2.planner.scenario import Choice, Optimizer, Precision
from fsdp2.planner.work import Checkpointing
from fsdp2.planner.workload import Workload


def code_for(
    units: Units,
    choice: Choice,
    machine: Machine,
    workload: Workload,
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
    reshard = _reshard_argument(choice, machine)
    shard = [
        *(f"{_at(path)}.config.use_cache = False  # training needs no cache of keys and values" for path in caches),
        *_master_weights(master_dtype),
        *_options(choice, machine, workload, cuts_other_dims),
        f"blocks = [{', '.join(map(_blocks, units.stacks))}]",
        *_per_block(choice, reshard),
        *(f"fsdp2.fully_shard({_at(path)}, {reshard}**options)" for path in units.large),
        f"# After this, build the optimizer as the plan counts it: {_optimizer(workload)}.",
        "return fsdp2.fully_shard(model, **options)",
    ]
    device = '"cpu"' if choice.offloads else "device_type"
    load = [
        '"""Safetensors in ``folder``, for a model that was built under ``torch.device("meta")``, then sharded."""',
        f"model.to_empty(device={device})",
        *["model.initialize_weights()  # fills the buffers that no file has"] * has_initializer,
        "fsdp2.checkpoint.load_safetensors(model, folder)  # names the buffers that are still empty",
    ]
    lines = [
        *_imports(choice, cuts_other_dims),
        *("", "", 'def shard(model: nn.Module, device_type: str = "cuda") -> nn.Module:'),
        *(f"    {line}" for line in shard),
        *("", "", 'def load(model: nn.Module, folder: str, device_type: str = "cuda") -> None:'),
        *(f"    {line}" for line in load),
    ]
    return "\n".join([*lines, ""])


def _imports(choice: Choice, cuts_other_dims: bool) -> Iterator[str]:
    yield "import torch"
    yield "import torch.distributed as dist"
    yield "from torch import nn"
    yield "from torch.distributed.device_mesh import init_device_mesh"
    yield ""
    yield "import fsdp2"
    if choice.wire is Wire.FP8:
        yield "from fsdp2.tensors import Float8AllGatherTensor, wrap_parameters"
    helpers = ["placement_for"] * cuts_other_dims
    if choice.checkpointing is not Checkpointing.NONE:
        helpers.append("recompute")
    if helpers:
        yield f"from fsdp2.planner import {', '.join(helpers)}"


def _master_weights(dtype: torch.dtype | None) -> Iterator[str]:
    if dtype is not None:
        cast = "float" if dtype is torch.float32 else str(dtype).removeprefix("torch.")
        yield "for param in model.parameters():"
        yield "    if param.requires_grad:"
        yield f"        param.data = param.data.{cast}()  # master weights"


def _options(choice: Choice, machine: Machine, workload: Workload, cuts_other_dims: bool) -> Iterator[str]:
    size, tensor, node = choice.shard_size, workload.tensor_parallel, machine.node_size // workload.tensor_parallel
    ranks, names = "dist.get_world_size()", ["shard"]
    if size or tensor > 1:
        divisor = (size or 1) * tensor
        yield f"if {ranks} % {divisor}:"
        why = f"each replica is on {divisor}" if size else f"{tensor} share every product"
        yield f'    raise ValueError("expected a multiple of {divisor} ranks: {why}.")'
        ranks += f" // {divisor}"
    shape = [ranks]
    if size:
        shape, names = [*shape, str(size)], ["replicate", *names]
    if tensor > 1:
        shape, names = [*shape, str(tensor)], [*names, "tensor"]
    ending = "," if len(names) == 1 else ""
    quoted = ", ".join(f'"{name}"' for name in names)
    shown = f"({', '.join(shape)}{ending}), mesh_dim_names=({quoted}{ending})"
    yield f"mesh = init_device_mesh(device_type, {shown})"
    if tensor > 1:
        yield '# Apply your plan of tensor parallelism here: parallelize_module(model, mesh["tensor"], ...).'
        data = ", ".join(f'"{name}"' for name in names[:-1])
        yield f"mesh = mesh[{data}]"
    if workload.context_parallel > 1:
        yield f"# Run each step under torch's context_parallel on {workload.context_parallel} ranks next to each other."
    if workload.precision == Precision.FP8.value:
        yield "# Convert the blocks here: torchao.float8.convert_to_float8_training(block)."
    policy = workload.policy
    yield f"policy = fsdp2.MixedPrecisionPolicy(param_dtype={policy.param_dtype}, reduce_dtype={policy.reduce_dtype})"
    policies = ["mesh=mesh", "mp_policy=policy"]
    if cuts_other_dims:
        policies.append('shard_placement_fn=placement_for(mesh["shard"].size())')
    if choice.offloads:
        policies.append("offload_policy=fsdp2.CPUOffloadPolicy()")
    yield f"options = dict({', '.join(policies)})"
    if choice.after_forward is AfterForward.RESHARD_TO_SMALLER_MESH and not size:
        # With HSDP, a replica consists of whole nodes. FSDP may be tried on fewer ranks than a node has.
        yield f"node = {node} if dist.get_world_size() % {node} == 0 else True  # True: reshard over all ranks"


def _optimizer(workload: Workload) -> str:
    """The optimizer with one kernel for all parameters; by default, torch's takes several."""
    name = "AdamW" if workload.optimizer == Optimizer.ADAMW.value else "SGD"
    momentum = ", momentum=0.9" if workload.optimizer == Optimizer.MOMENTUM.value else ""
    return f"torch.optim.{name}(model.parameters(){momentum}, fused=True)"


def _reshard_argument(choice: Choice, machine: Machine) -> str:
    """The argument of ``fully_shard``; "" for the default."""
    if choice.after_forward is AfterForward.RESHARD:
        return ""
    if choice.after_forward is AfterForward.KEEP:
        return "reshard_after_forward=False, "
    return f"reshard_after_forward={machine.node_size if choice.shard_size else 'node'}, "


def _per_block(choice: Choice, reshard: str) -> Iterator[str]:
    if choice.num_kept:
        yield "for index, block in enumerate(blocks):"
        reshard = f"reshard_after_forward=index < len(blocks) - {choice.num_kept}, "
    else:
        yield "for block in blocks:"
    if choice.checkpointing is not Checkpointing.NONE:
        yield f'    recompute(block, "{choice.checkpointing.value}")'
    if choice.wire is Wire.FP8:
        yield "    wrap_parameters(block, Float8AllGatherTensor)"
    yield f"    fsdp2.fully_shard(block, {reshard}**options)"


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
