"""What ranks tell each other about a plan: that it is the same, that a rank has failed, and a flag for each tensor.

A circle is all ranks of one mesh, with the tensors on it. Replicas, which may be outside of a domain, must hear of a
failed rank, too. Usually there is one circle; if there are several, a failure passes from the smallest to the largest,
and back. Rule: all ranks of a circle reach it at the same points of their programs, whatever other circles they are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.core import Axis, _torch, comms, plans
from fsdp2.extras.exchange import exchange
from fsdp2.optim.matrices.domains import Subject, cuts_of, joint_axis, ranks_along
from fsdp2.optim.matrices.planner import Cost
from fsdp2.optim.matrices.regions import Placed


@dataclass(frozen=True)
class Circle:
    """All ranks of a mesh. ``positions`` are those of its tensors; ``has_larger``: some rank is in a later circle."""

    axis: Axis
    ranks: tuple[int, ...]
    device: torch.device
    positions: tuple[int, ...]
    has_larger: bool = False


def circles_of(subjects: Sequence[Subject]) -> tuple[Circle, ...]:
    """The circles that this rank is in, the smallest first. Collective."""
    found: dict[tuple[int, ...], Circle] = {}
    for each in subjects:
        mesh = each.tensor.device_mesh
        axes = range(mesh.ndim)
        axis, ranks = joint_axis(mesh, axes), tuple(sorted(ranks_along(mesh, axes)))
        circle = found.setdefault(ranks, Circle(axis, ranks, plans.mesh_device(mesh), ()))
        found[ranks] = replace(circle, positions=(*circle.positions, each.position))
    # Ordered by ranks, not by this rank's list of tensors, which is compared with other ranks' lists only later.
    ordered = sorted(found.values(), key=lambda circle: (len(circle.ranks), circle.ranks))
    larger = [any(exchange(each.axis, each is not ordered[-1])) for each in ordered]
    return tuple(replace(each, has_larger=has) for each, has in zip(ordered, larger, strict=True))


def check_alike(circles: Sequence[Circle], subjects: Sequence[Subject], cost: Cost, options: object) -> None:
    """Check that all ranks would make the same plan, and that each shard agrees with its placements. Collective.

    Raises:
        ValueError: that is not so, on any rank. All ranks raise.
    """
    problem = next(filter(None, map(_unexpected_shard, subjects)), None)
    if problem is not None:
        problem = f"whole_matrices: on rank {dist.get_rank()}, {problem}"
    for circle in circles:
        mine = [_description(each, cost) for each in subjects if each.position in circle.positions]
        texts = exchange(circle.axis, repr((mine, options)))
        other = next((rank for rank, text in zip(circle.ranks, texts, strict=True) if text != texts[0]), None)
        if other is not None:
            problem = problem or (
                f"whole_matrices: rank {other} has other tensors, placements, rules or options than rank "
                f"{circle.ranks[0]}. Pass the same on all ranks, in the same order."
            )
    problems = told(circles, [] if problem is None else [problem])
    if problems:
        raise ValueError(problems[0])


def _description(subject: Subject, cost: Cost) -> object:
    tensor, rule = subject.tensor, subject.rule
    shapes = {(each.rows, each.columns) for each in rule.boxes(tensor.shape)}
    return subject.name, tensor.shape, tensor.placements, tensor.dtype, rule, sorted((*s, cost(*s)) for s in shapes)


def _unexpected_shard(subject: Subject) -> str | None:
    mesh = subject.tensor.device_mesh
    own = tuple(mesh.get_coordinate() or ())
    expected = Placed(tuple(subject.tensor.shape), cuts_of(subject.tensor), (own,)).local_shape(0)
    found = tuple(_torch.local_of(subject.tensor).shape)
    if expected == found:
        return None
    return (
        f"the shard of '{subject.name}' has shape {found}, expected {expected} by its placements. Shards of other "
        "sizes than torch.chunk makes cannot be joined."
    )


def told(circles: Sequence[Circle], texts: Sequence[str]) -> list[str]:
    """The texts of all ranks. Collective."""
    known = list(texts)
    back = (circle for circle in reversed(circles) if circle.has_larger)
    for circle in (*circles, *back):
        known = list(dict.fromkeys(text for each in exchange(circle.axis, known) for text in each))
    return known


def agreed(circles: Sequence[Circle], has_failed: bool, flags: Sequence[bool]) -> tuple[bool, list[bool]]:
    """Whether any rank has failed, and by position, whether any rank of the circle has set the flag. ``flags`` may be
    empty. Collective. The host waits for the device once."""
    found = list(flags)
    if not circles:
        return has_failed, found
    states: list[Tensor] = []
    for circle in circles:
        values = [has_failed, *(flags[position] for position in circle.positions if flags)]
        sent = torch.tensor(values, dtype=torch.uint8, device="cpu")
        if circle.device.type != "cpu":  # from pageable memory, the host would wait for the copy
            sent = sent.pin_memory()
        state = sent.to(circle.device, non_blocking=True)
        if states:
            state[:1] |= states[-1][:1]
        states.append(_reduced(circle, state))
    failed = states[-1][:1]
    for circle in reversed(circles):
        if circle.has_larger:
            failed = _reduced(circle, failed.clone())
    any_failed, *values = torch.cat([failed, *(state[1:] for state in states)]).tolist()
    for position, value in zip((p for circle in circles for p in circle.positions if flags), values, strict=True):
        found[position] = bool(value)
    return bool(any_failed), found


def _reduced(circle: Circle, state: Tensor) -> Tensor:
    """Reduce ``state`` over all ranks in place."""
    if circle.axis.group is not None:
        comms.wait_for(comms.launched(comms.all_reduce, circle.axis.group, state, dist.ReduceOp.MAX))
    return state
