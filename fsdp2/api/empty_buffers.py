"""Remembers the non-persistent buffers to which ``to_empty`` gave memory without values.

No checkpoint has them, so loading weights leaves them as they are. Rule: a buffer counts as filled once somebody has
written it or put another tensor in its place.
"""

from __future__ import annotations

from torch import nn

from fsdp2 import _torch

_EMPTY = "_fsdp2_empty_at"  # attribute of a buffer: its version when it got its memory


def buffers_without_memory(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """The non-persistent buffers under ``module`` that are on the meta device."""
    return [
        (owner, name)
        for owner in module.modules()
        for name, buffer in _torch.non_persistent_buffers(owner).items()
        if buffer is not None and buffer.is_meta
    ]


def note_memory(before: list[tuple[nn.Module, str]]) -> None:
    """The buffers ``before`` were on the meta device. Those that are not any more have no values yet."""
    for owner, name in before:
        buffer = _torch.buffers_dict(owner)[name]
        if buffer is not None and not buffer.is_meta:
            setattr(buffer, _EMPTY, _torch.versions_of([buffer]))


def buffers_without_values(module: nn.Module) -> list[str]:
    """The names of the non-persistent buffers under ``module`` that nobody has filled."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in module.named_modules()
        for name, buffer in _torch.non_persistent_buffers(owner).items()
        if buffer is not None and (buffer.is_meta or vars(buffer).get(_EMPTY) == _torch.versions_of([buffer]))
    ]
