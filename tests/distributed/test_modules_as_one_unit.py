"""``fully_shard([a, b])``: several modules that are unsharded and reduced together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.distributed.support import Stack, assert_gradients, batch, seeded, shard_each, step
from tests.harness.distributed import RankContext, distributed


class _Checkpointed(Stack):
    """The last two blocks, each checkpointed on its own; ``None`` checkpoints nothing."""

    use_reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.entry(x))
        for block in self.blocks[1:]:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.exit(x)


def _as_one_unit(ctx: RankContext) -> Any:
    model = seeded(_Checkpointed)
    return shard_each(list(model.blocks[1:]), model, mesh=ctx.mesh_1d())


def _assert_gradients_are_right(model: Any) -> None:
    reference = seeded(_Checkpointed)
    for seed in range(2):
        assert torch.allclose(step(model, seed), step(reference, seed), atol=1e-6)
    assert_gradients(model, reference)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@distributed(2)
def test_each_module_may_be_checkpointed_on_its_own(ctx: RankContext, use_reentrant: bool | None) -> None:
    model = _as_one_unit(ctx)
    model.use_reentrant = use_reentrant
    _assert_gradients_are_right(model)


@distributed(2)
def test_reshard_between_the_modules_gathers_again_for_the_next(ctx: RankContext) -> None:
    model = _as_one_unit(ctx)
    model.blocks[2].register_forward_pre_hook(lambda module, _: module.reshard(), prepend=True)
    _assert_gradients_are_right(model)


@pytest.mark.parametrize("async_op", [False, True])
@distributed(2)
def test_unshard_before_the_root_has_run(ctx: RankContext, async_op: bool) -> None:
    model = _as_one_unit(ctx)
    model.blocks[1].unshard(async_op)
    assert torch.allclose(model(batch()), seeded(_Checkpointed)(batch()), atol=1e-6)
    model.reset_iter_state()
    _assert_gradients_are_right(model)
