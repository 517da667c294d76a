"""Backwards that the user finalizes: what happens when, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2 import GradientReductionHandle, ScheduleError, fully_shard
from fsdp2.report import trace
from tests.distributed.changes import assert_gradients, assert_step_is_that_of, stepped
from tests.distributed.support import InjectedError, Stack, batch, compact, fail_now, seeded, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of
from tests.harness.selection import long


def _by_hand(ctx: RankContext, num_blocks: int = 2, **kwargs: Any) -> Any:
    model = sharded(ctx, num_blocks=num_blocks, **kwargs)
    model.set_manual_backward_finalization(True)
    return model


@golden_on_ranks()
def test_reducing_is_an_action_of_its_own(ctx: RankContext) -> str:
    """A backward with sync reduces at once what it can."""
    model = _by_hand(ctx, num_blocks=1)
    with trace.record(model) as first:
        step(model)
        model.finalize_backward()
    assert_gradients(model, stepped(0, num_blocks=1))
    model.zero_grad()
    with trace.record(model) as recorded:
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        step(model, 1)
        step(model, 2)
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        handle = model.finalize_backward(async_op=True)
        handle.wait()
    assert_gradients(model, stepped(1, 2, num_blocks=1))
    return "\n".join([*first.actions()[-6:], compact(recorded)])


@pytest.mark.every_case
@pytest.mark.parametrize("is_one_unit", [False, True])
@distributed(2)
def test_handle_waits_once_and_gradients_are_there_then(ctx: RankContext, is_one_unit: bool) -> None:
    model = fully_shard(seeded(lambda: Stack(2)), mesh=ctx.mesh_1d()) if is_one_unit else sharded(ctx, num_blocks=2)
    model.set_manual_backward_finalization(True)
    step(model)
    assert not is_one_unit or all(parameter.grad is None for parameter in model.parameters())
    handle = model.finalize_backward(async_op=True)
    assert isinstance(handle, GradientReductionHandle)
    handle.wait()
    assert_gradients(model, stepped(0, num_blocks=2))
    handle.wait()
    step(model, 1)
    assert model.finalize_backward() is None
    assert_gradients(model, stepped(0, 1, num_blocks=2))
    model.set_manual_backward_finalization(False)
    step(model, 2)  # ends by itself
    assert_gradients(model, stepped(0, 1, 2, num_blocks=2))


@pytest.mark.parametrize("with_unused", [False, True])
@distributed(2)
def test_finalization_without_a_backward_that_reaches_a_sharded_parameter_does_nothing(
    ctx: RankContext, with_unused: bool
) -> None:
    model = _by_hand(ctx)
    model.set_reduce_scatter_unused_params(with_unused)
    assert model.finalize_backward() is None
    model.finalize_backward(async_op=True).wait()
    with torch.no_grad():
        y = model(batch())
    y.requires_grad_().square().sum().backward()
    model.finalize_backward()
    model(batch())
    model.finalize_backward()
    assert all(parameter.grad is None for parameter in model.parameters())


@distributed(2)
def test_unused_parameters_of_several_backwards_are_reduced_once(ctx: RankContext) -> None:
    """The ranks' backwards reach different units in each of two backwards."""
    model = _by_hand(ctx, reshard_after_forward=False)
    model.set_ranks_may_differ(True)
    model.set_reduce_scatter_unused_params(True)
    outputs: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: outputs.append(output))
    for seed in range(2):
        outputs.clear()
        model(batch(seed))
        outputs[(ctx.rank + seed) % 2].square().mean().backward()
    model.finalize_backward()
    reference = seeded(lambda: Stack(2))
    for seed in range(2):
        hidden = reference.blocks[0](reference.entry(batch(seed)))
        (hidden.square().mean() / 2).backward(retain_graph=True)  # one of the two ranks
        (reference.blocks[1](hidden).square().mean() / 2).backward()
    for parameter in reference.exit.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert_gradients(model, reference)


# What is refused


