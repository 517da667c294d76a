"""How a parameter lies on a mesh, sharded and unsharded: DTensor specs.

A model axis (TP, EP) may already have cut the parameter; data parallelism cuts the local part again. If a model axis
further right in the mesh cuts the same dim, DTensor calls the placement a strided shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp2.core import _torch
from fsdp2.core.plan.layout import contiguous_stride
from fsdp2.core.plan.mesh import AxisRole, ParallelMesh, SpmdMesh


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of ``shape`` and ``stride`` on all ranks of ``mesh``: the metadata of a DTensor except for its dtype."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def dtensor(self, local: torch.Tensor) -> DTensor:
        """``local`` as this rank's part; not differentiable."""
        spec = _torch.dtensor_spec(self.mesh, self.placements, torch.Size(self.shape), self.stride, local.dtype)
        return _torch.dtensor(local, spec)


@dataclass(frozen=True)
class ParamSpec:
    """The specs of one parameter. ``unsharded``: the spec of a DTensor on model axes, which remains one; None for a
    plain tensor. ``data_parallel_axes``: the positions in ``unsharded.mesh`` of axes that the reduction sums over."""

    sharded: TensorSpec
    unsharded: TensorSpec | None = None
    data_parallel_axes: tuple[int, ...] = ()

    @property
    def may_be_pending(self) -> bool:
        """Whether a gradient may be a pending sum on a model axis, namely one on which the parameter is replicated."""
        placements = () if self.unsharded is None else self.unsharded.placements
        return any(p.is_replicate() for axis, p in enumerate(placements) if axis not in self.data_parallel_axes)

    def unsharded_tensor(self, local: torch.Tensor) -> torch.Tensor:
        """The gathered tensor ``local``, as a DTensor if the parameter lies on model axes."""
        return local if self.unsharded is None else self.unsharded.dtensor(local)

    def unsharded_parameter(self, local: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """The gathered tensor ``local``, as the parameter that compute reads."""
        return nn.Parameter(self.unsharded_tensor(local), requires_grad=requires_grad)

    def local_gradient(self, grad: torch.Tensor, pending_in: torch.dtype | None = None) -> torch.Tensor:
        """This rank's part of the unsharded parameter's gradient, placed like the parameter on model axes: sums pending
        there are computed, in ``pending_in`` if that dtype is wider. On data-parallel axes, sums stay pending."""
        if self.unsharded is None or not isinstance(grad, DTensor):
            return grad
        wanted = [
            found if axis in self.data_parallel_axes and found.is_partial() else placement
            for axis, (found, placement) in enumerate(zip(grad.placements, self.unsharded.placements, strict=True))
        ]
        if tuple(wanted) == grad.placements:
            return _torch.arrived_local(grad)
        dtype = grad.dtype if pending_in is None else torch.promote_types(grad.dtype, pending_in)
        return _torch.arrived_local(cast(DTensor, grad.to(dtype)).redistribute(placements=wanted))


def plain_spec(shape: Sequence[int], dim: int, parallel: ParallelMesh) -> ParamSpec:
    """A plain tensor of ``shape``, cut along ``dim``."""
    placements = _placements(parallel.roles, parallel.mesh.shape, (), dim)
    return ParamSpec(TensorSpec(parallel.mesh, placements, tuple(shape), contiguous_stride(shape)))


def param_spec(name: str, param: torch.Tensor, dim: int, parallel: ParallelMesh) -> ParamSpec:
    """The spec of ``param``, whose local part on this rank is cut along ``dim``.

    Raises:
        ValueError: ``param`` is not on the full mesh that was given, or is not whole on each data-parallel rank; or its
            mesh cannot be joined with the data-parallel one.
    """
    if isinstance(param, DTensor):
        if any(placement.is_partial() for placement in param.placements):
            raise ValueError(
                f"fully_shard: parameter '{name}' has placements {param.placements}. A sum that is still pending "
                "cannot be sharded. Redistribute the parameter to Replicate() or Shard(dim) first."
            )
        if parallel.spmd is None:
            return _on_model_mesh(name, param, dim, parallel)
        return _on_full_mesh(name, param, dim, parallel.spmd)
    if parallel.spmd is not None:
        raise ValueError(
            f"fully_shard: parameter '{name}' is a plain {type(param).__name__}, but with dp_mesh_dims every parameter "
            "must be a DTensor on the full mesh, or have types of spmd_types. Call "
            "torch.distributed.tensor.distribute_module(module, mesh) first."
        )
    return plain_spec(param.shape, dim, parallel)


def local_part(param: torch.Tensor) -> torch.Tensor:
    """This rank's local part of an unsharded parameter, detached."""
    return _torch.local_of(param).detach() if isinstance(param, DTensor) else param.detach()


def _on_model_mesh(name: str, param: DTensor, dim: int, parallel: ParallelMesh) -> ParamSpec:
    """The spec of ``param``, which lies on model axes only. The data-parallel axes are put in front of these."""
    model, shape, stride = param.device_mesh, tuple(param.shape), contiguous_stride(param.shape)
    try:
        mesh = _torch.concatenated_mesh([parallel.mesh, model])
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ValueError(
            f"fully_shard: parameter '{name}' is a DTensor on the mesh {model}. This mesh cannot be joined with the "
            f"mesh {parallel.mesh} given to fully_shard: {error}. Use parts of one mesh with names, without a common "
            'axis: mesh = init_device_mesh(..., mesh_dim_names=("dp", "tp")), then mesh["dp"] and mesh["tp"].'
        ) from error
    roles = (*parallel.roles, *[AxisRole.MODEL] * model.ndim)
    placements = _placements(roles, mesh.shape, param.placements, dim)
    return ParamSpec(TensorSpec(mesh, placements, shape, stride), TensorSpec(model, param.placements, shape, stride))


def _on_full_mesh(name: str, param: DTensor, dim: int, spmd: SpmdMesh) -> ParamSpec:
    """The spec of ``param``, which lies on the full mesh and is whole on each data-parallel rank."""
    if param.device_mesh != spmd.mesh:
        raise ValueError(
            f"fully_shard: parameter '{name}' is a DTensor on {param.device_mesh}, but the mesh given with "
            f"dp_mesh_dims is {spmd.mesh}. Distribute the module over the mesh given to fully_shard."
        )
    data_parallel = tuple(axis for axis, role in enumerate(spmd.roles) if role is not AxisRole.MODEL)
    for axis in data_parallel:
        if not param.placements[axis].is_replicate():
            raise ValueError(
                f"fully_shard: parameter '{name}' is placed {param.placements[axis]} on the data-parallel axis "
                f"'{(spmd.mesh.mesh_dim_names or ())[axis]}', expected Replicate(). fully_shard itself shards over "
                "this axis. Redistribute the parameter to Replicate() on this axis first."
            )
    shape, stride = tuple(param.shape), contiguous_stride(param.shape)
    on_model_axes = [param.placements[axis] for axis, role in enumerate(spmd.roles) if role is AxisRole.MODEL]
    placements = _placements(spmd.sharded_roles, spmd.sharded_mesh.shape, on_model_axes, dim)
    return ParamSpec(
        TensorSpec(spmd.sharded_mesh, placements, shape, stride),
        TensorSpec(spmd.mesh, param.placements, shape, stride),
        data_parallel,
    )


def _placements(
    roles: Sequence[AxisRole], sizes: Sequence[int], on_model_axes: Sequence[Placement], dim: int
) -> tuple[Placement, ...]:
    """The placements of a sharded parameter on axes of ``roles`` and ``sizes``. Those on model axes do not change."""
    remaining = iter(on_model_axes)
    placements = [next(remaining) if role is AxisRole.MODEL else Replicate() for role in roles]
    for axis, role in enumerate(roles):
        if role is AxisRole.SHARD:
            right = zip(placements[axis + 1 :], sizes[axis + 1 :], strict=True)
            pieces = math.prod(size for placement, size in right if _torch.shards_dim(placement, dim))
            placements[axis] = Shard(dim) if pieces == 1 else _torch.strided_shard(dim, pieces)
    return tuple(placements)
