"""What a sharded model refuses or warns of: each text, and that the model works as before, or once repaired."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel

import fsdp2
from fsdp2 import fully_shard
from tests.distributed.changes import alike, assert_gradients, assert_step_is_that_of
from tests.distributed.support import DIM, Stack, batch, seeded, shard, shard_each, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of, wrapped


def _assert_trains_like_new(model: Any) -> None:
    """``model`` has the values of ``Stack`` with seed 0, and its next step is that of the unsharded one."""
    model.zero_grad()
    assert_step_is_that_of(model, seeded(Stack))


def _refused(model: Any, *calls: Callable[[], Any]) -> str:
    """The errors; ``model`` has not changed by them."""
    errors = "\n".join(map(error_of, calls))
    _assert_trains_like_new(model)
    return errors


@golden_on_ranks()
def test_forward_on_the_meta_device(ctx: RankContext) -> str:
    model = shard(ctx, Stack().to("meta"))
    error = error_of(lambda: model(batch()))
    model.to_empty(device="cpu")
    model.load_state_dict(sharded(ctx).state_dict())
    _assert_trains_like_new(model)
    return error


@pytest.mark.parametrize("name", ["", "blocks.1.linear.weight"], ids=str)
@golden_on_ranks()
def test_state_dict_of_plain_tensors_to_assign(ctx: RankContext, name: str) -> str:
    """All are plain, or the named one."""
    model = sharded(ctx)
    model(batch())  # the root stays unsharded
    state = seeded(Stack, 1).state_dict()
    state = {**model.state_dict(), name: state[name]} if name else state
    return _refused(model, lambda: model.load_state_dict(state, assign=True))


@pytest.mark.parametrize("options", [{}, {"strict": False}], ids=str)
@golden_on_ranks()
def test_state_dict_of_local_tensors(ctx: RankContext, options: dict[str, Any]) -> str:
    """Plain tensors without what says which rank's they are."""
    model = sharded(ctx)
    state = {name: value.to_local() + 1 for name, value in model.state_dict().items()}
    return _refused(model, lambda: model.load_state_dict(state, **options))


