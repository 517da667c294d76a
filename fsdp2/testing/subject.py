"""The subclass under check, and one case of it: a shape on a number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fsdp2 import _torch
from fsdp2.group.param import subclass_shard
from fsdp2.plan.layout import ShardLayout
from fsdp2.testing.stand_in import sharded_parameter
from fsdp2.testing.world import PARAMETER, Setting, World


@dataclass(frozen=True)
class Subject:
    """What is checked, and under which setting."""

    make: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype
    dim: int
    tolerance: float
    setting: Setting

    def plain(self, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
        """Random values; the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            values = torch.randn(shape, generator=generator)
        else:
            values = torch.randint(0, 100, shape, generator=generator)
        return values.to(self.setting.device, self.dtype)


@dataclass(frozen=True)
class Case:
    """A plain tensor of ``shape`` that ``size`` ranks share."""

    subject: Subject
    shape: tuple[int, ...]
    size: int

    @property
    def where(self) -> str:
        return f"shape {self.shape} on {self.size} rank{'s' if self.size > 1 else ''}"

    @property
    def layout(self) -> ShardLayout:
        return ShardLayout(self.shape, self.subject.dim % len(self.shape), self.size)

    def plain(self, seed: int = 0) -> torch.Tensor:
        return self.subject.plain(self.shape, seed)

    def shards(self, seed: int = 0) -> list[torch.Tensor]:
        """The shards of all ranks, of a tensor of its own for each seed."""
        return self.cut(self.subject.make(self.plain(seed)))

    def cut(self, made: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return [
                subclass_shard(PARAMETER, made.detach(), self.layout, rank, self.subject.setting.device)
                for rank in range(self.size)
            ]

    def params(self, shards: Sequence[torch.Tensor]) -> list[torch.nn.Parameter]:
        return [sharded_parameter(shard, trainable=self.subject.setting.trainable) for shard in shards]

    def world(self, shards: Sequence[torch.Tensor]) -> World:
        return World(self.params(shards), self.layout, self.subject.setting)


def gradient_names(shard: torch.Tensor, unsharded: torch.Tensor) -> tuple[str, ...]:
    """The inner tensors by which a gradient of ``unsharded`` may be reduced; none if it has to be plain."""
    names = _torch.inner_names(unsharded)
    inner = [getattr(unsharded, name) for name in names]
    is_alike = all(t.shape == unsharded.shape and t.dtype is unsharded.dtype for t in inner)
    return names if is_alike and names == _torch.inner_names(shard) else ()
