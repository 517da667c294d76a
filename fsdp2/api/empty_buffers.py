"""Remembers the non-persistent buffers to which ``to_empty`` gave memory without values.

No checkpoint has them, so loading weights leaves them as they are. Rule: a buffer counts as filled once somebody has
written it or put another tensor in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from fsdp2 import _torch

_EMPTY = "_fsdp2_empty_at"  # attribute of a buffer: its version when it got its memory


class EmptyBuffer(NamedTuple):
    """A buffer without values, by its module and its name there. ``full_name``: from the module that was asked."""

    owner: nn.Module
    name: str
    full_name: str


def empty_buffers(module: nn.Module) -> list[EmptyBuffer]:
    """The non-persistent buffers under ``module`` that nobody has filled, on the meta device or not."""
    return [
        EmptyBuffer(owner, name, f"{prefix}.{name}" if prefix else name)
        for prefix, owner in module.named_modules()
        for name, buffer in _torch.non_persistent_buffers(owner).items()
        if buffer is not None and (buffer.is_meta or vars(buffer).get(_EMPTY) == _torch.versions_of([buffer]))
    ]


def note_replaced(before: Sequence[EmptyBuffer]) -> None:
    """``Module._apply`` has put other tensors in the place of ``before``: ``to_empty`` gave them memory, or ``to`` has
    cast what the memory held. They have no values either."""
    for owner, name, _ in before:
        buffer = _torch.buffers_dict(owner)[name]
        if buffer is not None and not buffer.is_meta:
            setattr(buffer, _EMPTY, _torch.versions_of([buffer]))
