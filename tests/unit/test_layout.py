"""Layouts cut as DTensor cuts and lose nothing; pieces in a buffer are aligned and apart.

Shapes are drawn at random from a fixed seed, with size 0, size 1 and more ranks than entries well represented.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.distributed.tensor import Shard

from fsdp2.plan.layout import ALIGNMENT_NBYTES, ShardLayout, contiguous_stride, pack


def _random_layouts(count: int) -> list[ShardLayout]:
    draw = random.Random(7)
    layouts = []
    for _ in range(count):
        shape = tuple(draw.choice((0, 1, 1, 2, 3, 4, 5, 7, 8, 13)) for _ in range(draw.randint(1, 4)))
        layouts.append(ShardLayout(shape, draw.randrange(len(shape)), draw.choice((1, 2, 3, 4, 5, 8, 16))))
    return layouts


LAYOUTS = [
    ShardLayout((0,), 0, 4),
    ShardLayout((1,), 0, 4),
    ShardLayout((3, 0), 0, 2),
    ShardLayout((0, 3), 1, 2),
    ShardLayout((5, 2), 0, 16),
    ShardLayout((2, 9, 3), 1, 4),
    ShardLayout((1, 6), 1, 4),
    *_random_layouts(300),
]


def _tensor_for(layout: ShardLayout) -> torch.Tensor:
    return torch.arange(layout.numel).reshape(layout.shape)


def _shards(full: torch.Tensor, layout: ShardLayout) -> list[torch.Tensor]:
    intervals = [layout.interval(rank) for rank in range(layout.num_shards)]
    return [full.narrow(layout.dim, start, stop - start) for start, stop in intervals]


def test_shards_of_all_ranks_joined_are_the_tensor() -> None:
    for layout in LAYOUTS:
        full = _tensor_for(layout)
        joined = torch.cat(_shards(full, layout), dim=layout.dim)
        assert joined.shape == full.shape, layout
        assert torch.equal(joined, full), layout


def test_intervals_follow_each_other_without_gap_or_overlap() -> None:
    for layout in LAYOUTS:
        intervals = [layout.interval(rank) for rank in range(layout.num_shards)]
        ends = [0, *(stop for _, stop in intervals)]
        assert [start for start, _ in intervals] == ends[:-1], layout
        assert ends[-1] == layout.shape[layout.dim], layout


def test_shards_are_those_of_dtensor() -> None:
    for layout in LAYOUTS:
        size = layout.shape[layout.dim]
        for rank in range(layout.num_shards):
            local_size, offset = Shard(layout.dim).local_shard_size_and_offset(size, layout.num_shards, rank)
            assert layout.interval(rank) == (offset, offset + local_size), (layout, rank)


def test_shard_shapes_and_numels_are_those_of_the_cut_tensor() -> None:
    for layout in LAYOUTS:
        for rank, shard in enumerate(_shards(_tensor_for(layout), layout)):
            assert layout.shard_shape(rank) == tuple(shard.shape), (layout, rank)
            assert math.prod(layout.shard_shape(rank)) == shard.numel(), (layout, rank)


def test_numels_count_the_tensor_its_largest_shard_and_all_padded_shards() -> None:
    for layout in LAYOUTS:
        assert layout.numel == math.prod(layout.shape), layout
        assert layout.chunk_numel == max(math.prod(layout.shard_shape(rank)) for rank in range(layout.num_shards)), (
            layout
        )
        assert layout.padded_numel == layout.chunk_numel * layout.num_shards, layout


def test_even_means_that_no_shard_needs_padding() -> None:
    for layout in LAYOUTS:
        numels = {math.prod(layout.shard_shape(rank)) for rank in range(layout.num_shards)}
        assert layout.is_even == (len(numels) == 1), layout


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
