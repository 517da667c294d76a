"""Private names of torch that only the codec of all-gather hooks uses; ``_torch.py`` says which versions were tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from fsdp2.core import _torch

# Wrappers that describe more than this rank's memory: a tensor of all ranks, or one that has not arrived.
DISTRIBUTED_TENSORS = (DTensor, AsyncCollectiveTensor)


def rebuilder(tensor: torch.Tensor) -> Callable[[Iterator[torch.Tensor]], torch.Tensor]:
    """A function that takes leaves from an iterator, in the order of ``leaves``, and makes a tensor of them that is
    nested as ``tensor`` is. Wrappers get the shape of their first inner tensor. The function keeps no memory alive."""
    if not _torch.inner_names(tensor):
        return next
    cls, (_, context) = type(tensor), cast(Any, tensor).__tensor_flatten__()
    parts = {name: rebuilder(getattr(tensor, name)) for name in _torch.inner_names(tensor)}

    def rebuild(iterator: Iterator[torch.Tensor]) -> torch.Tensor:
        inner = {name: part(iterator) for name, part in parts.items()}
        like = next(iter(inner.values()))
        return cast(torch.Tensor, cls.__tensor_unflatten__(inner, context, like.shape, like.stride()))  # type: ignore[attr-defined]

    return rebuild
