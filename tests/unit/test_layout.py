"""Where values lie, in numbers: layouts cut as DTensor cuts and lose nothing, placements on meshes, pieces in a buffer,
parameters in the flat parameter of torch's class, and what travels when other ranks are to hold the shards."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp2.checkpoint.transfers import Cut, Transfer, transfers
from fsdp2.core.plan.layout import ALIGNMENT_NBYTES, Layout, contiguous_stride, pack, shard_layout
from fsdp2.core.plan.mesh import AxisRole
from fsdp2.core.plan.placements import _placements
from fsdp2.fsdp1.state_values import TorchFlat, torch_flat


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


S, R, M = AxisRole.SHARD, AxisRole.REPLICATE, AxisRole.MODEL


def strided(dim: int, split_factor: int) -> _StridedShard:
    return _StridedShard(dim, split_factor=split_factor)


@pytest.mark.parametrize(
    ("roles", "sizes", "on_model_axes", "dim", "expected"),
    [
        ([S], [4], [], 1, (Shard(1),)),
        ([R, S], [2, 4], [], 0, (Replicate(), Shard(0))),
        ([R], [4], [], 0, (Replicate(),)),
        # tensor parallelism further right, on the same dim and on another
        ([S, M], [2, 4], [Shard(0)], 0, (strided(0, 4), Shard(0))),
        ([S, M], [2, 4], [Shard(1)], 0, (Shard(0), Shard(1))),
        ([S, M], [2, 4], [Replicate()], 0, (Shard(0), Replicate())),
        ([S, M], [2, 1], [Shard(0)], 0, (Shard(0), Shard(0))),
        # further left, it has cut first anyway
        ([M, S], [4, 2], [Shard(0)], 0, (Shard(0), Shard(0))),
        ([R, M, S], [2, 4, 2], [Shard(0)], 0, (Replicate(), Shard(0), Shard(0))),
        # several model axes count together; only those to the right
        ([S, M, M], [2, 3, 4], [Shard(0), Shard(0)], 0, (strided(0, 12), Shard(0), Shard(0))),
        ([M, S, M], [3, 2, 4], [Shard(0), Shard(0)], 0, (Shard(0), strided(0, 4), Shard(0))),
        ([R, S, M, M], [2, 2, 3, 4], [Shard(1), Shard(0)], 0, (Replicate(), strided(0, 4), Shard(1), Shard(0))),
        # a strided shard of a model axis counts like any other
        ([S, M, M], [2, 3, 4], [strided(0, 4), Shard(0)], 0, (strided(0, 12), strided(0, 4), Shard(0))),
    ],
)
def test_shard_is_strided_where_a_model_axis_further_right_cuts_the_same_dim(
    roles: list[AxisRole], sizes: list[int], on_model_axes: list[object], dim: int, expected: tuple[object, ...]
) -> None:
    assert _placements(roles, sizes, on_model_axes, dim) == expected  # type: ignore[arg-type]


# Transfers: every new shard is complete, and nothing travels twice


def _random_cut(draw: random.Random, size: int) -> Cut:
    replicas, shards = draw.randint(1, 3), draw.randint(1, 5)
    ranks = draw.sample(range(20), replicas * shards)
    rows = tuple(tuple(ranks[i * shards : (i + 1) * shards]) for i in range(replicas))
    return Cut(shard_layout((size, 2), 0, shards), rows)


def test_each_rank_gets_what_it_lacks_of_its_new_shard_once_from_a_rank_that_had_it() -> None:
    draw = random.Random(3)
    for size in (draw.choice((0, 1, 2, 3, 5, 7, 8, 16)) for _ in range(300)):
        before, after = _random_cut(draw, size), _random_cut(draw, size)
        got: dict[int, list[int]] = {rank: [] for row in after.ranks for rank in row}
        for each in transfers(before, after):
            start, stop = before.interval_of(each.source)
            assert start <= each.start < each.stop <= stop
            got[each.target] += range(each.start, each.stop)
            start, stop = before.interval_of(each.target)
            assert each.source == each.target or each.stop <= start or stop <= each.start
        assert got == {rank: list(range(*after.interval_of(rank))) for rank in got}


def test_replicas_share_the_work_and_a_scalar_travels_to_ranks_that_join_alone() -> None:
    before = Cut(shard_layout((4,), 0, 1), ((0,), (1,)))
    after = Cut(shard_layout((4,), 0, 2), ((2, 3),))
    assert transfers(before, after) == [Transfer(0, 2, 0, 2), Transfer(1, 3, 2, 4)]
    scalar = shard_layout((), 0, 1)
    assert transfers(Cut(scalar, ((0,),)), Cut(scalar, ((0,), (1,)))) == [Transfer(0, 0, 0, 1), Transfer(0, 1, 0, 1)]


@pytest.mark.parametrize(
    ("numels", "itemsize", "num_ranks", "aligned", "expected"),
    [
        ([15, 0, 5], 4, 3, False, TorchFlat((0, 15, 15), 20, 7)),  # ranks get equal parts, but the last
        ([15, 5], 4, 2, True, TorchFlat((0, 16), 22, 11)),  # aligned to 16 bytes, and the whole divides
        ([15, 5], 2, 3, True, TorchFlat((0, 16), 21, 7)),
        ([1, 1], 32, 2, True, TorchFlat((0, 1), 2, 1)),
    ],
)
def test_parameters_follow_each_other(
    numels: list[int], itemsize: int, num_ranks: int, aligned: bool, expected: TorchFlat
) -> None:
    assert torch_flat(numels, itemsize, num_ranks, aligned=aligned) == expected


@pytest.mark.parametrize("aligned", [False, True])
def test_parts_of_all_ranks_are_the_whole(aligned: bool) -> None:
    for numel in range(7):
        for num_ranks in (1, 2, 3, 4):
            layout = torch_flat([numel, 3], 4, num_ranks, aligned=aligned)
            starts, stops = zip(*(layout.interval(rank) for rank in range(num_ranks)), strict=True)
            assert (0, *stops) == (*starts, layout.numel)
