"""What one member sends and receives for a bucket."""

from __future__ import annotations

import itertools
import random

import pytest

from fsdp2.optim.matrices.messages import messages_of
from fsdp2.optim.matrices.planner import GroupPlan, plan_matrices
from fsdp2.optim.matrices.regions import AxisCut, Placed
from tests.unit.optim.matrices.placed import MIB, fsdp, placed, planned


def _random_plan(draw: random.Random) -> GroupPlan:
    num_ranks = draw.choice((1, 2, 3, 5))
    shapes = [
        tuple(draw.choice((1, 2, 5, 8)) for _ in range(draw.choice((2, 2, 3)))) for _ in range(draw.randint(0, 8))
    ]
    where = [fsdp(shape, num_ranks, draw.randrange(len(shape))) for shape in shapes]
    return plan_matrices(planned(where), num_ranks, bucket_nbytes=draw.choice((1, 64, 1000)))


def test_what_lies_as_the_matrix_is_not_copied() -> None:
    def flags(where: Placed, count: int = 1) -> tuple[bool, bool]:
        plan = plan_matrices(planned([where] * count), 2, bucket_nbytes=MIB)
        messages = messages_of(plan, plan.buckets[0], plan.owners[0])
        return messages.arriving.is_one_tensor, messages.returned.is_one_tensor

    assert flags(fsdp((9, 6), 2)) == (True, True)
    assert flags(fsdp((9, 6), 2, dim=1)) == (False, False)
    assert flags(fsdp((9, 6), 2), 4) == (False, False)  # two matrices: halves of both come from each rank
    assert flags(fsdp((8, 9, 6), 2)) == (True, True)  # experts, at home
    assert flags(placed((9, 6), AxisCut(2, None))) == (True, False)  # two copies go back


def test_experts_that_follow_each_other_are_one_slot() -> None:
    plan = plan_matrices(planned([fsdp((8, 4, 6), 2)]), 2, bucket_nbytes=MIB)
    messages = messages_of(plan, plan.buckets[0], 1)
    for layout, shape in (
        (messages.given, (4, 4, 6)),
        (messages.results, (4, 4, 6)),
        (messages.arriving, (4, 1, 4, 6)),
    ):
        assert [(slot.shape, slot.is_all) for slot in layout.slots] == [(shape, True)]


def test_rows_of_stacked_matrices_from_one_member_are_one_slot() -> None:
    plan = plan_matrices(planned([fsdp((9, 6), 2)] * 4), 2, bucket_nbytes=MIB)
    messages = messages_of(plan, plan.buckets[0], 0)
    assert [slot.shape for slot in messages.arriving.slots] == [(2, 5, 6), (2, 4, 6)]
    assert [slot.slices[1] for slot in messages.arriving.slots] == [slice(0, 5), slice(5, 9)]


@pytest.mark.parametrize("seed", range(30))
def test_each_matrix_has_one_owner_and_one_bucket_and_what_one_rank_sends_another_expects(seed: int) -> None:
    plan = _random_plan(random.Random(seed))
    assert plan == _random_plan(random.Random(seed))
    seen = [(index, owner) for bucket in plan.buckets for owner, of in enumerate(bucket.of_owner) for index in of]
    assert sorted(seen) == list(enumerate(plan.owners))
    for bucket, traffic in zip(plan.buckets, plan.traffic, strict=True):
        messages = [messages_of(plan, bucket, member) for member in range(plan.num_members)]
        for a, b in itertools.product(range(plan.num_members), repeat=2):
            assert messages[a].given.sizes[b] == messages[b].arriving.sizes[a]
            assert messages[a].returned.sizes[b] == messages[b].results.sizes[a]
        sizes = {"shards": "given", "owned": "arriving", "returned": "returned", "results": "results"}
        for name, of in sizes.items():
            assert [2 * sum(getattr(each, of).sizes) for each in messages] == list(getattr(traffic, name))
        own = [each.given.sizes[member] + each.returned.sizes[member] for member, each in enumerate(messages)]
        sent = [sum(each.given.sizes) + sum(each.returned.sizes) for each in messages]
        assert [2 * (each - kept) for each, kept in zip(sent, own, strict=True)] == list(traffic.sent)
