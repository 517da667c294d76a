"""Whole matrices, the pure part: what may be cut, where entries lie, who owns what, and what that costs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from fsdp2.optim.matrices.exchange import fill_results, stacked, take_results
from fsdp2.optim.matrices.messages import messages_of
from fsdp2.optim.matrices.planner import (
    GroupPlan,
    PlannedTensor,
    least_largest_load,
    newton_schulz_cost,
    plan_matrices,
)
from fsdp2.optim.matrices.regions import AxisCut, Placed
from fsdp2.optim.matrices.rules import MatrixRule
from tests.harness.golden import texts_beside
from tests.harness.selection import in_ci

TEXTS = texts_beside(__file__)
MIB = 1024 * 1024
Shape = tuple[int, ...]


def placed(shape: Shape, *axes: AxisCut) -> Placed:
    coordinates = itertools.product(*(range(axis.size) for axis in axes))
    return Placed(shape, axes, tuple(coordinates))


def fsdp(shape: Shape, num_ranks: int, dim: int = 0) -> Placed:
    return placed(shape, AxisCut(num_ranks, dim))


def planned(where: Sequence[Placed], itemsize: int = 2) -> list[PlannedTensor]:
    rules = [MatrixRule.batch() if len(each.shape) == 3 else MatrixRule.whole() for each in where]
    return [
        PlannedTensor(f"t{i}", each, itemsize, rule) for i, (each, rule) in enumerate(zip(where, rules, strict=True))
    ]


RULES = {
    "whole": (MatrixRule.whole(), (6, 4), [(6, 4)]),
    "rows": (MatrixRule.rows(4, 1, 1), (6, 4), [(4, 4), (1, 4), (1, 4)]),
    "columns": (MatrixRule.columns(3, 1), (6, 4), [(6, 3), (6, 1)]),
    "heads": (MatrixRule.heads(3), (6, 4), [(2, 4)] * 3),
    "batch": (MatrixRule.batch(), (2, 6, 4), [(6, 4)] * 2),
    "batch of rows": (MatrixRule.batch(MatrixRule.rows(2, 4)), (2, 6, 4), [(2, 4), (4, 4)] * 2),
    "batch of two dims": (MatrixRule.batch(), (2, 3, 6, 4), [(6, 4)] * 6),
    "flattened": (MatrixRule.flattened(), (5, 2, 3, 3), [(5, 18)]),
    "not whole": (MatrixRule.whole(), (2, 6, 4), None),
    "not these rows": (MatrixRule.rows(4, 1), (6, 4), None),
    "no rows": (MatrixRule.rows(6, 0), (6, 4), None),
    "not these columns": (MatrixRule.columns(3), (6, 4), None),
    "not these heads": (MatrixRule.heads(4), (6, 4), None),
    "not a batch": (MatrixRule.batch(), (6, 4), None),
    "not a batch of these rows": (MatrixRule.batch(MatrixRule.rows(4)), (2, 6, 4), None),
    "not flattened": (MatrixRule.flattened(), (6,), None),
}


@pytest.mark.parametrize("case", RULES)
def test_a_rule_divides_a_tensor_into_matrices_or_says_what_it_expects(case: str) -> None:
    rule, shape, expected = RULES[case]
    if expected is None:
        with pytest.raises(ValueError, match=r"has shape \(.*\), but MatrixRule\.\w+ expects "):
            rule.boxes(shape)
        return
    boxes = rule.boxes(shape)
    assert [(each.rows, each.columns) for each in boxes] == expected
    covered = torch.zeros(shape, dtype=torch.int64)
    for each in boxes:
        covered[tuple(slice(*interval) for interval in each.box)] += 1
    assert torch.equal(covered, torch.ones_like(covered))
    assert len({each.label for each in boxes}) == len(boxes)


# Regions


def _indices(where: Placed) -> torch.Tensor:
    return torch.arange(math.prod(where.shape)).reshape(where.shape)


def _local(where: Placed, member: int, whole: torch.Tensor) -> torch.Tensor:
    """What ``member`` has, made from its region."""
    for dim, along in enumerate(where.region(member)):
        parts = [whole.narrow(dim, start, stop - start) for start, stop in along]
        whole = torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)
    return whole


@pytest.mark.parametrize("size", [0, 1, 3, 7, 8, 9])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_a_region_is_what_torch_cuts(size: int, num_ranks: int) -> None:
    where = fsdp((3, size), num_ranks, dim=1)
    pieces, _ = Shard(1)._split_tensor(_indices(where), num_ranks, with_padding=False)
    for member in range(num_ranks):
        assert torch.equal(_local(where, member, _indices(where)), pieces[member])


@pytest.mark.parametrize("size", [1, 5, 8, 9, 13])
def test_a_strided_shard_is_cut_behind_the_axes_to_its_right(size: int) -> None:
    """As ``fully_shard`` cuts what tensor parallelism has cut before, evenly or not."""
    where = placed((size, 2), AxisCut(4, 0, split_factor=2), AxisCut(2, 0))
    for member, (data, model) in enumerate(where.coordinates):
        of_model = Shard(0)._split_tensor(_indices(where), 2, with_padding=False)[0][model]
        expected = Shard(0)._split_tensor(of_model, 4, with_padding=False)[0][data]
        assert torch.equal(_local(where, member, _indices(where)), expected)


def test_a_plain_axis_on_the_left_cuts_first_and_a_split_factor_that_names_no_axes_is_read_from_the_left() -> None:
    where = placed((16,), AxisCut(2, 0), AxisCut(2, 0, split_factor=2), AxisCut(2, 0))
    starts = (0, 4, 2, 6, 8, 12, 10, 14)
    assert [where.region(member)[0] for member in range(8)] == [((start, start + 2),) for start in starts]
    where = placed((12,), AxisCut(2, 0, split_factor=3))
    assert [where.region(member)[0] for member in range(2)] == [((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12))]


def _random_placed(draw: random.Random) -> Placed:
    shape = tuple(draw.choice((1, 2, 3, 5, 8)) for _ in range(draw.randint(2, 3)))
    axes = tuple(
        AxisCut(draw.choice((1, 2, 3)), draw.choice((None, *range(len(shape))))) for _ in range(draw.randint(1, 3))
    )
    return placed(shape, *axes)


@pytest.mark.parametrize("seed", range(40))
def test_pieces_of_all_members_are_the_box(seed: int) -> None:
    draw = random.Random(seed)
    where = _random_placed(draw)
    box = tuple(tuple(sorted(draw.choices(range(size + 1), k=2))) for size in where.shape)
    values = _indices(where)
    inside = values[tuple(slice(*interval) for interval in box)]
    counts = torch.zeros_like(inside)
    for member in range(len(where.coordinates)):
        local = _local(where, member, values)
        for piece in where.pieces(member, box):  # type: ignore[arg-type]
            of_box = tuple(slice(*interval) for interval in piece.inside)
            assert torch.equal(inside[of_box], local[tuple(slice(*interval) for interval in piece.local)])
            counts[of_box] += 1
    num_copies = math.prod(axis.size for axis in where.axes if axis.dim is None)
    assert bool((counts == num_copies).all())


# Owners and buckets


def _llama(width: int, kv: int, mlp: int, num_layers: int) -> list[Shape]:
    return [*[(rows, width) for rows in (width, kv, kv, width, mlp, mlp)], (width, mlp)] * num_layers


MODELS: dict[str, list[Shape]] = {
    "Llama 8B": _llama(4096, 1024, 14336, 32),
    "Llama 70B": _llama(8192, 1024, 28672, 80),
    "128 experts": [(8192, 4096), (512, 4096), (4096, 8192), (128, 1536, 4096), (128, 1536, 4096), (128, 4096, 1536)]
    * 8,
}


@pytest.mark.parametrize("num_ranks", [8, 64, 128, *in_ci(256, 512)])
@pytest.mark.parametrize("model", MODELS)
def test_owners_of_large_models_are_balanced_and_send_little(model: str, num_ranks: int) -> None:
    plan = plan_matrices(
        planned([fsdp(shape, num_ranks) for shape in MODELS[model]]), num_ranks, bucket_nbytes=64 * MIB
    )
    assert plan.distance_from_best <= 1.05
    ideal = 2 * sum(math.prod(shape) for shape in MODELS[model]) * 2 / num_ranks
    assert sum(plan.sent_nbytes) / num_ranks <= ideal


def _random_plan(draw: random.Random) -> GroupPlan:
    num_ranks = draw.choice((1, 2, 3, 5))
    shapes = [
        tuple(draw.choice((1, 2, 5, 8)) for _ in range(draw.choice((2, 2, 3)))) for _ in range(draw.randint(0, 8))
    ]
    where = [fsdp(shape, num_ranks, draw.randrange(len(shape))) for shape in shapes]
    return plan_matrices(planned(where), num_ranks, bucket_nbytes=draw.choice((1, 64, 1000)))


WHOLE, TWICE = fsdp((8, 8), 2), placed((8, 8), AxisCut(2, None), AxisCut(2, 0))
BY_AREA = {"cost": lambda rows, columns: rows * columns}
# Tensors, the number of ranks, and options. Buckets of 1 MiB, unless said otherwise.
PLANS: dict[str, tuple[list[Placed], int, dict[str, Any]]] = {
    "Llama 8B": ([fsdp(shape, 8) for shape in MODELS["Llama 8B"]], 8, {"bucket_nbytes": 256 * MIB}),
    "two buckets are the most memory": ([WHOLE] * 40, 2, {"bucket_nbytes": 1000}),
    "two buckets are the most memory, in two copies": ([TWICE] * 40, 4, {"bucket_nbytes": 1000}),
    "one that takes more than a bucket is alone": ([*[WHOLE] * 6, fsdp((100, 100), 2)], 2, {"bucket_nbytes": 1000}),
    "buckets begin with the last tensors": (
        [fsdp((8, 8 + index % 2), 2) for index in range(6)],
        2,
        {"bucket_nbytes": 1, "last_first": True},
    ),
    "a matrix goes to the rank that has it whole": ([fsdp((8, 16, 16), 4)], 4, {}),
    # To the owner: half a matrix from the other rank of its copy. Back: half a matrix to each of three ranks.
    "copies share the work": ([TWICE] * 4, 4, {}),
    "what ranks have to do already counts": ([WHOLE] * 3, 2, {"before": [2 * newton_schulz_cost(8, 8), 0.0]}),
    # Longest first alone gives 7: 3 + 2 + 2 and 3 + 2.
    "the busiest rank is relieved": ([fsdp((1, size), 2) for size in (3, 3, 2, 2, 2)], 2, BY_AREA),
}


@pytest.mark.parametrize("case", PLANS)
def test_plan_of(case: str) -> None:
    """What it costs; who owns what, and what that takes; and each bucket, with the matrices of each owner."""
    where, num_ranks, options = PLANS[case]
    plan = plan_matrices(planned(where), num_ranks, **{"bucket_nbytes": MIB, **options})
    across = [sum(each.across) for each in plan.traffic]
    said = [str(plan), f"loads {plan.loads}, sent {plan.sent_nbytes}, {plan.temporary_nbytes} bytes for a moment"]
    said += [f"{of.of_owner}, {nbytes} bytes across" for of, nbytes in zip(plan.buckets, across, strict=True)]
    TEXTS.check(case, "\n".join(said), among=PLANS)


BOUNDS = {
    "mean": ([1.0] * 8, 4, 2.0),
    "largest": ([9.0, 1.0, 1.0], 3, 9.0),
    "three on two": ([2.0, 2.0, 2.0], 2, 4.0),
    "small ones have no room beside large ones": ([16.0] * 3 + [6.0] * 4, 4, 22.0),
}


@pytest.mark.parametrize("case", BOUNDS)
def test_no_assignment_is_below_the_bound(case: str) -> None:
    costs, num_members, expected = BOUNDS[case]
    assert least_largest_load(costs, num_members) == pytest.approx(expected)
    best = min(
        max(sum(cost for cost, at in zip(costs, owners, strict=True) if at == member) for member in range(num_members))
        for owners in itertools.product(range(num_members), repeat=len(costs))
    )
    assert least_largest_load(costs, num_members) <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_messages_bring_whole_matrices_and_results_as_shards(seed: int) -> None:
    """The exchange of all members, in one process."""
    draw = random.Random(seed)
    first, *others = (_random_placed(draw) for _ in range(4))
    where = [first, *(_placed_as(first, each.shape) for each in others)]
    members = range(len(first.coordinates))
    plan = plan_matrices(planned(where, itemsize=8), len(members), bucket_nbytes=draw.choice((1, 300, 10_000)))
    values = [_indices(each) + 1000 * number for number, each in enumerate(where)]
    locals_ = [[_local(each, member, value) for each, value in zip(where, values, strict=True)] for member in members]
    results: list[list[torch.Tensor | None]] = [[None] * len(where) for _ in members]
    for bucket in plan.buckets:
        messages = [messages_of(plan, bucket, member) for member in members]
        sent = []
        for member, each in zip(members, messages, strict=True):
            pieces = [locals_[member][slot.tensor][slot.slices].flatten() for slot in each.given]
            sent.append(torch.cat([torch.empty(0, dtype=torch.int64), *pieces]).split(each.given_sizes))
        returned = []
        for member, each in zip(members, messages, strict=True):
            stacks = stacked(each, torch.cat([parts[member] for parts in sent]))
            for stack, found in zip(each.stacks, stacks, strict=True):
                for index, whole in zip(stack.matrices, found, strict=True):
                    matrix = plan.matrices[index]
                    inside = values[matrix.tensor][tuple(slice(*interval) for interval in matrix.box)]
                    assert torch.equal(whole, inside.reshape(whole.shape))
            memory = torch.empty(sum(each.returned_sizes), dtype=torch.int64)
            fill_results(each, [-found for found in stacks], memory)
            returned.append(memory.split(each.returned_sizes))
        for member, each in zip(members, messages, strict=True):
            arrived = torch.cat([parts[member] for parts in returned])
            take_results(
                each, arrived, lambda tensor, member=member: torch.empty_like(locals_[member][tensor]), results[member]
            )
    for member in members:
        for found, local in zip(results[member], locals_[member], strict=True):
            assert found is None or torch.equal(found, -local)
            assert found is not None or local.numel() == 0


def _placed_as(where: Placed, shape: Shape) -> Placed:
    """A tensor of ``shape`` on the axes of ``where``, on dim 0 where it has no such dim."""
    is_there = [axis.dim is None or axis.dim < len(shape) for axis in where.axes]
    axes = [axis if is_ else AxisCut(axis.size, 0) for axis, is_ in zip(where.axes, is_there, strict=True)]
    return Placed(shape, tuple(axes), where.coordinates)


def test_what_lies_as_the_matrix_is_not_copied() -> None:
    def flags(where: Placed, count: int = 1) -> tuple[bool, bool]:
        plan = plan_matrices(planned([where] * count), 2, bucket_nbytes=MIB)
        messages = messages_of(plan, plan.buckets[0], plan.owners[0])
        return messages.arrives_whole, messages.returns_whole

    assert flags(fsdp((9, 6), 2)) == (True, True)
    assert flags(fsdp((9, 6), 2, dim=1)) == (False, False)
    assert flags(fsdp((9, 6), 2), 4) == (False, False)  # two matrices: halves of both come from each rank
    assert flags(fsdp((8, 9, 6), 2)) == (True, True)  # experts, at home
    assert flags(placed((9, 6), AxisCut(2, None))) == (True, False)  # two copies go back


def test_experts_that_follow_each_other_are_one_slot() -> None:
    plan = plan_matrices(planned([fsdp((8, 4, 6), 2)]), 2, bucket_nbytes=MIB)
    messages = messages_of(plan, plan.buckets[0], 1)
    for slots in (messages.given, messages.results):
        assert [(slot.shape, slot.is_all) for slot in slots] == [((4, 4, 6), True)]
    assert [(slot.shape, slot.count) for slot in messages.arriving] == [((4, 4, 6), 4)]


@pytest.mark.parametrize("seed", range(30))
def test_each_matrix_has_one_owner_and_one_bucket_and_what_one_rank_sends_another_expects(seed: int) -> None:
    plan = _random_plan(random.Random(seed))
    assert plan == _random_plan(random.Random(seed))
    seen = [(index, owner) for bucket in plan.buckets for owner, of in enumerate(bucket.of_owner) for index in of]
    assert sorted(seen) == list(enumerate(plan.owners))
    for bucket, traffic in zip(plan.buckets, plan.traffic, strict=True):
        messages = [messages_of(plan, bucket, member) for member in range(plan.num_members)]
        for a, b in itertools.product(range(plan.num_members), repeat=2):
            assert messages[a].given_sizes[b] == messages[b].arriving_sizes[a]
            assert messages[a].returned_sizes[b] == messages[b].results_sizes[a]
        sizes = {"shards": "given", "owned": "arriving", "returned": "returned", "results": "results"}
        for name, of in sizes.items():
            assert [2 * sum(getattr(each, f"{of}_sizes")) for each in messages] == list(getattr(traffic, name))
        own = [each.given_sizes[member] + each.returned_sizes[member] for member, each in enumerate(messages)]
        sent = [sum(each.given_sizes) + sum(each.returned_sizes) for each in messages]
        assert [2 * (each - kept) for each, kept in zip(sent, own, strict=True)] == list(traffic.sent)
