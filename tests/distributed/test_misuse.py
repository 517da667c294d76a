"""What a sharded model refuses: each error as text, and that the model works as before, or once repaired."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel

import fsdp2
from fsdp2 import fully_shard
from fsdp2.tools import trace
from tests.distributed.changes import assert_step_is_that_of
from tests.distributed.support import DIM, Stack, batch, same_on_all_ranks, seeded, shard, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import Check, golden_on_ranks
from tests.harness.messages import error_of, wrapped


def _assert_trains_like_new(model: Any) -> None:
    """``model`` has the values of ``Stack`` with seed 0, and its next step is that of the unsharded one."""
    model.zero_grad()
    assert_step_is_that_of(model, seeded(Stack))


@golden_on_ranks()
def test_forward_on_the_meta_device(ctx: RankContext) -> str:
    model = shard(ctx, Stack().to("meta"))
    error = error_of(lambda: model(batch()))
    model.to_empty(device="cpu")
    for parameter, value in zip(model.parameters(), seeded(Stack).parameters(), strict=True):
        with torch.no_grad():
            parameter.copy_(distribute_tensor(value.detach(), ctx.mesh_1d(), parameter.placements))
    _assert_trains_like_new(model)
    return error


@golden_on_ranks()
def test_forward_where_saved_tensors_may_be_written(ctx: RankContext) -> str:
    model = sharded(ctx)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        error = error_of(lambda: model(batch()))
    _assert_trains_like_new(model)
    return error


def _replaced(ctx: RankContext, change: str) -> str:
    """Put something else in the place of a parameter, run, put the parameter back."""
    model = sharded(ctx)
    linear = model.blocks[1].linear
    weight = linear.weight
    if change == "plain":
        linear.weight = nn.Parameter(torch.zeros(DIM, DIM))
    else:
        linear.weight = nn.Parameter(distribute_tensor(torch.zeros(4, DIM), ctx.mesh_1d(), weight.placements))
    error = error_of(lambda: model(batch()))
    linear.weight = weight
    model.reset_iter_state()
    _assert_trains_like_new(model)
    return error


def test_parameter_replaced_by_a_plain_one(golden: Check) -> None:
    golden(same_on_all_ranks(_replaced, change="plain"))


def test_parameter_replaced_by_one_of_another_shape(golden: Check) -> None:
    golden(same_on_all_ranks(_replaced, change="shape"))


def _plain_values(ctx: RankContext, names: list[str] | None, **options: Any) -> str:
    """Load plain tensors into ``names``, or into all parameters."""
    model = sharded(ctx)
    model(batch())  # the root stays unsharded
    whole = seeded(Stack, 1).state_dict()
    state = whole if names is None else {**model.state_dict(), **{name: whole[name] for name in names}}
    error = error_of(lambda: model.load_state_dict(state, **options))
    _assert_trains_like_new(model)
    return error


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}], ids=str)
def test_state_dict_of_plain_tensors(golden: Check, options: dict[str, bool]) -> None:
    golden(same_on_all_ranks(_plain_values, names=None, **options))


def test_state_dict_with_one_plain_tensor() -> None:
    error = same_on_all_ranks(_plain_values, names=["blocks.1.linear.weight"])
    assert error.startswith("RuntimeError: load_state_dict: found plain tensors for 'blocks.1.linear.weight', expected")


def _plain_values_that_hooks_cut(ctx: RankContext) -> None:
    """A hook of the user makes shards of plain values; torch takes plain values in a context of its own."""
    model = sharded(ctx)
    whole = seeded(Stack).state_dict()

    def cut(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            state[prefix + name] = distribute_tensor(whole[prefix + name], ctx.mesh_1d(), parameter.placements)

    with implicit_replication():
        model.load_state_dict(seeded(Stack, 1).state_dict())
    handle = model.register_load_state_dict_pre_hook(cut)
    model.load_state_dict(seeded(Stack, 1).state_dict())
    handle.remove()
    _assert_trains_like_new(model)


def test_plain_tensors_that_somebody_cuts_on_the_way_are_loaded() -> None:
    same_on_all_ranks(_plain_values_that_hooks_cut)


def _data_parallel(ctx: RankContext, *, with_root: bool) -> str:
    model = sharded(ctx) if with_root else seeded(Stack)
    for block in () if with_root else model.blocks:
        fully_shard(block, mesh=ctx.mesh_1d())
    error = error_of(lambda: DistributedDataParallel(model))
    if not with_root:
        fully_shard(model, mesh=ctx.mesh_1d())
    _assert_trains_like_new(model)
    return error


def test_data_parallel_around_shards(golden: Check) -> None:
    errors = [same_on_all_ranks(_data_parallel, with_root=with_root) for with_root in (True, False)]
    golden("\n".join(errors))


def _data_parallel_beside_shards(ctx: RankContext) -> None:
    """It reduces what no unit has, and is told to ignore the rest."""
    model, reference = seeded(Stack), seeded(Stack)
    for block in model.blocks:
        fully_shard(block, mesh=ctx.mesh_1d())
    ignored = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    parallel(batch(ctx.rank)).sum().backward()
    optimizer.step()  # warns of nothing
    (sum(reference(batch(rank)).sum() for rank in range(ctx.world_size)) / ctx.world_size).backward()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        grad = found.grad.full_tensor() if isinstance(found.grad, DTensor) else found.grad
        torch.testing.assert_close(grad, expected.grad)


def test_data_parallel_that_ignores_shards_reduces_the_others() -> None:
    same_on_all_ranks(_data_parallel_beside_shards)


class _Encodes(Stack):
    def encode(self, x: Tensor) -> Tensor:
        return self.entry(x)


def _outside_of_its_unit(ctx: RankContext, *, has_run: bool) -> str:
    model = shard(ctx, seeded(_Encodes))
    if has_run:
        step(model)
    calls = [lambda: model.encode(batch()), lambda: model.blocks[1].linear(batch())]
    errors = [error_of(call) for call in calls]
    fsdp2.register_fsdp_forward_method(model, "encode")
    torch.testing.assert_close(model.encode(batch()), seeded(_Encodes).encode(batch()))
    model.reshard()
    _assert_trains_like_new(model)
    return "\n".join(errors)


def test_submodule_and_method_outside_of_the_forward_of_their_unit(golden: Check) -> None:
    golden(same_on_all_ranks(_outside_of_its_unit, has_run=True))
    error = same_on_all_ranks(_outside_of_its_unit, has_run=False)  # there is no root yet, and so no names from there
    assert "Linear 'entry' was called outside the forward of its unit 'FSDP_Encodes'" in error


class _ReadsWeight(nn.Module):
    """Computes as its linear layer would, times a gain of its own, without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(DIM, DIM), nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight, self.inner.bias) * self.gain


