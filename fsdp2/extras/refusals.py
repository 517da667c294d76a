"""Refuses modules that do not go together with ``fully_shard``, before they fail in another way.

``MultiheadAttention`` never calls its ``out_proj``, which so cannot be a unit. ``DistributedDataParallel`` around
sharded parameters is refused where it is built: its own error names an operation of a process group. Rule: it may be
around a sharded model if it ignores the sharded parameters, since it then reduces only the others. What torch's
``fully_shard`` has sharded is refused, too.
"""

from __future__ import annotations

from functools import cache

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from fsdp2 import _torch
from fsdp2.api.fully_shard import PlugIns
from fsdp2.group.group import groups_by_slot
from fsdp2.group.param import Slot
from fsdp2.runtime.torch_names import plain_name
from fsdp2.runtime.unit import unit_of


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
    """Let ``fully_shard`` check modules so."""
    PlugIns.check_module = check_module
