"""Expert parallelism: the meshes for the experts and for everything else, and the divide factor for the gradients of
the experts.

The loss is the mean over the tokens of all ranks, so the gradient of a dense parameter is the average over all ranks.
An expert also sees tokens of all ranks, but only the ranks that hold it sum its gradients: the divisor must be the
number of all ranks, not just of these. Rule: code that shards experts with ``ExpertMeshes`` cannot pass a wrong number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.core import _torch, fully_shard, unit_of, units_under
from fsdp2.extras import torch_names
from fsdp2.extras.checked import checked
from fsdp2.extras.output import listed

_M = TypeVar("_M", bound=nn.Module)


@dataclass(frozen=True)
class ExpertMeshes:
    """The meshes that ``expert_meshes`` derives from a mesh.

    Attributes:
        dense: the mesh to shard everything but experts: all ranks as one shard axis; 2D with replicas.
        experts: a 1D mesh of the ranks that hold different experts and exchange tokens.
        shards: the mesh to shard experts: the ranks that hold the same experts; 2D with replicas.
    """

    dense: DeviceMesh
    experts: DeviceMesh
    shards: DeviceMesh

    @property
    def divide_factor(self) -> float:
        """The divisor for sums of experts' gradients: the number of ranks whose tokens the experts see."""
        return float(self.dense.size())

    def shard_experts(self, module: _M, **options: Any) -> _M:
        """Call ``fully_shard`` on ``module``, which holds this rank's experts and nothing else.

        The ranks of ``experts`` then hold different values under the same names. fsdp2's ``clip_grad_norm_`` counts all
        of them. fsdp2's functions for files and engines refuse such parameters, and torch's checkpoints keep the values
        of only one rank unless keys differ between ranks. If experts are DTensors on ``experts`` first, it all works.

        Args:
            options: options of ``fully_shard``, except ``mesh``.

        Raises:
            TypeError: ``mesh`` is among the options.
        """
        if "mesh" in options:
            raise TypeError("shard_experts: got a mesh, but ExpertMeshes says which one experts are on.")
        fully_shard(module, mesh=self.shards, **options).set_gradient_divide_factor(self.divide_factor)
        unit = unit_of(module)
        assert unit is not None
        for group in unit.groups if self.experts.size() > 1 else ():
            if all(param.spec.unsharded is None for param in group.params):  # else DTensors say which rank holds what
                group.configure(apart_over=self.experts.get_group())
        return module

    def check(self, model: nn.Module) -> None:
        """Check the mesh and the divisor of every unit in ``model``, however it was sharded. Not collective.

        Raises:
            ValueError: a unit is on other ranks than ``dense`` and ``shards``, or divides by another number.
        """
        dense, shards = _ranks_of(self.dense), _ranks_of(self.shards)
        for name, unit in units_under(model):
            for group in unit.groups:
                ranks = _ranks_of(group.mesh.mesh)
                names = listed((f"'{param.name}'" for param in group.params), 3)
                where = f"unit '{name or '(root)'}', with {names}"
                if ranks not in (dense, shards):
                    raise ValueError(
                        f"ExpertMeshes.check: {where}, is sharded over the ranks {ranks}, expected {dense} (dense) or "
                        f"{shards} (experts). Pass mesh=meshes.dense to fully_shard, or call meshes.shard_experts."
                    )
                factor = group.options.gradient_divide_factor or group.mesh.data_parallel_size
                if factor != self.divide_factor:
                    raise ValueError(
                        f"ExpertMeshes.check: {where}, divides gradients by {factor:g}, expected "
                        f"{self.divide_factor:g}: they come from tokens of so many ranks. Call "
                        f"set_gradient_divide_factor({self.divide_factor:g}) on it, or meshes.shard_experts."
                    )


@checked()
def expert_meshes(mesh: DeviceMesh, *, experts: str, shard: str, replicate: str | None = None) -> ExpertMeshes:
    """Read the axes of ``mesh`` for a model with expert parallelism. Collective: it may make a process group.

    Args:
        mesh: a mesh with names: ``init_device_mesh("cuda", (num_ranks // 8, 8), mesh_dim_names=("dp", "expert"))``. On
            any other axis, such as that of tensor parallelism, each rank uses its own coordinate.
        experts: the axis whose ranks hold different experts.
        shard: the axis whose ranks hold the same experts, among which they are sharded.
        replicate: the axis of replicas (HSDP).

    Raises:
        ValueError: the mesh has no axis with this name, or a name is given twice.
    """
    names = [shard, experts] if replicate is None else [replicate, shard, experts]
    found = mesh.mesh_dim_names or ()
    if len(set(names)) < len(names) or not set(names) <= set(found):
        raise ValueError(
            f"expert_meshes: experts is {experts!r}, shard {shard!r} and replicate {replicate!r}, expected different "
            f"names of axes of the mesh, {found}."
        )
    both = sorted((shard, experts), key=found.index)
    flat = torch_names.flattened_mesh(mesh[tuple(both)], "_".join(both))
    if replicate is None:
        return ExpertMeshes(flat, mesh[experts], mesh[shard])
    dense, shards = (_torch.concatenated_mesh([mesh[replicate], each]) for each in (flat, mesh[shard]))
    return ExpertMeshes(dense, mesh[experts], shards)


def _ranks_of(mesh: DeviceMesh) -> list[int]:
    return sorted(mesh.mesh.flatten().tolist())
