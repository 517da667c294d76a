"""Placements of parameters on meshes: on which axes a dim is sharded, and behind which others."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp2.core.plan.mesh import AxisRole
from fsdp2.core.plan.placements import _placements

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
