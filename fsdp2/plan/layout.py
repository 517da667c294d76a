"""How one tensor is cut over W ranks, and how pieces lie behind each other in a flat buffer.

Integers in, integers out: no torch, no process group. Sizes are elements unless the name says nbytes.
Rule: the intervals of all ranks, joined in rank order, are the tensor, for every shape, including size 0 and W > size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

# Regions that compute reads or a collective writes start at multiples of this: what vectorised GPU kernels want.
ALIGNMENT_NBYTES = 128


@dataclass(frozen=True)
class Layout(ABC):
    """A tensor of ``shape``, cut along ``dim`` into consecutive pieces, one for each of ``num_shards`` ranks.

    In a message every piece takes ``chunk_numel`` elements, padded at its end. Subclasses define the piece lengths.
    """

    shape: tuple[int, ...]
    dim: int
    num_shards: int

    @property
    @abstractmethod
    def chunk_size(self) -> int:
        """Entries along ``dim`` of the longest piece."""

    @property
    @abstractmethod
    def is_contiguous(self) -> bool:
        """Whether the padded pieces, one after another, start with the whole tensor in its memory order."""

    @abstractmethod
    def interval(self, rank: int) -> tuple[int, int]:
        """``rank``'s piece along ``dim``, as (start, stop)."""

    @property
    def size(self) -> int:
        """Entries along ``dim``; a scalar is one."""
        return self.shape[self.dim] if self.shape else 1

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def chunk_numel(self) -> int:
        """Elements of the longest piece."""
        return math.prod(self.shape[: self.dim]) * self.chunk_size * math.prod(self.shape[self.dim + 1 :])

    @cached_property
    def padded_numel(self) -> int:
        """Elements of all pieces with their padding: what the gathered region needs."""
        return self.chunk_numel * self.num_shards

    @property
    def is_even(self) -> bool:
        return self.padded_numel == self.numel

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        if not self.shape:
            return ()
        start, stop = self.interval(rank)
        return (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])


@dataclass(frozen=True)
class ShardLayout(Layout):
    """A parameter cut as DTensor's ``Shard(dim)`` cuts it: all shards are ``chunk_size`` long, but the last non-empty
    one may be shorter and later ones are empty. A scalar has one shard."""

    @cached_property
    def chunk_size(self) -> int:
        return -(-self.size // self.num_shards)

    @property
    def is_contiguous(self) -> bool:
        return self.dim == 0

    def interval(self, rank: int) -> tuple[int, int]:
        return min(rank * self.chunk_size, self.size), min((rank + 1) * self.chunk_size, self.size)


@dataclass(frozen=True)
class JoinedLayout(Layout):
    """Pieces whose ``sizes`` along ``dim`` the ranks chose themselves: what all-gather hooks send."""

    sizes: tuple[int, ...]

    @property
    def chunk_size(self) -> int:
        return max(self.sizes)

    @cached_property
    def is_contiguous(self) -> bool:
        full = self.chunk_size
        first_short = next((rank for rank, size in enumerate(self.sizes) if size < full), len(self.sizes))
        return self.dim == 0 and not any(self.sizes[first_short + 1 :])

    def interval(self, rank: int) -> tuple[int, int]:
        start = sum(self.sizes[:rank])
        return start, start + self.sizes[rank]


def join(shapes: Sequence[tuple[int, ...]], dim: int) -> JoinedLayout:
    """The layout of pieces of ``shapes``, one per rank, along ``dim``, or dim 0 where they have no such dim. Empty
    pieces fit to any shape.

    Raises:
        ValueError: the other dims differ.
    """
    pieces = [shape or (1,) for shape in shapes]
    present = [shape for shape in pieces if math.prod(shape) > 0] or [pieces[0]]
    dim = dim if all(dim < len(shape) for shape in present) else 0
    rests = {(*shape[:dim], *shape[dim + 1 :]) for shape in present}
    if len(rests) > 1 or len({len(shape) for shape in present}) > 1:
        raise ValueError(f"shapes {sorted(set(shapes))} differ in more than dim {dim}")
    sizes = tuple(shape[dim] if math.prod(shape) > 0 else 0 for shape in pieces)
    shape = (*present[0][:dim], sum(sizes), *present[0][dim + 1 :])
    return JoinedLayout(shape, dim, len(sizes), sizes)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch counts them (a dim of size 0 counts as 1)."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Packing:
    """Pieces that lie behind each other: where each starts, and the size of the whole."""

    offsets: tuple[int, ...]
    total: int


def pack(sizes: Sequence[int], alignment: int = 1) -> Packing:
    """Place pieces of ``sizes`` in order, each at a multiple of ``alignment``, with the total rounded up to it."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // alignment) * alignment
    return Packing(tuple(offsets), end)
