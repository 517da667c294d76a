"""Which ranks share the work on which tensors: turns DTensors into process groups and input for the planner.

A domain is a process group with the tensors that its ranks shard or replicate, and that are sent in one dtype.
Rule: all ranks of a group have the same domains in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2.core import Axis, plans
from fsdp2.extras import torch_names
from fsdp2.extras.own_groups import own_axis
from fsdp2.optim.matrices.planner import Cost, GroupPlan, PlannedTensor, plan_matrices
from fsdp2.optim.matrices.regions import AxisCut, Coordinate, Placed
from fsdp2.optim.matrices.rules import MatrixRule

Copies = Literal["cheaper", "share", "each"]


@dataclass(frozen=True)
class Rates:
    """What a machine roughly does per second. Used to choose whether replicas share the work or each repeat it.

    Attributes:
        flops: floating-point operations of a rank.
        nbytes: bytes that a rank sends to ranks that have parts of the same copy.
        nbytes_across: bytes that a rank sends to other copies, which are usually on other nodes.
    """

    flops: float
    nbytes: float
    nbytes_across: float

    def seconds(self, plan: GroupPlan) -> float:
        """The compute time of the busiest rank plus the communication time of the rank that sends most."""
        across = max(map(sum, zip(*(each.across for each in plan.traffic), strict=True)), default=0)
        return max(plan.loads) / self.flops + max(plan.sent_nbytes) / self.nbytes + across / self.nbytes_across


ON_CPU = Rates(flops=5e10, nbytes=2e9, nbytes_across=1e9)
ON_ACCELERATOR = Rates(flops=3e14, nbytes=2e11, nbytes_across=2.5e10)


@dataclass(frozen=True)
class Subject:
    """A tensor that is to be whole for a moment. ``position`` is its index among all tensors."""

    position: int
    name: str
    tensor: DTensor
    rule: MatrixRule


@dataclass(frozen=True)
class Domain:
    """Tensors on the ranks of one process group.

    Attributes:
        ranks: the global ranks, by member.
        dtype: the dtype in which they are sent.
        device: the device of messages and whole matrices.
    """

    axis: Axis
    ranks: tuple[int, ...]
    plan: GroupPlan
    dtype: torch.dtype
    device: torch.device

    @property
    def me(self) -> int:
        return self.axis.rank

    def empty(self, *shape: int) -> Tensor:
        """Memory for messages or results."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


def subject_of(position: int, name: str, tensor: Tensor, rule: MatrixRule | None) -> Subject:
    """Check ``tensor`` and describe it.

    Raises:
        TypeError: it is not a DTensor.
        ValueError: it is a pending sum; it does not have two dims and has no rule; its rule does not fit.
    """
    if not isinstance(tensor, DTensor):
        raise TypeError(
            f"whole_matrices: '{name}' is a plain {type(tensor).__name__}, so it is not sharded over a mesh. Shard its "
            "module with fully_shard first; of what every rank has whole, no rank needs to be given anything."
        )
    if not all(p.is_replicate() or torch_names.sharded_dim(p) is not None for p in tensor.placements):
        raise ValueError(
            f"whole_matrices: '{name}' has placements {tensor.placements}, expected Shard or Replicate on each axis. "
            "Redistribute it first."
        )
    if rule is None and tensor.ndim != 2:
        raise ValueError(
            f"whole_matrices: '{name}' has shape {tuple(tensor.shape)}, so it is no matrix. Return a rule for it: "
            "MatrixRule.batch() for experts [E, m, n], MatrixRule.flattened() for a convolution; or leave it out."
        )
    rule = rule or MatrixRule.whole()
    try:
        rule.boxes(tensor.shape)
    except ValueError as error:
        raise ValueError(f"whole_matrices: '{name}' {error}") from None
    return Subject(position, name, tensor, rule)


def domains_of(
    subjects: Sequence[Subject],
    *,
    cost: Cost,
    dtype: torch.dtype | None,
    bucket_nbytes: int,
    copies: Copies,
    last_first: bool,
) -> list[Domain]:
    """The domains of ``subjects``, those with most ranks first. Collective: all ranks pass the same arguments."""

    def make(*, shares: bool) -> list[Domain]:
        plan = partial(plan_matrices, cost=cost, bucket_nbytes=bucket_nbytes, last_first=last_first)
        return _planned(subjects, dtype, plan, shares=shares)

    has_copies = any(p.is_replicate() for each in subjects for p in each.tensor.placements)
    if not has_copies or copies != "cheaper":
        return make(shares=copies != "each")
    return min([make(shares=True), make(shares=False)], key=_seconds)


