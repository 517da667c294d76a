"""Where the blocks of a parameter lie on this rank: elements that share a scale.

Rule: whether a parameter is quantised, and where its blocks lie, follow from its whole shape. Blocks run along one dim,
so only cuts of that dim can divide one. What a rank has is described by pieces, each of whole blocks or of one part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2.core import plans
from fsdp2.optim.matrices.domains import cuts_of
from fsdp2.optim.matrices.regions import Placed

_LEAST_BLOCKS = 16  # smaller parameters keep fp32 states, as do vectors: they take little memory
_CPU_CHUNK_NUMEL, _CHUNK_NUMEL = 1 << 17, 1 << 24  # stays in a core's cache; bounds temporary memory


class Piece(NamedTuple):
    """``num`` neighbouring blocks in some rows of a shard ``[outer, along, inner]``, or one part of a block.

    ``columns`` are its entries along the dim of blocks, the first of which has index ``place`` in its block. ``scales``
    are the indices of its scales; ``cut`` those among the blocks that are cut on some rank, if it is only a part.
    """

    rows: slice
    columns: slice
    num: int
    length: int
    place: int
    scales: slice
    cut: slice | None


@dataclass(frozen=True)
class Blocks:
    """The blocks of one shard, seen as ``[outer, along, inner]``. ``axes`` of the mesh cut the dim of blocks."""

    shape: tuple[int, int, int]
    pieces: tuple[Piece, ...]
    num_scales: int
    num_cut: int
    axes: tuple[int, ...]

    def of_shard(self, tensor: Tensor, piece: Piece) -> Tensor:
        """The piece of a contiguous tensor of the shard's shape, as ``[outer, blocks, length, inner]``."""
        return tensor.view(self.shape)[piece.rows, piece.columns].unflatten(1, (piece.num, piece.length))


def dim_of_blocks(shape: Sequence[int], block_size: int) -> int | None:
    """The dim along which the blocks of a parameter run: the last one with at least half a block. None if it is not
    quantised, since it has no such dim, is a vector, or is small."""
    if len(shape) < 2 or math.prod(shape) < _LEAST_BLOCKS * block_size:
        return None
    return next((dim for dim in reversed(range(len(shape))) if 2 * shape[dim] >= block_size), None)


def blocks_of(param: Tensor, dim: int, block_size: int) -> Blocks:
    """The blocks of this rank's shard of ``param``."""
    size, local = param.size(dim), plans.local_part(param)
    axes: tuple[int, ...] = ()
    intervals: Sequence[tuple[int, int]] = [(0, size)]
    cut: list[int] = []
    if isinstance(param, DTensor):
        cuts, at = cuts_of(param), param.device_mesh.get_coordinate()
        if at is None:  # this rank is not in the mesh, so its shard is empty
            return Blocks((0, 0, 0), (), 0, 0, ())
        axes = tuple(i for i, each in enumerate(cuts) if each.dim == dim and each.size > 1)
        coordinates = tuple(itertools.product(*(range(cuts[i].size) for i in axes)))
        placed = Placed(tuple(param.shape), tuple(cuts[i] for i in axes), coordinates)
        along = [placed.region(member)[dim] for member in range(len(coordinates))]
        intervals = along[coordinates.index(tuple(at[i] for i in axes))]
        ends = {end for each in along for interval in each for end in interval if 0 < end < size}
        cut = sorted({end // block_size for end in ends if end % block_size})
    shape = math.prod(local.shape[:dim]), local.size(dim), math.prod(local.shape[dim + 1 :])
    limit = _CPU_CHUNK_NUMEL if local.device.type == "cpu" else _CHUNK_NUMEL
    pieces: list[Piece] = []
    start = scale = 0
    for begin, end in intervals:
        while begin < end:
            block, place = divmod(begin, block_size)
            num = 0 if place else min((end - begin) // block_size, max(1, limit // max(1, block_size * shape[2])))
            length = block_size if num else min(block_size - place, end - begin)
            num = num or 1
            is_part = length < min(block_size, size - block * block_size)
            at_cut = slice(cut.index(block), cut.index(block) + 1) if is_part else None
            columns, scales = slice(start, start + num * length), slice(scale, scale + num)
            rows = max(1, limit // max(1, num * length * shape[2]))
            pieces += (
                Piece(slice(row, row + rows), columns, num, length, place, scales, at_cut)
                for row in range(0, shape[0], rows)
            )
            begin, start, scale = begin + num * length, start + num * length, scale + num
    assert start == shape[1], "the shard has other entries than its placements say"
    return Blocks(shape, tuple(pieces) if local.numel() else (), scale, len(cut), axes)
