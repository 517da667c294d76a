"""Sharded models that share memory, for example after ``q.load_state_dict(m.state_dict(), assign=True)``.

The shards of a group lie in the group's own flat buffers. If the tensors that a user has assigned are the shards of
another group that is cut in the same way, the group uses that group's buffers: then a write to one model is a write to
the other, as with plain modules. Their parameters share the count of optimizer steps, and version counters, since one
was detached from the other. If the groups are cut differently, the values are copied, and the user is warned.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from fsdp2.core import groups_by_slot, is_plain, marks, seams


def adopt_memory(shards: seams.GroupShards, params: Sequence[nn.Parameter], tensors: Sequence[torch.Tensor]) -> bool:
    """``params`` with the local ``tensors`` are about to become those of ``shards``. Returns whether ``shards`` now
    uses the buffers of another group, in which the tensors lie. A parameter that itself belongs to another group is a
    tie, which is not handled here."""
    others = [each for each in {group.shards for group, _ in groups_by_slot().values()} if each is not shards]
    assigned = [
        each for param, each in zip(params, tensors, strict=True) if not marks.is_shard(param) and not each.is_meta
    ]
    where = next((each for each in assigned if each.numel()), None)
    owner = None if where is None else next((other for other in others if _has(other, where)), None)
    if owner is None:
        return False
    if _would_lie_in(shards, owner, tensors):
        shards.lie_in(owner, tensors)
        return True
    warnings.warn(
        "parameters were assigned by load_state_dict(assign=True) that are shards of another model, but the two "
        "models are sharded differently. Their values were copied, so later writes to the one do not change the other. "
        "Call fully_shard on the same modules of both models, or load without assign=True.",
        stacklevel=2,
    )
    return False


def _would_lie_in(shards: seams.GroupShards, other: seams.GroupShards, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether ``tensors`` lie in the buffers of ``other`` where they would lie in buffers of ``shards``."""
    (home, plan), buffers = shards.layout, other.flats
    return (
        home == other.layout[0]
        and all(map(is_plain, tensors))
        and dict(plan.shard_numels) == {dtype: flat.numel() for dtype, flat in buffers.items()}
        and all(
            tensors[step.index].data_ptr() == buffers[step.source].data_ptr() + step.shard_offset * step.source.itemsize
            for step in plan.steps
            if tensors[step.index].numel()
        )
    )


def _has(shards: seams.GroupShards, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` lies in a flat buffer of ``shards``."""
    start = tensor.data_ptr()
    buffers = ((flat.data_ptr(), flat.numel() * flat.itemsize) for flat in shards.flats.values() if not flat.is_meta)
    return any(begin <= start < begin + nbytes for begin, nbytes in buffers)