def _seconds(domains: Sequence[Domain]) -> float:
    return sum((ON_CPU if each.device.type == "cpu" else ON_ACCELERATOR).seconds(each.plan) for each in domains)


def _planned(
    subjects: Sequence[Subject], dtype: torch.dtype | None, plan: Callable[..., GroupPlan], *, shares: bool
) -> list[Domain]:
    """The domains. ``shares`` says whether copies of a tensor share the work; otherwise each does its own."""
    found: dict[_Key, tuple[Axis, list[tuple[Subject, Placed]]]] = {}
    for each in subjects:
        axis, ranks, placed = _on_group(each, shares=shares)
        key = _Key(ranks, dtype or each.tensor.dtype, plans.mesh_device(each.tensor.device_mesh))
        found.setdefault(key, (axis, []))[1].append((each, placed))
    loads: list[dict[int, float]] = []  # loads by rank, for each group so far
    domains = []
    for key in sorted(found, key=lambda key: (-len(key.ranks), found[key][1][0][0].position)):
        axis, members = found[key]
        tensors = {
            each.position: PlannedTensor(each.name, placed, key.dtype.itemsize, each.rule) for each, placed in members
        }
        # All ranks of this group know only the loads of groups that they are all in.
        known = [each for each in loads if each.keys() >= {*key.ranks}]
        before = [sum(each[rank] for each in known) for rank in key.ranks]
        made = plan(tensors, len(key.ranks), before=before)
        own = [load - earlier for load, earlier in zip(made.loads, before, strict=True)]
        loads.append(dict(zip(key.ranks, own, strict=True)))
        domains.append(Domain(axis, key.ranks, made, key.dtype, key.device))
    return domains


class _Key(NamedTuple):
    ranks: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def cuts_of(tensor: DTensor) -> tuple[AxisCut, ...]:
    """What each axis of the mesh of ``tensor`` does to it."""
    return tuple(
        AxisCut(size, torch_names.sharded_dim(placement), torch_names.split_factor_of(placement))
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    )


def _on_group(subject: Subject, *, shares: bool) -> tuple[Axis, tuple[int, ...], Placed]:
    """The process group for ``subject``, its ranks, and where the tensor lies on them."""
    tensor = subject.tensor
    mesh, cuts = tensor.device_mesh, cuts_of(tensor)
    axes = [i for i, cut in enumerate(cuts) if cut.size > 1 and (shares or cut.dim is not None)]
    axis, reached = joint_axis(mesh, axes), ranks_along(mesh, axes)
    ranks = tuple(reached) if axis.group is None else tuple(dist.get_process_group_ranks(axis.group))
    coordinates: tuple[Coordinate, ...] = tuple(reached[rank] for rank in ranks)
    placed = Placed(tuple(tensor.shape), tuple(cuts[i] for i in axes), coordinates)
    return axis, ranks, placed


def joint_axis(mesh: DeviceMesh, axes: Sequence[int]) -> Axis:
    """Join several axes of ``mesh``, given by position, into one with the ranks that this rank reaches over them,
    ascending. Collective if more than one of them has several ranks: a process group is then made, once."""
    long = [Axis(mesh.get_group(i), mesh.size(i), mesh.get_local_rank(i)) for i in axes if mesh.size(i) > 1]
    if len(long) < 2:
        return next((replace(each, rank=dist.get_rank(each.group)) for each in long), plans.NO_AXIS)
    return own_axis(sorted(ranks_along(mesh, axes)), "fsdp2_joint", long, plans.mesh_device(mesh))


def ranks_along(mesh: DeviceMesh, axes: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The global ranks that this rank reaches over ``axes`` of ``mesh``, with their coordinates on these axes."""
    own = mesh.get_coordinate()
    assert own is not None
    reached = mesh.mesh[tuple(slice(None) if axis in axes else own[axis] for axis in range(mesh.ndim))]
    coordinates = itertools.product(*(range(mesh.size(axis)) for axis in axes))
    return dict(zip(reached.flatten().tolist(), coordinates, strict=True))
