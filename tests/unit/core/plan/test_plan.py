"""Plans as text, with what hooks send beside parameters, and what holds for every plan.

The comm is a stub: what it prefers is all that a plan is compiled for. Sizes in the texts, which are in
``golden/plan.txt``, follow from shapes, dtypes and alignment alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress, pairwise
from typing import Any

import pytest
import torch

from fsdp2.core._torch import GradDtype
from fsdp2.core.plan.dtypes import DivideFactors, ParamDtypes, param_dtypes
from fsdp2.core.plan.layout import ALIGNMENT_NBYTES, join, shard_layout
from fsdp2.core.plan.plan import (
    GatherPlan,
    Origin,
    PlanInput,
    ReducePlan,
    Route,
    Routing,
    compile_gather,
    compile_reduces,
    cut_after_forward,
)
from fsdp2.core.types import MixedPrecisionPolicy
from tests.harness.golden import Check

F32, BF16, F16, I8, U8 = torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8
HOOK, CONSUMED = Origin.HOOK, Origin.HOOK_CONSUMED
WORLD_SIZE = 4
ROUTING = Routing(direct_min_nbytes=1024, reduces_uneven=False)
Shape = tuple[int, ...]


def _input(
    name: str, shape: Shape, *, dim: int = 0, orig: torch.dtype = F32, grad: GradDtype | None = None, **policy: Any
) -> PlanInput:
    dtypes = param_dtypes(orig, MixedPrecisionPolicy(**policy), grad)
    return PlanInput(name, shard_layout(shape, dim, WORLD_SIZE), dtypes)


def _hook(name: str, shapes: list[Shape], dtype: torch.dtype, origin: Origin, dim: int = 0) -> PlanInput:
    return PlanInput(name, join(shapes, dim), ParamDtypes.uncast(dtype), origin)


def _gather(inputs: Sequence[PlanInput]) -> GatherPlan:
    return compile_gather(dict(enumerate(inputs)), ROUTING)


def _reduce(inputs: Sequence[PlanInput], **changes: Any) -> ReducePlan:
    (plan,) = compile_reduces(inputs, replace(ROUTING, **changes), WORLD_SIZE)
    return plan


def _arrow(*dtypes: torch.dtype) -> str:
    return " -> ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _text(plan: GatherPlan | ReducePlan) -> str:
    if isinstance(plan, GatherPlan):
        rows = [f"all-gather into {plan.unsharded_nbytes} bytes"]
        for step in plan.steps:
            dtypes = _arrow(step.dtype) if step.source is step.dtype else _arrow(step.source, step.dtype)
            chunk_nbytes = step.layout.chunk_numel * step.dtype.itemsize
            sent = f"{step.route.value}, {dtypes}, {step.layout.num_shards} x {chunk_nbytes} bytes"
            is_param = step.origin is Origin.SHARD
            place = f"at {step.offset_nbytes}" if is_param else step.origin.value
            rows.append(f"  {step.name}: {sent} {place}")
        return "\n".join(rows)
    divide = f"divide by {plan.factors.before:g} before, {plan.factors.after:g} after"
    sent = [plan.dtypes.param] if plan.dtypes.param is plan.dtypes.reduce else [plan.dtypes.param, plan.dtypes.reduce]
    rows = [f"reduce-scatter {_arrow(*sent, plan.dtypes.grad)}, {divide}"]
    for each in plan.steps:
        rows.append(f"  {each.name}: {each.route.value}, {each.layout.num_shards} x {each.layout.chunk_numel} elements")
    return "\n".join(rows)


GATHERS: dict[str, list[PlanInput]] = {
    "large ones direct": [_input("up.weight", (64, 32)), _input("up.bias", (64,)), _input("norm", (32,))],
    "other dims": [_input("weight", (8, 64), dim=1), _input("bias", (8,)), _input("table", (3, 5, 16), dim=2)],
    "casts": [
        _input("weight", (64, 32), param_dtype=BF16),
        _input("bias", (64,), param_dtype=BF16),
        _input("half", (64, 32), orig=BF16, param_dtype=BF16),
        _input("index", (64,), orig=torch.int64, param_dtype=BF16),
    ],
    "uneven": [_input("large", (33, 32)), _input("small", (5, 3)), _input("one", (1,)), _input("empty", (0, 4))],
    "hooks beside a parameter": [
        _input("bias", (64,)),
        _hook("weight[0]", [(64, 32)] * 4, I8, CONSUMED),
        _hook("weight[1]", [(64, 1)] * 4, F32, CONSUMED),
        _hook("columns[0]", [(4, 8)] * 4, F32, HOOK, dim=1),
        _hook("ragged[0]", [(3,), (0,), (7,), (1,)], U8, HOOK),
        _hook("short[0]", [(7,), (7,), (2,), (0,)], U8, HOOK),
        _hook("large[0]", [(600,), (600,), (600,), (5,)], BF16, HOOK),
    ],
    "casts beside a hook": [
        _input("bias", (64,), param_dtype=BF16),
        _hook("weight[0]", [(5, 3), (5, 3), (3, 3), (0, 3)], BF16, CONSUMED),
        _input("norm", (6,), param_dtype=BF16),
    ],
    "a hook that sends nothing": [_hook("w[0]", [(0, 3)] * 4, F32, HOOK)],
    "nothing": [],
}


@pytest.mark.parametrize("case", GATHERS)
def test_gather(case: str, golden: Check) -> None:
    plan = _gather(GATHERS[case])
    golden(_text(plan))
    if case == "casts beside a hook":  # flat shards in front, in one run
        assert [[step.name for step in bucket.steps] for bucket in plan.buckets] == [["bias", "norm", "weight[0]"]]
    assert plan.steps or (plan.buckets, plan.staging_nbytes) == ((), 0)


def test_gather_back_from_a_smaller_mesh_lands_where_the_parameters_came_from(golden: Check) -> None:
    whole = _gather([_input("weight", (33, 32), param_dtype=BF16), _input("bias", (33,), param_dtype=BF16)])
    resting = {step.index: cut_after_forward(step, 2) for step in whole.steps}
    plan = compile_gather(resting, ROUTING, back_into=whole)
    assert plan.unsharded_nbytes == whole.unsharded_nbytes
    golden(_text(plan))


def test_hooks_add_nothing_to_the_flat_shards_nor_to_the_shared_storage() -> None:
    plain = [_input("a", (64, 32)), _input("b", (7,))]
    hooked = [_hook("c[0]", [(3, 4)] * 4, F32, HOOK), _hook("d[0]", [(1000,)] * 4, F32, CONSUMED)]
    alone, together = _gather(plain), _gather([*plain, *hooked])
    assert (together.shard_numels, together.shared_nbytes) == (alone.shard_numels, alone.shared_nbytes)
    assert together.unsharded_nbytes == alone.unsharded_nbytes + 4 * 3 * 4 * 4  # what is consumed does not count


UNEVEN = [_input("large", (33, 32)), _input("small", (5, 3))]
REDUCES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "large ones direct": ([*GATHERS["large ones direct"][:2], _input("table", (3, 16), dim=1)], {}),
    "a cast": ([_input("weight", (64, 32), param_dtype=BF16, reduce_dtype=F32)], {}),
    "fp16 divides before and after": ([_input("weight", (64, 32), param_dtype=F16, reduce_dtype=F16)], {}),
    "uneven": (UNEVEN, {}),
    "uneven, which the comm takes": (UNEVEN, {"reduces_uneven": True}),
    "a plan per combination of dtypes": (
        [
            _input("norm", (64,)),
            _input("up", (64, 32), orig=BF16),
            _input("bias", (64,), orig=BF16),
            _input("down", (32, 64), orig=BF16, grad=GradDtype(F32)),
            _input("gate", (64, 8), orig=F16),
        ],
        {},
    ),
}


@pytest.mark.parametrize("case", REDUCES)
def test_reduce(case: str, golden: Check) -> None:
    inputs, routing = REDUCES[case]
    plans = compile_reduces(inputs, replace(ROUTING, **routing), WORLD_SIZE)
    golden("\n\n".join(map(_text, plans)))
    by_index = {input.name: index for index, input in enumerate(inputs)}
    assert all(step.index == by_index[step.name] for plan in plans for step in plan.steps)


@pytest.mark.parametrize("reduce_dtype", [F32, torch.float16], ids=str)
def test_large_gradients_travel_direct_cast_by_whoever_can(reduce_dtype: torch.dtype) -> None:
    """In fp16, they are divided between cast and reduction."""
    inputs = [_input(f"weight{i}", (64, 64), param_dtype=BF16, reduce_dtype=reduce_dtype) for i in range(3)]
    for plan, casts_first in ((_reduce(inputs), True), (_reduce(inputs, reduces_casts=True), reduce_dtype is not F32)):
        assert [step.route for step in plan.steps] == [Route.DIRECT] * 3
        assert (plan.factors.before != 1.0) == (reduce_dtype is not F32)
        assert plan.casts_first is casts_first


AVERAGED, SUMMED = DivideFactors(1.0, 1.0, averages=True), DivideFactors(1.0, 4.0)


@pytest.mark.parametrize(
    ("reduce_dtypes", "factor", "options", "expected"),
    [
        ([None], None, {"averages": True}, {AVERAGED}),
        ([None, BF16], None, {"averages": True}, {AVERAGED}),
        ([None], 4.0, {"averages": True}, {AVERAGED}),
        ([None], None, {}, {SUMMED}),
        ([None], 3.0, {"averages": True}, {DivideFactors(1.0, 3.0)}),
        ([None], 3.0, {}, {DivideFactors(1.0, 3.0)}),
        ([None], None, {"behind_hook": True, "averages": True}, {replace(SUMMED, behind_hook=True)}),
        # one gradient that cannot be averaged makes all sums: one launch, one operation
        ([None, F16], None, {"averages": True}, {SUMMED, DivideFactors(2.0, 2.0, behind_hook=True)}),
    ],
)
def test_collectives_average_where_they_can_and_the_mean_over_all_ranks_is_asked_for(
    reduce_dtypes: list[Any], factor: float | None, options: dict[str, bool], expected: set[DivideFactors]
) -> None:
    inputs = [_input("weight", (4, 2), reduce_dtype=dtype) for dtype in reduce_dtypes]
    plans = compile_reduces(inputs, ROUTING, WORLD_SIZE, factor, **options)
    assert {plan.factors for plan in plans} == expected


_POLICIES = [{}, {"param_dtype": BF16}, {"param_dtype": BF16, "reduce_dtype": F32}, {"param_dtype": F16}]


def _random_inputs(seed: int, *, one_dtype: bool) -> list[PlanInput]:
    draw = random.Random(seed)
    policy = draw.choice(_POLICIES)
    inputs = []
    for index in range(draw.randint(1, 7)):
        shape = tuple(draw.choice((0, 1, 2, 3, 5, 8, 33, 64)) for _ in range(draw.randint(1, 3)))
        orig = F32 if one_dtype else draw.choice((F32, BF16, torch.int64, U8))
        own = policy if one_dtype or draw.random() < 0.7 else {}  # its dtype is kept
        inputs.append(_input(f"p{index}", shape, dim=draw.randrange(len(shape)), orig=orig, **own))
    return inputs


def _assert_apart(intervals: Sequence[tuple[int, int]], total: int) -> None:
    filled = sorted((start, stop) for start, stop in intervals if stop > start)
    ends = [0, *(stop for _, stop in filled)]
    assert all(end <= start for end, (start, _) in zip(ends, filled, strict=False)), intervals
    assert ends[-1] <= total, (intervals, total)


@pytest.mark.parametrize("seed", range(60))
def test_gathered_regions_and_shards_lie_apart_bucketed_shards_touch_and_all_else_is_aligned(seed: int) -> None:
    inputs = _random_inputs(seed, one_dtype=False)
    plan = _gather(inputs)
    assert sorted(step.index for step in plan.steps) == list(range(len(inputs)))
    assert all(step.offset_nbytes % ALIGNMENT_NBYTES == 0 for step in plan.steps)
    starts = [(step.offset_nbytes, step.layout.padded_numel * step.dtype.itemsize) for step in plan.steps]
    _assert_apart([(start, start + nbytes) for start, nbytes in starts], plan.unsharded_nbytes)
    for source in {step.source for step in plan.steps}:
        steps = [step for step in plan.steps if step.source is source]
        shards = [(step.shard_offset, step.shard_offset + step.layout.chunk_numel) for step in steps]
        _assert_apart(shards, dict(plan.shard_numels)[source])
        direct = [step.shard_offset * source.itemsize for step in steps if step.route is Route.DIRECT]
        assert all(offset_nbytes % ALIGNMENT_NBYTES == 0 for offset_nbytes in direct)
        for dtype in {step.dtype for step in steps}:
            in_bucket = [step.dtype is dtype and step.route is not Route.DIRECT for step in steps]
            bucket = list(compress(shards, in_bucket))
            assert all(before[1] == after[0] for before, after in pairwise(bucket))


@pytest.mark.parametrize("seed", range(60))
def test_reduced_gradients_lie_apart_and_only_even_ones_cut_on_their_first_dim_travel_directly(seed: int) -> None:
    inputs = _random_inputs(seed, one_dtype=True)
    for plan in (_reduce(inputs), _reduce(inputs, direct_min_nbytes=0)):
        assert sorted(step.index for step in plan.steps) == list(range(len(inputs)))
        _assert_apart([(step.offset, step.offset + step.layout.chunk_numel) for step in plan.steps], plan.flat_numel)
        assert all(step.layout.is_even for step in plan.steps if step.route is Route.DIRECT)
        assert all((step.route is Route.STRIDED) == (step.layout.dim != 0) for step in plan.steps)
