"""What the runtime does in a step: events, and the actions that each of them leads to, as ``compact`` writes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdp2 import Observer
from fsdp2.tools import trace
from tests.distributed.support import Stack, batch, compact, seeded, shard, sharded, step
from tests.harness.alone import on_one_rank
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import Check, golden_alone


def _trace_of_step(model: Any, index: int = 1) -> str:
    """The trace of step ``index``; from the second step on, the order is known."""
    for _ in range(index):
        step(model)
    with trace.record(model) as recorded:
        step(model)
    return compact(recorded)


def _plain(ctx: RankContext, index: int, **kwargs: Any) -> str:
    return _trace_of_step(sharded(ctx, **kwargs), index)


def test_first_step_gathers_each_unit_when_it_is_needed(golden: Check) -> None:
    golden(on_one_rank(_plain, index=0))


def test_second_step_prefetches_along_the_recorded_order(golden: Check) -> None:
    golden(on_one_rank(_plain, index=1))


@golden_alone()
def test_gradient_of_the_input_alone_reduces_nothing(ctx: RankContext) -> str:
    """It reduced zeros for each unit."""
    model = sharded(ctx)
    with trace.record(model) as recorded:
        x = batch().requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
    assert all(parameter.grad is None for parameter in model.parameters())
    return compact(recorded)


class _InPlace(Stack):
    """Each block writes its input in place, twice, before it computes."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda _, args: (args[0].mul_(2).add_(1),))


@golden_alone()
def test_units_that_write_their_input_in_place_are_reduced_when_their_backward_ends(ctx: RankContext) -> str:
    """They stayed unsharded and unreduced until the whole backward had ended. Torch refuses them."""
    return _trace_of_step(shard(ctx, seeded(_InPlace)))


class _InPlaceAround(Stack):
    """Each block also writes its input behind the use of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = lambda x, block=block: x.mul_(2).add_(block.linear(x * 1)) * 0.5


@pytest.mark.parametrize("made", [_InPlace, _InPlaceAround])
@distributed(2)
def test_units_that_write_their_input_in_place_train_as_in_the_unsharded_model(
    ctx: RankContext, made: type[Stack]
) -> None:
    model, reference = shard(ctx, seeded(made)), seeded(made)
    for each in (model, reference):
        step(each)
    for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), expected.grad)


def test_later_steps_are_the_second_one_again() -> None:
    assert on_one_rank(_plain, index=4) == on_one_rank(_plain, index=1)


def test_parameters_kept_after_forward_are_not_gathered_in_backward(golden: Check) -> None:
    golden(on_one_rank(_plain, index=1, reshard_after_forward=False))


def test_parameters_rest_on_the_smaller_mesh_between_forward_and_backward(golden: Check) -> None:
    golden(on_one_rank(_plain, world_size=4, index=1, reshard_after_forward=2))


@golden_alone()
def test_only_units_that_reduce_are_said_to_reduce(ctx: RankContext) -> str:
    model = seeded(Stack)
    model.blocks[1].requires_grad_(False)
    shard(ctx, model)
    step(model)
    with trace.record(model) as recorded:
        step(model)
    return "\n".join(action for action in recorded.actions() if action.startswith("reduce"))


@golden_alone()
def test_nothing_is_recorded_outside_the_block(ctx: RankContext) -> str:
    model = sharded(ctx)
    with trace.record(model) as recorded:
        pass
    step(model)
    return str(recorded)


def _traces_of_parts(ctx: RankContext) -> list[tuple[str, ...]]:
    """What records of a block and of the model say of that block, before there is a root and after."""
    model = sharded(ctx)
    found = []
    for _ in range(2):
        with trace.record(model.blocks[0]) as of_block, trace.record(model) as of_model:
            step(model)
        said = "\n".join(line for line in str(of_model).splitlines() if "blocks.0" in line)
        found.append((str(of_block), said))
    step(model)
    assert str(of_block) == said
    return found


def test_a_unit_is_recorded_on_its_own_even_before_it_has_a_root() -> None:
    for of_block, said_of_block in on_one_rank(_traces_of_parts):
        assert of_block == said_of_block
        assert of_block.startswith(("pre_forward blocks.0", "    prefetch blocks.0"))


@golden_alone()
def test_transitions_are_those_of_the_units_that_are_observed(ctx: RankContext) -> str:
    class Transitions(Observer):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_transition(self, unit: str, before: str, after: str) -> None:
            self.seen.append(f"{unit} {before} {after}")

    model, transitions = sharded(ctx), Transitions()
    with trace.observe(model.blocks[1], transitions), torch.no_grad():
        model(batch())
    model(batch())
    return "\n".join(transitions.seen)


# Where a step is more than one forward and one backward


@golden_alone()
def test_accumulation_without_sync_reduces_in_the_last_backward_only(ctx: RankContext) -> str:
    model = sharded(ctx, num_blocks=1)
    step(model)
    with trace.record(model) as recorded:
        model.set_requires_gradient_sync(False)
        step(model)
        model.set_requires_gradient_sync(True)
        step(model)
    return compact(recorded)


@golden_alone()
def test_parameters_kept_after_backward_are_not_gathered_for_the_next_microbatch(ctx: RankContext) -> str:
    model = sharded(ctx, num_blocks=1)
    step(model)
    with trace.record(model) as recorded:
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        step(model)
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        step(model)
    return "\n".join(recorded.actions())


@golden_alone()
def test_forward_prefetches_what_the_user_listed(ctx: RankContext) -> str:
    model = sharded(ctx)
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2]])
    model.blocks[1].set_modules_to_forward_prefetch([])
    step(model)
    with trace.record(model) as recorded:
        model(batch())
    return compact(recorded)


@golden_alone()
def test_backward_prefetches_what_the_user_listed(ctx: RankContext) -> str:
    model = sharded(ctx)
    model.set_modules_to_backward_prefetch([model.blocks[2], model.blocks[1]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[0]])
    model.blocks[1].set_modules_to_backward_prefetch([])
    step(model)
    loss = model(batch()).sum()
    with trace.record(model) as recorded:
        loss.backward()
    return compact(recorded)


@golden_alone()
def test_forward_without_grad(ctx: RankContext) -> str:
    model = sharded(ctx)
    with torch.no_grad():
        model(batch())
        with trace.record(model) as recorded:
            model(batch())
    return compact(recorded)


class CheckpointedBlocks(Stack):
    """Every block is recomputed on its own, from outside."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.exit(x)


