"""Modules that users add to a sharded model, or take out of it, mostly after the first steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import fully_shard
from fsdp2.tools import trace
from tests.distributed.changes import USES, assert_step_is_that_of, step_and_zero
from tests.distributed.support import DIM, Stack, batch, same_on_all_ranks, seeded, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import Check
from tests.harness.messages import wrapped
from tests.harness.selection import long

# Removed modules


@distributed(2)
def test_units_and_modules_taken_out_of_the_tree_take_part_no_more(ctx: RankContext) -> None:
    model, reference = sharded(ctx), seeded(Stack)
    removed = model.blocks[1]
    for _ in range(2):
        step_and_zero(model)
    for each in (model, reference):
        each.blocks[1] = nn.Identity()  # a unit
        each.exit = nn.Identity()  # a module of the root's unit
    for _ in range(2):
        assert_step_is_that_of(model, reference)
    with trace.record(model) as recorded:
        step(model)
    assert not [action for action in recorded.actions() if "blocks.1" in action]
    x = batch()
    assert torch.allclose(removed(x), seeded(Stack).blocks[1](x), atol=1e-6)  # a root of its own now


# Added modules


class _Adapter(nn.Module):
    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.down = nn.Linear(DIM, rank, bias=False)
        self.up = nn.Linear(rank, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class _Adapted(nn.Module):
    """A linear layer with an adapter beside it."""

    def __init__(self, base: nn.Module, adapter: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.adapter = adapter

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


def _adapt(model: Any, shard_adapter: Callable[[nn.Module], Any], *, freezes: bool = True) -> None:
    """An adapter in every block and one at the exit, as LoRA libraries insert them."""
    model.requires_grad_(not freezes)
    torch.manual_seed(3)
    for block in model.blocks:
        block.linear = _Adapted(block.linear, _Adapter())
        shard_adapter(block.linear.adapter)
    model.exit = _Adapted(model.exit, _Adapter())
    shard_adapter(model.exit.adapter)


def _assert_adapters_train_alike(ctx: RankContext, use: str, kept: bool | int | None, *, freezes: bool) -> None:
    model, reference = sharded(ctx, reshard_after_forward=kept), seeded(Stack)
    USES[use](model)
    _adapt(model, lambda adapter: fully_shard(adapter, mesh=ctx.mesh_1d()), freezes=freezes)
    _adapt(reference, lambda adapter: None, freezes=freezes)
    optimizers = [
        torch.optim.AdamW([param for param in each.parameters() if param.requires_grad], lr=1e-2, eps=1e-3)
        for each in (model, reference)
    ]
    for seed in range(4):
        assert_step_is_that_of(model, reference, seed=seed)
        for optimizer in optimizers:
            optimizer.step()
    state, expected = model.state_dict(), reference.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.allclose(state[name].full_tensor(), value, atol=1e-5), name


@pytest.mark.parametrize("kept", [None, *long(False)])
@pytest.mark.parametrize("freezes", [True, False])
@pytest.mark.parametrize("use", ["no use", "step", "evaluation, reshard"])
@distributed(2)
def test_adapters_sharded_after_the_model_train_like_unsharded_ones(
    ctx: RankContext, use: str, kept: bool | None, freezes: bool
) -> None:
    _assert_adapters_train_alike(ctx, use, kept, freezes=freezes)


@pytest.mark.long
@distributed(4)
def test_adapters_under_units_that_rest_on_a_smaller_mesh(ctx: RankContext) -> None:
    _assert_adapters_train_alike(ctx, "step", 2, freezes=True)


@distributed(2)
def test_adapters_work_under_the_root_that_ran_before(ctx: RankContext) -> None:
    """They are prefetched, named from it, and observed."""
    model = sharded(ctx, num_blocks=1)
    with trace.record(model) as recorded:
        step(model)
        _adapt(model, lambda adapter: fully_shard(adapter, mesh=ctx.mesh_1d()))
        step(model)
        recorded.clear()
        step(model)
    gathers = [action for action in recorded.actions() if action.startswith(("unshard", "prefetch"))]
    assert gathers == [
        "unshard (root)",
        *("prefetch blocks.0", "prefetch blocks.0.linear.adapter", "prefetch exit.adapter"),
        *("prefetch exit.adapter", "prefetch blocks.0", "prefetch blocks.0.linear.adapter"),
    ]


@distributed(2)
def test_adapter_that_was_sharded_apart_joins_the_root_it_is_put_under(ctx: RankContext) -> None:
    model, reference = sharded(ctx), seeded(Stack)
    adapters = [seeded(_Adapter), seeded(_Adapter)]
    fully_shard(adapters[0], mesh=ctx.mesh_1d())
    adapters[0](batch())  # a root of its own
    step_and_zero(model)
    for each, adapter in zip((model, reference), adapters, strict=True):
        each.exit = _Adapted(each.exit, adapter)
    for _ in range(3):
        assert_step_is_that_of(model, reference)


@distributed(2)
def test_adapter_around_a_sharded_layer_ignores_the_layers_parameters(ctx: RankContext) -> None:
    model, reference = sharded(ctx), seeded(Stack)
    step_and_zero(model)
    _adapt(model, lambda adapter: None)
    _adapt(reference, lambda adapter: None)
    for adapted in (*(block.linear for block in model.blocks), model.exit):
        fully_shard(adapted, mesh=ctx.mesh_1d(), ignored_params=set(adapted.base.parameters()))
    for _ in range(2):
        assert_step_is_that_of(model, reference)


def _plain_adapters(ctx: RankContext, use: str, noticed_by: str) -> list[str]:
    model = sharded(ctx)
    USES[use](model)
    _adapt(model, lambda adapter: None)
    if noticed_by == "load":
        model.load_state_dict(model.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(model)
            model.load_state_dict(model.state_dict())
    return [wrapped(str(warning.message)) for warning in caught]


def test_plain_parameters_added_without_fully_shard_are_warned_of_once(golden: Check) -> None:
    found = same_on_all_ranks(_plain_adapters, use="no use", noticed_by="first use")
    assert found == same_on_all_ranks(_plain_adapters, use="step", noticed_by="load")
    (warning,) = found
    golden(warning)


@distributed(2)
def test_ignored_and_frozen_plain_parameters_are_not_warned_of(ctx: RankContext) -> None:
    """Warnings are errors here. On the meta device, too, where materialising makes new parameters."""
    for device in (ctx.device_type, "meta"):
        model = seeded(Stack).to(device)
        ignored = list(model.exit.parameters())
        for block in model.blocks:
            fully_shard(block, mesh=ctx.mesh_1d(), ignored_params={block.linear.bias})
        fully_shard(model, mesh=ctx.mesh_1d(), ignored_params=ignored)
        model.to_empty(device=ctx.device_type)
        model.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        step(model)