@golden_on_ranks()
def test_finalization_is_for_roots_that_asked_for_it(ctx: RankContext) -> str:
    model, other = sharded(ctx), sharded(ctx)
    other.blocks[0].set_manual_backward_finalization(True)
    step(model)
    block = model.blocks[0]
    calls = [partial(block.set_manual_backward_finalization, True), block.finalize_backward, model.finalize_backward]
    errors = [*map(error_of, calls), error_of(lambda: other(batch()))]
    other.blocks[0].set_manual_backward_finalization(False)
    assert_step_is_that_of(other, seeded(Stack))
    return "\n".join(errors)


@golden_on_ranks()
def test_finalization_at_the_wrong_time(ctx: RankContext) -> str:
    model = _by_hand(ctx)
    errors = []

    def in_backward(_: Any) -> None:
        errors.append(error_of(model.finalize_backward))
        errors.append(error_of(lambda: model.set_manual_backward_finalization(False)))

    y = model(batch())
    y.register_hook(in_backward)
    y.square().mean().backward()
    errors.append(error_of(lambda: model.set_manual_backward_finalization(False)))
    handle = model.finalize_backward(async_op=True)
    errors.append(error_of(model.finalize_backward))
    errors.append(error_of(lambda: model(batch())))
    handle.wait()
    assert_gradients(model, stepped(0, num_blocks=2))
    step(model)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    errors.append(error_of(handle.wait))
    assert error_of(handle.wait) == errors[-1]
    model.zero_grad()
    step(model, 1)
    model.finalize_backward()
    assert_gradients(model, stepped(1, num_blocks=2))
    return "\n".join(errors)


@pytest.mark.parametrize("resets", [True, *long(False)])
@distributed(2)
def test_finalization_after_a_backward_that_raised_is_refused(ctx: RankContext, resets: bool) -> None:
    """What it has left are parts of sums. Gradients of the backward before are dropped with them, and the step begins
    again, also without a reset."""
    model = _by_hand(ctx)
    model.set_requires_gradient_sync(False)
    step(model, 1)
    handle = model.blocks[0].register_forward_hook(
        lambda _module, _args, output: output.register_hook(fail_now) and None
    )
    with pytest.raises(InjectedError):
        step(model, 2)
    handle.remove()
    model.set_requires_gradient_sync(True)
    for _ in range(2):
        with pytest.raises(ScheduleError, match=r"the last backward has raised\. Call reset_iter_state"):
            model.finalize_backward()
    if resets:
        model.reset_iter_state()
        model.finalize_backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    step(model, 3)
    model.finalize_backward()
    assert_gradients(model, stepped(3, num_blocks=2))


def _in_two_halves(model: Any, seed: int) -> None:
    """As zero-bubble pipeline schedules do: gradients of the input, then those of the parameters at hand."""
    x = batch(seed).requires_grad_()
    loss = model(x).square().mean()
    torch.autograd.grad(loss, x, retain_graph=True)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@pytest.mark.parametrize("kept", [False, True])
@distributed(2)
def test_gradients_that_the_second_half_of_a_backward_loses_are_an_error(ctx: RankContext, kept: bool) -> None:
    model = _by_hand(ctx, reshard_after_forward=not kept)
    step(model, 5)  # parameters are there
    model.finalize_backward()
    model.zero_grad()
    for seed in (1, 2):
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        _in_two_halves(model, seed)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    if not kept:
        with pytest.raises(ScheduleError, match=r"unit '\(root\)' is resharded .* Pass reshard_after_forward=False"):
            model.finalize_backward()
        model.reset_iter_state()
        for seed in (1, 2):
            step(model, seed)
    model.finalize_backward()
    assert_gradients(model, stepped(1, 2, num_blocks=2))


@pytest.mark.parametrize("reduces", [False, True])
@distributed(2)
def test_backwards_that_keep_or_reduce_their_gradients_lose_none(ctx: RankContext, reduces: bool) -> None:
    model = _by_hand(ctx)
    model.set_requires_gradient_sync(reduces)
    torch.autograd.grad(model(x := batch().requires_grad_()).sum(), x)  # as pipelining does, to find out shapes
    for seed in (1, 2, 3):
        step(model, seed)
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    assert_gradients(model, stepped(1, 2, 3, num_blocks=2))
