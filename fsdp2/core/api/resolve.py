"""Checks the arguments of ``fully_shard`` and decides what they mean, without changing anything."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2.core import _torch, seams
from fsdp2.core.api.arguments import expect
from fsdp2.core.comm.offload import Home
from fsdp2.core.group.param import ShardedParam
from fsdp2.core.marks import is_plain
from fsdp2.core.plan.dtypes import check_grad_dtype, own_policy, param_dtypes
from fsdp2.core.plan.layout import Layout, shard_layout
from fsdp2.core.plan.mesh import ParallelMesh, replicated
from fsdp2.core.plan.placements import local_part, param_spec
from fsdp2.core.runtime.unit import UnitConfig
from fsdp2.core.schedule.schedule import AfterForward
from fsdp2.core.types import MixedPrecisionPolicy, ParamPlacement

ShardPlacementFn = Callable[[nn.Parameter], Shard | Replicate | ParamPlacement | None]


@dataclass(frozen=True)
class ResolvedGroup:
    """Parameters that are gathered together. ``post_forward``: the smaller mesh between forward and backward, or None.
    ``on_commit``: functions for other changes to make when the parameters are sharded."""

    mesh: ParallelMesh
    params: list[ShardedParam]
    post_forward: ParallelMesh | None
    on_commit: list[Callable[[], None]]


def resolve_groups(
    found: Sequence[seams.Found],
    parallel: ParallelMesh,
    placement_fn: ShardPlacementFn | None,
    policy: MixedPrecisionPolicy,
    home: Home,
    post_forward_size: int | None,
) -> list[ResolvedGroup]:
    """One group per set of ranks, in the order of the first parameter of each group. ``post_forward_size``: the number
    of ranks over which the user wants shards between forward and backward."""

    def ranks(mesh: ParallelMesh) -> tuple[object, ...]:
        return mesh.shard.group, mesh.replicate.group, mesh.roles

    meshes: dict[tuple[object, ...], ParallelMesh] = {ranks(parallel): parallel}

    def known(mesh: ParallelMesh, param: torch.Tensor) -> ParallelMesh:
        """One object for all meshes of the same ranks, except that a DTensor's mesh can only join the given one."""
        is_joined = isinstance(param, DTensor) and mesh.mesh != parallel.mesh
        return meshes.setdefault((*ranks(mesh), mesh.mesh) if is_joined else ranks(mesh), mesh)

    members: dict[ParallelMesh, list[tuple[ShardedParam, Callable[[], None] | None]]] = {}
    for item in found:
        seams.check_param(item, parallel.device)
        placement, mesh = _asked_placement(item, parallel, placement_fn)
        # All ranks hold parameters that stay whole, and all-reduce their gradients. A scalar cannot be cut.
        if isinstance(placement, Replicate) or item.param.dim() == 0:
            mesh, placement = replicated(known(mesh, item.param)), None
        mesh = known(mesh, item.param)
        members.setdefault(mesh, []).append(_resolve(item, mesh, placement, policy, home))
    groups = []
    for mesh, resolved in members.items():
        on_commit = [commit for _, commit in resolved if commit is not None]
        smaller = _post_forward_mesh(post_forward_size, mesh)
        groups.append(ResolvedGroup(mesh, [param for param, _ in resolved], smaller, on_commit))
    return groups


def _asked_placement(
    item: seams.Found, parallel: ParallelMesh, placement_fn: ShardPlacementFn | None
) -> tuple[Shard | Replicate | None, ParallelMesh]:
    asked = None if placement_fn is None else placement_fn(item.param)
    if asked is None or isinstance(asked, (Shard, Replicate)):
        return asked, parallel
    return seams.read_placement(item.name, asked, parallel)


