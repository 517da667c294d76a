"""Cuts tensor subclasses into shards, with operations of the class, since only it knows where its values are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp2.core import ExtensionError, comms, plans


def pinned_shard(name: str, full: torch.Tensor, layout: plans.Layout, rank: int, home: comms.Home) -> torch.Tensor:
    """The shard of ``rank`` of the tensor subclass ``full``, in its own memory at ``home`` (or still on meta).

    Raises:
        ExtensionError: the class lacks an operation that cutting needs, or the operation returns another class.
    """
    cls = type(full).__name__
    if type(full).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        raise ExtensionError(
            f"parameter '{name}' is a {cls} without __torch_dispatch__. A DTensor would lose this class and ignore its "
            f"hooks. Make {cls} a wrapper subclass, or make the parameter a plain tensor."
        )
    options: dict[str, Any] = {} if full.device == home.device or full.is_meta else {"device": home.device}
    try:
        local = full.new_zeros(layout.shard_shape(rank), **options)
        chunks = torch.chunk(full, layout.num_shards, layout.dim)
        if rank < len(chunks) and local.numel() > 0:
            local.copy_(chunks[rank])
    except Exception as error:
        raise ExtensionError(
            f"parameter '{name}': cutting a {cls} into shards raised {type(error).__name__}: {error}\n"
            f"Let {cls}.__torch_dispatch__ support new_zeros, split and copy_."
        ) from error
    if type(local) is not type(full) or local.shape != layout.shard_shape(rank):
        raise ExtensionError(
            f"parameter '{name}': new_zeros{layout.shard_shape(rank)} of a {cls} returned a {type(local).__name__} of "
            f"shape {tuple(local.shape)}. Sharding would lose the class. Let {cls}.__torch_dispatch__ keep the class."
        )
    return pinned(name, local, home)


def pinned(name: str, local: torch.Tensor, home: comms.Home) -> torch.Tensor:
    """Copy the shard ``local`` of a tensor subclass to pinned memory, if ``home`` asks for that. A plain tensor with
    its own hooks is returned as it is, since a copy would lose the hooks.

    Raises:
        ExtensionError: the class lacks an operation that pinning needs, or the operation returns another class.
    """
    if not home.pin_memory or local.is_meta or type(local) in (torch.Tensor, nn.Parameter):
        return local
    cls = type(local).__name__
    advice = f"Let {cls}.__torch_dispatch__ support is_pinned and _pin_memory, or pass "
    advice += "CPUOffloadPolicy(pin_memory=False)."
    try:
        copy = local.pin_memory()
    except Exception as error:
        problem = f"raised {type(error).__name__}: {error}\n"
        raise ExtensionError(f"parameter '{name}': pin_memory() of a {cls} {problem}{advice}") from error
    if type(copy) is not type(local):
        raise ExtensionError(f"parameter '{name}': pin_memory() of a {cls} returned a {type(copy).__name__}. {advice}")
    return copy
