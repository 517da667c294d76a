"""Refuses modules and parameters that ``fully_shard`` cannot take, before they fail in another way.

``MultiheadAttention`` never calls its ``out_proj``, which therefore cannot be a unit. ``DistributedDataParallel``
around sharded parameters is refused when it is built, because its own error names only an operation of a process group.
Rule: it may wrap a sharded model if it ignores the sharded parameters, since it then reduces only the others. Anything
that torch's ``fully_shard`` has sharded is refused, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from fsdp2.core import (
    DOCS,
    ExtensionError,
    ScheduleError,
    Slot,
    Unit,
    _torch,
    groups_by_slot,
    marks,
    plans,
    seams,
    unit_of,
)
from fsdp2.extras import torch_names
from fsdp2.extras.plain_names import joined_name, plain_name


def check_roots(roots: Sequence[nn.Module]) -> None:
    """Refuse modules that were given to ``fully_shard`` before, or that have no forward."""
    for item in roots:
        if unit_of(item) is not None:
            name = type(item).__name__.removeprefix("FSDP")
            raise ValueError(
                f"fully_shard: this {name} was given to fully_shard before. Call fully_shard once per module, "
                "on inner modules first."
            )
        if isinstance(item, (nn.ModuleList, nn.ModuleDict)) and type(item).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard: {type(item).__name__} has no forward, so its parameters would never be unsharded. "
                "Call fully_shard on each inner module, or pass a list of the inner modules to make one unit."
            )


def check_module(prefix: str, module: nn.Module) -> None:
    """Check a module that a unit will manage. From the first call on, also check what is wrapped around modules."""
    if "fully_shard" in _torch.composable_apis(module):  # it is not one of our units yet
        where = f"module '{prefix[:-1]}', a {type(module).__name__}," if prefix else f"this {type(module).__name__}"
        raise ValueError(
            f"fsdp2.fully_shard: {where} was given to torch.distributed.fsdp.fully_shard before. One of the two can "
            "shard a model, not both. Import fully_shard from fsdp2 wherever you call it, or call fsdp2.install() "
            "first."
        )
    attention = nn.MultiheadAttention
    if isinstance(module, attention) and type(module).forward is attention.forward and unit_of(module.out_proj):
        raise ValueError(
            f"fully_shard: '{prefix}out_proj' of a MultiheadAttention was given to fully_shard, but the attention "
            "reads its weight and never calls it, so nothing would unshard it. Call fully_shard on the "
            "MultiheadAttention or a module around it, and not on out_proj."
        )
    _refuse_ddp()


def check_not_flattened(name: str, param: nn.Parameter) -> None:
    """Refuse a parameter that torch's ``FullyShardedDataParallel`` has sharded."""
    if torch_names.is_flattened(param):
        raise ValueError(
            f"fsdp2: parameter '{name}' was sharded by torch.distributed.fsdp.FullyShardedDataParallel before. One of "
            "the two can shard a model, not both. Import FullyShardedDataParallel from fsdp2 wherever you call it, or "
            "call fsdp2.install() first."
        )


def check_handed_out(unit: Unit, memory: torch.Tensor) -> None:
    """Refuse ``memory``, which the forward of ``unit`` returns, itself or as a view, if it is an unsharded parameter
    that resharding frees. Reading it would read address 0 on the CPU: torch's ``fully_shard`` ends with a segmentation
    fault."""
    groups = [group for group in unit.groups if group.unsharded.versioned and not group.keeps_storage]
    if any(memory is each for group in groups for each in group.unsharded.parameters):
        assert unit.hooks is not None
        unit.hooks.note_raised()
        name = getattr(memory, marks.NAME_IN_PASS)
        raise ScheduleError(
            f"forward of unit '{unit.name}' returned parameter '{name}', or a view of it, but the unit is resharded "
            "after its forward, which frees this memory. Return a copy, with clone(). Or pass "
            "reshard_after_forward=False to fully_shard for this unit, or leave out that call, so that the unit around "
            "it has the parameter."
        )


def check_param(item: seams.Found, device: torch.device) -> None:
    """Refuse a parameter that cannot be sharded on ``device``. Hooks of subclasses are checked when it is cut."""
    name, param = item.name, item.param
    check_not_flattened(name, param)
    is_own_class = nn.Parameter in type(param).__mro__[1:]
    if is_own_class and not marks.has_hooks(param) and seams.adapter_of(param) is None:
        raise ExtensionError(
            f"fully_shard: parameter '{name}' is a {type(param).__name__}. Sharding would lose this class: compute "
            "would read an nn.Parameter. Replace the parameter by nn.Parameter(...) of its values, or of a tensor "
            "subclass that has the methods fsdp_pre_all_gather, fsdp_post_all_gather and __torch_dispatch__: see "
            f"{DOCS}/guide/extensions.md#all-gather-hooks. Or list the parameter in ignored_params."
        )
    full = plans.local_part(param)
    if not isinstance(param, DTensor) and marks.has_hooks(param) and not marks.has_hooks(full):
        raise ExtensionError(
            f"fully_shard: parameter '{name}' is a {type(param).__name__} with all-gather hooks, but its data is a "
            f"{type(full).__name__} without hooks. fully_shard shards the data and would ignore the hooks. Define the "
            "hooks on the tensor that nn.Parameter wraps."
        )
    if marks.is_shard(param) or hasattr(param, marks.NAME_IN_PASS):  # the root stays unsharded after forward
        raise ValueError(
            f"fully_shard: parameter '{name}' is already sharded, by a call on a module around this one, or on one "
            "that shares it. Call fully_shard on inner modules first. To add modules later, pass only the new modules, "
            "or list this parameter in ignored_params."
        )
    if isinstance(param, DTensor) and param.device_mesh.device_type != device.type:
        raise ValueError(
            f"fully_shard: parameter '{name}' is a DTensor on a mesh of {param.device_mesh.device_type}, but the mesh "
            f"given to fully_shard is on {device.type}. Use parts of one mesh for both."
        )
    layout = "nested" if param.is_nested else "quantized" if param.is_quantized else str(param.layout)
    if layout != str(torch.strided):
        raise ValueError(
            f"fully_shard: parameter '{name}' is a {layout} tensor. Only dense values can be cut into shards. Make "
            "the parameter a dense tensor or a tensor subclass with all-gather hooks, or list the parameter in "
            "ignored_params."
        )


@cache
def _refuse_ddp() -> None:
    """From now on, check every module of this process that is given a submodule. A step registers no modules."""
    register_module_module_registration_hook(_check_wrapped)


def _check_wrapped(around: nn.Module, _: str, module: object) -> None:
    if not isinstance(around, DistributedDataParallel) or not isinstance(module, nn.Module):
        return
    managed, ignored = groups_by_slot(), around.parameters_to_ignore
    found = [
        plain_name(module, key)
        for prefix, owner in module.named_modules()
        for name in _torch.parameters_dict(owner)
        if Slot(owner, name) in managed and (key := joined_name(prefix, name)) not in ignored
    ]
    if found:
        raise ValueError(
            f"DistributedDataParallel: found {len(found)} parameters that fully_shard manages, such as '{found[0]}', "
            f"in this {type(module).__name__}, expected parameters that are the same on all ranks. fsdp2 averages the "
            "gradients of its parameters itself, so leave out DistributedDataParallel. For copies of the shards, give "
            "fully_shard a 2D mesh (HSDP). If fully_shard has not taken all parameters, call it on the outermost "
            "module, too."
        )
