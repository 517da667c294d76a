"""What users change in a sharded model, mostly after the first steps: parameters, modules, ``requires_grad``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.func import functional_call
from torch.nn.utils import parametrize

from fsdp2 import fully_shard
from fsdp2.report import trace
from tests.distributed.changes import (
    USES,
    alike,
    assert_gradients,
    assert_step_is_that_of,
    double,
    evaluate,
    reshard_all,
    step_and_zero,
)
from tests.distributed.support import DIM, Stack, batch, same_on_all_ranks, seeded, shard, shard_each, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import Check, golden_on_ranks
from tests.harness.messages import error_of, wrapped
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


def _between_forward_and_backward(model: Any, change: Callable[[], object]) -> None:
    loss = model(batch()).square().mean()
    change()
    loss.backward()


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
    assert_gradients(model, reference)
    for each in (model, reference):
        each.zero_grad()
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


# By what is in the slot of a bias then.
CHANGES: dict[str, Callable[[Any], object]] = {
    "gathered": lambda linear: setattr(linear, "bias", nn.Parameter(linear.bias.full_tensor() * 2)),
    "replicated": lambda linear: setattr(
        linear, "bias", nn.Parameter(linear.bias.detach().redistribute(placements=(Replicate(),)))
    ),
    "of another shape": lambda linear: setattr(linear, "bias", alike(linear.bias, torch.zeros(4))),
    "deleted": lambda linear: delattr(linear, "bias"),
    "none": lambda linear: setattr(linear, "bias", None),
    "parametrized": lambda linear: parametrize.register_parametrization(linear, "bias", nn.Tanh()),
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
def test_functional_call_computes_with_parameters_that_are_sharded_alike_and_refuses_plain_tensors(
    ctx: RankContext,
) -> str:
    """An average of weights, say; the model's own parameters are back afterwards."""
    model, reference = sharded(ctx), seeded(Stack)
    step_and_zero(model)
    plain = {name: value.detach().clone() for name, value in seeded(Stack, 1).named_parameters()}
    error = error_of(lambda: functional_call(model, plain, (batch(),)))
    model.reset_iter_state()
    other = dict(sharded(ctx).named_parameters())
    double(other.values())
    with torch.no_grad():
        expected = functional_call(reference, {n: p * 2 for n, p in reference.named_parameters()}, (batch(),))
        assert torch.allclose(functional_call(model, other, (batch(),)), expected, atol=1e-6)
        assert torch.allclose(functional_call(model, dict(model.named_parameters()), (batch(),)), reference(batch()))
    assert_step_is_that_of(model, reference)
    return error


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


# Assigned data


def _warned_of(ctx: RankContext, value: Callable[[nn.Parameter], Tensor]) -> list[str]:
    """What forwards warn of after ``param.data = value(param)``, which changes nothing."""
    model = sharded(ctx)
    for change in (lambda: None, lambda: model.load_state_dict(model.state_dict()), lambda: model.double().float()):
        change()  # none of these is an assignment
        step_and_zero(model)
    param = model.blocks[0].linear.weight
    with torch.no_grad():
        param.data.mul_(2.0)
        expected = model(batch())
    param.data = value(param)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        found = [model(batch()) for _ in range(2)]
    assert all(torch.equal(each, expected) for each in found)
    return [str(each.message) for each in caught]


def _doubled(param: nn.Parameter) -> Tensor:
    return param.detach() * 2


def _plain(param: nn.Parameter) -> Tensor:
    return torch.zeros(2, 2)


@pytest.mark.parametrize("value", [_doubled, *long(_plain)])
def test_an_assignment_to_data_is_said_at_the_next_forward(value: Callable[[nn.Parameter], Tensor]) -> None:
    (said,) = same_on_all_ranks(_warned_of, value=value)
    assert said.startswith(
        "the data of parameter 'blocks.0.linear.weight' was assigned, which has no effect on a sharded "
    )


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


def _adapter() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 4, bias=False), nn.Linear(4, DIM, bias=False))


class _Adapted(nn.Module):
    """A linear layer with an adapter beside it."""

    def __init__(self, base: nn.Module, adapter: nn.Module) -> None:
        super().__init__()
        self.base, self.adapter = base, adapter

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


