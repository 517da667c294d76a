"""A limit on temporary memory: what is withheld, what lands for it, what is refused, and that the allocator agrees.

The words are in ``golden/memory_limit.txt``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from fsdp2.report import trace
from tests.distributed.support import Scaled, Stack, batch, compact, same_on_all_ranks, seeded, shard, sharded, step
from tests.harness.alone import on_one_rank
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of
from tests.harness.models import MLP

TEXTS = texts_beside(__file__)
PLANS = "plan", "plan that keeps", "plan that rests"
WIDTH = 384  # weights of 1.1 MiB: on two ranks of gloo, shards that travel without a bucket; biases do not
SLACK_NBYTES = 256 * 1024  # activations, and what autograd needs for itself


def _sharded(ctx: RankContext, **options: Any) -> Any:
    return shard(ctx, seeded(lambda: MLP(num_blocks=4, dim=WIDTH)), **options)


def _step(model: Any) -> None:
    model(torch.ones(2, WIDTH)).float().square().mean().backward()


def _peak_nbytes(run: Callable[[], object]) -> int:
    """The most bytes of tensors that were alive while ``run`` ran, beyond those alive before."""
    # acc_events: without it, torch 2.11 warns at the first profile of a process, even though this one has one cycle.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns())
    live = peak = 0
    for event in memory:
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _trace(ctx: RankContext, limit: int | None) -> tuple[str, str]:
    """Of a forward, and of its backward."""
    model = sharded(ctx)
    model.set_temporary_memory_limit(limit)
    step(model)
    with trace.record(model) as forward:
        loss = model(batch()).square().mean()
    with trace.record(model) as backward:
        loss.backward()
    return compact(forward), compact(backward)


def test_prefetch_that_does_not_fit_is_withheld_and_what_is_needed_makes_room() -> None:
    unlimited = same_on_all_ranks(_trace, limit=None)
    assert same_on_all_ranks(_trace, limit=1_000_000) == unlimited
    forward, backward = same_on_all_ranks(_trace, limit=35_000)
    assert forward == unlimited[0]  # it fits
    TEXTS.check("trace of a backward", backward)


def _check_against_the_allocator(ctx: RankContext, **options: Any) -> None:
    unlimited, model = _sharded(ctx, **options), _sharded(ctx, **options)
    for each in (unlimited, model):
        _step(each)  # there are gradients to add to from here on, so that all else a step allocates is temporary
        _step(each)
    plan = fsdp2.memory.memory_plan(model)
    without_limit = _peak_nbytes(lambda: _step(unlimited))
    assert plan.at_least + SLACK_NBYTES < without_limit <= plan.peak + SLACK_NBYTES
    for limit in (plan.at_least, (plan.at_least + plan.peak) // 2, plan.peak):
        model.set_temporary_memory_limit(limit)
        peak = _peak_nbytes(lambda: _step(model))
        assert 0.5 * limit < peak <= limit + SLACK_NBYTES, (limit, peak)
    _step(unlimited)
    _step(unlimited)
    for ours, theirs in zip(model.parameters(), unlimited.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize("options", [{}, {"mp_policy": MIXED}])
@distributed(2)
def test_allocator_stays_under_the_limit_and_the_numbers_stay(ctx: RankContext, options: dict[str, Any]) -> None:
    _check_against_the_allocator(ctx, **options)


@pytest.mark.long
@distributed(4)
def test_allocator_stays_under_the_limit_with_resting_shards(ctx: RankContext) -> None:
    _check_against_the_allocator(ctx, reshard_after_forward=2)


def _smallest_limit(ctx: RankContext, *, keeps_storage: bool = False, stays_on: int = 0, **options: Any) -> str:
    model = sharded(ctx, **options)
    model.set_keep_unsharded_storage(keeps_storage)
    if stays_on:
        model.set_reshard_after_backward(stays_on)
    at_least = fsdp2.memory.memory_plan(model).at_least
    model.set_temporary_memory_limit(at_least)
    step(model)
    step(model)
    model.set_temporary_memory_limit(at_least - 1)
    found = error_of(lambda: step(model))
    model.set_temporary_memory_limit(None)
    step(model)  # what was refused has changed nothing
    return found


SMALLEST: dict[str, dict[str, Any]] = {
    "unit that does not fit": {},
    "kept units that do not fit together": {"reshard_after_forward": False},
    "memory that is kept counts once": {"keeps_storage": True},
    "shards on a smaller mesh that stay": {"reshard_after_forward": 2, "stays_on": 2},
}


@pytest.mark.parametrize("case", SMALLEST)
def test_smallest_limit_is_exact_and_one_byte_less_is_refused_at_the_first_use(case: str) -> None:
    TEXTS.check(case, same_on_all_ranks(_smallest_limit, 4 if "stays" in case else 2, **SMALLEST[case]))


@distributed(2)
def test_smallest_limit_counts_gradients_that_wait_for_another_use_of_their_unit(ctx: RankContext) -> None:
    model = sharded(ctx)
    model.exit.register_forward_pre_hook(lambda _, inputs: model.blocks[0](*inputs))  # again behind the others
    step(model)
    step(model)  # the order that the ranks compare in the first step has each unit once
    at_least = fsdp2.memory.memory_plan(model).at_least
    model.set_temporary_memory_limit(at_least)
    step(model)
    model.set_temporary_memory_limit(at_least - 1)
    with pytest.raises(fsdp2.MemoryLimitError, match=f"at least {at_least} bytes"):
        step(model)


@distributed(2)
def test_smallest_limit_counts_the_staging_of_a_kept_unit_in_forward_only(ctx: RankContext) -> None:
    """Backward does not gather it, so its staging never lies beside the gradients of the root."""
    model = seeded(lambda: Stack(num_blocks=1))
    model.blocks[0].linear.weight.requires_grad_(False)
    shard(ctx, model, reshard_after_forward=False)
    model.set_temporary_memory_limit(fsdp2.memory.memory_plan(model).at_least)
    step(model)
    step(model)


@pytest.mark.parametrize("shards", [1, 2])
@distributed(2)
def test_what_is_not_gathered_counts_neither_before_nor_after_the_first_step(ctx: RankContext, shards: int) -> None:
    """Scalars, and all parameters if the shard axis has one rank."""
    model = shard(ctx, seeded(Scaled), mesh=ctx.mesh_2d(2 // shards, shards))
    before = fsdp2.memory.memory_plan(model)
    step(model)
    assert fsdp2.memory.memory_plan(model) == before
    assert [unit.bytes.unsharded > 0 for unit in before.units] == [shards > 1] * 4


def _plan(ctx: RankContext, **options: Any) -> str:
    return str(fsdp2.memory.memory_plan(sharded(ctx, **options)))


def test_memory_plan_shows_what_each_unit_and_a_step_take() -> None:
    TEXTS.check("plan", same_on_all_ranks(_plan))
    TEXTS.check("plan that keeps", same_on_all_ranks(_plan, reshard_after_forward=False))
    TEXTS.check("plan that rests", on_one_rank(_plan, 4, reshard_after_forward=2))


def _refusals(ctx: RankContext) -> list[str]:
    model = sharded(ctx)
    values: tuple[Any, ...] = (0, True, "some")
    found = [error_of(partial(model.set_temporary_memory_limit, value)) for value in values]
    model.blocks[0].set_temporary_memory_limit(10**6)
    found.append(error_of(lambda: step(model)))
    model.blocks[0].set_temporary_memory_limit(None)
    step(model)
    found.append(error_of(lambda: model.blocks[0].set_temporary_memory_limit(10**6)))
    found.append(error_of(lambda: fsdp2.memory.memory_plan(nn.Linear(1, 1))))
    return found


def test_what_is_no_limit_is_refused() -> None:
    TEXTS.check("what is no limit", "\n".join(same_on_all_ranks(_refusals)))
    TEXTS.check_names([*SMALLEST, "trace of a backward", *PLANS, "what is no limit"])
