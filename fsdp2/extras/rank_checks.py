"""What ranks must know about each other: whether their models are the same, and which parameters were used.

``check_agreement`` compares the units of all ranks once, before the first collective that would hang if units differed.
It sends a hash per mesh in one small all-reduce, and the descriptions only if hashes differ (I4).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist

from fsdp2.core import CommunicationError, ParallelMesh, ParamGroup, ScheduleError, Unit, UnitTree, comms
from fsdp2.extras.claims import named_ranks
from fsdp2.extras.exchange import exchange
from fsdp2.extras.local_parts import LocalPartSpec
from fsdp2.extras.peers import match_channels
from fsdp2.extras.stalls import last_words

_T = TypeVar("_T")


def check_agreement(root_class: str, units: Sequence[Unit]) -> None:
    """Compare ``units``, and the software, with those of the other ranks. Collective on the meshes of their groups. If
    they differ, all ranks raise an error that names the ranks, and the software or the unit and the parameter."""
    unit_of = {group: unit for unit in units for group in unit.groups}
    for mesh, groups in by_mesh(unit_of):
        lines = [software(), *(line for group in groups for line in _described(unit_of[group], group))]
        found = compare_on(mesh, lines)
        if len(found) > 1:
            match_channels(mesh.shard)  # so that models built later work
            raise ScheduleError(_difference(root_class, mesh, found))


@cache
def software() -> str:
    """The versions of the software that this rank runs."""
    try:
        own = version("fsdp2")
    except PackageNotFoundError:  # a checkout that was not installed
        own = "not installed"
    return f"torch {torch.__version__}, fsdp2 {own}"


def agree(tree: UnitTree, what: str, communicate: Callable[[], _T]) -> _T:
    """Call ``communicate``. If that fails, the error names ``what`` as the communication that failed."""
    try:
        return communicate()
    except CommunicationError as error:
        if not dist.is_initialized():
            raise  # the process group was destroyed, as the error says, so it knows no ranks
        groups = [each for unit in tree.units for group in unit.groups for each in group.mesh.process_groups]
        explained = CommunicationError(f"{error}{last_words()}")
        raise comms.lost(what, explained, tree.executor.story(), groups) from error.__cause__


def compare_on(mesh: ParallelMesh, found: _T) -> list[_T]:
    """The values ``found`` on the ranks of ``mesh``, in rank order; one entry if all are equal. ``found`` consists of
    plain values."""
    if _is_agreed(mesh, repr(found)):
        return [found]
    return [each for row in exchange(mesh.replicate, exchange(mesh.shard, found)) for each in row]


def reduce(mesh: ParallelMesh, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
    """Reduce ``values`` in place over all ranks of ``mesh``."""
    for axis in (mesh.shard, mesh.replicate):
        if axis.size > 1:
            comms.wait_for(comms.launched(comms.all_reduce, axis.group, values, op))


def _is_agreed(mesh: ParallelMesh, text: str) -> bool:
    """Whether the hash of ``text`` is the same on all ranks. One all-reduce takes the minimum of each byte b and of
    255 - b; the hashes are equal if the minimum and the maximum of each byte are."""
    digest = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
    bounds = torch.stack([digest, 255 - digest]).to(mesh.device)
    reduce(mesh, bounds, dist.ReduceOp.MIN)
    least, lacking = bounds.cpu()
    return torch.equal(least, 255 - lacking)


def _described(unit: Unit, group: ParamGroup) -> list[str]:
    lines = [f"unit '{unit.name}', after forward: {unit.config.after_forward.value}"]
    for param in group.params:
        lines.append(
            f"parameter '{param.full_name}' of unit '{unit.name}': {param.dtypes.orig} {param.layout.shape} "
            f"{'trainable' if param.sharded.requires_grad else 'frozen'}, dim {param.layout.dim} cut in "
            f"{param.layout.num_shards}, gathered in {param.dtypes.param}, reduced in {param.dtypes.reduce}"
            + (f", {param.spec.geometry}" if isinstance(param.spec, LocalPartSpec) else "")
        )
    return lines


def _difference(root_class: str, mesh: ParallelMesh, found: Sequence[Sequence[str]]) -> str:
    """Names the first line that differs. ``found`` has the lines of each rank of ``mesh``."""
    ranks = [rank for row in mesh.ranks for rank in row]
    line_number, said = first_difference(list(zip(ranks, found, strict=True)))
    if line_number == 0:
        head = "the ranks do not run the same software:"
        advice = "Install the same torch and the same fsdp2 on all ranks."
    else:
        head = f"{root_class} is not the same on all ranks. The ranks would hang, or add wrong gradients."
        head += " First difference:"
        advice = "Build the same model on all ranks, with the same calls of fully_shard and the same requires_grad."
    return "\n".join([head, *said, advice])


def first_difference(found: Sequence[tuple[int, Sequence[str]]]) -> tuple[int, list[str]]:
    """The number of the first line that differs between ranks, and each variant of it with its ranks. If no line
    differs, the number is -1 and the list is empty."""
    by_line = zip_longest(*(theirs for _, theirs in found), fillvalue="nothing more")
    number, differing = next(((i, each) for i, each in enumerate(by_line) if len(set(each)) > 1), (-1, ()))
    ranks = {line: [rank for (rank, _), its in zip(found, differing, strict=True) if its == line] for line in differing}
    return number, [f"  {named_ranks(ranks[line])}: {line}" for line, _ in Counter(differing).most_common()]


def by_mesh(groups: Iterable[ParamGroup]) -> list[tuple[ParallelMesh, list[ParamGroup]]]:
    """Meshes with their groups. Meshes may overlap, so all ranks sort them in the same order, whatever their units."""
    found: dict[object, tuple[ParallelMesh, list[ParamGroup]]] = {}
    for group in groups:
        mesh = group.mesh
        found.setdefault((mesh.shard.group, mesh.replicate.group), (mesh, []))[1].append(group)
    return sorted(found.values(), key=lambda each: (each[0].data_parallel_size, each[0].shard.size, each[0].ranks))
