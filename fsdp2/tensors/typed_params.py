"""Plain parameters with types of the library ``spmd_types``, which define their layout on model axes.

Compute reads plain tensors with types. Between passes, parameters are DTensors on the full mesh, like any others. A
type also determines the gradient on an axis: for R (replicated) it is a pending sum, for I (invariant) the whole
gradient, and for S(dim) this rank's part.

Nothing is imported here: code that uses types has imported the library. Its checker follows each operation of the
user, and the runtime stays out of it.

Rule: a type on a data-parallel axis is R, since the runtime itself shards there and reduces. All ranks have the same
types, or all raise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fsdp2.core import Axis, ModuleHooks, ParallelMesh, _torch, plans, seams
from fsdp2.extras.exchange import exchange
from fsdp2.extras.rank_checks import first_difference


@dataclass(frozen=True)
class TypedSpec(plans.ParamSpec):
    """A plain parameter with types.

    Attributes:
        types: the types of the unsharded parameter, by axis of the mesh that compute is checked on.
        partition_spec: the axes that shard each dim, in order; None if no axis does.
        grad_placements: the placements of the gradient from autograd, on the axes of ``unsharded.mesh``.
    """

    types: tuple[tuple[Any, Any], ...] = field(kw_only=True)
    partition_spec: Any = field(kw_only=True)
    grad_placements: tuple[Placement, ...] = field(kw_only=True)

    @property
    def may_be_pending(self) -> bool:
        model = (p for axis, p in enumerate(self.grad_placements) if axis not in self.data_parallel_axes)
        return any(placement.is_partial() for placement in model)

    def unsharded_parameter(self, local: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        made = nn.Parameter(local, requires_grad=requires_grad)
        _library().assert_type(made, dict(self.types), self.partition_spec)
        return made

    def local_gradient(self, grad: torch.Tensor, pending_in: torch.dtype | None = None) -> torch.Tensor:
        assert self.unsharded is not None
        if not self.may_be_pending:
            return grad
        spec = plans.TensorSpec(self.unsharded.mesh, self.grad_placements, self.unsharded.shape, self.unsharded.stride)
        return super().local_gradient(spec.dtensor(grad), pending_in)


def written(name: str, param: torch.Tensor, dim: int, parallel: ParallelMesh) -> plans.ParamSpec | None:
    """Reads the types of parameters. It is a ``SpecReader``."""
    if isinstance(param, DTensor) or not _library().get_local_type(param):
        return None
    if parallel.spmd is None:
        raise ValueError(
            f"fully_shard: parameter '{name}' has the types {_types_of(param)} of spmd_types, but the call has no "
            "dp_mesh_dims, so it does not say which axes are data-parallel. Pass the mesh that has all axes, with "
            'their names, and dp_mesh_dims=DataParallelMeshDims(shard="..."), or replicate="...", too.'
        )
    return _typed_spec(name, param, dim, parallel, parallel.spmd)


def resolved(parallel: ParallelMesh, resolve: Callable[[], list[seams.ResolvedGroup]]) -> list[seams.ResolvedGroup]:
    """Return the result of ``resolve``. If it raises on any rank, or types differ, all ranks raise."""
    _keep_out_of_checks()
    if parallel.spmd is None:
        return resolve()
    error: Exception | None = None
    found: list[str] = []
    try:
        resolved = resolve()
        found = [_described(param) for group in resolved for param in group.params]
    except Exception as raised:
        error = raised
    _check_agreement(parallel.spmd, error, found)
    return resolved


def _library() -> Any:
    """The module ``spmd_types``, which other code has imported."""
    return sys.modules["spmd_types"]


def _keep_out_of_checks() -> None:
    """Exclude the runtime from the checker, which follows only the user's computation."""
    function = ModuleHooks.input_function
    if function not in _kept_out:
        _kept_out.append(function)
        _library().register_local_autograd_function(function)
        _torch.add_checker(_library().is_type_checking, _library().no_typecheck)


_kept_out: list[type] = []


# From types to placements


def _types_of(param: torch.Tensor) -> dict[Any, Any]:
    """The types of ``param`` by axis, with S(dim) for the axes that shard a dim."""
    types = dict(_library().get_local_type(param))
    cut = _library().get_partition_spec(param)
    if cut is not None:
        types |= import_module("spmd_types.types").partition_spec_to_shard_types(cut)
    return types


def _typed_spec(name: str, param: torch.Tensor, dim: int, parallel: ParallelMesh, spmd: plans.SpmdMesh) -> TypedSpec:
    types, library = _types_of(param), _library()
    by_position = _on_storage_axes(name, types, spmd)
    placements = tuple(library.spmd_type_to_dtensor_placement(each) for each in by_position)
    grads = tuple(library.spmd_type_to_dtensor_placement(each.backward_type()) for each in by_position)
    whole = DTensor.from_local(param.detach(), spmd.mesh, placements, run_check=False)
    spec = plans.param_spec(name, whole, dim, parallel)
    local = library.get_local_type(param)
    return TypedSpec(
        spec.sharded,
        spec.unsharded,
        spec.data_parallel_axes,
        types=tuple((axis, local.get(axis, library.R)) for axis in _compute_axes(name, types, spmd)),
        partition_spec=library.get_partition_spec(param),
        grad_placements=grads,
    )


