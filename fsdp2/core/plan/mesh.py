"""Which ranks take part: the shard, replicate and model axes, and the smaller mesh between forward and backward.

A mesh always has a shard and a replicate axis; an absent one has size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2.core import seams
from fsdp2.core.types import DataParallelMeshDims


class AxisRole(Enum):
    """What a mesh axis does to a parameter. Model axes (TP, EP) have already cut it."""

    SHARD = "shard"
    REPLICATE = "replicate"
    MODEL = "model"


@dataclass(frozen=True)
class Axis:
    """One mesh axis as this rank sees it. ``group`` is None for an absent axis, whose size is 1, and on ranks that are
    not in the mesh. The ``rank`` of the latter is ``size``, one after the last, so that they hold nothing."""

    group: dist.ProcessGroup | None
    size: int
    rank: int

    @property
    def has_this_rank(self) -> bool:
        return self.rank < self.size


NO_AXIS = Axis(group=None, size=1, rank=0)


@dataclass(frozen=True)
class SpmdMesh:
    """The full mesh with all axes, on which DTensor parameters lie before they are sharded. ``sharded_mesh`` is the
    same mesh with its shard axes flattened into one."""

    mesh: DeviceMesh
    roles: tuple[AxisRole, ...]
    sharded_mesh: DeviceMesh
    sharded_roles: tuple[AxisRole, ...]


@dataclass(frozen=True)
class ParallelMesh:
    """The axes of ``mesh`` over which parameters are sharded or replicated, according to ``roles``. ``spmd`` is the
    full mesh, if the user named its data-parallel axes."""

    mesh: DeviceMesh
    roles: tuple[AxisRole, ...]
    shard: Axis
    replicate: Axis
    device: torch.device
    spmd: SpmdMesh | None = None

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that a gradient is averaged over."""
        return self.shard.size * self.replicate.size

    @property
    def has_this_rank(self) -> bool:
        """Whether this rank takes part. If not, its shards are empty until ``reshard_to`` brings it in."""
        return self.mesh.get_coordinate() is not None

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The global ranks: a row for each replica, with a rank for each shard."""
        last = self.mesh.shape[-1] if AxisRole.SHARD in self.roles else 1
        return tuple(map(tuple, self.mesh.mesh.reshape(-1, last).tolist()))

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """The process groups of the axes with more than one rank."""
        return [axis.group for axis in (self.shard, self.replicate) if axis.group is not None and axis.size > 1]


def replicated(parallel: ParallelMesh) -> ParallelMesh:
    """The mesh of the same ranks as ``parallel``, but with parameters whole on each rank. Collective on a 2D mesh."""
    spmd = parallel.spmd
    if spmd is not None:
        whole = _without_shard(spmd.roles)
        spmd = SpmdMesh(spmd.mesh, whole, spmd.mesh, whole)
    if parallel.replicate.size == 1:
        joint = parallel.shard
    elif parallel.shard.size == 1:
        joint = parallel.replicate
    elif not parallel.has_this_rank:
        joint = _axis_of_others(parallel.mesh.size())
    else:
        ranks = parallel.mesh.mesh.flatten().tolist()
        joint = seams.own_axis(ranks, "fsdp2_replicate", (parallel.shard, parallel.replicate), parallel.device)
    return replace(parallel, roles=_without_shard(parallel.roles), shard=NO_AXIS, replicate=joint, spmd=spmd)


def _without_shard(roles: Sequence[AxisRole]) -> tuple[AxisRole, ...]:
    return tuple(AxisRole.REPLICATE if role is AxisRole.SHARD else role for role in roles)


def default_mesh() -> DeviceMesh:
    """A 1D mesh over all ranks, on the accelerator if torch sees one, else on the CPU.

    Raises:
        ValueError: there is no process group, and the environment does not say which rank this is.
    """
    if not dist.is_initialized():
        try:
            dist.init_process_group()
        except ValueError as error:
            raise ValueError(
                f"fully_shard: there is no process group, and torch cannot make one: {error}\n"
                "Start the program with torchrun, which sets these variables: torchrun --nproc-per-node 2 train.py"
            ) from error
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))


def parallel_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> ParallelMesh:
    """Read a 1D mesh as (shard) and a 2D mesh as (replicate, shard); with ``dims``, read a mesh of any shape by the
    names of its axes.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: ``mesh`` has more than two axes, or lacks an axis that ``dims`` names.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"fully_shard: mesh must be a torch.distributed.device_mesh.DeviceMesh, not {type(mesh).__name__}. "
            "Build one with init_device_mesh(device_type, shape)."
        )
    if dims is not None:
        return seams.data_parallel_part(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard: mesh has {mesh.ndim} axes {tuple(mesh.shape)}, expected 1 (shard) or 2 (replicate, shard). "
            'Pass a submesh, for example mesh["dp"], or name the data-parallel axes with dp_mesh_dims.'
        )
    roles = (AxisRole.REPLICATE, AxisRole.SHARD)[-mesh.ndim :]
    return mesh_with_roles(mesh, roles)


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank on ``mesh``: the CPU, or the accelerator's current device."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def mesh_with_roles(mesh: DeviceMesh, roles: tuple[AxisRole, ...], spmd: SpmdMesh | None = None) -> ParallelMesh:
    """``mesh``, whose axes have the given ``roles``, as this rank sees it."""
    if mesh.get_coordinate() is None:
        axes = {role: _axis_of_others(mesh.size(i)) for i, role in enumerate(roles)}
    else:
        axes = {role: Axis(mesh.get_group(i), mesh.size(i), mesh.get_local_rank(i)) for i, role in enumerate(roles)}
    shard, replicate = (axes.get(role, NO_AXIS) for role in (AxisRole.SHARD, AxisRole.REPLICATE))
    return ParallelMesh(mesh, roles, shard, replicate, mesh_device(mesh), spmd)


def _axis_of_others(size: int) -> Axis:
    """An axis of ``size`` ranks without this one."""
    return Axis(group=None, size=size, rank=size)