@distributed(2)
def test_plain_tensors_that_somebody_cuts_on_the_way_are_loaded(ctx: RankContext) -> None:
    """A hook of the user makes shards of plain values; torch takes plain values in a context of its own."""
    model = sharded(ctx)
    whole = seeded(Stack).state_dict()

    def cut(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            state[prefix + name] = alike(parameter, whole[prefix + name]).detach()

    with implicit_replication():
        model.load_state_dict(seeded(Stack, 1).state_dict())
    handle = model.register_load_state_dict_pre_hook(cut)
    model.load_state_dict(seeded(Stack, 1).state_dict())
    handle.remove()
    _assert_trains_like_new(model)


@pytest.mark.parametrize("with_root", [True, False])
@golden_on_ranks()
def test_data_parallel_around_shards(ctx: RankContext, with_root: bool) -> str:
    model = sharded(ctx) if with_root else seeded(Stack)
    if not with_root:
        shard_each(*model.blocks, mesh=ctx.mesh_1d())
    error = error_of(lambda: DistributedDataParallel(model))
    if not with_root:
        fully_shard(model, mesh=ctx.mesh_1d())
    _assert_trains_like_new(model)
    return error


class _Encodes(Stack):
    def encode(self, x: Tensor) -> Tensor:
        return self.entry(x)


@pytest.mark.parametrize("has_run", [True, False])  # there is no root before, and so no names from there
@golden_on_ranks()
def test_submodule_and_method_outside_of_the_forward_of_their_unit(ctx: RankContext, has_run: bool) -> str:
    model = shard(ctx, seeded(_Encodes))
    if has_run:
        step(model)
    errors = error_of(lambda: model.encode(batch())), error_of(lambda: model.blocks[1].linear(batch()))
    fsdp2.register_fsdp_forward_method(model, "encode")
    torch.testing.assert_close(model.encode(batch()), seeded(_Encodes).encode(batch()))
    model.reshard()
    _assert_trains_like_new(model)
    return "\n".join(errors)


class _ReadsWeight(nn.Module):
    """Computes as its linear layer would, times a gain of its own, without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(DIM, DIM), nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight, self.inner.bias) * self.gain


@golden_on_ranks()
def test_weight_of_an_inner_unit_that_is_not_called(ctx: RankContext) -> str:
    model = seeded(Stack)
    model.exit = _ReadsWeight()
    fully_shard(model.exit.inner, mesh=ctx.mesh_1d())
    shard(ctx, model)
    return error_of(lambda: model(batch()))


@golden_on_ranks()
def test_state_dict_of_another_shape(ctx: RankContext) -> str:
    model, name = sharded(ctx), "blocks.1.linear.weight"
    state = {**model.state_dict(), name: alike(model.get_parameter(name), torch.zeros(4, DIM)).detach()}
    return _refused(model, lambda: model.load_state_dict(state))


@golden_on_ranks()
def test_one_of_several_modules_of_a_unit_run_without_a_root(ctx: RankContext) -> str:
    model = seeded(Stack)
    fully_shard(list(model.blocks), mesh=ctx.mesh_1d())
    error = error_of(lambda: model.blocks[0](batch()))
    fully_shard(model, mesh=ctx.mesh_1d())
    _assert_trains_like_new(model)
    return error


class _WritesInputs(nn.Module):
    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.linear, self._copies = nn.Linear(DIM, DIM), copies

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = (x.clone(), y.clone()) if self._copies else (x, y)
        return self.linear(x.mul_(2) + y.mul_(3))


@golden_on_ranks()
def test_step_before_all_gradients_have_landed(ctx: RankContext) -> str:
    """They would land in the next step's ``.grad``. torch's runtime has set ``.grad``, and does not wait for it."""
    model = sharded(ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.set_is_last_backward(False)
    loss, waiting = (model(batch()).square().mean() for _ in range(2))
    for _ in range(2):  # gradients of two backwards are one sum
        step(model)
    loss.backward()
    optimizer.step()
    error = error_of(waiting.backward)
    assert error_of(lambda: model(batch())) == error
    model.reset_iter_state()
    model.set_is_last_backward(True)
    _assert_trains_like_new(model)
    return error


@pytest.mark.parametrize("copies", [False, True])
@distributed(2)
def test_two_inputs_changed_in_place(ctx: RankContext, copies: bool) -> None:
    """torch has the rest of the text: to change a copy."""
    x, module = batch().requires_grad_(), seeded(lambda: _WritesInputs(copies=copies))
    (expected,) = torch.autograd.grad(module(x * 1, x * 1).sum(), x)
    fully_shard(module, mesh=ctx.mesh_1d())
    if copies:
        (found,) = torch.autograd.grad(module(x * 1, x * 1).sum(), x)
        torch.testing.assert_close(found, expected)
    else:
        with pytest.raises(RuntimeError, match="Output 0 of InputOfShardedModule is a view and is being modified in"):
            module(x * 1, x * 1)
        module.reset_iter_state()


def _whole(table: Tensor) -> Tensor:
    return table


def _view(table: Tensor) -> Tensor:
    return table[:DIM]


class _Positions(nn.Module):
    def __init__(self, returned: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.table, self.returned = nn.Parameter(torch.randn(2 * DIM)), returned

    def forward(self) -> Any:
        return (self.returned(self.table),)


class _AddsPositions(nn.Module):
    def __init__(self, returned: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.positions, self.linear = _Positions(returned), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        (table,) = self.positions()
        output: Tensor = self.linear(x) + table[:DIM]
        return output


@pytest.mark.every_case
@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("returned", [_whole, _view])
@golden_on_ranks()
def test_parameter_that_outlives_its_memory(
    ctx: RankContext, returned: Callable[[Tensor], Tensor], records: bool
) -> str:
    """Reading it would end the process. It may be returned where it is kept, and its copy anywhere."""
    model, reference = (seeded(lambda: _AddsPositions(returned)) for _ in range(2))
    reference(batch()).square().mean().backward()
    shard_each(model.positions, model, mesh=ctx.mesh_1d())
    with torch.set_grad_enabled(records):
        error = error_of(lambda: model(batch()))
    model.positions.returned = lambda table: returned(table).clone()
    for _ in range(2):
        model.zero_grad()
        model(batch()).square().mean().backward()
        assert_gradients(model, reference)
        model.positions.returned = returned
        model.positions.set_reshard_after_forward(False)
    return error


# Optimizers, and hooks for gradients that nothing would call, are warned of

Steps = tuple[torch.optim.Optimizer, Callable[[], Tensor], int]  # on the gradients of what, and how many


def _beside_shards(ctx: RankContext, *, ignored: bool = False) -> Steps:
    model = seeded(Stack)
    plain = {*model.entry.parameters(), *model.exit.parameters()} if ignored else None
    shard_each(*model.blocks, mesh=ctx.mesh_1d(), ignored_params=plain)
    return torch.optim.AdamW(model.parameters()), lambda: model(batch(ctx.rank)), 2


def _ignored_and_materialised(ctx: RankContext) -> Steps:
    with torch.device("meta"):
        model = Stack()
    fully_shard(model, mesh=ctx.mesh_1d(), ignored_params=set(model.exit.parameters()))
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.ones_(param)
    return torch.optim.AdamW(model.parameters()), lambda: model(batch(ctx.rank)), 2


def _of_no_module(ctx: RankContext) -> Steps:
    model, scale = sharded(ctx), nn.Parameter(torch.ones(()))
    return torch.optim.SGD([*model.parameters(), scale]), lambda: model(batch()) * scale, 2


def _nothing_is_reduced(ctx: RankContext) -> Steps:
    model, mesh = seeded(Stack), init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))
    shard_each(*model.blocks, mesh=mesh["dp"])
    return torch.optim.SGD(model.parameters()), lambda: model(batch()), 2


def _one_of_a_tie(ctx: RankContext) -> Steps:
    model = nn.Sequential(nn.Embedding(DIM, DIM), nn.Linear(DIM, DIM, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model[0], mesh=ctx.mesh_1d())
    return torch.optim.AdamW(model.parameters()), lambda: model(torch.arange(4)), 2


WARNED: dict[str, Callable[[RankContext], Steps]] = {
    "plain parameters beside shards": _beside_shards,
    "ignored parameters beside shards": functools.partial(_beside_shards, ignored=True),
    "ignored parameters that were materialised since": _ignored_and_materialised,
    "plain parameter that no module has": _of_no_module,
    "plain parameters where nothing is reduced": _nothing_is_reduced,
    "one of two tied modules is sharded": _one_of_a_tie,
}


@pytest.mark.parametrize("name", WARNED)
@golden_on_ranks()
def test_optimizer_is_warned_of_once(ctx: RankContext, name: str) -> str:
    optimizer, compute, num_steps = WARNED[name](ctx)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(num_steps):
            compute().square().mean().backward()
            optimizer.step()
    return "\n".join(wrapped(str(each.message)) for each in caught if issubclass(each.category, UserWarning))


@distributed(2)
def test_an_original_that_somebody_else_trains_is_not_warned_of(ctx: RankContext) -> None:
    """Nor is an optimizer of shards, beside one that was built before them."""
    model, other = seeded(Stack), nn.Linear(DIM, DIM)
    other.weight = model.entry.weight
    shard(ctx, model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = other(batch()).sum()
        value.backward()
        return value

    loss()
    optimizer.step()  # a warning would be an error
    optimizer.zero_grad()
    optimizer.step(loss)
    torch.optim.SGD(nn.Linear(2, 2).parameters()).step()  # nobody has sharded these
    step(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()


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
