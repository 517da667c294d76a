"""Layouts cut as DTensor cuts and lose nothing; pieces in a buffer are aligned and apart."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.distributed.tensor import Shard

from fsdp2.plan.layout import ALIGNMENT_NBYTES, Layout, contiguous_stride, pack, shard_layout


def _random_layouts(count: int) -> list[Layout]:
    draw = random.Random(7)
    layouts = []
    for _ in range(count):
        shape = tuple(draw.choice((0, 1, 1, 2, 3, 4, 5, 7, 8, 13)) for _ in range(draw.randint(1, 4)))
        layouts.append(shard_layout(shape, draw.randrange(len(shape)), draw.choice((1, 2, 3, 4, 5, 8, 16))))
    return layouts


LAYOUTS = [
    shard_layout((0,), 0, 4),
    shard_layout((1,), 0, 4),
    shard_layout((3, 0), 0, 2),
    shard_layout((0, 3), 1, 2),
    shard_layout((5, 2), 0, 16),
    shard_layout((2, 9, 3), 1, 4),
    shard_layout((1, 6), 1, 4),
    *_random_layouts(300),
]


def _shards(full: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    intervals = [layout.interval(rank) for rank in range(layout.num_shards)]
    return [full.narrow(layout.dim, start, stop - start) for start, stop in intervals]


def test_shards_are_those_of_dtensor() -> None:
    """So joined, they are the tensor, without gap or overlap."""
    for layout in LAYOUTS:
        size = layout.shape[layout.dim]
        for rank in range(layout.num_shards):
            local_size, offset = Shard(layout.dim).local_shard_size_and_offset(size, layout.num_shards, rank)
            assert layout.interval(rank) == (offset, offset + local_size), (layout, rank)


def test_shapes_and_numels_are_those_of_the_tensor_its_shards_and_all_padded_ones() -> None:
    for layout in LAYOUTS:
        shards = _shards(torch.arange(math.prod(layout.shape)).reshape(layout.shape), layout)
        assert [layout.shard_shape(rank) for rank in range(layout.num_shards)] == [tuple(each.shape) for each in shards]
        numels = [shard.numel() for shard in shards]
        assert (layout.numel, layout.chunk_numel) == (math.prod(layout.shape), max(numels)), layout
        assert layout.padded_numel == layout.chunk_numel * layout.num_shards, layout
        assert layout.is_even == (len(set(numels)) == 1), layout


def test_contiguous_stride_is_that_of_torch() -> None:
    for layout in LAYOUTS:
        assert contiguous_stride(layout.shape) == torch.empty(layout.shape).stride(), layout.shape
    assert contiguous_stride(()) == torch.empty(()).stride()


@pytest.mark.parametrize("alignment", [1, 4, 32, ALIGNMENT_NBYTES])
def test_packed_pieces_are_aligned_in_order_and_apart(alignment: int) -> None:
    draw = random.Random(alignment)
    for _ in range(100):
        sizes = [draw.choice((0, 1, 3, 31, 32, 33, 128, 1000)) for _ in range(draw.randint(0, 8))]
        packing = pack(sizes, alignment)
        starts = [*packing.offsets, packing.total]
        assert len(packing.offsets) == len(sizes)
        assert all(start % alignment == 0 for start in starts), (sizes, packing)
        for start, size, following in zip(packing.offsets, sizes, starts[1:], strict=True):
            assert start + size <= following < start + size + alignment, (sizes, packing)


def test_packing_nothing_takes_no_room() -> None:
    assert pack([]).total == 0
    assert pack([0, 0], 128).total == 0
