"""Where the entries of one tensor lie on the members of a process group.

Integers in, integers out: no torch. A region is what one member has of a tensor: for each dim, intervals in the order
in which they lie in the member's shard. Rule: the regions of members with different coordinates on the axes that shard
are disjoint, and together cover the tensor; along the other axes, members have copies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from fsdp2.optim.matrices.rules import Box, Interval

Region = tuple[tuple[Interval, ...], ...]
Coordinate = tuple[int, ...]


@dataclass(frozen=True)
class AxisCut:
    """What a mesh axis of ``size`` ranks does to a tensor: it cuts ``dim``, or if that is None, each rank has a copy.

    ``split_factor`` is the number of ranks of axes further right that cut ``dim`` earlier, as in ``_StridedShard``.
    """

    size: int
    dim: int | None
    split_factor: int = 1


@dataclass(frozen=True)
class Piece:
    """The entries of a box that a member has. ``local`` is where they lie in its shard, ``inside`` where they lie in
    the box. Both have one interval per dim."""

    local: Box
    inside: Box

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.inside)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Placed:
    """A tensor of ``shape`` on the members of a process group, whose mesh coordinates are ``coordinates``."""

    shape: tuple[int, ...]
    axes: tuple[AxisCut, ...]
    coordinates: tuple[Coordinate, ...]

    def __hash__(self) -> int:  # hashing all coordinates would take most of the planner's time
        return hash((self.shape, self.axes, len(self.coordinates)))

    def region(self, member: int) -> Region:
        """The region that ``member`` has."""
        return _region(self.shape, self.axes, self.coordinates[member])

    def local_shape(self, member: int) -> tuple[int, ...]:
        """The shape of the shard that ``member`` has."""
        return tuple(sum(stop - start for start, stop in along) for along in self.region(member))

    def copy_of(self, member: int) -> Coordinate:
        """The copy of the tensor that ``member`` has a part of. The members of one copy together have the tensor."""
        return tuple(
            at if axis.dim is None else 0 for at, axis in zip(self.coordinates[member], self.axes, strict=True)
        )

    def pieces(self, member: int, box: Box) -> tuple[Piece, ...]:
        """The pieces of ``box`` that ``member`` has, in the order that messages use."""
        return _pieces(self.shape, self.axes, self.coordinates[member], box)

    def holders(self, box: Box) -> tuple[tuple[int, int], ...]:
        """The members that have entries of ``box``, with the number of entries."""
        return _holders(self, box)


@lru_cache(maxsize=1 << 16)
def _region(shape: tuple[int, ...], axes: tuple[AxisCut, ...], coordinate: Coordinate) -> Region:
    return tuple(_intervals(_entries(dim, size, axes, coordinate)) for dim, size in enumerate(shape))


def _entries(dim: int, size: int, axes: Sequence[AxisCut], coordinate: Coordinate) -> Sequence[int]:
    """The indices along ``dim`` at ``coordinate``."""
    cutting = [(axis, at) for axis, at in zip(axes, coordinate, strict=True) if axis.dim == dim]
    found: Sequence[int] = range(size)
    order = _order(cutting)
    if order is not None:
        for axis, at in order:
            found = _chunk(found, axis.size, at)
        return found
    for axis, at in cutting:  # DTensor reads placements from the left
        pieces = [_chunk(found, axis.split_factor, index) for index in range(axis.split_factor)]
        found = list(itertools.chain.from_iterable(_chunk(piece, axis.size, at) for piece in pieces))
    return found


def _order(cutting: Sequence[tuple[AxisCut, int]]) -> list[tuple[AxisCut, int]] | None:
    """The order in which axes have cut one dim: a strided axis comes after as many shards as its split factor says.
    None if the factors are consistent with no order."""
    order: list[tuple[AxisCut, int]] = []
    for each in reversed(cutting):
        shards = list(itertools.accumulate((axis.size for axis, _ in order), int.__mul__, initial=1))
        if each[0].split_factor not in shards:
            return None
        order.insert(shards.index(each[0].split_factor), each)
    return order


def _chunk(entries: Sequence[int], num_chunks: int, index: int) -> Sequence[int]:
    """Chunk ``index`` of ``entries``, divided as ``torch.chunk`` does."""
    length = -(-len(entries) // num_chunks)
    return entries[index * length : (index + 1) * length]


def _intervals(entries: Sequence[int]) -> tuple[Interval, ...]:
    if isinstance(entries, range):
        return ((entries.start, entries.stop),) if entries else ()
    starts = [at for at, entry in enumerate(entries) if at == 0 or entry != entries[at - 1] + 1]
    return tuple((entries[start], entries[stop - 1] + 1) for start, stop in pairwise([*starts, len(entries)]))


@lru_cache(maxsize=1 << 14)
def _holders(placed: Placed, box: Box) -> tuple[tuple[int, int], ...]:
    numels = [sum(piece.numel for piece in placed.pieces(member, box)) for member in range(len(placed.coordinates))]
    return tuple((member, numel) for member, numel in enumerate(numels) if numel > 0)


@lru_cache(maxsize=1 << 18)
def _pieces(shape: tuple[int, ...], axes: tuple[AxisCut, ...], coordinate: Coordinate, box: Box) -> tuple[Piece, ...]:
    along = [
        list(_overlaps(intervals, bounds))
        for intervals, bounds in zip(_region(shape, axes, coordinate), box, strict=True)
    ]
    return tuple(
        Piece(tuple(local for local, _ in each), tuple(inside for _, inside in each))
        for each in itertools.product(*along)
    )


def _overlaps(intervals: Sequence[Interval], bounds: Interval) -> Iterator[tuple[Interval, Interval]]:
    """The overlaps of ``intervals`` with ``bounds``: where they lie in the shard, and where in the box."""
    passed = 0
    for start, stop in intervals:
        begin, end = max(start, bounds[0]), min(stop, bounds[1])
        if begin < end:
            yield (passed + begin - start, passed + end - start), (begin - bounds[0], end - bounds[0])
        passed += stop - start
