"""What travels when other ranks are to hold the shards: every new shard is complete, and nothing travels twice."""

from __future__ import annotations

import random

from fsdp2.checkpoint.transfers import Cut, Transfer, transfers
from fsdp2.core.plan.layout import shard_layout


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
