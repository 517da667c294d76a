"""Optimizers that were built before ``fully_shard``, or while parameters were unsharded, train as the plain model's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.distributed.changes import whole
from tests.distributed.support import Stack, batch, seeded, shard, step
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.patience import assert_freed
from tests.harness.selection import long

Builds = Callable[[Any], torch.optim.Optimizer]


def _two_groups(model: Any) -> torch.optim.Optimizer:
    groups = [{"params": list(model.exit.parameters()), "lr": 0.5}, {"params": list(model.blocks.parameters())}]
    return torch.optim.AdamW(groups, lr=0.1)


BUILDS: dict[str, Builds] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "two groups of some parameters": _two_groups,
    "one by one": lambda model: torch.optim.Adam(model.parameters(), lr=0.1, foreach=False),
}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    step(model, seed)
    optimizer.step()
    optimizer.zero_grad()


def _assert_has_shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert {id(param) for param in held} <= {id(param) for param in model.parameters()}
    assert optimizer.state.keys() <= set(held)
    assert all(isinstance(param, DTensor) for param in held)


@pytest.mark.parametrize("steps_before", [0, *long(1)])
@pytest.mark.parametrize("build", ["AdamW", *long(*(name for name in BUILDS if name != "AdamW"))])
@distributed(2)
def test_an_optimizer_that_was_built_before_fully_shard_trains(ctx: RankContext, build: str, steps_before: int) -> None:
    """With the states of the steps before, which are cut as the parameters."""
    model, plain = seeded(Stack), seeded(Stack)
    optimizer, expected = BUILDS[build](model), BUILDS[build](plain)
    for seed in range(steps_before):
        for each in ((model, optimizer), (plain, expected)):
            _step(*each, seed)
    shard(ctx, model)
    for seed in range(2, 5):
        for each in ((model, optimizer), (plain, expected)):
            _step(*each, seed)
    _assert_has_shards(model, optimizer)
    compare_values("parameters", whole(model), whole(plain))


@pytest.mark.parametrize("how", ["forward", *long("unshard")])
@distributed(2)
def test_an_optimizer_that_was_built_while_the_root_was_unsharded_trains(ctx: RankContext, how: str) -> None:
    model, plain = seeded(Stack), seeded(Stack)
    shard(ctx, model)
    model(batch()) if how == "forward" else model.unshard()
    optimizer, expected = BUILDS["AdamW"](model), BUILDS["AdamW"](plain)
    assert not all(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"])
    for seed in range(3):
        for each in ((model, optimizer), (plain, expected)):
            _step(*each, seed)
    model.reshard()
    _assert_has_shards(model, optimizer)
    compare_values("parameters", whole(model), whole(plain))


@distributed(2)
def test_an_original_whose_model_is_gone_is_left_alone(ctx: RankContext) -> None:
    model = seeded(Stack)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [param for group in optimizer.param_groups for param in group["params"]]
    shard(ctx, model)
    step(model)
    gone = weakref.ref(model)
    del model
    assert_freed(gone)
    with pytest.warns(UserWarning, match="trained nothing"):
        optimizer.step()
    after = [param for group in optimizer.param_groups for param in group["params"]]
    assert all(old is new for old, new in zip(before, after, strict=True))
