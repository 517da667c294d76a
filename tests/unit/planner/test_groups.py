"""Along which dim a parameter is sharded."""

from __future__ import annotations

from fsdp2.planner.groups import shard_dim


def test_stacked_experts_are_cut_where_they_are_long_enough() -> None:
    assert [shard_dim(shape, 64) for shape in [(8, 4096, 128), (4096, 8), (8, 8), (8,), ()]] == [1, 0, 0, 0, 0]
