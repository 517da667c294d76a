"""What users put in the place of parameters after ``fully_shard``, mostly after the first steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.func import functional_call
from torch.nn.utils import parametrize

from tests.distributed.changes import USES, alike, assert_step_is_that_of, evaluate, reshard_all, step_and_zero
from tests.distributed.support import DIM, Stack, assert_gradients, batch, seeded, shard, sharded
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of
from tests.harness.selection import long

# Replaced by parameters that are sharded alike


def _assign(model: Any, name: str, value: Tensor, shard: Any = None) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, alike(model.get_parameter(name) if shard is None else shard, value))


def _swap(model: Any, name: str, value: Tensor) -> None:
    param = model.get_parameter(name)
    torch.utils.swap_tensors(param, alike(param, value))


def _load_assign(model: Any, name: str, value: Tensor) -> None:
    state = {name: alike(model.get_parameter(name), value).detach()}
    model.load_state_dict(model.state_dict() | state, assign=True)


def _copy(model: Any, name: str, value: Tensor) -> None:
    with torch.no_grad():
        param = model.get_parameter(name)
        param.copy_(alike(param, value))


REPLACE = {"assign": _assign, "swap_tensors": _swap, "load with assign": _load_assign, "copy": _copy}


@pytest.mark.every_case
@pytest.mark.parametrize("use", list(USES))
@pytest.mark.parametrize("how", list(REPLACE))
@distributed(2)
def test_replaced_parameters_are_trained_from_the_next_step_on(ctx: RankContext, how: str, use: str) -> None:
    """Twice, as adapters do that are initialised anew: one parameter of a unit that is resharded after every forward,
    and one of the root, which is not."""
    model, reference = sharded(ctx), seeded(Stack)
    shards = dict(model.named_parameters())
    for seed in (1, 2):
        USES[use](model)
        for name in ("blocks.1.linear.weight", "exit.bias"):
            value = torch.randn(shards[name].shape, generator=torch.Generator().manual_seed(seed))
            if isinstance(model.get_parameter(name), DTensor):
                REPLACE[how](model, name, value)
            else:  # unsharded still: the user holds the shard, and can build its successor by that
                _assign(model, name, value, shards[name])
            with torch.no_grad():
                reference.get_parameter(name).copy_(value)
        assert_step_is_that_of(model, reference)
        assert_step_is_that_of(model, reference, seed=1)


@distributed(2)
def test_backward_of_a_parameter_replaced_after_its_forward(ctx: RankContext) -> None:
    """As without sharding, the gradient is that of the earlier parameter. The next step trains the new one."""
    model, reference = sharded(ctx), seeded(Stack)
    name, value = "blocks.1.linear.weight", torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(1))
    step_and_zero(model)
    earlier, expected = model.get_parameter(name), reference.get_parameter(name)
    losses = [each(batch()).square().mean() for each in (model, reference)]
    _assign(model, name, value)
    reference.blocks[1].linear.weight = nn.Parameter(value)
    for loss in losses:
        loss.backward()
    assert torch.allclose(earlier.grad.full_tensor(), expected.grad, atol=1e-6)
    assert model.get_parameter(name).grad is None
    model.zero_grad()
    reference.zero_grad()
    assert_step_is_that_of(model, reference)


@distributed(2)
def test_backward_of_a_parameter_frozen_after_its_forward(ctx: RankContext) -> None:
    """As without sharding, it gets no gradient; the others do."""
    model, reference = sharded(ctx), seeded(Stack)
    step_and_zero(model)
    losses = [each(batch()).square().mean() for each in (model, reference)]
    for each, loss in zip((model, reference), losses, strict=True):
        each.get_parameter("blocks.1.linear.weight").requires_grad_(False)
        loss.backward()
    assert_gradients(model, reference)
    for each in (model, reference):
        each.zero_grad()
    assert_step_is_that_of(model, reference)


def _between_forward_and_backward(model: Any, change: Callable[[], object]) -> None:
    loss = model(batch()).square().mean()
    change()
    loss.backward()
    model.zero_grad()


def _after_an_evaluation(model: Any, change: Callable[[], object]) -> None:
    evaluate(model)
    change()
    reshard_all(model)


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("is_trainable", [True, False])
@pytest.mark.parametrize("when", [_between_forward_and_backward, _after_an_evaluation])
@distributed(2)
def test_what_is_frozen_or_thawed_while_it_is_unsharded_stays_so(
    ctx: RankContext, when: Callable[..., None], is_trainable: bool, reshard: bool | None
) -> None:
    """As without sharding, until the user changes it again. No gradient of one step is left for another."""
    names = ("entry.weight", "exit.bias", "blocks.1.linear.weight")

    def change(model: Any, requires_grad: bool) -> None:
        for name in names:
            model.get_parameter(name).requires_grad_(requires_grad)

    model, reference = seeded(Stack), seeded(Stack)
    for each in (model, reference):
        change(each, not is_trainable)
    shard(ctx, model, reshard_after_forward=reshard)
    for each in (model, reference):
        when(each, lambda each=each: change(each, is_trainable))
        assert [each.get_parameter(name).requires_grad for name in names] == [is_trainable] * len(names)
    for requires_grad in (is_trainable, not is_trainable, is_trainable, True):
        for each in (model, reference):
            change(each, requires_grad)
        assert_step_is_that_of(model, reference)
        assert_step_is_that_of(model, reference, seed=1)


@pytest.mark.parametrize("module", ["entry", "exit"])
@distributed(2)
def test_tied_parameter_replaced_in_one_place_stays_tied(ctx: RankContext, module: str) -> None:
    model, reference = seeded(Stack), seeded(Stack)
    for each in (model, reference):
        each.exit.weight = each.entry.weight
    step_and_zero(shard(ctx, model))
    value = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(1))
    _assign(model, f"{module}.weight", value)
    with torch.no_grad():
        reference.entry.weight.copy_(value)
    assert_step_is_that_of(model, reference)
    assert model.entry.weight is model.exit.weight


# Replaced by something else


def _parametrize(linear: nn.Linear) -> None:
    """``torch.nn.utils.parametrize`` takes the parameter out of its slot."""
    parametrize.register_parametrization(linear, "bias", nn.Tanh())


def _delete(linear: nn.Linear) -> None:
    del linear.bias


# By what is in the slot of a bias then.
CHANGES: dict[str, Callable[[Any], object]] = {
    "gathered": lambda linear: setattr(linear, "bias", nn.Parameter(linear.bias.full_tensor() * 2)),
    "replicated": lambda linear: setattr(
        linear, "bias", nn.Parameter(linear.bias.detach().redistribute(placements=(Replicate(),)))
    ),
    "of another shape": lambda linear: setattr(linear, "bias", alike(linear.bias, torch.zeros(4))),
    "deleted": _delete,
    "none": lambda linear: setattr(linear, "bias", None),
    "parametrized": _parametrize,
}


@pytest.mark.parametrize("has_run", [True, *long(False)])
@pytest.mark.parametrize("change", CHANGES)
@golden_on_ranks()
def test_parameter_in_whose_place_is_something_else(ctx: RankContext, change: str, has_run: bool) -> str:
    """Change the model, run, mend it, run."""
    model, reference = sharded(ctx), seeded(Stack)
    if has_run:
        step_and_zero(model)
    linear = model.blocks[1].linear
    weight, bias = linear.weight, linear.bias
    CHANGES[change](linear)
    error = error_of(lambda: model(batch()))
    assert error_of(lambda: model(batch())) == error, "the second use must fail alike"
    model.reset_iter_state()
    if change == "gathered":  # nothing is lost: neither what the user put there, nor what was there before
        assert torch.equal(linear.bias, bias.full_tensor() * 2)
        bias = alike(bias, linear.bias.detach())
        with torch.no_grad():
            reference.blocks[1].linear.bias *= 2
    elif change == "parametrized":
        parametrize.remove_parametrizations(linear, "bias", leave_parametrized=False)
    linear.bias = bias
    assert linear.weight is weight
    assert_step_is_that_of(model, reference)
    return error


@golden_on_ranks()
def test_functional_call_with_plain_tensors(ctx: RankContext) -> str:
    model, reference = sharded(ctx), seeded(Stack)
    step_and_zero(model)
    plain = {name: value.detach().clone() for name, value in seeded(Stack, 1).named_parameters()}
    error = error_of(lambda: functional_call(model, plain, (batch(),)))
    model.reset_iter_state()
    assert_step_is_that_of(model, reference)
    return error


@distributed(2)
def test_functional_call_computes_with_parameters_that_are_sharded_alike(ctx: RankContext) -> None:
    """An average of weights, say; the model's own parameters are back afterwards."""
    model, reference = sharded(ctx), seeded(Stack)
    step_and_zero(model)
    other = dict(sharded(ctx).named_parameters())
    with torch.no_grad():
        for param in other.values():
            param.mul_(0.5)
        expected = functional_call(reference, {n: p * 0.5 for n, p in reference.named_parameters()}, (batch(),))
        assert torch.allclose(functional_call(model, other, (batch(),)), expected, atol=1e-6)
        assert torch.allclose(functional_call(model, dict(model.named_parameters()), (batch(),)), reference(batch()))
    assert_step_is_that_of(model, reference)


@distributed(2)
def test_model_is_sharded_moved_and_copied_in_inference_mode_and_trained_outside(ctx: RankContext) -> None:
    expected = sharded(ctx).double()
    with torch.inference_mode():
        model = sharded(ctx)  # its own parameters are tensors of inference mode, too
        model(batch())
        model.double()
        copied = copy.deepcopy(model)
        with torch.no_grad():
            outputs = [each(batch().double()) for each in (model, copied, expected)]
    assert all(torch.equal(each, outputs[2]) for each in outputs)
    for each in (model, copied, expected):
        each.reshard()
        each(batch().double()).sum().backward()
    gradients = [[p.grad.to_local() for p in each.parameters()] for each in (model, copied, expected)]
    assert all(map(torch.equal, gradients[0] + gradients[1], gradients[2] * 2))