def _adapt(model: Any, shard_adapter: Callable[[nn.Module], Any], *, freezes: bool = True) -> None:
    """An adapter in every block and one at the exit, as LoRA libraries insert them."""
    model.requires_grad_(not freezes)
    torch.manual_seed(3)
    for block in model.blocks:
        block.linear = _Adapted(block.linear, _adapter())
        shard_adapter(block.linear.adapter)
    model.exit = _Adapted(model.exit, _adapter())
    shard_adapter(model.exit.adapter)


@pytest.mark.parametrize("kept", [None, *long(False, 2)])
@pytest.mark.parametrize("freezes", [True, False])
@pytest.mark.parametrize("use", ["no use", "step", "evaluation, reshard"])
@distributed(2, 4)
def test_adapters_sharded_after_the_model_train_like_unsharded_ones(
    ctx: RankContext, use: str, kept: bool | int | None, freezes: bool
) -> None:
    """``kept`` 2 on 4 ranks: under units that rest on a smaller mesh."""
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
def test_a_forward_runs_after_one_whose_warning_was_an_error(ctx: RankContext) -> None:
    """A unit has joined at the same time."""
    model, adapter = sharded(ctx), seeded(_adapter)
    step_and_zero(model)
    fully_shard(adapter, mesh=ctx.mesh_1d())
    model.exit, model.plain = _Adapted(model.exit, adapter), nn.Linear(1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"parameters were added .*: 'plain\.weight'"):
            step(model)
        warnings.simplefilter("ignore")
        step(model)
    assert all(param.grad is not None for param in adapter.parameters())


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


# ``requires_grad`` that changes between a forward and its backward


class _Policy(nn.Module):
    """A base layer with an adapter, inside a root with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.base = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.adapter = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor, uses_adapter: bool = True) -> Tensor:
        x = self.entry(x)
        return self.base(x) + self.adapter(x) if uses_adapter else self.base(x)


@distributed(2)
def test_parameter_frozen_between_micro_batches_is_reduced_though_one_rank_did_not_use_it(ctx: RankContext) -> None:
    """What is reduced follows from flags, which all ranks share: one rank has no gradient of the adapter."""
    plain, model = seeded(_Policy), seeded(_Policy)
    fully_shard(model.adapter, mesh=ctx.mesh_1d())  # a unit by itself, in which this rank may have no gradient at all
    fully_shard(model, mesh=ctx.mesh_1d())
    model.set_ranks_may_differ(True)
    model.set_requires_gradient_sync(False)
    for each in (plain, model):
        each(batch(), uses_adapter=ctx.rank == 0).square().mean().backward()
        each.adapter.requires_grad_(False)
    model.set_requires_gradient_sync(True)
    for each in (plain, model):
        each(batch(1)).square().mean().backward()
    if ctx.rank == 1:
        plain.adapter.weight.grad = torch.zeros(DIM, DIM)
    for mine, expected in zip((model.base, model.adapter), (plain.base, plain.adapter), strict=True):
        dist.all_reduce(expected.weight.grad)
        torch.testing.assert_close(mine.weight.grad.full_tensor(), expected.weight.grad / ctx.world_size)


@pytest.mark.parametrize("are_alike", [True, False])
@distributed(2)
def test_models_share_memory_after_loading_with_assign(ctx: RankContext, are_alike: bool) -> None:
    """As plain modules do. If they are sharded differently, values are copied, with a warning."""

    def follow(model: Any, follower: Any) -> list[Tensor]:
        seen, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        follower.load_state_dict(model.state_dict(), assign=True)
        for seed in range(2):
            step(model, seed)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append(follower(batch()))
        reshard_all(model)
        reshard_all(follower)
        double(follower.parameters())
        with torch.no_grad():
            seen += [model(batch()), follower(batch())]
        return seen

    model, follower = sharded(ctx), seeded(Stack, 1)
    shard(ctx, follower) if are_alike else shard_each(follower, mesh=ctx.mesh_1d())
    with nullcontext() if are_alike else pytest.warns(UserWarning, match="sharded differently"):
        found = follow(model, follower)
    expected = follow(seeded(Stack), seeded(Stack, 1))
    is_equal = [torch.allclose(*pair, atol=1e-6) for pair in zip(found, expected, strict=True)]
    assert all(is_equal) is are_alike, is_equal
