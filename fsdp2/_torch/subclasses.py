"""What wrapper subclasses are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Subclasses tell by ``__tensor_flatten__``; torch's test for that is private. Its type guard confuses mypy.
_is_wrapper: Callable[[object], bool] = is_traceable_wrapper_subclass


def inner_names(tensor: torch.Tensor) -> tuple[str, ...]:
    """The attributes that hold the tensors a wrapper subclass is made of; none for other tensors."""
    names = cast(Any, tensor).__tensor_flatten__()[0] if _is_wrapper(tensor) else ()
    return tuple(name for name in names if isinstance(getattr(tensor, name), torch.Tensor))  # DTensor lists its mesh


def leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a wrapper subclass is made of, however nested, or ``tensor`` itself."""
    names = inner_names(tensor)
    return [leaf for name in names for leaf in leaves(getattr(tensor, name))] if names else [tensor]


def versioned(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What carries a version that autograd compares: the tensor, and under a compiled block what it is made of."""
    return [tensor, *(leaf for leaf in leaves(tensor) if leaf is not tensor)]


def rewrapped(like: torch.Tensor, inner: dict[str, torch.Tensor]) -> torch.Tensor:
    """A tensor of ``like``'s class, shape and context that is made of ``inner``."""
    _, context = cast(Any, like).__tensor_flatten__()
    return cast(torch.Tensor, type(like).__tensor_unflatten__(inner, context, like.shape, like.stride()))  # type: ignore[attr-defined]
