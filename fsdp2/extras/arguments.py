"""Reads what users pass to ``fully_shard``: policies, dtypes and functions, ``dp_mesh_dims``, and placements.

Torch's classes are accepted in place of ours, so a program that changes one import may keep the others. Torch's
policies are recognized by name, since its modules take long to import and may not have been imported.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from fsdp2.core import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ParallelMesh,
    _torch,
    expect,
    plans,
)
from fsdp2.extras import torch_names
from fsdp2.extras.managed_groups import check_axes

_OURS: dict[str, type] = {cls.__name__: cls for cls in (MixedPrecisionPolicy, OffloadPolicy, CPUOffloadPolicy)}


def read_arguments(
    mesh: object,
    dims: object,
    policy: Any,
    offload_policy: Any,
    placement_fn: object,
    ignored_params: object,
) -> tuple[MixedPrecisionPolicy, OffloadPolicy]:
    """Check arguments of ``fully_shard``. Returns the two policies; torch's policies are converted to ours."""
    if isinstance(mesh, DeviceMesh):
        check_axes(mesh, has_roles=dims is not None)
        if dims is None:
            _warn_of_first_axis(mesh)
    policy = as_ours(policy)
    offload_policy = OffloadPolicy() if offload_policy is None else as_ours(offload_policy)
    for name, value, cls in (
        ("mp_policy", policy, MixedPrecisionPolicy),
        ("offload_policy", offload_policy, OffloadPolicy),
    ):
        expect(isinstance(value, cls), f"fully_shard: {name}", value, f"an fsdp2.{cls.__name__}")
    for field in ("param_dtype", "reduce_dtype", "output_dtype"):
        where, dtype = f"fully_shard: mp_policy.{field}", getattr(policy, field)
        remedy = f"For example: MixedPrecisionPolicy({field}=torch.bfloat16)."
        expect(isinstance(dtype, torch.dtype | None), where, dtype, "a torch.dtype or None", remedy)
        check_computes(where, dtype, is_reduced=field == "reduce_dtype")
    if policy.reduce_wire is not None:
        from fsdp2.extras.gradient_wires import check_wire  # only policies with a wire need it

        check_wire(policy.reduce_wire, policy.param_dtype, policy.reduce_dtype, _device_of(mesh))
    for name, function, of_parameter, remedy in (
        ("mp_policy.param_dtype_override_fn", policy.param_dtype_override_fn, "a dtype or None", ""),
        ("shard_placement_fn", placement_fn, "Shard(dim), a ParamPlacement or None", "lambda param: Shard(0)"),
    ):
        expected = f"a function from a parameter to {of_parameter}"
        remedy = remedy and f"For example: {remedy}."
        expect(function is None or callable(function), f"fully_shard: {name}", function, expected, remedy)
    where, expected = "fully_shard: ignored_params", "a set of parameters"
    remedy = "For example: set(model.head.parameters())."
    is_set = isinstance(ignored_params, set | frozenset | list | tuple | None)
    expect(is_set, where, ignored_params, expected, remedy)
    for each in ignored_params or ():  # type: ignore[attr-defined]
        expect(isinstance(each, torch.Tensor), f"{where}: an item", each, "a parameter", remedy)
    return policy, offload_policy


def _device_of(mesh: object) -> torch.device:
    if isinstance(mesh, DeviceMesh):
        return plans.mesh_device(mesh)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def check_computes(what: str, dtype: torch.dtype | None, *, is_reduced: bool = False) -> None:
    """Refuse the dtype named ``what`` if it is not a floating-point dtype; or, if gradients are reduced in it
    (``is_reduced``), if torch cannot add in it."""
    if dtype is None or ((dtype.is_complex or dtype.is_floating_point) and (dtype.itemsize > 1 or not is_reduced)):
        return
    size = " of at least 16 bits, since torch cannot add smaller ones" if is_reduced else ""
    remedy = " To gather parameters as int8, see fsdp2.tensors.wrap_parameters." if dtype is torch.int8 else ""
    raise ValueError(f"{what} is {dtype}, expected a floating-point dtype{size}. For example: torch.bfloat16.{remedy}")


def as_ours(policy: Any) -> Any:
    """Our policy with the same settings, if ``policy`` is one of torch's or of a class derived from it; else
    ``policy``. Refuses settings that fsdp2 does not know, perhaps from a newer torch."""
    for cls in type(policy).__mro__:
        ours = _OURS.get(cls.__name__)
        if ours is not None and cls.__module__.split(".")[0] == "torch":
            return _converted(policy, cls, ours)
    return policy


def _converted(policy: Any, theirs: Any, ours: Any) -> Any:
    known = {field.name for field in dataclasses.fields(ours)}
    settings = {field.name: getattr(policy, field.name) for field in dataclasses.fields(theirs)}
    defaults = {field.name: field.default for field in dataclasses.fields(theirs)}
    unknown = [name for name in settings if name not in known and settings[name] != defaults[name]]
    if unknown:
        raise TypeError(
            f"fully_shard: {theirs.__name__} of torch has {unknown[0]}={settings[unknown[0]]!r}, which fsdp2 does not "
            f"know. Leave {unknown[0]} at its default, or pass an fsdp2.{ours.__name__}."
        )
    return ours(**{name: value for name, value in settings.items() if name in known})


# Meshes

_NOT_REPLICATED = {"shard", "fsdp", "cp", "sp", "tp"}  # parts of names of axes that hold different data or weights


def _warn_of_first_axis(mesh: DeviceMesh) -> None:
    """Warn if a 2D mesh is about to be read as HSDP, but its first axis is named as if it were not for replicas."""
    names = mesh.mesh_dim_names or ("",)
    if mesh.ndim == 2 and not _NOT_REPLICATED.isdisjoint(names[0].split("_")):
        warnings.warn(
            f"fully_shard: mesh has the axes {names}. The first axis of a 2D mesh replicates parameters (HSDP), and "
            f"only '{names[1]}' shards them, though '{names[0]}' sounds like an axis that holds no replicas. To shard "
            f"over one of them, pass mesh['{names[0]}'] or mesh['{names[1]}']; over both, mesh._flatten('dp_shard'). "
            "If parameters are DTensors on the whole mesh, name its data-parallel axes: "
            f"dp_mesh_dims=DataParallelMeshDims(shard='{names[0]}'). For HSDP, call the first axis 'dp_replicate'.",
            stacklevel=4,  # the caller of fully_shard
        )


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
