"""Chooses the dim to shard a parameter along, where dim 0 has too few rows."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.tensor import Shard


def shard_dim(shape: tuple[int, ...], num_shards: int) -> int:
    """The first dim, unless it has fewer rows than there are shards and another dim has enough, as with stacked
    experts, where sharding the first dim would send padding."""
    if shape and shape[0] < num_shards:
        return next((dim for dim, size in enumerate(shape) if size >= num_shards), 0)
    return 0


def placement_for(num_shards: int) -> Callable[[nn.Parameter], Shard]:
    """The ``shard_placement_fn`` that shards each parameter along :func:`shard_dim`."""
    return lambda param: Shard(shard_dim(tuple(param.shape), num_shards))
