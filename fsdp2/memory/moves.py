"""Move the shards of whole units between the mesh's device and the host, after ``fully_shard``.

Rule: everything is checked for all units before the first one moves. Sharded parameters stay the same objects. A unit
that moves gets new groups at the new location; settings that the user has made on it stay.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from fsdp2.checkpoint.reshard import restore_settings, successor
from fsdp2.checkpoint.reshard_checks import check_nothing_in_flight
from fsdp2.core import _torch
from fsdp2.core.api.module import FSDPModule
from fsdp2.core.comm.offload import Home
from fsdp2.core.group.codec import is_plain
from fsdp2.core.group.group import ParamGroup
from fsdp2.core.group.param import ShardedParam
from fsdp2.core.runtime.unit import Unit
from fsdp2.extras.lending import check_idle
from fsdp2.tensors.cut import pinned

_FIRST = "Call {caller} after fully_shard and after loading, and before you build optimizers."


def move_shards(caller: str, module: nn.Module, units: Sequence[Unit], homes: Mapping[ParamGroup, Home]) -> None:
    """Move the shards of each group in ``homes`` to its home. ``units`` are all units under the root ``module``.

    Raises:
        ScheduleError: a forward or backward is running; a unit is unsharded; gradients are in flight or not reduced.
        ValueError: a unit was made by ``FullyShardedDataParallel``, or was trained before; other code refers to its
            parameters. No unit has moved.
        RuntimeError: a parameter is on the meta device. No unit has moved.
        ExtensionError: the shard of a tensor subclass cannot be pinned. No unit has moved.
    """
    moving = [unit for unit in units if any(group in homes for group in unit.groups)]
    if not moving:
        return
    check_idle(module, caller)
    counts = Counter(id(param.sharded) for unit in units for group in unit.groups for param in group.params)
    for unit in moving:
        _check_unit(caller, unit, counts)
    subclasses = {
        param: pinned(param.full_name, local.to(home.device), home)
        for group, home in homes.items()
        for param in group.params
        if not is_plain(local := _torch.local_of(param.sharded))
    }
    tree = moving[0].tree
    for unit in units:
        groups = [_moved(unit, g, homes[g], subclasses) if g in homes else g for g in unit.groups]
        unit.move_to(unit.mesh, tuple(groups))  # all units, since their root knows groups that are gone
    if tree is not None:
        restore_settings(tree)


def _check_unit(caller: str, unit: Unit, counts: Mapping[int, int]) -> None:
    if not all(isinstance(module, FSDPModule) for module in unit.modules):
        raise ValueError(
            f"{caller}: the shards of unit '{unit.name}' have to move, but FullyShardedDataParallel has made it. Shard "
            "with fully_shard."
        )
    check_nothing_in_flight(caller, unit.name, unit)
    for group in unit.groups:
        group.take_replaced()
        if group.gradients.on_landed is not None or group.shards.num_steps:
            found = "has been stepped" if group.shards.num_steps else "is stepped by a HostAdamW"
            raise ValueError(
                f"{caller}: the shards of unit '{unit.name}' have to move, but it {found}, and optimizer states would "
                f"stay where they are. {_FIRST.format(caller=caller)}"
            )
        for param in group.params:
            _check_param(caller, param, counts[id(param.sharded)])


def _check_param(caller: str, param: ShardedParam, num_groups: int) -> None:
    name, sharded = param.full_name, param.sharded
    if _torch.local_of(sharded).is_meta:
        raise RuntimeError(
            f"{caller}: the shard of parameter '{name}' has to move, but it is on the meta device. Materialise the "
            "model first: pass offload_policy=CPUOffloadPolicy() to each fully_shard, and call "
            "model.to_empty(device='cpu')."
        )
    problem = None
    if num_groups > 1:
        problem = "is in several units"
    elif sharded.grad is not None:
        problem = "has a gradient"
    elif _torch.way_of_hooks(sharded) is not None:
        problem = f"has hooks of {_torch.way_of_hooks(sharded)}"
    elif weakref.getweakrefcount(sharded):
        problem = "is held by weak references"
    if problem is not None:
        raise ValueError(
            f"{caller}: the shard of parameter '{name}' has to move, but the parameter {problem}. "
            f"{_FIRST.format(caller=caller)}"
        )


@torch.no_grad()
def _moved(unit: Unit, group: ParamGroup, home: Home, subclasses: Mapping[ShardedParam, torch.Tensor]) -> ParamGroup:
    """A new group of the same parameters, whose shards are at ``home``."""
    params = [_moved_param(param, home, subclasses.get(param)) for param in group.params]
    return successor(unit, group, params, home, group.mesh, group.unsharded.post_forward_mesh)


def _moved_param(param: ShardedParam, home: Home, subclass: torch.Tensor | None) -> ShardedParam:
    """``param`` on another device, with the same sharded parameter. Its new group copies a plain shard."""
    before = _torch.local_of(param.sharded)
    if subclass is not None:
        _swap(param, subclass)
        return replace(param, local=subclass, is_cut=True)
    _swap(param, torch.zeros((), dtype=before.dtype, device=home.device).expand(before.shape))  # takes no memory
    return replace(param, local=before, is_cut=True)


def _swap(param: ShardedParam, local: torch.Tensor) -> None:
    """Move the sharded parameter to the device of ``local``. Attributes that users have set on it stay."""
    sharded = param.sharded
    noted = dict(vars(sharded))
    with torch.inference_mode(False):
        made = param.sharded_parameter(local, requires_grad=sharded.requires_grad)
        torch.utils.swap_tensors(sharded, made)
    vars(sharded).update({name: value for name, value in noted.items() if name not in vars(sharded)})
