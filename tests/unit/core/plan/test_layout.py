"""Where values lie, in numbers: layouts cut as DTensor cuts and lose nothing, and pieces in a buffer."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.distributed.tensor import Shard

from fsdp2.core.group.all_gather import piece_pairs
from fsdp2.core.plan.layout import ALIGNMENT_NBYTES, Layout, contiguous_stride, join, pack, shard_layout


def _random_layouts(count: int) -> list[Layout]:
    draw = random.Random(7)
    layouts = []
    for _ in range(count):
        shape = tuple(draw.choice((0, 1, 1, 2, 3, 4, 5, 7, 8, 13)) for _ in range(draw.randint(1, 4)))
        layouts.append(shard_layout(shape, draw.randrange(len(shape)), draw.choice((1, 2, 3, 4, 5, 8, 16))))
    return layouts


EDGES = [((0,), 0, 4), ((1,), 0, 4), ((3, 0), 0, 2), ((0, 3), 1, 2), ((5, 2), 0, 16), ((2, 9, 3), 1, 4), ((1, 6), 1, 4)]
LAYOUTS = [*(shard_layout(*edge) for edge in EDGES), *_random_layouts(300)]


def test_shards_are_those_of_dtensor_and_layouts_count_them() -> None:
    """So joined, they are the tensor, without gap or overlap."""
    for layout in LAYOUTS:
        full, intervals = torch.empty(layout.shape), [layout.interval(rank) for rank in range(layout.num_shards)]
        for rank, (start, stop) in enumerate(intervals):
            of = Shard(layout.dim).local_shard_size_and_offset(layout.shape[layout.dim], layout.num_shards, rank)
            assert (stop - start, start) == of, (layout, rank)
        shards = [full.narrow(layout.dim, start, stop - start) for start, stop in intervals]
        assert [layout.shard_shape(rank) for rank in range(layout.num_shards)] == [tuple(each.shape) for each in shards]
        numels = [shard.numel() for shard in shards]
        assert (layout.numel, layout.chunk_numel) == (math.prod(layout.shape), max(numels)), layout
        assert layout.padded_numel == layout.chunk_numel * layout.num_shards, layout
        assert layout.is_even == (len(set(numels)) == 1), layout
    for shape in ((), *(layout.shape for layout in LAYOUTS)):
        assert contiguous_stride(shape) == torch.empty(shape).stride(), shape


@pytest.mark.parametrize("alignment", [1, 4, 32, ALIGNMENT_NBYTES])
def test_packed_pieces_are_aligned_in_order_and_apart(alignment: int) -> None:
    draw = random.Random(alignment)
    for _ in range(100):
        sizes = [draw.choice((0, 1, 3, 31, 32, 33, 128, 1000)) for _ in range(draw.randint(0, 8))]
        found, total = pack(sizes, alignment)
        starts = [*found, total]
        assert len(found) == len(sizes)
        assert all(start % alignment == 0 for start in starts), (sizes, starts)
        for start, size, following in zip(found, sizes, starts[1:], strict=True):
            assert start + size <= following < start + size + alignment, (sizes, starts)
    assert pack([], alignment)[1] == pack([0, 0], alignment)[1] == 0


Shape = tuple[int, ...]


# Pieces of sizes that the ranks chose, joined


def _random_pieces(draw: random.Random) -> tuple[list[torch.Tensor], int]:
    """One piece per rank that differ along one dim only; some of size 0."""
    num_dims = draw.randint(1, 4)
    dim = draw.randrange(num_dims)
    rest = [draw.choice((1, 2, 3, 5)) for _ in range(num_dims)]
    sizes = [draw.choice((0, 1, 1, 2, 4, 7)) for _ in range(draw.randint(1, 5))]
    return [torch.randn(*rest[:dim], size, *rest[dim + 1 :]) for size in sizes], dim


@pytest.mark.parametrize("seed", range(100))
def test_joined_pieces_are_their_concatenation_and_cut_back_into_them(seed: int) -> None:
    """Contiguous: padding lies behind the last piece only."""
    parts, dim = _random_pieces(random.Random(seed))
    layout = join([tuple(part.shape) for part in parts], dim)
    full = torch.cat(parts, dim)
    assert layout.numel == full.numel()
    padded = [torch.cat([part.flatten(), torch.full((layout.chunk_numel - part.numel(),), -1.0)]) for part in parts]
    assert torch.equal(torch.cat(padded)[: layout.numel], full.flatten()) or not layout.is_contiguous
    if full.numel():
        assert (layout.shape, layout.dim) == (tuple(full.shape), dim)
        assert [layout.shard_shape(rank) for rank in range(len(parts))] == [tuple(part.shape) for part in parts]
        rows, back = torch.full((len(parts), layout.chunk_numel), -1.0), torch.zeros_like(full)
        for piece, place in zip(*piece_pairs(full, rows, layout), strict=True):
            place.copy_(piece)
        assert torch.equal(rows, torch.stack(padded))
        for piece, place in zip(*piece_pairs(back, rows, layout), strict=True):
            piece.copy_(place)
        assert torch.equal(back, full)


@pytest.mark.parametrize("seed", range(100))
def test_joined_layout_counts_as_a_shard_layout_of_the_same_pieces_does(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.choice((1, 2, 3, 5, 8)) for _ in range(draw.randint(1, 3)))
    cut = shard_layout(shape, draw.randrange(len(shape)), draw.choice((1, 2, 3, 4, 7)))
    joined = join([cut.shard_shape(rank) for rank in range(cut.num_shards)], cut.dim)
    for name in ("shape", "dim", "num_shards", "numel", "chunk_numel", "padded_numel", "is_even", "is_contiguous"):
        assert getattr(joined, name) == getattr(cut, name), (name, cut)
    for rank in range(cut.num_shards):
        start, stop = cut.interval(rank)
        assert joined.interval(rank) == (start, stop) or start == stop == joined.interval(rank)[1]


@pytest.mark.parametrize(
    ("shapes", "dim", "expected"),
    [
        ([(), (), ()], 0, Layout((3,), 0, (1, 1, 1))),
        ([(), ()], 1, Layout((2,), 0, (1, 1))),
        ([(4,), (9,)], 1, Layout((13,), 0, (4, 9))),  # no such dim: joined along the first
        ([(2, 3), (0,)], 0, Layout((2, 3), 0, (2, 0))),  # empty pieces fit to any shape
        ([(0, 7), (2, 3)], 0, Layout((2, 3), 0, (0, 2))),
        ([(0,), (0, 5)], 0, Layout((0,), 0, (0, 0))),
        ([(2, 3), (2, 4)], 0, None),
        ([(2, 3), (3, 3)], 1, None),
        ([(2, 3), (6,)], 0, None),
        ([(), (2, 2)], 0, None),
    ],
)
def test_pieces_that_differ_along_one_dim_are_joined(shapes: list[Shape], dim: int, expected: Layout | None) -> None:
    if expected is not None:
        assert join(shapes, dim) == expected
    else:
        with pytest.raises(ValueError, match="differ in more than dim"):
            join(shapes, dim)
