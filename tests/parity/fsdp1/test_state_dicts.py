"""Model state dicts of every kind, entry by entry as with torch's class."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from fsdp2.extras.lending import gathered_together
from fsdp2.fsdp1 import state_values
from tests.distributed.compile_support import start_compiling
from tests.harness.comms import gathers_noted
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import in_ci
from tests.parity.fsdp1.fronts import Front, as_torchs, assert_same, ours, quiet, same, with_ours
from tests.parity.fsdp1.kinds import FULL, FULL_SHARD, HYBRID, LOCAL, NO_SHARD, SHARDED


def on_rank_0(**options: bool) -> fsdp.FullStateDictConfig:
    """A new one: torch's class notes in it whether it has DTensors."""
    return fsdp.FullStateDictConfig(rank0_only=True, **options)


class Model(nn.Module):
    """Sizes that do not divide; a buffer that is not saved; a norm with an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(2))
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 1)
        self.register_buffer("saved", torch.arange(3.0))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)
        self.head.bias.requires_grad_(False)


def wrapped_model(front: Front, **options: Any) -> Any:
    """A wrapper in a wrapper, one around a module without parameters of its own, and the root."""
    model = Model()
    model.head.bias.requires_grad_(not options.get("use_orig_params", front.use_orig_params))
    for index in ("0", "2"):
        model.blocks[0].register_module(index, front.wrap(model.blocks[0].get_submodule(index), **options))
    model.blocks[0] = front.wrap(model.blocks[0], **options)
    model.norm = front.wrap(model.norm, **options)
    return front.wrap(model, **options)


def described(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Entries for ``assert_same``: ShardedTensors as their metadata and local parts."""
    return {name: _described_value(value) for name, value in state_dict.items()}


def _described_value(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        parts = [(repr(s.metadata), s.tensor.requires_grad, s.tensor.detach().clone()) for s in value.local_shards()]
        return ["ShardedTensor", repr(value.metadata()), parts]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def state_of(front: Front, model: nn.Module, kind: fsdp.StateDictType, *configs: Any, **options: Any) -> dict[str, Any]:
    with front.of_kind(model, kind, *configs):
        return described(quiet(model.state_dict, **options))


def values_of(module: nn.Module) -> dict[str, Any]:
    """What this rank has, by name."""
    return {
        f"{path}.{name}": (each.to_local() if isinstance(each, DTensor) else each).detach().clone()
        for path, child in module.named_modules()
        for name, each in [*child._parameters.items(), *child._buffers.items()]
        if each is not None
    }


@torch.no_grad()
def refill(module: nn.Module) -> None:
    """Give all parameters and buffers other values. State dicts share the memory of buffers."""
    for child in module.modules():
        for param in child._parameters.values():
            if param is not None:
                param.fill_(7)
        for name, buffer in child._buffers.items():
            if name not in child._non_persistent_buffers_set:
                setattr(child, name, torch.full_like(buffer, 7))


def loads_again(front: Front, model: Any, *kinds: fsdp.StateDictType) -> dict[str, Any]:
    """Each kind of state dict gives a model back what it had. Returns the last."""
    expected, state = values_of(model), {}
    for kind in kinds:
        with front.of_kind(model, kind):
            state = model.state_dict()
            refill(model)
            model.load_state_dict(state)
        assert_same(values_of(model), expected)
    return state


@as_torchs(2, 4, both_modes=True)
def test_every_kind_is_torchs(front: Front) -> list[Any]:
    model = wrapped_model(front)
    result = [state_of(front, model, FULL), state_of(front, model, FULL, prefix="a.b.", keep_vars=True)]
    result += [state_of(front, model, FULL, on_rank_0()), state_of(front, model, SHARDED)]
    result.append(state_of(front, model.blocks[0], SHARDED, fsdp.ShardedStateDictConfig(offload_to_cpu=True)))
    if not front.use_orig_params:  # else torch's has leftovers of its flattening, which it cannot load again
        result.append(state_of(front, model, LOCAL))
        result.append(state_of(front, nn.Sequential(model), LOCAL, fsdp.LocalStateDictConfig(offload_to_cpu=True)))
    return result


@as_torchs(2)
def test_local_values_lie_as_torchs_do_and_as_parameters_lay_in_memory(front: Front) -> list[Any]:
    """Torch aligns original parameters to 16 bytes; it also returns pieces of them, and cannot load the result. A
    convolution may lie in ``channels_last``, a weight may be transposed; either class loads what the other saves."""
    original = front.wrap(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)), use_orig_params=True)
    found = state_of(front, original, LOCAL)
    kind, metadata, ((place, requires_grad, values),) = found["_flat_param"]
    values[values == 42] = 0  # torch's filling
    assert not front.is_ours or list(found) == ["_flat_param"]

    def wrapped(seed: int) -> Any:
        torch.manual_seed(seed)
        convolution, linear = nn.Conv2d(3, 5, 3), nn.Linear(3, 4)
        linear.weight = nn.Parameter(torch.randn(3, 4).t())
        return front.wrap(nn.Sequential(convolution.to(memory_format=torch.channels_last), linear))

    model, other = wrapped(0), wrapped(1)
    with front.of_kind(model, LOCAL), front.of_kind(other, LOCAL):
        saved = model.state_dict()
        other.load_state_dict(saved)
    return [kind, metadata, place, requires_grad, values, described(saved), state_of(front, other, FULL)]


