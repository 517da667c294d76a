"""Treats several axes of a mesh as one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.core.plan.mesh import NO_AXIS, Axis, mesh_device
from fsdp2.extras.own_groups import own_axis


def joint_axis(mesh: DeviceMesh, axes: Sequence[int]) -> Axis:
    """Join several axes of ``mesh``, given by position, into one with the ranks that this rank reaches over them,
    ascending. Collective if more than one of them has several ranks: a process group is then made, once."""
    long = [Axis(mesh.get_group(i), mesh.size(i), mesh.get_local_rank(i)) for i in axes if mesh.size(i) > 1]
    if len(long) < 2:
        return next((replace(each, rank=dist.get_rank(each.group)) for each in long), NO_AXIS)
    return own_axis(sorted(ranks_along(mesh, axes)), "fsdp2_joint", long, mesh_device(mesh))


def ranks_along(mesh: DeviceMesh, axes: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The global ranks that this rank reaches over ``axes`` of ``mesh``, with their coordinates on these axes."""
    own = mesh.get_coordinate()
    assert own is not None
    reached = mesh.mesh[tuple(slice(None) if axis in axes else own[axis] for axis in range(mesh.ndim))]
    coordinates = itertools.product(*(range(mesh.size(axis)) for axis in axes))
    return dict(zip(reached.flatten().tolist(), coordinates, strict=True))
