"""Sharded models with the same memory, as ``q.load_state_dict(m.state_dict(), assign=True)`` makes them.

A group's shards lie in flat buffers of its own. If the tensors that a user has assigned are the shards of another group
that is cut in the same way, the group uses that group's buffers: then writes to the one are writes to the other, as in
plain modules. Their parameters share version counters, since torch has detached one from the other, and the count of
optimizer steps. If the groups are cut differently, values are copied, and the user is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from fsdp2.group.group import alive_groups
from fsdp2.group.shards import GroupShards, PlugIns


def _adopt_memory(shards: GroupShards, tensors: Sequence[torch.Tensor]) -> bool:
    """``tensors`` are about to become those of ``shards``. Returns whether these now have the buffers of another group,
    in which the tensors lie."""
    others = [group.shards for group in alive_groups() if group.shards is not shards]
    where = next((each for each in tensors if each.numel() and not each.is_meta), None)
    owner = None if where is None else next((other for other in others if _has(other, where)), None)
    if owner is None:
        return False
    if shards.would_lie_in(owner, tensors):
        shards.lie_in(owner, tensors)
        return True
    warnings.warn(
        f"parameter '{shards.names[0]}' and others of its unit were assigned shards of another model, but the two "
        "models are sharded differently. Their values were copied, so later writes to the one do not change the other. "
        "Call fully_shard on the same modules of both models, or load without assign=True.",
        stacklevel=2,
    )
    return False


def _has(shards: GroupShards, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` lies in a flat buffer of ``shards``."""
    start = tensor.data_ptr()
    buffers = ((flat.data_ptr(), flat.numel() * flat.itemsize) for flat in shards.flats.values() if not flat.is_meta)
    return any(begin <= start < begin + nbytes for begin, nbytes in buffers)


def register() -> None:
    """Ask when a group takes over tensors that the user has assigned."""
    PlugIns.adopt_memory = _adopt_memory
