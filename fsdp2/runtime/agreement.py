"""All ranks gather and reduce the same: compared once, before the first collective that would hang if they did not.

Each rank describes the groups on a mesh, a line per parameter. The ranks of that mesh compare a hash of it in one small
all-reduce per axis, and exchange the lines only if hashes differ. (I4)
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist

from fsdp2.comm.backends import exchange, match_channels
from fsdp2.group.group import ParamGroup
from fsdp2.plan.mesh import ParallelMesh
from fsdp2.runtime.units import GroupedUnit
from fsdp2.types import ScheduleError

_T = TypeVar("_T")


def check_agreement(root_class: str, units: Sequence[GroupedUnit]) -> None:
    """Compare ``units`` with those of the other ranks. Collective on the meshes of their groups.

    Raises:
        ScheduleError: they differ; on all ranks alike. Names the ranks, the unit and the parameter.
    """
    by_groups: dict[object, tuple[ParallelMesh, list[str]]] = {}
    for unit in units:
        for group in unit.groups:
            mesh = group.mesh
            by_groups.setdefault((mesh.shard.group, mesh.replicate.group), (mesh, []))[1].extend(
                _described(unit, group)
            )
    # In an order that ranks with other meshes share, whatever their units are: meshes may overlap.
    for mesh, lines in sorted(by_groups.values(), key=_size):
        if not _is_agreed(mesh, "\n".join(lines)):
            match_channels(mesh.shard)  # for the models that are built next
            raise ScheduleError(_difference(root_class, mesh, lines))


def compare(units: Sequence[GroupedUnit], found: _T) -> list[_T]:
    """What the ranks of the largest mesh of ``units`` have ``found``, in rank order; one entry if that is the same.
    ``found``: plain values."""
    meshes = [group.mesh for unit in units for group in unit.groups]
    mesh = max(meshes, key=lambda mesh: mesh.data_parallel_size)
    if _is_agreed(mesh, repr(found)):
        return [found]
    return [each for row in exchange(mesh.replicate, exchange(mesh.shard, found)) for each in row]


def _is_agreed(mesh: ParallelMesh, text: str) -> bool:
    """Whether the least and the greatest hash of all ranks are one: each byte, and what it lacks to 255, reduced to
    their least."""
    digest = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
    bounds = torch.stack([digest, 255 - digest]).to(mesh.device)
    for axis in (mesh.shard, mesh.replicate):
        if axis.size > 1:
            dist.all_reduce(bounds, dist.ReduceOp.MIN, group=axis.group)
    least, lacking = bounds.cpu()
    return torch.equal(least, 255 - lacking)


def _described(unit: GroupedUnit, group: ParamGroup) -> list[str]:
    lines = [f"unit '{unit.name}', after forward: {unit.rules.after_forward.value}"]
    for param in group.params:
        lines.append(
            f"parameter '{param.full_name}' of unit '{unit.name}': {param.dtypes.orig} {param.layout.shape} "
            f"{'trainable' if param.sharded.requires_grad else 'frozen'}, dim {param.layout.dim} cut in "
            f"{param.layout.num_shards}, gathered in {param.dtypes.param}, reduced in {param.dtypes.reduce}"
        )
    return lines


def _difference(root_class: str, mesh: ParallelMesh, lines: list[str]) -> str:
    """The first line that is not the same on all ranks of ``mesh``."""
    rank = dist.get_rank()
    found = [entry for row in exchange(mesh.replicate, exchange(mesh.shard, (rank, lines))) for entry in row]
    by_line = zip_longest(*(theirs for _, theirs in found), fillvalue="nothing more")
    differing = next(each for each in by_line if len(set(each)) > 1)
    ranks = {line: [rank for (rank, _), its in zip(found, differing, strict=True) if its == line] for line in differing}
    said = [f"  {_named(ranks[line])}: {line}" for line, _ in Counter(differing).most_common()]
    return "\n".join(
        [
            f"{root_class} is not the same on all ranks: they would hang, or add the wrong gradients. The first "
            "difference:",
            *said,
            "Build the model alike on all ranks, with the same calls of fully_shard and the same requires_grad.",
        ]
    )


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _size(described: tuple[ParallelMesh, list[str]]) -> tuple[int, int]:
    mesh, _ = described
    return mesh.data_parallel_size, mesh.shard.size
