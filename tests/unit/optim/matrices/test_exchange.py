"""The exchange of all members, in one process."""

from __future__ import annotations

import random

import pytest
import torch

from fsdp2.optim.matrices.exchange import fill_results, stacked, take_results
from fsdp2.optim.matrices.messages import messages_of
from fsdp2.optim.matrices.planner import plan_matrices
from fsdp2.optim.matrices.regions import AxisCut, Placed
from tests.unit.optim.matrices.placed import Shape, indices, local_part, planned, random_placed


@pytest.mark.parametrize("seed", range(30))
def test_messages_bring_whole_matrices_and_results_as_shards(seed: int) -> None:
    """The exchange of all members, in one process."""
    draw = random.Random(seed)
    first, *others = (random_placed(draw) for _ in range(4))
    where = [first, *(_placed_as(first, each.shape) for each in others)]
    members = range(len(first.coordinates))
    plan = plan_matrices(planned(where, itemsize=8), len(members), bucket_nbytes=draw.choice((1, 300, 10_000)))
    values = [indices(each) + 1000 * number for number, each in enumerate(where)]
    locals_ = [
        [local_part(each, member, value) for each, value in zip(where, values, strict=True)] for member in members
    ]
    results: list[list[torch.Tensor | None]] = [[None] * len(where) for _ in members]
    for bucket in plan.buckets:
        messages = [messages_of(plan, bucket, member) for member in members]
        sent = []
        for member, each in zip(members, messages, strict=True):
            pieces = [locals_[member][slot.of][slot.slices].flatten() for slot in each.given.slots]
            sent.append(torch.cat([torch.empty(0, dtype=torch.int64), *pieces]).split(each.given.sizes))
        returned = []
        for member, each in zip(members, messages, strict=True):
            stacks = stacked(each, torch.cat([parts[member] for parts in sent]))
            for stack, found in zip(each.stacks, stacks, strict=True):
                for matrix, whole in zip(stack, found, strict=True):
                    inside = values[matrix.tensor][tuple(slice(*interval) for interval in matrix.box)]
                    assert torch.equal(whole, inside.reshape(whole.shape))
            memory = torch.empty(sum(each.returned.sizes), dtype=torch.int64)
            fill_results(each, [-found for found in stacks], memory)
            returned.append(memory.split(each.returned.sizes))
        for member, each in zip(members, messages, strict=True):
            arrived = torch.cat([parts[member] for parts in returned])
            take_results(each, arrived, results[member])
    for member in members:
        for found, local in zip(results[member], locals_[member], strict=True):
            assert found is None or torch.equal(found, -local)
            assert found is not None or local.numel() == 0


def _placed_as(where: Placed, shape: Shape) -> Placed:
    """A tensor of ``shape`` on the axes of ``where``, on dim 0 where it has no such dim."""
    is_there = [axis.dim is None or axis.dim < len(shape) for axis in where.axes]
    axes = [axis if is_ else AxisCut(axis.size, 0) for axis, is_ in zip(where.axes, is_there, strict=True)]
    return Placed(shape, tuple(axes), where.coordinates)
