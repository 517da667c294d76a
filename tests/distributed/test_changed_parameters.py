"""What users change after ``fully_shard``, mostly after the first steps: replaced, added and removed parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.func import functional_call
from torch.nn.utils import parametrize

from fsdp2 import FSDPModule, fully_shard, trace
from tests.distributed.support import DIM, Stack, batch, same_on_all_ranks, seeded, shard, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of, wrapped


def _evaluate(model: Any) -> None:
    with torch.no_grad():
        model(batch())


def _step(model: Any) -> None:
    step(model)
    model.zero_grad()


def _evaluate_and_reshard(model: Any) -> None:
    """What stays unsharded after an evaluation is nothing to freeze, or to build an optimizer of."""
    _evaluate(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _alike(param: DTensor, value: Tensor) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(value, param.device_mesh, param.placements))


def _assert_step_is_that_of(model: nn.Module, reference: nn.Module, *, seed: int = 0) -> None:
    """The next step of both, loss and gradients, parameter by parameter. There is no gradient before and none after."""
    assert torch.allclose(step(model, seed), step(reference, seed), atol=1e-6)
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(param, DTensor), name
        assert (param.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            assert torch.allclose(param.grad.full_tensor(), expected.grad, atol=1e-6), name
    for each in (model, reference):
        each.zero_grad()


# Replaced by parameters that are sharded alike


def _assign(model: Any, name: str, value: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, _alike(model.get_parameter(name), value))


def _swap(model: Any, name: str, value: Tensor) -> None:
    param = model.get_parameter(name)
    torch.utils.swap_tensors(param, _alike(param, value))


def _load_assign(model: Any, name: str, value: Tensor) -> None:
    state = {name: _alike(model.get_parameter(name), value).detach()}
    model.load_state_dict(model.state_dict() | state, assign=True)


def _copy(model: Any, name: str, value: Tensor) -> None:
    with torch.no_grad():
        param = model.get_parameter(name)
        param.copy_(_alike(param, value))


REPLACE = {"assign": _assign, "swap_tensors": _swap, "load with assign": _load_assign, "copy": _copy}
USES: dict[str, Callable[[Any], Any]] = {
    "no use": lambda model: None,
    "step": _step,
    "evaluation": _evaluate,
    "evaluation, reshard": _evaluate_and_reshard,
    "unshard": lambda model: model.unshard(async_op=True),
}


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
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, _alike(shards[name], value))
            with torch.no_grad():
                reference.get_parameter(name).copy_(value)
        _assert_step_is_that_of(model, reference)
        _assert_step_is_that_of(model, reference, seed=1)


@distributed(2)
def test_replaced_parameter_is_what_a_new_optimizer_steps(ctx: RankContext) -> None:
    model, reference = sharded(ctx), seeded(Stack)
    _step(model)
    for each in (model, reference):
        if each is model:
            _assign(model, "exit.weight", torch.ones(DIM, DIM))
        else:
            nn.init.ones_(reference.exit.weight)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            step(each)
            optimizer.step()
    assert torch.allclose(model.exit.weight.full_tensor(), reference.exit.weight, atol=1e-6)


class _Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.exit.weight = self.entry.weight


@pytest.mark.parametrize("module", ["entry", "exit"])
@distributed(2)
def test_tied_parameter_replaced_in_one_place_stays_tied(ctx: RankContext, module: str) -> None:
    model, reference = shard(ctx, seeded(_Tied)), seeded(_Tied)
    _step(model)
    value = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(1))
    _assign(model, f"{module}.weight", value)
    with torch.no_grad():
        reference.entry.weight.copy_(value)
    _assert_step_is_that_of(model, reference)
    assert model.entry.weight is model.exit.weight


@pytest.mark.parametrize("kept", [None, False])
@distributed(2)
def test_adapters_merged_into_weights_and_taken_out_again(ctx: RankContext, kept: bool | None) -> None:
    """As PEFT does it: written in place, between steps and between evaluations."""
    model, reference = sharded(ctx, reshard_after_forward=kept), seeded(Stack)
    delta = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(1))
    shards = dict(model.named_parameters())
    for factor in (1.0, -1.0, 0.5):
        for each in (model, reference):
            _evaluate(each)
            weight = shards["blocks.0.linear.weight"] if each is model else reference.blocks[0].linear.weight
            with torch.no_grad():
                weight += factor * (_alike(weight, delta) if isinstance(weight, DTensor) else delta)
        with torch.no_grad():
            assert torch.allclose(model(batch()), reference(batch()), atol=1e-6)
        _assert_step_is_that_of(model, reference)


# Replaced by something else


def _refused(ctx: RankContext, change: str) -> str:
    """Change the model after a step, run, mend it, run."""
    model, reference = sharded(ctx), seeded(Stack)
    _step(model)
    linear = model.blocks[1].linear
    weight, bias = linear.weight, linear.bias
    if change == "gathered":
        linear.bias = nn.Parameter(bias.full_tensor() * 2)
    elif change == "replicated":
        linear.bias = nn.Parameter(bias.detach().redistribute(placements=(torch.distributed.tensor.Replicate(),)))
    elif change == "deleted":
        del linear.bias
    elif change == "none":
        linear.bias = None
    else:
        parametrize.register_parametrization(linear, "bias", nn.Tanh())
    error = error_of(lambda: model(batch()))
    assert error_of(lambda: model(batch())) == error, "the second use must fail alike"
    model.reset_iter_state()
    if change == "gathered":  # nothing is lost: neither what the user put there, nor what was there before
        assert torch.equal(linear.bias, bias.full_tensor() * 2)
        linear.bias = _alike(bias, linear.bias.detach())
        with torch.no_grad():
            reference.blocks[1].linear.bias *= 2
    elif change == "parametrized":
        parametrize.remove_parametrizations(linear, "bias", leave_parametrized=False)
        linear.bias = bias
    else:
        linear.bias = bias
    assert linear.weight is weight
    _assert_step_is_that_of(model, reference)
    return error


def test_parameter_replaced_by_a_gathered_one_after_a_step() -> None:
    assert_expected_inline(
        same_on_all_ranks(_refused, change="gathered"),
        """\