def _resolve(
    item: seams.Found, parallel: ParallelMesh, placement: Shard | None, policy: MixedPrecisionPolicy, home: Home
) -> tuple[ShardedParam, Callable[[], None] | None]:
    """The parameter, not sharded yet, and a function for other changes to make when it is, or None."""
    name, param = item.name, item.param
    adapter = seams.adapter_of(param)
    adapted = None if adapter is None else adapter(name, param, tuple(item.slots))
    form = param if adapted is None else nn.Parameter(adapted.tensor, requires_grad=False)
    dim = _resolve_dim(name, form, placement)
    full = local_part(form)
    layout = shard_layout(tuple(full.shape), dim, parallel.shard.size)
    written = (read(name, form, dim, parallel) for read in seams.spec_readers)
    own, grad_dtype = own_policy(name, param, policy), _torch.own_grad_dtype(param)
    check_grad_dtype(name, grad_dtype, own)
    resolved = ShardedParam(
        name=name,
        sharded=param,
        slots=tuple(item.slots),
        mesh=parallel,
        layout=layout,
        spec=next(filter(None, written), None) or param_spec(name, form, dim, parallel),
        dtypes=param_dtypes(form.dtype, own, grad_dtype),
        policy=own,
        local=_subclass_shard(name, form, full, layout, parallel.shard.rank, home),
        grad_dtype=grad_dtype,
    )
    return resolved, None if adapted is None else adapted.commit


def _subclass_shard(
    name: str, param: nn.Parameter, full: torch.Tensor, layout: Layout, rank: int, home: Home
) -> torch.Tensor | None:
    if is_plain(full):
        return None
    with torch.no_grad():
        return seams.cut_subclass(name, full, layout, rank, home)


def _resolve_dim(name: str, param: nn.Parameter, placement: Shard | None) -> int:
    if placement is None or param.dim() == 0:
        return 0
    if not -param.dim() <= placement.dim < param.dim():
        raise ValueError(
            f"fully_shard: parameter '{name}' has shape {tuple(param.shape)}, so it cannot be sharded on dim "
            f"{placement.dim}. Return a dim in [{-param.dim()}, {param.dim() - 1}] from shard_placement_fn."
        )
    return placement.dim % param.dim()


def read_reshard_after_forward(value: bool | int | None, parallel: ParallelMesh) -> UnitConfig:
    """The configuration of a unit with ``reshard_after_forward=value``.

    Raises:
        TypeError, ValueError: ``value`` is neither a bool nor a number of ranks that divides the shard axis.
    """
    if value is None:
        return UnitConfig()
    if isinstance(value, bool):
        return UnitConfig(AfterForward.RESHARD if value else AfterForward.KEEP, stays_as_root=False)
    expect(isinstance(value, int), "fully_shard: reshard_after_forward", value, "a bool, an int or None")
    size = parallel.shard.size
    if value < 1 or size % value != 0:
        factors = [n for n in range(1, size + 1) if size % n == 0]
        raise ValueError(
            f"fully_shard: reshard_after_forward={value} does not divide the {size} ranks of the shard axis. "
            f"Pass one of {factors}, or a bool."
        )
    if value > 1:
        return UnitConfig(AfterForward.RESHARD_TO_SMALLER_MESH, stays_as_root=False, post_forward_size=value)
    warnings.warn(
        "reshard_after_forward=1 means one rank per shard, so parameters stay unsharded after forward. Pass False to "
        "keep parameters unsharded, or True to reshard parameters over all ranks.",
        stacklevel=4,  # the caller of fully_shard
    )
    return UnitConfig(AfterForward.KEEP, stays_as_root=False)


def _post_forward_mesh(size: int | None, mesh: ParallelMesh) -> ParallelMesh | None:
    """The smaller mesh of a group between forward and backward, or None. A mesh from ``shard_placement_fn`` may have
    fewer ranks than ``size``."""
    if size is None or size >= mesh.shard.size:
        return None
    if mesh.shard.size % size != 0:
        raise ValueError(
            f"fully_shard: reshard_after_forward={size} does not divide the {mesh.shard.size} ranks of a mesh that "
            "shard_placement_fn returned. Pass a number that divides the ranks of every shard axis, or a bool."
        )
    return seams.post_forward_mesh(mesh, size) if mesh.has_this_rank else None