@as_torchs(2)
def test_device_mesh_makes_sharded_values_dtensors_and_refuses_local_ones(front: Front) -> list[Any]:
    model = wrapped_model(front, device_mesh=front.mesh(), use_orig_params=True)
    result = [state_of(front, model, FULL), state_of(front, model, SHARDED)]
    with front.of_kind(model, SHARDED):
        model.state_dict()  # torch's sets _use_dtensor here only
        result.append(front.cls.get_state_dict_type(model))
    with front.of_kind(model, LOCAL), pytest.raises(RuntimeError, match=r"device_mesh|DeviceMesh"):
        model.state_dict()
    return result


@as_torchs(2)
def test_no_shard_is_always_full_and_says_so(front: Front) -> list[Any]:
    model = wrapped_model(front, sharding_strategy=NO_SHARD)
    with front.of_kind(model, SHARDED), pytest.warns(UserWarning, match="NO_SHARD"):
        model.load_state_dict(model.state_dict())
    return [state_of(front, model, kind) for kind in (FULL, SHARDED, LOCAL)]


# Settings


@as_torchs(2)
def test_settings_come_and_go_as_with_torchs(front: Front) -> list[Any]:
    """After an exception, torch's class keeps them, and without wrappers it fails at the end of a block."""
    model = nn.Sequential(front.wrap(nn.Linear(3, 3)), front.wrap(nn.Linear(3, 3)))
    get, change = front.cls.get_state_dict_type, front.cls.set_state_dict_type
    result = [get(model)]
    with front.of_kind(model, SHARDED, fsdp.ShardedStateDictConfig(offload_to_cpu=True)):
        result.append(get(model))
        with front.of_kind(model[0], LOCAL):
            result.append(get(model[0]))
        result.append(get(model[1]))
    result.append(get(model))
    result.append(quiet(change, model, LOCAL))
    rank_0_has_states = fsdp.FullStateDictConfig(), fsdp.FullOptimStateDictConfig(rank0_only=True)
    result.append(quiet(change, model, FULL, *rank_0_has_states))
    for wrong in ([fsdp.FullStateDictConfig()], [None, fsdp.FullOptimStateDictConfig()]):
        with pytest.raises(RuntimeError, match=r"[Ee]xpected"):
            quiet(change, model, SHARDED, *wrong)
    result += [get(model), get(nn.Linear(2, 2))]
    if front.is_ours:
        with pytest.raises(KeyError), front.of_kind(model, SHARDED):
            raise KeyError
        with front.of_kind(nn.Linear(2, 2), SHARDED):
            pass
        assert get(model) == result[-2]
        with front.of_kind(model[0], SHARDED):  # unlike ones
            for call in (lambda: get(model), lambda: change(model, LOCAL)):
                with pytest.raises(RuntimeError, match="outermost one has"):
                    call()
            assert get(model[1]) == result[-2]
    return result


# What else is in a model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight


class Extra(nn.Linear):
    extra = 3

    def get_extra_state(self) -> dict[str, int]:
        return {"extra": self.extra}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.extra = state["extra"]


