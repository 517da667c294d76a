"""Hooks for gradients that users have registered on parameters, and that nothing would call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.distributed.support import Stack, seeded, shard, sharded, step
from tests.harness.distributed import RankContext, distributed


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
@distributed(2)
def test_hooks_that_sharding_loses_are_named(ctx: RankContext, method: str) -> None:
    model = seeded(Stack)
    getattr(model.blocks[1].linear.weight, method)(lambda _: None)
    with pytest.warns(UserWarning, match=f"'linear.weight' has hooks of {method}, which are lost"):
        shard(ctx, model)


@distributed(2)
def test_a_hook_that_autograd_would_call_on_a_shard_is_named_and_the_other_kind_is_called(ctx: RankContext) -> None:
    model, seen = sharded(ctx), list[Tensor]()
    weight = model.blocks[1].linear.weight
    weight.register_hook(lambda _: pytest.fail("it was called"))
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.to_local().clone()))
    with pytest.warns(UserWarning, match="'blocks.1.linear.weight': hooks of register_hook are never called"):
        step(model)
    assert torch.equal(seen[0], weight.grad.to_local())
