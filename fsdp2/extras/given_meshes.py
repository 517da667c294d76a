"""Reads what a user says about meshes: ``dp_mesh_dims``, and what ``shard_placement_fn`` returns for one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from fsdp2.core import DataParallelMeshDims, ParallelMesh, _torch, expect, plans
from fsdp2.extras import torch_names


def data_parallel_part(mesh: DeviceMesh, dims: DataParallelMeshDims) -> ParallelMesh:
    """The data-parallel axes of ``mesh``, by the names in ``dims``, as one shard and one replicate axis. ``dims`` may
    be torch's class of the same name."""
    remedy = 'Pass DataParallelMeshDims(shard="dp"), with the names of the data-parallel axes of the mesh.'
    is_alike = hasattr(dims, "shard") and hasattr(dims, "replicate")
    expect(is_alike, "fully_shard: dp_mesh_dims", dims, "an fsdp2.DataParallelMeshDims", remedy)
    dims = DataParallelMeshDims(dims.shard, dims.replicate)
    names = _checked_names(mesh, dims)
    role_of = dict.fromkeys(dims.shard_names, plans.AxisRole.SHARD) | dict.fromkeys(
        dims.replicate_names, plans.AxisRole.REPLICATE
    )
    roles = tuple(role_of.get(name, plans.AxisRole.MODEL) for name in names)
    flat = {
        role: _flat(mesh, [name for name, found in zip(names, roles, strict=True) if found is role])
        for role in (plans.AxisRole.REPLICATE, plans.AxisRole.SHARD)
        if role in roles
    }
    sharded, sharded_roles = mesh, roles
    if roles.count(plans.AxisRole.SHARD) > 1:  # the first of the shard axes stands for all of them
        first = roles.index(plans.AxisRole.SHARD)
        kept = [i for i, role in enumerate(roles) if role is not plans.AxisRole.SHARD or i == first]
        sharded_roles = tuple(roles[i] for i in kept)
        sharded = _torch.concatenated_mesh([flat[plans.AxisRole.SHARD] if i == first else mesh[names[i]] for i in kept])
    spmd = plans.SpmdMesh(mesh, roles, sharded, sharded_roles)
    return plans.mesh_with_roles(_torch.concatenated_mesh(list(flat.values())), tuple(flat), spmd)


def _checked_names(mesh: DeviceMesh, dims: DataParallelMeshDims) -> tuple[str, ...]:
    names = mesh.mesh_dim_names
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"fully_shard: rank {dist.get_rank()} is not in the mesh {mesh} that is given with dp_mesh_dims. Call "
            "fully_shard on the ranks of the mesh only."
        )
    if names is None:
        raise ValueError(
            "fully_shard: dp_mesh_dims names axes of the mesh, but this mesh has no names. "
            "Build the mesh with init_device_mesh(..., mesh_dim_names=(...))."
        )
    asked = (*dims.shard_names, *dims.replicate_names)
    for name in asked:
        if name not in names:
            raise ValueError(
                f"fully_shard: dp_mesh_dims names the axis '{name}', but the mesh has the axes {names}. Pass names of "
                "these axes."
            )
    if len(set(asked)) < len(asked):
        raise ValueError(f"fully_shard: dp_mesh_dims names an axis twice: {dims}. Name each axis once.")
    return names


def _flat(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """The axes ``names`` of ``mesh`` as one axis."""
    return mesh[names[0]] if len(names) == 1 else torch_names.flattened_mesh(mesh[tuple(names)], "_".join(names))


def read_placement(name: str, asked: Any, parallel: ParallelMesh) -> tuple[Shard | Replicate | None, ParallelMesh]:
    """The placement of the parameter ``name`` and its mesh, if ``shard_placement_fn`` has returned ``asked``: a
    :class:`ParamPlacement`, or torch's ``ShardPlacementResult``."""
    of_ranks = getattr(asked, "mesh_info", asked)  # torch's ShardPlacementResult has a mesh_info
    dims = getattr(of_ranks, "dp_mesh_dims", None)  # set if torch has read the mesh_info from a full mesh
    mesh = getattr(of_ranks, "mesh" if dims is None else "spmd_mesh", None)
    placement = asked if mesh is None else asked.placement
    is_known = placement is None or isinstance(placement, (Shard, Replicate))
    if not is_known or not (mesh is None or isinstance(mesh, DeviceMesh)):
        raise TypeError(
            f"fully_shard: shard_placement_fn returned {asked!r} for parameter '{name}', "
            "expected Shard(dim), Replicate(), ParamPlacement of one of these and a mesh, or None."
        )
    if mesh is None:
        return placement, parallel
    read = plans.parallel_mesh(mesh, None if dims is None else DataParallelMeshDims(dims.shard, dims.replicate))
    if not read.has_this_rank:
        raise ValueError(
            f"fully_shard: shard_placement_fn returned the mesh {mesh} for parameter '{name}', but rank "
            f"{dist.get_rank()} is not in that mesh. Return the mesh that this rank is in."
        )
    if read.device != parallel.device:
        raise ValueError(
            f"fully_shard: shard_placement_fn returned a mesh on {read.device} for parameter '{name}', but the "
            f"mesh given to fully_shard is on {parallel.device}. Return a mesh on {parallel.device}."
        )
    return placement, read