TypeError: parameter 'blocks.1.linear.bias': expected a parameter that is a DTensor of shape (32,)
with placements (Shard(dim=0),) on DeviceMesh((shard=2), 'cpu', stride=(1,)), found a plain
Parameter of shape (32,). Assign nn.Parameter(distribute_tensor(value, mesh, (Shard(dim=0),)))
instead, with that mesh; a state dict that is loaded with assign=True must hold such DTensors.""",
    )


def test_parameter_replaced_by_a_replicated_one() -> None:
    assert_expected_inline(
        same_on_all_ranks(_refused, change="replicated"),
        """\
TypeError: parameter 'blocks.1.linear.bias': expected a parameter that is a DTensor of shape (32,)
with placements (Shard(dim=0),) on DeviceMesh((shard=2), 'cpu', stride=(1,)), found a DTensor of
shape (32,) with placements (Replicate(),) on DeviceMesh((shard=2), 'cpu', stride=(1,)), with a
shard of shape (32,) here. Assign nn.Parameter(distribute_tensor(value, mesh, (Shard(dim=0),)))
instead, with that mesh; a state dict that is loaded with assign=True must hold such DTensors.""",
    )


def test_removed_parameter() -> None:
    error = same_on_all_ranks(_refused, change="deleted")
    assert same_on_all_ranks(_refused, change="none") == error
    assert_expected_inline(
        error,
        """\
TypeError: parameter 'blocks.1.linear.bias': it was removed after fully_shard. Put it back; to leave
it out, freeze it with requires_grad_(False), or change the module before fully_shard.""",
    )


def test_parametrized_parameter() -> None:
    """``torch.nn.utils.parametrize`` takes the parameter out of its slot."""
    assert_expected_inline(
        same_on_all_ranks(_refused, change="parametrized"),
        """\
TypeError: parameter 'blocks.1.linear.bias': expected a parameter that is a DTensor of shape (32,)
with placements (Shard(dim=0),) on DeviceMesh((shard=2), 'cpu', stride=(1,)), found a DTensor of
shape (32,) with placements (Shard(dim=0),) on DeviceMesh((shard=2), 'cpu', stride=(1,)), with a
shard of shape (16,) here, that is no parameter. Parametrize modules before fully_shard; assign
nn.Parameters only, and give none else to torch.func.functional_call, sharded like those that were
there.""",
    )


def _functional_call(ctx: RankContext) -> str:
    model, reference = sharded(ctx), seeded(Stack)
    _step(model)
    plain = {name: value.detach().clone() for name, value in seeded(Stack, 1).named_parameters()}
    error = error_of(lambda: functional_call(model, plain, (batch(),)))
    model.reset_iter_state()
    _assert_step_is_that_of(model, reference)
    return error


def test_functional_call_with_plain_tensors() -> None:
    assert_expected_inline(
        same_on_all_ranks(_functional_call),
        """\
