"""Plans as text, and what holds for every plan: regions are apart, bucketed shards touch.

The comm is a stub: what it prefers is all that a plan is compiled for. Sizes in the texts follow from shapes, dtypes
and alignment alone. ``EXPECTTEST_ACCEPT=1`` rewrites the texts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress, pairwise
from typing import Any

import pytest
import torch

from fsdp2._torch import GradDtype
from fsdp2.plan.dtypes import DivideFactors, param_dtypes
from fsdp2.plan.layout import ALIGNMENT_NBYTES, shard_layout
from fsdp2.plan.plan import (
    GatherPlan,
    PlanInput,
    ReducePlan,
    Route,
    Routing,
    compile_gather,
    compile_reduces,
    cut_after_forward,
)
from fsdp2.types import MixedPrecisionPolicy
from tests.harness.golden import Check
from tests.unit.plan_text import text_of_gather, text_of_reduce

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
WORLD_SIZE = 4


ROUTING = Routing(direct_min_nbytes=1024, reduces_uneven=False)


def _input(
    name: str,
    shape: tuple[int, ...],
    *,
    dim: int = 0,
    num_shards: int = WORLD_SIZE,
    orig: torch.dtype = F32,
    grad: GradDtype | None = None,
    **policy: Any,
) -> PlanInput:
    layout = shard_layout(shape, dim, num_shards)
    return PlanInput(name, layout, param_dtypes(orig, MixedPrecisionPolicy(**policy), grad))


def _gather(inputs: Sequence[PlanInput], **changes: Any) -> GatherPlan:
    return compile_gather(dict(enumerate(inputs)), replace(ROUTING, **changes))


def _reduce(inputs: Sequence[PlanInput], *, factor: float | None = None, **changes: Any) -> ReducePlan:
    (plan,) = compile_reduces(inputs, replace(ROUTING, **changes), WORLD_SIZE, factor)
    return plan


# Gathers


def test_gather_sends_large_parameters_directly_and_small_ones_in_a_bucket(golden: Check) -> None:
    inputs = [_input("up.weight", (64, 32)), _input("up.bias", (64,)), _input("norm", (32,))]
    golden(text_of_gather(_gather(inputs)))


def test_gather_scatters_shards_of_other_dims(golden: Check) -> None:
    inputs = [_input("weight", (8, 64), dim=1), _input("bias", (8,)), _input("table", (3, 5, 16), dim=2)]
    golden(text_of_gather(_gather(inputs)))


def test_gather_casts_to_the_compute_dtype(golden: Check) -> None:
    inputs = [
        _input("weight", (64, 32), param_dtype=BF16),
        _input("bias", (64,), param_dtype=BF16),
        _input("half", (64, 32), orig=BF16, param_dtype=BF16),
        _input("index", (64,), orig=torch.int64, param_dtype=BF16),
    ]
    golden(text_of_gather(_gather(inputs)))


def test_gather_pads_uneven_parameters(golden: Check) -> None:
    inputs = [_input("large", (33, 32)), _input("small", (5, 3)), _input("one", (1,)), _input("empty", (0, 4))]
    golden(text_of_gather(_gather(inputs)))


def test_gather_back_from_a_smaller_mesh_lands_where_the_parameters_came_from(golden: Check) -> None:
    inputs = [_input("weight", (33, 32), param_dtype=BF16), _input("bias", (33,), param_dtype=BF16)]
    whole = _gather(inputs)
    resting = {step.index: cut_after_forward(step, 2) for step in whole.steps}
    plan = compile_gather(resting, ROUTING, back_into=whole)
    assert plan.unsharded_nbytes == whole.unsharded_nbytes
    golden(text_of_gather(plan))


# Reductions


def test_reduce_sends_large_gradients_directly_and_small_ones_in_a_bucket(golden: Check) -> None:
    inputs = [_input("up.weight", (64, 32)), _input("up.bias", (64,)), _input("table", (3, 16), dim=1)]
    golden(text_of_reduce(_reduce(inputs)))


def test_reduce_casts_to_the_reduce_dtype(golden: Check) -> None:
    inputs = [_input("weight", (64, 32), param_dtype=BF16, reduce_dtype=F32)]
    golden(text_of_reduce(_reduce(inputs)))


def test_reduce_in_fp16_divides_before_and_after(golden: Check) -> None:
    inputs = [_input("weight", (64, 32), param_dtype=F16, reduce_dtype=F16)]
    golden(text_of_reduce(_reduce(inputs)))


def test_reduce_divides_by_the_factor_of_the_user(golden: Check) -> None:
    golden(text_of_reduce(_reduce([_input("bias", (64,))], factor=3)))


def test_reduce_pads_uneven_gradients_in_the_bucket_unless_the_comm_takes_them(golden: Check) -> None:
    inputs = [_input("large", (33, 32)), _input("small", (5, 3))]
    padded, as_they_are = _reduce(inputs, reduces_uneven=False), _reduce(inputs, reduces_uneven=True)
    golden(f"{text_of_reduce(padded)}\n\n{text_of_reduce(as_they_are)}")


def test_reduce_has_a_plan_per_combination_of_dtypes(golden: Check) -> None:
    inputs = [
        _input("norm", (64,)),
        _input("up", (64, 32), orig=BF16),
        _input("bias", (64,), orig=BF16),
        _input("down", (32, 64), orig=BF16, grad=GradDtype(F32)),
        _input("gate", (64, 8), orig=F16),
    ]
    plans = compile_reduces(inputs, ROUTING, WORLD_SIZE)
    golden("\n\n".join(map(text_of_reduce, plans)))
    assert [step.index for plan in plans for step in plan.steps] == [0, 2, 1, 3, 4]


def test_shards_of_one_bucket_touch_though_others_of_their_dtype_travel_in_another() -> None:
    inputs = [
        _input("norm", (8,)),
        _input("up", (8, 4), param_dtype=BF16),
        _input("scale", (8,)),
        _input("down", (3, 8), dim=1, param_dtype=BF16),
        _input("table", (3, 8), dim=1),
    ]
    plan = _gather(inputs)
    places = [(step.name, step.shard_offset, step.layout.chunk_numel) for step in plan.steps]
    assert places == [("norm", 0, 2), ("scale", 2, 2), ("table", 4, 6), ("up", 10, 8), ("down", 18, 6)]
    assert [[step.name for step in bucket.steps] for bucket in plan.buckets] == [
        ["norm", "scale", "table"],
        ["up", "down"],
    ]


# What holds for every plan

_POLICIES = [{}, {"param_dtype": BF16}, {"param_dtype": BF16, "reduce_dtype": F32}, {"param_dtype": F16}]


def _random_inputs(draw: random.Random, *, one_dtype: bool) -> list[PlanInput]:
    policy = draw.choice(_POLICIES)
    inputs = []
    for index in range(draw.randint(1, 7)):
        shape = tuple(draw.choice((0, 1, 2, 3, 5, 8, 33, 64)) for _ in range(draw.randint(1, 3)))
        orig = F32 if one_dtype else draw.choice((F32, BF16, torch.int64, torch.uint8))
        own = policy if one_dtype or draw.random() < 0.7 else {}  # its dtype is kept
        inputs.append(_input(f"p{index}", shape, dim=draw.randrange(len(shape)), orig=orig, **own))
    return inputs


def _assert_apart(intervals: Sequence[tuple[int, int]], total: int) -> None:
    filled = sorted((start, stop) for start, stop in intervals if stop > start)
    ends = [0, *(stop for _, stop in filled)]
    assert all(end <= start for end, (start, _) in zip(ends, filled, strict=False)), intervals
    assert ends[-1] <= total, (intervals, total)


@pytest.mark.parametrize("seed", range(60))
def test_gathered_regions_are_aligned_and_apart(seed: int) -> None:
    plan = _gather(_random_inputs(random.Random(seed), one_dtype=False))
    assert all(step.offset_nbytes % ALIGNMENT_NBYTES == 0 for step in plan.steps)
    regions = [
        (step.offset_nbytes, step.offset_nbytes + step.layout.padded_numel * step.dtype.itemsize) for step in plan.steps
    ]
    _assert_apart(regions, plan.unsharded_nbytes)


@pytest.mark.parametrize("seed", range(60))
def test_shards_lie_apart_in_their_flat_buffer_bucketed_ones_touch_and_direct_ones_are_aligned(seed: int) -> None:
    inputs = _random_inputs(random.Random(seed), one_dtype=False)
    plan = _gather(inputs)
    assert sorted(step.index for step in plan.steps) == list(range(len(inputs)))
    numels = dict(plan.shard_numels)
    for source in {step.source for step in plan.steps}:
        steps = [step for step in plan.steps if step.source is source]
        shards = [(step.shard_offset, step.shard_offset + step.layout.chunk_numel) for step in steps]
        _assert_apart(shards, numels[source])
        direct = [step.shard_offset * source.itemsize for step in steps if step.route is Route.DIRECT]
        assert all(offset_nbytes % ALIGNMENT_NBYTES == 0 for offset_nbytes in direct)
        for dtype in {step.dtype for step in steps}:
            in_bucket = [step.dtype is dtype and step.route is not Route.DIRECT for step in steps]
            bucket = list(compress(shards, in_bucket))
            assert all(before[1] == after[0] for before, after in pairwise(bucket))


@pytest.mark.parametrize("seed", range(60))
def test_reduced_gradients_lie_apart_in_their_flat_buffer(seed: int) -> None:
    inputs = _random_inputs(random.Random(seed), one_dtype=True)
    plan = _reduce(inputs)
    assert sorted(step.index for step in plan.steps) == list(range(len(inputs)))
    _assert_apart([(step.offset, step.offset + step.layout.chunk_numel) for step in plan.steps], plan.flat_numel)


@pytest.mark.parametrize("seed", range(20))
def test_only_even_gradients_cut_on_their_first_dim_travel_directly(seed: int) -> None:
    for step in _reduce(_random_inputs(random.Random(seed), one_dtype=True), direct_min_nbytes=0).steps:
        if step.route is Route.DIRECT:
            assert step.layout.dim == 0
            assert step.layout.is_even
        assert (step.route is Route.STRIDED) == (step.layout.dim != 0)


def test_plan_is_the_same_for_every_rank_and_call() -> None:
    inputs = _random_inputs(random.Random(3), one_dtype=False)
    assert _gather(inputs) == _gather(list(inputs))


def _factors(*policies: dict[str, Any], factor: float | None = None, **options: bool) -> set[DivideFactors]:
    inputs = [_input("weight", (4, 2), **policy) for policy in policies]
    plans = compile_reduces(inputs, ROUTING, WORLD_SIZE, factor, **options)
    return {plan.factors for plan in plans}


AVERAGED = {DivideFactors(1.0, 1.0, averages=True)}


def test_collectives_that_can_average_leave_nothing_to_divide() -> None:
    bf16 = {"reduce_dtype": torch.bfloat16}
    assert _factors({}, averages=True) == AVERAGED
    assert _factors({}, bf16, averages=True) == AVERAGED
    assert _factors({}, factor=float(WORLD_SIZE), averages=True) == AVERAGED


def test_collectives_sum_where_they_cannot_average_or_where_no_mean_over_all_ranks_is_asked_for() -> None:
    summed = DivideFactors(1.0, float(WORLD_SIZE))
    fp16 = {"reduce_dtype": torch.float16}
    assert _factors({}) == {summed}
    assert _factors({}, factor=3.0, averages=True) == {DivideFactors(1.0, 3.0)}
    assert _factors({}, behind_hook=True, averages=True) == {replace(summed, behind_hook=True)}
    assert not any(each.averages for each in _factors({}, fp16, averages=True))  # one launch, one operation


def test_gradients_that_are_cast_share_a_bucket_where_launches_count() -> None:
    inputs = [_input(f"weight{i}", (64, 64), param_dtype=torch.bfloat16, reduce_dtype=F32) for i in range(3)]
    alone, together = _reduce(inputs), _reduce(inputs, buckets_casts=True)
    assert [step.route for step in alone.steps] == [Route.DIRECT] * 3
    assert [step.route for step in together.steps] == [Route.ROWS] * 3
    assert (len(alone.calls), len(together.calls)) == (3, 1)
    uncast = _reduce([_input("weight", (64, 64))], buckets_casts=True)
    assert [step.route for step in uncast.steps] == [Route.DIRECT]
