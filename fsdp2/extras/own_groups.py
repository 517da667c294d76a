"""Process groups that fsdp2 creates: for shards between forward and backward, for reductions that do not queue behind
gathers, for all ranks of an HSDP mesh, and for messages on the host.

Rule: whether a group is created depends only on ranks and earlier calls, never on what a rank has freed (I4).
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.core import Axis, ParallelMesh, plans
from fsdp2.extras import torch_names
from fsdp2.extras.exchange import axis_of, highest


def post_forward_mesh(parallel: ParallelMesh, shard_size: int) -> ParallelMesh:
    """The mesh for shards between forward and backward: groups of ``shard_size`` neighbouring ranks of ``parallel``,
    replicated across the groups. Collective."""
    ranks = parallel.mesh.mesh.reshape(-1, shard_size)
    ((row, column),) = (ranks == dist.get_rank()).nonzero().tolist()
    axes, device = (parallel.shard, parallel.replicate), parallel.device
    lines = (ranks[:, column].tolist(), ranks[row, :].tolist())
    own = [own_axis(line, "fsdp2_post_forward", axes, device) for line in lines]
    groups = [axis.group for axis in own if axis.group is not None]
    names = ("replicate", "shard")
    mesh = DeviceMesh.from_group(groups, parallel.mesh.device_type, ranks, mesh_dim_names=names)
    return plans.mesh_with_roles(mesh, (plans.AxisRole.REPLICATE, plans.AxisRole.SHARD))


def separate_axis(axis: Axis, device: torch.device) -> Axis:
    """``axis``, of a mesh on ``device``, with a process group of its own. Axes of the same ranks share that group.
    Collective."""
    if axis.group is None or axis.size == 1:
        return axis
    return own_axis(dist.get_process_group_ranks(axis.group), "fsdp2_reduce_scatter", (axis,), device)


def _match_names(axes: Sequence[Axis], device: torch.device) -> None:
    """Let the ranks of ``axes`` use the same names for the groups that they create from now on."""
    count = torch.tensor([torch_names.num_groups()], dtype=torch.int64, device=device)
    for axis in axes:
        if axis.size > 1:
            dist.all_reduce(count, dist.ReduceOp.MAX, group=axis.group)
    _count_to(int(count.item()))


def _count_to(count: int) -> None:
    """Let this rank have created ``count`` groups. torch puts the number of a rank's groups into the name of a new one,
    and ranks that were in other meshes before have other numbers. Groups of one rank make up the difference."""
    for _ in range(count - torch_names.num_groups()):
        with torch_names.groups_made_from_nothing():
            dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="fsdp2_counted")


# I4: all ranks must agree on whether to create a group. So keys are plain values, since one rank alone may free a mesh.
_Key = tuple[tuple[int, ...], str]
_own_groups: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, dist.ProcessGroup]] = WeakKeyDictionary()


def own_axis(ranks: list[int], description: str, axes: Sequence[Axis], device: torch.device) -> Axis:
    """An axis of ``ranks`` with its own process group for this use, created once. Collective on ``axes``; their other
    ranks create their own groups at the same time, or have them already."""
    assert dist.group.WORLD is not None  # the mesh has groups
    _match_names(axes, device)
    made = _own_groups.setdefault(dist.group.WORLD, {})
    key = (tuple(ranks), description)
    if key not in made:
        with torch_names.groups_made_from_nothing():
            made[key] = dist.new_group(ranks, use_local_synchronization=True, group_desc=description)
    return Axis(made[key], len(ranks), dist.get_rank(made[key]))


def host_axis(description: str) -> Axis:
    """All ranks, with a process group of their own for this use, which communicates on the host and was created once.
    Collective."""
    world = axis_of(None)
    if dist.group.WORLD is None or world.size == 1:
        return plans.NO_AXIS
    made = _own_groups.setdefault(dist.group.WORLD, {})
    key = (tuple(range(world.size)), description)
    if key not in made:
        _count_to(highest(world, [torch_names.num_groups()])[0])
        made[key] = dist.new_group(backend="gloo", group_desc=description)
    return Axis(made[key], world.size, world.rank)