class CheckpointedRegion(Stack):
    """The last two blocks are recomputed together."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.entry(x))
        x = checkpoint(lambda x: self.blocks[2](self.blocks[1](x)), x, use_reentrant=False)
        return self.exit(x)


def _checkpointed(ctx: RankContext, model: type[Stack]) -> str:
    built = shard(ctx, seeded(model))
    step(built)
    loss = built(batch()).sum()
    with trace.record(built) as recorded:
        loss.backward()
    return compact(recorded)


def test_backward_of_checkpointed_blocks_gathers_each_once(golden: Check) -> None:
    golden(on_one_rank(_checkpointed, model=CheckpointedBlocks))


def test_backward_of_a_checkpointed_region_keeps_what_it_recomputed(golden: Check) -> None:
    golden(on_one_rank(_checkpointed, model=CheckpointedRegion))


class _Skipping(Stack):
    """Leaves its last two blocks out."""

    skips = True

    def forward(self, x: Tensor) -> Tensor:
        return self.exit(self.blocks[0](self.entry(x))) if self.skips else super().forward(x)


def _units_that_are_skipped(ctx: RankContext, ranks_may_differ: bool) -> list[str]:
    model = shard(ctx, seeded(_Skipping))
    model.set_ranks_may_differ(ranks_may_differ)
    step(model)
    with trace.record(model) as recorded:
        step(model)
    return [action for action in recorded.actions() if "blocks.1" in action]


def test_unit_that_is_skipped_is_gathered_for_other_ranks() -> None:
    assert on_one_rank(_units_that_are_skipped, world_size=2, ranks_may_differ=True) != []


def test_unit_that_is_skipped_is_left_alone_where_ranks_do_not_differ() -> None:
    assert on_one_rank(_units_that_are_skipped, world_size=2, ranks_may_differ=False) == []
    assert on_one_rank(_units_that_are_skipped, world_size=1, ranks_may_differ=True) == []


@golden_alone()
def test_unit_without_any_gradient_is_not_reduced_if_no_rank_may_have_one(ctx: RankContext) -> str:
    model = shard(ctx, seeded(_Skipping))
    model.skips = False
    step(model)
    model.skips = True
    with trace.record(model) as recorded:
        step(model)
    return "\n".join(action for action in recorded.actions() if action.startswith("reduce"))
