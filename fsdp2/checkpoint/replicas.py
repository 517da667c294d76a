"""Replicas: whether ranks that hold the same part of a tensor hold the same values, and how to give them the same.

Ranks that build a model from different seeds start with different replicas. With HSDP, and for buffers, they stay
different, because training averages only gradients.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.checkpoint.weights import Weight, check_ready, weights_of
from fsdp2.core import _torch, comms, expect
from fsdp2.extras.exchange import axis_of, exchange
from fsdp2.extras.local_parts import LocalPartSpec
from fsdp2.extras.plain_names import plain_name

_MAX_NAMES = 5  # that an error lists
_CHUNK_NUMEL = 2**20  # words of 8 bytes that are hashed at once, which bounds the memory that hashing takes
_ODD = 0x1E3779B97F4A7C15  # spreads the positions of words over 63 bits


class _Part(NamedTuple):
    """This rank's ``values`` of the tensor ``name``. Ranks with the same ``place`` hold the same part of it.
    ``replica``: which replica of HSDP this rank belongs to, and the ranks that share it."""

    name: str
    values: torch.Tensor
    place: str
    replica: tuple[int, tuple[int, ...]]
    group: dist.ProcessGroup | None


def check_replicas(model: nn.Module) -> None:
    """Check that replicas are equal: ranks that hold the same part of a parameter or buffer hold the same bits.

    Replicas are the copies of HSDP, parameters that are not sharded, and buffers, also those that are not persistent.
    All ranks of the default process group must call this. Each sends one message of some 50 bytes per tensor.

    Raises:
        RuntimeError: replicas differ. All ranks raise it. It has the first names, and the ranks that differ from the
            first replica.
        ScheduleError: a forward or backward is running, or :func:`unsharded` has lent parameters.
    """
    parts = _parts(model, "check_replicas")
    found = exchange(axis_of(None), [(part.name, _short(part.place), _digest(part.values)) for part in parts])
    by_place: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, rows in enumerate(found):
        for name, place, digest in rows:
            by_place[name, place][digest].append(rank)
    differing: dict[str, list[int]] = defaultdict(list)
    for (name, _), replicas in by_place.items():
        for ranks in list(replicas.values())[1:]:
            differing[name] += ranks
    if differing:
        named = [f"'{name}' (ranks {', '.join(map(str, sorted(ranks)))})" for name, ranks in differing.items()]
        more = f" and {len(named) - _MAX_NAMES} more" if len(named) > _MAX_NAMES else ""
        raise RuntimeError(
            f"check_replicas: replicas differ in {', '.join(named[:_MAX_NAMES])}{more}. The ranks are those that "
            "differ from the first replica. Expected the same bits everywhere. Call fsdp2.broadcast_from(model), or "
            "build the model from the same seed on all ranks."
        )


def broadcast_from(model: nn.Module, rank: int = 0) -> None:
    """Give all replicas the values of the replica that ``rank`` belongs to, for parameters and buffers.

    A shard is sent to the ranks that hold the same part; where no two ranks do, nothing is sent. Parameters that are
    not sharded, and buffers, also those that are not persistent, go from ``rank`` to all ranks. So before
    :func:`fully_shard`, this sends the whole model. All ranks of the default process group must call it.

    Raises:
        ValueError: ``rank`` is not a rank of the default process group.
        ScheduleError: a forward or backward is running, or :func:`unsharded` has lent parameters.
    """
    world = axis_of(None)
    expect(rank in range(world.size), "broadcast_from: rank", rank, f"0 to {world.size - 1}", by_value=True)
    parts = _parts(model, "broadcast_from")
    found = exchange(world, [(_short(part.place), part.replica) for part in parts])
    for part, rows in zip(parts, zip(*found, strict=True), strict=True):
        index, mates = rows[rank][1]
        holders = [each for each, (place, _) in enumerate(rows) if place == rows[world.rank][0]]
        source = min(holders, key=lambda each: (each != rank, each not in mates, rows[each][1][0] != index, each))
        for leaf in _torch.leaves(part.values):
            _send(leaf, source, holders, [dist.group.WORLD, part.group])


def _send(values: torch.Tensor, source: int, holders: list[int], groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Send ``values`` from ``source`` to the other ``holders``, in one of ``groups`` if it has just these ranks."""
    for group in groups:
        if group is not None and len(holders) > 1 and dist.get_process_group_ranks(group) == holders:
            comms.launched(dist.broadcast, values, source, group)
            return
    if dist.get_rank() != source:
        comms.launched(dist.recv, values, source)
        return
    for other in holders:
        if other != source:
            comms.launched(dist.send, values, other)


def _parts(model: nn.Module, caller: str) -> list[_Part]:
    weights = weights_of(model, caller)
    known = {id(weight.tensor) for weight in weights}
    for name, buffer in model.named_buffers():
        if id(buffer) not in known:  # it is not persistent
            weights.append(Weight((plain_name(model, name),), buffer))
    check_ready(weights, caller)
    return [_Part(each.names[0], each.local, _place(each), *_replica(each)) for each in weights]


def _place(weight: Weight) -> str:
    geometry = None
    if weight.param is not None and isinstance(weight.param.spec, LocalPartSpec):
        geometry = weight.param.spec.geometry
    return repr((weight.along(), geometry))


def _replica(weight: Weight) -> tuple[tuple[int, tuple[int, ...]], dist.ProcessGroup | None]:
    if weight.param is None:
        return (0, ()), None
    mesh = weight.param.mesh
    mates = () if mesh.shard.group is None else tuple(dist.get_process_group_ranks(mesh.shard.group))
    return (mesh.replicate.rank, mates), mesh.replicate.group


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest(values: torch.Tensor) -> str:
    """A hash of the bits of ``values`` that also depends on where each bit is."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for leaf in _torch.leaves(values):
        nbytes = leaf.contiguous().view(-1).view(torch.uint8) if leaf.numel() else leaf.new_empty(0, dtype=torch.uint8)
        padded = torch.nn.functional.pad(nbytes, (0, -nbytes.numel() % 8)).view(torch.int64)
        for start in range(0, padded.numel(), _CHUNK_NUMEL):
            words = padded[start : start + _CHUNK_NUMEL]
            places = torch.arange(start, start + words.numel(), device=words.device) * 2 + 1
            mixed = (words ^ (words >> 29)) * (places * _ODD)
            total = total * 31 + (mixed ^ (mixed >> 32)).sum()
    return f"{int(total) & (2**64 - 1):x}"
