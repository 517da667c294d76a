"""A flattened optimizer keeps, saves and loads states as torch made it, and uses what users put there."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_optimizer_state_dict

import fsdp2
from tests.distributed.flat_optimizer_support import OPTIMIZERS, Mixed, Twins, adamw, records, sharded
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import DIM, MLP
from tests.harness.selection import long


@pytest.mark.parametrize("make", [adamw, *long(OPTIMIZERS["SGD with momentum"], OPTIMIZERS["Adagrad"])])
@distributed(2)
def test_state_dicts_load_into_each_other(ctx: RankContext, make: Any) -> None:
    twins = Twins(ctx, Mixed, make)
    twins.step()
    twins.step(use_side=False)
    for source, target in ((0, 1), (1, 0), (1, 1)):  # into the flat one, out of it, back into itself
        (_, saved), (_, loaded) = twins.both[source], twins.both[target]
        state = copy.deepcopy(saved.state_dict())
        twins.step()
        for _, optimizer in twins.both:
            optimizer.load_state_dict(copy.deepcopy(state))
        assert loaded.state
        twins.step()
        twins.step()


@distributed(2)
def test_loading_frees_the_states_that_there_were(ctx: RankContext) -> None:
    model = sharded(ctx, MLP)
    optimizer = fsdp2.flatten_optimizer(adamw(model.parameters()))
    model(torch.ones(2, DIM)).sum().backward()
    optimizer.step()
    replaced = [weakref.ref(entry["exp_avg"].to_local()) for entry in optimizer.state.values()]
    replaced += [weakref.ref(entry["exp_avg"]) for entry in optimizer.state.values()]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    gc.collect()
    assert not any(ref() is not None for ref in replaced)


@distributed(2)
def test_distributed_checkpoints_hold_the_same_and_load_before_the_first_step(ctx: RankContext) -> None:
    twins = Twins(ctx, Mixed, adamw)
    twins.step(use_side=False)
    twins.step()
    saved = [get_optimizer_state_dict(model, optimizer) for model, optimizer in twins.both]
    compare_values("checkpoint", records(saved[1]), records(saved[0]))
    fresh = Twins(ctx, Mixed, adamw)
    for (model, optimizer), state in zip(fresh.both, reversed(saved), strict=True):
        _, empty = get_state_dict(model, optimizer)  # as loaders do, to know what to read
        assert empty["state"]
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(state))
    fresh.compare()
    fresh.index = twins.index
    fresh.step()
    fresh.step(use_side=False)


def _moved(model: nn.Module) -> None:
    state = copy.deepcopy(model.state_dict())
    model.to_empty(device=next(model.parameters()).device)
    model.load_state_dict(state)


@distributed(2)
def test_states_follow_parameters_that_move(ctx: RankContext) -> None:
    twins = Twins(ctx, MLP, adamw)
    twins.step()
    for model, _ in twins.both:
        _moved(model)
    memory = [entry["exp_avg"].to_local().data_ptr() for entry in twins.flat_optimizer.state.values()]
    twins.step()
    twins.step()
    after = [entry["exp_avg"].to_local().data_ptr() for entry in twins.flat_optimizer.state.values()]
    assert after == memory  # nothing was copied


def _give_hooks(param: nn.Parameter) -> None:
    """Hooks that send the shard as it is."""

    def pre(self: Tensor, mesh: Any) -> Any:
        return (self.detach(),), None

    def post(self: Tensor, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)

    local = param._local_tensor
    local.fsdp_pre_all_gather = types.MethodType(pre, local)
    local.fsdp_post_all_gather = types.MethodType(post, local)


@distributed(2)
def test_single_parameters_may_be_swapped_or_given_hooks(ctx: RankContext) -> None:
    twins = Twins(ctx, MLP, adamw)
    twins.step()
    twins.backward()
    for model, _ in twins.both:
        swapped = model.blocks[1].down.weight
        grad, swapped.grad = swapped.grad, None
        torch.utils.swap_tensors(swapped, nn.Parameter(swapped.detach() * 2))
        swapped.grad = grad
    twins.update()
    for model, _ in twins.both:
        _moved(model)
    twins.step()
    for model, _ in twins.both:
        for param in model.blocks[0].parameters():
            _give_hooks(param)
        model.load_state_dict(copy.deepcopy(model.state_dict()))  # after which hooks are looked for
    twins.step()


def _count_on(entry: dict[str, Any]) -> None:
    entry["step"] += 3


def _replace(entry: dict[str, Any]) -> None:
    entry["exp_avg"] = entry["exp_avg"] * 2


CHANGES: list[Callable[[dict[str, Any]], object]] = [
    _count_on,
    _replace,
    lambda entry: entry["exp_avg_sq"].mul_(4),
    lambda entry: entry.clear(),
]


@distributed(2)
def test_states_that_the_user_changes_are_used(ctx: RankContext) -> None:
    twins = Twins(ctx, MLP, adamw)
    twins.step()
    for change in CHANGES:
        for model, optimizer in twins.both:
            change(optimizer.state[model.blocks[1].up.weight])
        twins.step()
        for _, optimizer in twins.both:  # so that states are alike again
            for entry in optimizer.state.values():
                entry["step"].fill_(9)
        twins.step()