TypeError: parameter 'entry.weight': expected a parameter that is a DTensor of shape (32, 32) with
placements (Shard(dim=0),) on DeviceMesh((shard=2), 'cpu', stride=(1,)), found a plain Tensor of
shape (32, 32) that is no parameter. Parametrize modules before fully_shard; assign nn.Parameters
only, and give none else to torch.func.functional_call, sharded like those that were there.""",
    )


@distributed(2)
def test_functional_call_computes_with_parameters_that_are_sharded_alike(ctx: RankContext) -> None:
    """An average of weights, say; the model's own parameters are back afterwards."""
    model, reference = sharded(ctx), seeded(Stack)
    _step(model)
    other = dict(sharded(ctx).named_parameters())
    with torch.no_grad():
        for param in other.values():
            param.mul_(0.5)
        expected = functional_call(reference, {n: p * 0.5 for n, p in reference.named_parameters()}, (batch(),))
        assert torch.allclose(functional_call(model, other, (batch(),)), expected, atol=1e-6)
        assert torch.allclose(functional_call(model, dict(model.named_parameters()), (batch(),)), reference(batch()))
    _assert_step_is_that_of(model, reference)


# Removed modules


@distributed(2)
def test_units_and_modules_taken_out_of_the_tree_take_part_no_more(ctx: RankContext) -> None:
    model, reference = sharded(ctx), seeded(Stack)
    removed = model.blocks[1]
    for _ in range(2):
        _step(model)
    for each in (model, reference):
        each.blocks[1] = nn.Identity()  # a unit
        each.exit = nn.Identity()  # a module of the root's unit
    for _ in range(2):
        _assert_step_is_that_of(model, reference)
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
        _assert_step_is_that_of(model, reference, seed=seed)
        for optimizer in optimizers:
            optimizer.step()
    state, expected = model.state_dict(), reference.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.allclose(state[name].full_tensor(), value, atol=1e-5), name


@pytest.mark.parametrize("kept", [None, False])
@pytest.mark.parametrize("freezes", [True, False])
@pytest.mark.parametrize("use", ["no use", "step", "evaluation, reshard"])
@distributed(2)
def test_adapters_sharded_after_the_model_train_like_unsharded_ones(
    ctx: RankContext, use: str, kept: bool | None, freezes: bool
) -> None:
    _assert_adapters_train_alike(ctx, use, kept, freezes=freezes)


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
    _step(model)
    for each, adapter in zip((model, reference), adapters, strict=True):
        each.exit = _Adapted(each.exit, adapter)
    for _ in range(3):
        _assert_step_is_that_of(model, reference)


@distributed(2)
def test_adapter_around_a_sharded_layer_ignores_the_layers_parameters(ctx: RankContext) -> None:
    model, reference = sharded(ctx), seeded(Stack)
    _step(model)
    _adapt(model, lambda adapter: None)
    _adapt(reference, lambda adapter: None)
    for adapted in (*(block.linear for block in model.blocks), model.exit):
        fully_shard(adapted, mesh=ctx.mesh_1d(), ignored_params=set(adapted.base.parameters()))
    for _ in range(2):
        _assert_step_is_that_of(model, reference)


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


def test_plain_parameters_added_without_fully_shard_are_warned_of_once() -> None:
    found = same_on_all_ranks(_plain_adapters, use="no use", noticed_by="first use")
    assert found == same_on_all_ranks(_plain_adapters, use="step", noticed_by="load")
    (warning,) = found
    assert_expected_inline(
        warning,
        """\
parameters were added to a sharded module after fully_shard: 'blocks.0.linear.adapter.down.weight',
'blocks.0.linear.adapter.up.weight', 'blocks.1.linear.adapter.down.weight',
'blocks.1.linear.adapter.up.weight' and 4 more. They are not sharded, and nobody reduces their
gradients, so ranks come to differ. Call fully_shard on the new modules, and build the optimizer
after that; or freeze them with requires_grad_(False).""",
    )


@distributed(2)
def test_ignored_and_frozen_plain_parameters_are_not_warned_of(ctx: RankContext) -> None:
    """Warnings are errors here. On the meta device, too, where materialising makes new parameters."""
    for device in ("cpu", "meta"):
        model = seeded(Stack).to(device)
        ignored = set(model.exit.parameters())
        for block in model.blocks:
            fully_shard(block, mesh=ctx.mesh_1d(), ignored_params={block.linear.bias})
        fully_shard(model, mesh=ctx.mesh_1d(), ignored_params=ignored)
        model.to_empty(device="cpu")
        model.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        step(model)
