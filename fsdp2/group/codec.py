"""What travels in place of shards that have all-gather hooks: the seam for the codec that runs these hooks.

Plain shards need none: they travel as they lie, cast to the compute dtype. ``tensors/all_gather_hooks.py`` has the one
for the hooks of tensor subclasses, and is loaded with the first such parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from fsdp2.comm.offload import Home
from fsdp2.group.param import ShardedParam
from fsdp2.plan.layout import Layout
from fsdp2.plan.mesh import ParallelMesh
from fsdp2.plan.plan import PlanInput

PRE = "fsdp_pre_all_gather"
POST = "fsdp_post_all_gather"


def has_hooks(local: torch.Tensor) -> bool:
    """Whether ``local``, or its class, defines one of the two hooks."""
    return hasattr(local, PRE) or hasattr(local, POST)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is an ordinary tensor without hooks, which can lie in a flat buffer."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and not has_hooks(tensor)


class Codec(Protocol):
    """Decides what the parameters of one group send, and makes unsharded tensors of what has arrived.

    Attributes:
        storages: memory that ``arrive`` fills, and that is freed with the group's unsharded storage.
    """

    storages: list[tuple[torch.UntypedStorage, int]]

    def inputs(self, first_key: int, *, keeps_consumed: bool) -> dict[int, PlanInput]:
        """For the plan: each tensor that travels, by keys from ``first_key`` on. ``keeps_consumed``: also what may be
        freed on arrival is kept while the group is unsharded. If it raises, all ranks raise."""

    def bind_outputs(self, outputs: Mapping[int, torch.Tensor], first_key: int) -> None:
        """Bind ``outputs`` of the gather whose plan was made from ``inputs(first_key)``."""

    def payloads(self) -> list[torch.Tensor]:
        """This rank's part of every tensor that travels, in the order of their keys, without empty ones."""

    def arrive(self) -> None:
        """Everything has been gathered: fill the unsharded tensors. Staging memory is freed afterwards."""


class PlugIns:
    """What knows shards that are not plain.

    Attributes:
        cut: the shard of a rank, in memory of its own; gets the name of a parameter, the tensor to cut, its layout, the
            rank, and where the shard is to live. Raises an ExtensionError if the class cannot be cut.
        pin: the shard of a parameter, in pinned memory if that is where it is to live; gets the name of the parameter.
        codec: for those parameters of a group whose shards are not plain; all ranks call it together. If it raises, all
            ranks raise.
    """

    cut: Callable[[str, torch.Tensor, Layout, int, Home], torch.Tensor]
    pin: Callable[[str, torch.Tensor, Home], torch.Tensor]
    codec: Callable[[Sequence[ShardedParam], ParallelMesh, Home], Codec]
