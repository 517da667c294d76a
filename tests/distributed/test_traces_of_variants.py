"""What the runtime does, as text, where a step is more than one forward and one backward.

Accumulation, prefetch by hand, evaluation and activation checkpointing. ``EXPECTTEST_ACCEPT=1`` rewrites the texts;
read the difference before keeping it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdp2.tools import trace
from tests.distributed.support import Stack, batch, compact, seeded, shard, sharded, step
from tests.harness.alone import on_one_rank
from tests.harness.distributed import RankContext
from tests.harness.golden import Check, golden_alone


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


def _unit_that_is_skipped_once(ctx: RankContext) -> list[str]:
    model = shard(ctx, seeded(_Skipping))
    model.skips = False
    step(model)
    model.skips = True
    with trace.record(model) as recorded:
        step(model)
    return [action for action in recorded.actions() if action.startswith("reduce")]


def test_unit_without_any_gradient_is_not_reduced_if_no_rank_may_have_one() -> None:
    assert on_one_rank(_unit_that_is_skipped_once) == ["reduce blocks.0", "reduce (root)"]
