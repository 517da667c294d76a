"""How one tensor is cut over W ranks, and how pieces are laid out one after another in a flat buffer.

Integers in, integers out: no torch, no process group. Sizes are elements unless the name says nbytes.
Rule: the intervals of all ranks, joined in rank order, are the tensor, for every shape, including size 0 and W > size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

# Regions that compute reads or a collective writes start at multiples of this, as vectorised GPU kernels prefer.
ALIGNMENT_NBYTES = 128


@dataclass(frozen=True)
class Layout:
    """A tensor of ``shape``, cut along ``dim`` into consecutive pieces. ``sizes`` are their lengths along it, by rank.

    In a message, every piece takes ``chunk_numel`` elements, with padding at its end.
    """

    shape: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]

    @property
    def num_shards(self) -> int:
        return len(self.sizes)

    @cached_property
    def chunk_size(self) -> int:
        """Entries along ``dim`` of the longest piece."""
        return max(self.sizes)

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the padded pieces, one after another, start with the whole tensor in its memory order."""
        full = self.chunk_size
        first_short = next((rank for rank, size in enumerate(self.sizes) if size < full), len(self.sizes))
        return self.dim == 0 and not any(self.sizes[first_short + 1 :])

    def interval(self, rank: int) -> tuple[int, int]:
        """``rank``'s piece along ``dim``, as (start, stop). It is empty for a rank after the last one."""
        return sum(self.sizes[:rank]), sum(self.sizes[: rank + 1])

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


@lru_cache(maxsize=1024)
def shard_layout(shape: tuple[int, ...], dim: int, num_shards: int) -> Layout:
    """The layout of DTensor's ``Shard(dim)``: all shards have the same length, except that the last non-empty one may
    be shorter and later ones are empty. A scalar is one entry, in one shard."""
    size = shape[dim] if shape else 1
    chunk = -(-size // num_shards)
    sizes = (min(chunk, max(size - rank * chunk, 0)) for rank in range(num_shards))
    return Layout(shape, dim, tuple(sizes))


def join(shapes: Sequence[tuple[int, ...]], dim: int) -> Layout:
    """The layout of pieces of ``shapes``, one per rank, along ``dim``, or along dim 0 if they have no such dim. Empty
    pieces match any shape.

    Raises:
        ValueError: the pieces differ in other dims.
    """
    pieces = [shape or (1,) for shape in shapes]
    present = [shape for shape in pieces if math.prod(shape) > 0] or [pieces[0]]
    dim = dim if all(dim < len(shape) for shape in present) else 0
    rests = {(*shape[:dim], *shape[dim + 1 :]) for shape in present}
    if len(rests) > 1 or len({len(shape) for shape in present}) > 1:
        raise ValueError(f"shapes {sorted(set(shapes))} differ in more than dim {dim}")
    sizes = tuple(shape[dim] if math.prod(shape) > 0 else 0 for shape in pieces)
    shape = (*present[0][:dim], sum(sizes), *present[0][dim + 1 :])
    return Layout(shape, dim, sizes)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch counts them (a dim of size 0 counts as 1)."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def pack(sizes: Sequence[int], alignment: int) -> tuple[list[int], int]:
    """Place pieces of ``sizes`` one after another, at multiples of ``alignment``. Returns where each piece starts, and
    where the next one would start."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // alignment) * alignment
    return offsets, end