class _HoldsReader(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.exit = _ReadsWeight()  # type: ignore[assignment]


@golden_on_ranks()
def test_weight_of_an_inner_unit_that_is_not_called(ctx: RankContext) -> str:
    model = seeded(_HoldsReader)
    fully_shard(model.exit.inner, mesh=ctx.mesh_1d())
    shard(ctx, model)
    return error_of(lambda: model(batch()))


@golden_on_ranks()
def test_dtypes_that_nothing_is_computed_in(ctx: RankContext) -> str:
    model, errors = seeded(Stack), []
    for dtypes in ({"param_dtype": torch.int8}, {"output_dtype": torch.bool}, {"reduce_dtype": torch.float8_e5m2}):
        policy = fsdp2.MixedPrecisionPolicy(**dtypes)
        errors.append(error_of(partial(fully_shard, model, mesh=ctx.mesh_1d(), mp_policy=policy)))
    assert type(model) is Stack
    fully_shard(model, mesh=ctx.mesh_1d())
    _assert_trains_like_new(model)
    return "\n".join(errors)


@golden_on_ranks()
def test_output_of_attention_as_a_unit(ctx: RankContext) -> str:
    model = nn.Sequential(nn.MultiheadAttention(DIM, 2))
    fully_shard(model[0].out_proj, mesh=ctx.mesh_1d())
    error = error_of(lambda: fully_shard(model, mesh=ctx.mesh_1d()))
    assert type(model) is nn.Sequential
    return error


@golden_on_ranks()
def test_state_dict_of_another_shape(ctx: RankContext) -> str:
    model = sharded(ctx)
    state = dict(model.state_dict())
    state["blocks.1.linear.weight"] = distribute_tensor(
        torch.zeros(4, DIM), ctx.mesh_1d(), model.entry.weight.placements
    )
    error = error_of(lambda: model.load_state_dict(state))
    _assert_trains_like_new(model)
    return error


@golden_on_ranks()
def test_prefetch_of_a_plain_module(ctx: RankContext) -> str:
    model = sharded(ctx)
    modules = [model.blocks[1], model.entry]
    errors = [
        error_of(partial(setter, modules))
        for setter in (model.set_modules_to_forward_prefetch, model.set_modules_to_backward_prefetch)
    ]
    step(model)
    _assert_trains_like_new(model)
    return "\n".join(errors)


@golden_on_ranks()
def test_set_reshard_after_forward_to_a_number_of_ranks(ctx: RankContext) -> str:
    model = sharded(ctx)
    error = error_of(lambda: model.set_reshard_after_forward(2))
    _assert_trains_like_new(model)
    return error


@golden_on_ranks()
def test_trace_of_a_plain_module(ctx: RankContext) -> str:
    def attempt() -> None:
        with trace.record(seeded(Stack)):
            pass

    return error_of(attempt)


@golden_on_ranks()
def test_one_of_several_modules_of_a_unit_run_without_a_root(ctx: RankContext) -> str:
    model = seeded(Stack)
    fully_shard(list(model.blocks), mesh=ctx.mesh_1d())
    error = error_of(lambda: model.blocks[0](batch()))
    fully_shard(model, mesh=ctx.mesh_1d())
    _assert_trains_like_new(model)
    return error


def _unit_on_its_own(ctx: RankContext) -> None:
    model = sharded(ctx)
    reference = seeded(Stack)
    for _ in range(2):
        expected = reference.blocks[1](batch())
        actual = model.blocks[1](batch())
        assert torch.allclose(actual, expected, atol=1e-6)
        actual.sum().backward()
        reference.zero_grad()
        reference.blocks[1](batch()).sum().backward()
        grad = model.blocks[1].linear.weight.grad
        assert torch.allclose(grad.full_tensor(), reference.blocks[1].linear.weight.grad, atol=1e-5)
        _assert_trains_like_new(model)
        model.zero_grad()


def test_unit_run_outside_its_root_is_right_and_so_is_the_root_afterwards() -> None:
    same_on_all_ranks(_unit_on_its_own)


def _raising_unit_on_its_own(ctx: RankContext) -> None:
    model = sharded(ctx)
    too_wide = torch.zeros(4, DIM + 1)
    of_torch = error_of(lambda: seeded(Stack).blocks[1](too_wide))  # each version of torch has another text
    error = error_of(lambda: model.blocks[1](too_wide))  # before the root has ever run
    assert error.startswith(of_torch), error
    model.reset_iter_state()
    _assert_trains_like_new(model)


def test_root_recovers_from_a_unit_that_raised_when_run_on_its_own() -> None:
    same_on_all_ranks(_raising_unit_on_its_own)


@golden_on_ranks()
def test_inner_module_after_the_outer_one(ctx: RankContext) -> str:
    model = seeded(Stack)
    fully_shard(model, mesh=ctx.mesh_1d())
    error = error_of(lambda: fully_shard(model.blocks[0], mesh=ctx.mesh_1d()))
    _assert_trains_like_new(model)
    return error


@golden_on_ranks()
def test_optimizer_of_parameters_that_are_unsharded(ctx: RankContext) -> str:
    model = sharded(ctx)
    with torch.no_grad():
        model(batch())  # the root stays unsharded
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch()).sum().backward()
    error = error_of(optimizer.step)
    torch.optim.AdamW(model.parameters(), lr=0.0).step()
    _assert_trains_like_new(model)
    return error


