"""Refuses modules and parameters that do not go together with ``fully_shard``, before they fail in another way.

``MultiheadAttention`` never calls its ``out_proj``, which so cannot be a unit. ``DistributedDataParallel`` around
sharded parameters is refused where it is built: its own error names an operation of a process group. Rule: it may be
around a sharded model if it ignores the sharded parameters, since it then reduces only the others. What torch's
``fully_shard`` has sharded is refused, too.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from fsdp2 import _torch
from fsdp2.api.adapters import adapter_of
from fsdp2.api.fully_shard import PlugIns
from fsdp2.api.resolve import Found, PlugIns as OfParams
from fsdp2.extras.plain_names import plain_name
from fsdp2.group.codec import has_hooks
from fsdp2.group.group import groups_by_slot
from fsdp2.group.param import NAME_IN_PASS, Slot
from fsdp2.group.shards import is_shard
from fsdp2.runtime.unit import unit_of
from fsdp2.types import ExtensionError


def check_module(prefix: str, module: nn.Module) -> None:
    """Check a module that a unit is to manage. From the first one on, look at what is wrapped around modules, too."""
    _check_unsharded(prefix, module)
    _check_attention(prefix, module)
    _refuse_ddp()


def _check_unsharded(prefix: str, module: nn.Module) -> None:
    """``module`` is no unit of ours.

    Raises:
        ValueError: torch's ``fully_shard`` was applied to it.
    """
    if "fully_shard" in _torch.composable_apis(module):
        where = f"module '{prefix[:-1]}', a {type(module).__name__}," if prefix else f"this {type(module).__name__}"
        raise ValueError(
            f"fsdp2.fully_shard: {where} was given to torch.distributed.fsdp.fully_shard before. One of the two can "
            "shard a model, not both. Import fully_shard from fsdp2 wherever you call it, or call fsdp2.install() "
            "first."
        )


def _check_attention(prefix: str, module: nn.Module) -> None:
    """torch's attention computes with the weight of ``out_proj``, and never calls it.

    Raises:
        ValueError: ``out_proj`` is a unit of its own, which nothing would unshard.
    """
    if not isinstance(module, nn.MultiheadAttention) or type(module).forward is not nn.MultiheadAttention.forward:
        return
    if unit_of(module.out_proj) is not None:
        raise ValueError(
            f"fully_shard: '{prefix}out_proj' of a MultiheadAttention was given to fully_shard, but the attention "
            "reads its weight and never calls it, so nothing would unshard it. Call fully_shard on the "
            "MultiheadAttention or a module around it, and not on out_proj."
        )


def check_not_flattened(name: str, param: nn.Parameter) -> None:
    """Refuse a parameter that torch's ``FullyShardedDataParallel`` has sharded.

    Raises:
        ValueError: names it.
    """
    if _torch.is_flattened(param):
        raise ValueError(
            f"fsdp2: parameter '{name}' was sharded by torch.distributed.fsdp.FullyShardedDataParallel before. One of "
            "the two can shard a model, not both. Import FullyShardedDataParallel from fsdp2 wherever you call it, or "
            "call fsdp2.install() first."
        )


def check_param(item: Found, device: torch.device) -> None:
    """Check a parameter that is to be sharded on ``device``. Hooks of subclasses are checked when it is cut.

    Raises:
        ValueError, ExtensionError: it cannot be sharded.
    """
    name, param = item.name, item.param
    check_not_flattened(name, param)
    is_own_class = nn.Parameter in type(param).__mro__[1:]
    if is_own_class and not has_hooks(param) and adapter_of(param) is None:
        raise ExtensionError(
            f"fully_shard: parameter '{name}' is a {type(param).__name__}. Sharding would lose this class: compute "
            "would read an nn.Parameter. Replace the parameter by nn.Parameter(...) of its values, or of a tensor "
            "subclass that has the methods fsdp_pre_all_gather, fsdp_post_all_gather and __torch_dispatch__: see "
            "docs/guide/extensions.md#all-gather-hooks. Or list the parameter in ignored_params."
        )
    if is_shard(param) or hasattr(param, NAME_IN_PASS):  # the root stays unsharded after forward
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
    """Look at every module that gets another one from now on, in the whole process. A step sets no modules."""
    register_module_module_registration_hook(_check_wrapped)


def _check_wrapped(around: nn.Module, _: str, module: object) -> None:
    if not isinstance(around, DistributedDataParallel) or not isinstance(module, nn.Module):
        return
    managed, ignored = groups_by_slot(), around.parameters_to_ignore
    found = [
        plain_name(module, key)
        for prefix, owner in module.named_modules()
        for name in _torch.parameters_dict(owner)
        if Slot(owner, name) in managed and (key := f"{prefix}.{name}" if prefix else name) not in ignored
    ]
    if found:
        raise ValueError(
            f"DistributedDataParallel: found {len(found)} parameters that fully_shard manages, such as '{found[0]}', "
            f"in this {type(module).__name__}, expected parameters that are the same on all ranks. fsdp2 averages the "
            "gradients of its parameters itself, so leave out DistributedDataParallel. For copies of the shards, give "
            "fully_shard a 2D mesh (HSDP). If fully_shard has not taken all parameters, call it on the outermost "
            "module, too."
        )


def register() -> None:
    """Let ``fully_shard`` check modules and parameters so."""
    PlugIns.check_module = check_module
    OfParams.check_param = check_param