@pytest.mark.parametrize("kind", [FULL, SHARDED])
@distributed(2)
def test_ties_extra_states_hooks_and_checkpoint_wrappers_are_saved_and_loaded(ctx: RankContext, kind) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def made(front: Front) -> nn.Module:
        model = nn.Sequential(Tied(), Extra(3, 3), checkpoint_wrapper(nn.Linear(5, 3)), nn.ReLU())
        model[1] = front.wrap(model[1], use_orig_params=True)
        model[2] = front.wrap(model[2], use_orig_params=True)
        model = nn.Sequential(front.wrap(model, use_orig_params=True), nn.Linear(2, 2))

        def add(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
            state_dict[f"{prefix}added"] = sorted(name for name in state_dict if name.startswith(prefix))

        model[0].register_state_dict_post_hook(add)
        return model

    def scenario(front: Front) -> dict[str, Any]:
        found = state_of(front, made(front), kind)
        if not front.is_ours:  # torch's shares freed memory between tied entries
            found["0.0.b.weight"] = found["0.0.a.weight"]
        return dict(sorted(found.items()))

    same(ctx, scenario)
    model: Any = made(ours(ctx))
    expected = values_of(model)
    with ours(ctx).of_kind(model, kind):
        state = model.state_dict()
        assert state["0.0.a.weight"] is state["0.0.b.weight"]
        del state["0.added"]
        refill(model[0])
        model[0].module[1].module.extra = 0
        model.load_state_dict(state)
    assert_same(values_of(model), expected)
    assert model[0].module[1].module.extra == 3


@with_ours(2)
def test_state_dicts_inside_of_compiled_functions(front: Front) -> None:
    """They enter the runtime by a door that ends the compiler's graph."""
    start_compiling()
    model = front.wrap(nn.Sequential(front.wrap(nn.Linear(3, 5)), nn.Linear(5, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    for kind in (FULL, SHARDED):
        with front.of_kind(model, kind):
            state, expected = torch.compile(lambda: model.state_dict(), backend="eager")(), values_of(model)
            assert_same(described(state), described(model.state_dict()))
            refill(model)
            torch.compile(lambda: model.load_state_dict(state), backend="eager")()  # noqa: B023
            assert_same(values_of(model), expected)
    calls: list[Callable[[], Any]] = [
        lambda: front.cls.optim_state_dict(model, optimizer),
        lambda: front.cls.optim_state_dict_to_load(model, optimizer, front.cls.optim_state_dict(model, optimizer)),
    ]
    for call in calls:
        assert_same(torch.compile(call, backend="eager")(), call())


@with_ours(2)
def test_a_parameter_tied_across_wrappers_is_saved_under_both_names(front: Front) -> None:
    """The outer unit takes it over. Torch's class leaves a part of it with the inner wrapper."""
    model = Tied()
    model.a = front.wrap(model.a)
    model = front.wrap(model)
    for kind in (FULL, SHARDED, LOCAL):
        state = loads_again(front, model, kind)
        if kind is not LOCAL:
            assert sorted(state) == ["a.bias", "a.weight", "b.bias", "b.weight"]
            assert state["a.weight"] is state["b.weight"]


@with_ours(2)
def test_wrappers_inside_modules_and_modules_inside_wrappers_have_state_dicts(front: Front) -> None:
    """Inside of ``unsharded``, they have what was written, as torch's class inside of ``summon_full_params``."""
    whole = {name: value.clone() for name, value in Model().state_dict().items()}
    torch.manual_seed(0)
    model = wrapped_model(front)
    # A module inside a wrapper has the shards, as with fully_shard, and takes whole values.
    inner = model.module.head
    assert inner.state_dict()["weight"].placements == (Shard(0),)
    inner.load_state_dict({name: whole[f"head.{name}"] for name in ("weight", "bias")})
    model.module.load_state_dict(whole)
    assert_same(dict(model.state_dict()), whole)
    model = front.wrap(nn.Linear(3, 5))
    with fsdp2.unsharded(model), torch.no_grad():
        model.module.weight.fill_(2.0)
        full, sharded = model.state_dict(), state_of(front, model, SHARDED)
        model.module.weight.fill_(3.0)
    assert_same(full["weight"], torch.full((5, 3), 2.0))
    assert (sharded["weight"][2][0][2] == 2).all()


@with_ours(2)
def test_values_stay_when_the_model_is_trained_on(front: Front) -> None:
    inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    inner[1] = front.wrap(inner[1])
    inner[2].register_buffer("first", torch.zeros(2))
    inner[2].register_buffer("second", inner[2].first)
    model = front.wrap(inner)
    states = []
    for kind in (FULL, SHARDED, LOCAL):
        with front.of_kind(model, kind):
            states.append(quiet(model.state_dict))
    assert all(state["2.first"].data_ptr() == state["2.second"].data_ptr() for state in states)
    expected = [str(described(state)) for state in states]
    front.train(model, torch.optim.SGD, lr=1.0, num_steps=1, shape=(2, 3))
    inner[2].first.add_(1)
    assert [str(described(state)) for state in states] == expected
    assert str(state_of(front, model, FULL)) != expected[0]


@with_ours(2)
def test_full_state_dict_is_one_of_the_model_without_wrappers(front: Front) -> None:
    """Its values have memory of their own and no more. On the CPU, torch 2.13 reads freed memory where it offloads."""
    for strategy in (FULL_SHARD, NO_SHARD):
        model, plain = wrapped_model(front, sharding_strategy=strategy), Model()
        state, expected = model.state_dict(), state_of(front, model, FULL)
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in state.values())
        assert list(state) == list(plain.state_dict())
        assert state._metadata["norm"] == {"version": 2}
        plain.load_state_dict(state)
        assert_same(dict(plain.state_dict()), dict(state))
        assert_same(state_of(front, model, FULL, fsdp.FullStateDictConfig(offload_to_cpu=True)), expected)
        found = state_of(front, model, FULL, on_rank_0(offload_to_cpu=True))
        assert_same(found, expected if front.ctx.rank == 0 or strategy is NO_SHARD else {})


@with_ours(2)
def test_full_gathers_once_per_unit_and_holds_one_where_nothing_is_saved_and_sharded_not_at_all(front: Front) -> None:
    seen: list[Any] = []
    counts = []

    def gathered(*args: Any) -> list[torch.Tensor]:
        counts.append(sum(each() is not None for each in seen))
        values = gathered_together(*args)
        seen.extend(map(weakref.ref, values))
        return values

    model = wrapped_model(front)
    with mock.patch.object(state_values, "gathered_together", gathered), front.of_kind(model, FULL, on_rank_0()):
        state = model.state_dict()
    assert len(counts) == 4
    assert front.ctx.rank == 0 or not any(counts)
    assert len(state) == (0 if front.ctx.rank else 17)
    for kind, expected in ((FULL, 4), (SHARDED, 0)):
        with front.of_kind(model, kind), gathers_noted() as launches:
            model.state_dict()
        assert len(launches) == expected


class Scaled(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("scale", torch.rand(sizes[1]))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale.to(x.dtype)


def one_more(model: Any) -> dict[str, Any]:
    """Load what the state dict holds, plus 1."""
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    return dict(sorted(model.state_dict().items()))


@as_torchs(2)
def test_buffers_that_were_cast_are_saved_in_their_original_dtype(front: Front) -> list[Any]:
    precision = fsdp.MixedPrecision(buffer_dtype=torch.float16)
    inner = front.wrap(Scaled(3, 3), mixed_precision=precision)
    model = front.wrap(nn.Sequential(inner, Scaled(3, 3)), mixed_precision=precision)
    model(front.batch(4, 3))  # torch's casts already when a state dict is made, and so loses bits
    result: list[Any] = [[buffer.dtype for buffer in model.buffers()]]
    result += [state_of(front, model, kind) for kind in (FULL, SHARDED)]  # torch's local ones stay cast
    return [*result, one_more(model), [buffer.dtype for buffer in model.buffers()]]


@as_torchs(2, both_modes=True)
def test_ignored_parameters_and_buffers_are_saved_as_they_are(front: Front) -> list[Any]:
    model = Model()
    model.head.bias.requires_grad_(True)
    model.blocks[1] = front.wrap(model.blocks[1])
    model = front.wrap(model, ignored_modules=[model.blocks[0], model.norm])
    kinds = [(FULL,), (SHARDED,), (FULL, on_rank_0()), *([] if front.use_orig_params else [(LOCAL,)])]
    result = [state_of(front, model, *kind) for kind in kinds]
    return [*(dict(sorted(each.items())) for each in result), one_more(model)]


@pytest.mark.parametrize("given", ["device_mesh", "process_group"])
@distributed(4)
@pytest.mark.long
def test_hsdp_is_torchs(ctx: RankContext, given: str) -> None:
    """Torch's local parts name ranks of their group as if these were ranks of the world. So local state dicts of the
    second replica raise."""
    mesh, models = ctx.mesh_2d(2, 2), list[Any]()
    options = {"device_mesh": mesh, "process_group": (mesh.get_group("shard"), mesh.get_group("replicate"))}

    def scenario(front: Front) -> list[Any]:
        models.append(wrapped_model(front, sharding_strategy=HYBRID, **{given: options[given]}))
        result = [state_of(front, models[-1], *kind) for kind in ((FULL,), (FULL, on_rank_0()), (SHARDED,))]
        if given == "process_group":
            sharded = [(name, value) for name, value in result.pop().items() if isinstance(value, list)]
            result += [{name: [value[1], [values for *_, values in value[2]]]} for name, value in sharded]
        return result

    same(ctx, scenario)
    loads_again(ours(ctx), models[-1], SHARDED, *([LOCAL] if given == "process_group" else []))


# Loading


def loaded(front: Front, model: nn.Module, state: dict[str, Any], **options: Any) -> Any:
    """What loading returns or raises."""
    try:
        result = quiet(model.load_state_dict, state, **options)
    except Exception as error:
        return type(error).__name__, str(error).replace("_fsdp_wrapped_module.", "")
    return list(result.missing_keys), list(result.unexpected_keys)


@pytest.mark.every_case
@pytest.mark.parametrize("case", [(FULL, True), (SHARDED, False), *in_ci((FULL, False))], ids=str)
@as_torchs(2)
def test_loading_returns_and_raises_what_torchs_does(front: Front, case: tuple[fsdp.StateDictType, bool]) -> list[Any]:
    """Afterwards, torch's class has loaded a part. Ours has loaded nothing."""
    kind, use_orig_params = case
    model, source = (wrapped_model(front, use_orig_params=use_orig_params) for _ in range(2))
    with front.of_kind(model, kind), front.of_kind(source, kind):
        other = source.state_dict()
        expected = values_of(model)
        less = {name: value for name, value in other.items() if name != "blocks.0.2.bias"}
        more = {**other, "x": torch.ones(1)}
        result = [loaded(front, model, each) for each in ({}, less, more)]
        if kind is FULL:
            wrong = {**other, "blocks.0.0.weight": torch.zeros(4, 3)}
            result += [loaded(front, model, each) for each in (wrong, more | {"head.weight": torch.ones(2)})]
            result.append(loaded(front, model, wrong, strict=False))
        else:
            result.append(loaded(front, model, {**other, "head.weight": other["norm.weight"]}))
        if front.is_ours:
            assert_same(values_of(model), expected)
        result.append(loaded(front, model, {"x": torch.ones(1), **less}, strict=False))
        return [*result, loaded(front, model, other), described(model.state_dict())]


@with_ours(2)
def test_what_one_rank_cannot_load_raises_on_all_and_loads_nothing(front: Front) -> None:
    model = wrapped_model(front)
    before = values_of(model)
    whole = {name: value + 1 for name, value in model.state_dict().items()}
    less = {name: value for name, value in whole.items() if name != "norm.weight"}
    no_dict = "On rank 1: load_state_dict: expected a dict of tensors, got a NoneType"  # only the first read the file
    given: Any
    for given, error, match in ((less, RuntimeError, r"norm\.weight"), (None, TypeError, no_dict)):
        with pytest.raises(error, match=match):
            model.load_state_dict(given if front.ctx.rank == 1 else whole)
        assert_same(values_of(model), before)
    model.load_state_dict(less, strict=False)


@with_ours(2, both_modes=True)
def test_every_kind_is_loaded_again(front: Front) -> None:
    model = wrapped_model(front)
    local = loads_again(front, model, FULL, SHARDED, LOCAL)
    with front.of_kind(model, LOCAL):
        refill(model)
        before = values_of(model)
        right, local["blocks.0.2._flat_param"] = local["blocks.0.2._flat_param"], local["_flat_param"]
        with pytest.raises(RuntimeError, match=r"'blocks\.0\.2\._flat_param'.*number of ranks"):
            model.load_state_dict(local)
        local["blocks.0.2._flat_param"] = right
        if front.ctx.rank == 1:
            del local["_flat_param"]
        match = r"rank 1 of the group: .*'_flat_param' is missing|load_state_dict: '_flat_param' is missing"
        with pytest.raises(RuntimeError, match=match):
            model.load_state_dict(local)
        assert_same(values_of(model), before)


@with_ours(2)
def test_assigned_values_are_taken_over(front: Front) -> None:
    """``assign=True`` replaces parameters, also those on the meta device."""
    model = front.wrap(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), use_orig_params=True)
    state = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert_same(dict(model.state_dict()), state)
    assert model(front.batch(4, 3)).shape == (4, 5)
    replicated = {
        name: DTensor.from_local(value + 1, front.mesh(), [Replicate()]) if value.ndim else value
        for name, value in state.items()
    }
    replicated.update((name, state[name]) for name in state if "running" in name)
    model.load_state_dict(replicated)
    assert_same(model.state_dict()["0.weight"], state["0.weight"] + 1)


@with_ours(2)
def test_refused_without_values_and_while_a_forward_runs(front: Front) -> None:
    model = front.wrap(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    model.module[1].register_forward_hook(lambda *_: model.state_dict())
    with pytest.raises(fsdp2.ScheduleError, match="forward"):
        model(front.batch(2, 3))
    model = front.wrap(nn.Linear(3, 3)).to("meta")
    with pytest.raises(RuntimeError, match="meta device"):
        model.state_dict()
