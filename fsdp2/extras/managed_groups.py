"""Replicate axes whose process group gets other ranks while the program runs: torchft's, for replicas that come and go.

Such a group is known by its method ``configure``. A mesh cannot say how many replicas take part in a step, so the axis
has size 1 there, and the group itself takes the mean over those that do, in the all-reduce hook of each unit. Errors of
such a group do not raise: torchft drops the step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.core import Unit, comms

Hook = Callable[[torch.Tensor], object]


def check_axes(mesh: DeviceMesh, *, has_roles: bool) -> None:
    """Refuse a ``mesh`` of which an axis has a managed group, unless that is a replicate axis of size 1. ``has_roles``:
    the user names the roles of its axes; else the last one cuts parameters.

    Raises:
        ValueError: the size of the axis would be wrong in most steps, or shards would move between ranks.
    """
    for axis in range(mesh.ndim if mesh.get_coordinate() is not None else 0):
        is_shard = axis == mesh.ndim - 1 and not has_roles
        if is_managed(mesh.get_group(axis)) and (mesh.size(axis) > 1 or is_shard):
            raise ValueError(
                f"fully_shard: axis {axis} of the mesh with shape {tuple(mesh.shape)} has a "
                f"{type(mesh.get_group(axis)).__name__}, whose ranks change while the program runs. Expected that of "
                "the replicate axis, with size 1: DeviceMesh.from_group([managed, shard_group], device_type, "
                "mesh=[ranks_of_this_replica], mesh_dim_names=('dp_replicate', 'dp_shard'))."
            )


def is_managed(group: dist.ProcessGroup | None) -> bool:
    """Whether the ranks of ``group`` may change."""
    return hasattr(group, "configure")


def with_mean(unit: Unit, hook: Hook | None) -> Hook | None:
    """``hook``, after the mean over the replicate axis of ``unit`` if that has a managed group."""
    group = unit.mesh.replicate.group
    if not is_managed(group):
        return hook

    def run(gradients: torch.Tensor) -> None:
        dist.all_reduce(gradients, op=dist.ReduceOp.AVG, group=group)
        if hook is not None:
            hook(gradients)

    return run


def average(unit: Unit) -> None:
    """Let ``unit`` take means over a managed group, unless it does already."""
    run = with_mean(unit, None)
    if run is None:
        return
    for group in unit.groups:
        if group.options.all_reduce_hook is None:
            group.configure(all_reduce_hook=comms.AllReduceHook(run))