@distributed(2)
def test_an_optimizer_built_before_fully_shard_is_warned_of(ctx: RankContext) -> None:
    model = seeded(Stack)
    stale = torch.optim.AdamW(model.parameters())
    shard(ctx, model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch()).sum().backward()
    with pytest.warns(UserWarning, match="trained nothing") as warned:
        stale.step()
    assert [str(each.message) for each in warned] == [
        "AdamW.step() trained nothing: none of its parameters has a gradient. fully_shard has replaced some of them, "
        "for example 'entry.weight'. Build the optimizer after fully_shard."
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()


@distributed(2)
def test_an_original_that_somebody_else_trains_is_not_warned_of(ctx: RankContext) -> None:
    model = seeded(Stack)
    other = nn.Linear(DIM, DIM)
    other.weight = model.entry.weight
    shard(ctx, model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = other(batch()).sum()
        value.backward()
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step(loss)
        torch.optim.SGD(nn.Linear(2, 2).parameters()).step()  # nobody has sharded these


def _step_of(optimizer: torch.optim.Optimizer, model: nn.Module, x: Tensor) -> list[str]:
    """What two steps warn of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
    return [wrapped(str(each.message)) for each in caught if issubclass(each.category, UserWarning)]


class _WritesInputs(nn.Module):
    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.linear, self._copies = nn.Linear(DIM, DIM), copies

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = (x.clone(), y.clone()) if self._copies else (x, y)
        return self.linear(x.mul_(2) + y.mul_(3))


def _inputs_in_place(ctx: RankContext) -> str:
    x = batch().requires_grad_()
    error = ""
    for copies in (False, True):
        module = seeded(lambda copies=copies: _WritesInputs(copies=copies))
        (expected,) = torch.autograd.grad(module(x * 1, x * 1).sum(), x)
        fully_shard(module, mesh=ctx.mesh_1d())
        if copies:
            (found,) = torch.autograd.grad(module(x * 1, x * 1).sum(), x)
            torch.testing.assert_close(found, expected)
        else:
            error = error_of(lambda module=module: module(x * 1, x * 1))
            module.reset_iter_state()
    return error


def test_two_inputs_changed_in_place() -> None:
    """torch has the rest of the text: to change a copy."""
    error = same_on_all_ranks(_inputs_in_place)
    assert error.startswith("RuntimeError: Output 0 of InputOfShardedModule is a view and is being modified inplace.")


def _blocks_without_root(ctx: RankContext, ignored: bool = False) -> list[str]:
    model = seeded(Stack)
    plain = {*model.entry.parameters(), *model.exit.parameters()} if ignored else None
    for block in model.blocks:
        fully_shard(block, mesh=ctx.mesh_1d(), ignored_params=plain)
    return _step_of(torch.optim.AdamW(model.parameters()), model, batch(ctx.rank))


def test_plain_parameters_beside_shards_are_warned_of_once(golden: Check) -> None:
    (warning,) = same_on_all_ranks(_blocks_without_root)
    golden(warning)


def _parameter_of_the_loss(ctx: RankContext) -> str:
    model, scale = sharded(ctx), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), scale])
    (model(batch()) * scale).sum().backward()
    with pytest.warns(UserWarning, match="also plain parameters") as warned:
        optimizer.step()
    return str(warned[0].message)


def test_plain_parameter_that_no_module_has_is_warned_of_by_its_shape() -> None:
    text = same_on_all_ranks(_parameter_of_the_loss)
    assert "also plain parameters: one of shape () that no module has. Nothing reduces" in text


def test_plain_parameters_that_are_ignored_are_not_warned_of() -> None:
    assert same_on_all_ranks(_blocks_without_root, ignored=True) == []


def _blocks_of_one_rank(ctx: RankContext) -> list[str]:
    model, mesh = seeded(Stack), init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return _step_of(torch.optim.SGD(model.parameters()), model, batch())


def test_plain_parameters_are_not_warned_of_where_nothing_is_reduced() -> None:
    assert same_on_all_ranks(_blocks_of_one_rank) == []


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(DIM, DIM), nn.Linear(DIM, DIM, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


def _half_of_a_tie(ctx: RankContext) -> list[str]:
    model = seeded(_Tied)
    fully_shard(model.embedding, mesh=ctx.mesh_1d())
    return _step_of(torch.optim.AdamW(model.parameters()), model, torch.arange(4))


def test_one_of_two_tied_modules_sharded_is_warned_of_once(golden: Check) -> None:
    (warning,) = same_on_all_ranks(_half_of_a_tie)
    golden(warning)