def _on_storage_axes(name: str, types: dict[Any, Any], spmd: plans.SpmdMesh) -> list[Any]:
    """The type on each axis of the given mesh, by position.

    Raises:
        ValueError: a type is on no axis of the mesh, or is not allowed on its axis; a model axis has no type.
    """
    library, names = _library(), spmd.mesh.mesh_dim_names or ()
    axes = _axes_of(spmd)
    model = {axis: i for i, axis in enumerate(axes) if spmd.roles[i] is plans.AxisRole.MODEL and axis.size() > 1}
    data = _joined([axis for i, axis in enumerate(axes) if spmd.roles[i] is not plans.AxisRole.MODEL])
    found = [library.R] * len(axes)
    for axis, each in types.items():
        if axis in model:
            if each is library.P or each is library.V:
                problem = "a sum that is still pending" if each is library.P else "different values along no dim"
                raise ValueError(
                    f"fully_shard: parameter '{name}' has the type {each} on the axis '{axis}', expected R, I or "
                    f"S(dim): {problem} cannot be sharded. Use S(dim) for a part of the parameter."
                )
            found[model[axis]] = each
        elif data is None or not axis <= data:
            raise ValueError(
                f"fully_shard: parameter '{name}' has the type {each} on the axis '{axis}', which is no axis of the "
                f"mesh given to fully_shard, {spmd.mesh}. Pass the mesh that has all axes."
            )
        elif each is not library.R:
            raise ValueError(
                f"fully_shard: parameter '{name}' has the type {each} on the data-parallel axis '{axis}', expected R. "
                "fully_shard itself shards over this axis and reduces the gradients. Give the parameter the type R "
                "there, or leave the axis out of its types."
            )
    missing = [names[i] for axis, i in model.items() if axis not in types]
    if missing:
        raise ValueError(
            f"fully_shard: parameter '{name}' has the types {types}, but none on the axes {missing} of the mesh given "
            "to fully_shard. Its gradients there are unknown. Give it a type on each axis that is not data-parallel: "
            "I or R if it is whole there, S(dim) if it is cut."
        )
    return found


def _compute_axes(name: str, types: dict[Any, Any], spmd: plans.SpmdMesh) -> Sequence[Any]:
    """The axes that compute is checked on: those of ``types`` if they reach all ranks of the mesh, else those of the
    library's current mesh. Two meshes may have the same ranks but divide them differently.

    Raises:
        ValueError: neither reaches all ranks.
    """
    storage, current = _joined(_axes_of(spmd)), _library().current_mesh()
    if _joined(list(types)) == storage:
        return list(types)
    if current is not None and _joined(list(current)) == storage and set(types) <= set(current):
        return list(current)
    raise ValueError(
        f"fully_shard: parameter '{name}' has the types {types}, which do not reach all ranks of the mesh given to "
        f"fully_shard, {spmd.mesh}; and spmd_types.current_mesh() is {current}. Give the parameter the type R on the "
        "data-parallel axes, or call fully_shard inside spmd_types.set_current_mesh(mesh) with all axes."
    )


def _axes_of(spmd: plans.SpmdMesh) -> list[Any]:
    return [_library().MeshAxis.of(spmd.mesh.get_group(i)) for i in range(spmd.mesh.ndim)]


def _joined(axes: Sequence[Any]) -> Any:
    """Join several axes into one; None if each has only one rank."""
    several = tuple(axis for axis in axes if axis.size() > 1)
    return import_module("spmd_types._mesh_axis").flatten_axes(several) if several else None


# All ranks


def _described(param: Any) -> str:
    spec = param.spec
    return f"parameter '{param.name}': {getattr(spec, 'types', 'no types')} {getattr(spec, 'partition_spec', None)}"


def _check_agreement(spmd: plans.SpmdMesh, error: Exception | None, found: Sequence[str]) -> None:
    """Raise ``error``, or report that of another rank of the full mesh. Collective on that mesh.

    Raises:
        ValueError: another rank has refused the call, or has other types.
    """
    mine = (dist.get_rank(), None if error is None else str(error), found)
    everyone = [mine]
    for i in range(spmd.mesh.ndim):
        axis = Axis(spmd.mesh.get_group(i), spmd.mesh.size(i), spmd.mesh.get_local_rank(i))
        everyone = [each for row in exchange(axis, everyone) for each in row]
    if error is not None:
        raise error
    for rank, text, _ in everyone:
        if text is not None:
            raise ValueError(f"fully_shard: rank {rank} has refused this call, so all ranks do. It says: {text}")
    _, said = first_difference(sorted((rank, lines) for rank, _, lines in everyone))
    if said:
        raise ValueError(
            "\n".join(["fully_shard: the ranks have other types of spmd_types:", *said, "Give all ranks the same."])
        )
