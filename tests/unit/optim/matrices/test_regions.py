"""Where the entries of a tensor lie on the members of a process group."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.distributed.tensor import Shard

from fsdp2.optim.matrices.regions import AxisCut
from tests.unit.optim.matrices.placed import fsdp, indices, local_part, placed, random_placed


@pytest.mark.parametrize("size", [0, 1, 3, 7, 8, 9])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_a_region_is_what_torch_cuts(size: int, num_ranks: int) -> None:
    where = fsdp((3, size), num_ranks, dim=1)
    pieces, _ = Shard(1)._split_tensor(indices(where), num_ranks, with_padding=False)
    for member in range(num_ranks):
        assert torch.equal(local_part(where, member, indices(where)), pieces[member])


@pytest.mark.parametrize("size", [1, 5, 8, 9, 13])
def test_a_strided_shard_is_cut_behind_the_axes_to_its_right(size: int) -> None:
    """As ``fully_shard`` cuts what tensor parallelism has cut before, evenly or not."""
    where = placed((size, 2), AxisCut(4, 0, split_factor=2), AxisCut(2, 0))
    for member, (data, model) in enumerate(where.coordinates):
        of_model = Shard(0)._split_tensor(indices(where), 2, with_padding=False)[0][model]
        expected = Shard(0)._split_tensor(of_model, 4, with_padding=False)[0][data]
        assert torch.equal(local_part(where, member, indices(where)), expected)


def test_a_plain_axis_on_the_left_cuts_first_and_a_split_factor_that_names_no_axes_is_read_from_the_left() -> None:
    where = placed((16,), AxisCut(2, 0), AxisCut(2, 0, split_factor=2), AxisCut(2, 0))
    starts = (0, 4, 2, 6, 8, 12, 10, 14)
    assert [where.region(member)[0] for member in range(8)] == [((start, start + 2),) for start in starts]
    where = placed((12,), AxisCut(2, 0, split_factor=3))
    assert [where.region(member)[0] for member in range(2)] == [((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12))]


@pytest.mark.parametrize("seed", range(40))
def test_pieces_of_all_members_are_the_box(seed: int) -> None:
    draw = random.Random(seed)
    where = random_placed(draw)
    box = tuple(tuple(sorted(draw.choices(range(size + 1), k=2))) for size in where.shape)
    values = indices(where)
    inside = values[tuple(slice(*interval) for interval in box)]
    counts = torch.zeros_like(inside)
    for member in range(len(where.coordinates)):
        local = local_part(where, member, values)
        for piece in where.pieces(member, box):  # type: ignore[arg-type]
            of_box = tuple(slice(*interval) for interval in piece.inside)
            assert torch.equal(inside[of_box], local[tuple(slice(*interval) for interval in piece.local)])
            counts[of_box] += 1
    num_copies = math.prod(axis.size for axis in where.axes if axis.dim is None)
    assert bool((counts == num_copies).all())
