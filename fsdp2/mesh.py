"""Which ranks: the shard axis, the replicate axis, and the smaller mesh that parameters rest on between passes.

A mesh always has both axes; an absent one has size 1, so nobody else branches on FSDP or HSDP. This is the only room
that knows how process groups and DTensor placements follow from a ``DeviceMesh``. Model axes (TP) join here later.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Axis:
    """One mesh axis as this rank sees it. ``group`` is None for an absent axis, whose size is 1."""

    group: dist.ProcessGroup | None
    size: int
    rank: int


NO_AXIS = Axis(group=None, size=1, rank=0)


@dataclass(frozen=True)
class ParallelMesh:
    """The axes that parameters are sharded over and replicated on."""

    mesh: DeviceMesh
    shard: Axis
    replicate: Axis
    device: torch.device

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that a gradient is averaged over."""
        return self.shard.size * self.replicate.size

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The shard axis as a 1D mesh of its own: what all-gather hooks are given."""
        if self.mesh.ndim == 1 or self.shard.group is None:
            return self.mesh
        names = self.mesh.mesh_dim_names
        return self.mesh[names[-1]] if names else DeviceMesh.from_group(self.shard.group, self.mesh.device_type)

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """DTensor placements, on ``mesh``, of a parameter sharded along tensor dimension ``dim``."""
        return (Shard(dim),) if self.mesh.ndim == 1 else (Replicate(), Shard(dim))


def default_mesh() -> DeviceMesh:
    """A 1D mesh over all ranks, on the accelerator if torch sees one, else on the CPU."""
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))


def parallel_mesh(mesh: DeviceMesh) -> ParallelMesh:
    """Read a 1D mesh as (shard) and a 2D mesh as (replicate, shard).

    Raises:
        TypeError: ``mesh`` is no DeviceMesh.
        ValueError: ``mesh`` has more than two axes.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"fully_shard: mesh must be a torch.distributed.device_mesh.DeviceMesh, not {type(mesh).__name__}. "
            "Build one with init_device_mesh(device_type, shape)."
        )
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard: mesh has {mesh.ndim} axes {tuple(mesh.shape)}, expected 1 (shard) or 2 (replicate, shard). "
            'Pass a submesh, for example mesh["dp"].'
        )
    replicate = _axis(mesh, 0) if mesh.ndim == 2 else NO_AXIS
    return ParallelMesh(mesh, _axis(mesh, mesh.ndim - 1), replicate, mesh_device(mesh))


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank on ``mesh``: the CPU, or the accelerator's current device."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


# Creating process groups is collective and slow, so all calls with equal meshes share the smaller one. It is no
# attribute of the mesh, because DTensors are copied and pickled with theirs. The shard axis' group tells meshes apart
# that were made before and after a destroy_process_group.
_PostForwardKey = tuple[int, dist.ProcessGroup | None]
_post_forward_meshes: WeakKeyDictionary[DeviceMesh, dict[_PostForwardKey, ParallelMesh]] = WeakKeyDictionary()


def post_forward_mesh(parallel: ParallelMesh, shard_size: int) -> ParallelMesh:
    """Parameters rest on groups of ``shard_size`` neighbouring ranks of ``parallel``, replicated across the groups."""
    kept = _post_forward_meshes.setdefault(parallel.mesh, {})
    key = (shard_size, parallel.shard.group)
    if key not in kept:
        smaller = DeviceMesh(parallel.mesh.device_type, parallel.mesh.mesh.reshape(-1, shard_size))
        kept[key] = ParallelMesh(smaller, _axis(smaller, 1), _axis(smaller, 0), parallel.device)
    return kept[key]


def _axis(mesh: DeviceMesh, axis: int) -> Axis:
    return Axis(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis))
