"""Remembers the non-persistent buffers to which ``to_empty`` gave memory without values.

No checkpoint contains them, so loading weights leaves them as they are. Rule: a buffer counts as filled once it has
been written or replaced by another tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn

from fsdp2.core import _torch
from fsdp2.extras import torch_names
from fsdp2.extras.plain_names import joined_name, plain_name
from fsdp2.extras.torch_names import buffers_dict

_EMPTY = "_fsdp2_empty_at"  # attribute of a buffer: its version when it got its memory


class EmptyBuffer(NamedTuple):
    """A buffer without values, given by its module and its name there. ``full_name`` starts at the module that was
    asked, and leaves out wrappers. ``path`` is the path of ``owner`` that ``get_submodule`` takes."""

    owner: nn.Module
    name: str
    full_name: str
    path: str


def empty_buffers(module: nn.Module) -> list[EmptyBuffer]:
    """The non-persistent buffers under ``module`` that have not been filled, whether on the meta device or not."""
    return [
        EmptyBuffer(owner, name, plain_name(module, joined_name(prefix, name)), prefix)
        for prefix, owner in module.named_modules()
        for name, buffer in torch_names.non_persistent_buffers(owner).items()
        if buffer is not None and (buffer.is_meta or vars(buffer).get(_EMPTY) == _torch.versions_of([buffer]))
    ]


@contextmanager
def noting_replaced(module: nn.Module) -> Iterator[None]:
    """In the block, ``Module._apply`` replaces empty buffers: ``to_empty`` gives them memory, or ``to`` casts what that
    memory holds. The new tensors have no values either, and are marked as empty."""
    before = empty_buffers(module)
    yield
    for owner, name, *_ in before:
        buffer = buffers_dict(owner)[name]
        if buffer is not None and not buffer.is_meta:
            setattr(buffer, _EMPTY, _torch.versions_of([buffer]))
