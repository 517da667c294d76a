"""Construction: names and arguments are torch's, what is wrapped, over which ranks; what is refused changes nothing."""

from __future__ import annotations

import copy
import inspect
import itertools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, sharded_grad_scaler, wrap
from torch.distributed.fsdp._fsdp_extensions import FSDPExtensions
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp2
import fsdp2.fsdp1
import fsdp2.fsdp1.wrap
from fsdp2.core.group.group import groups_by_slot
from fsdp2.core.runtime.unit import unit_of
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Block
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import CPU, ON_TWO_RANKS, Front, as_torchs, mlp, ours, quiet, same, theirs, with_ours
from tests.parity.fsdp1.kinds import FULL_SHARD, GRAD_OP, HYBRID, HYBRID_ZERO2, NO_SHARD, SHARDED
from tests.parity.fsdp1.test_extensions import example, extension_set

THEIRS, OURS = torch.distributed.fsdp, fsdp2.fsdp1
OF_FSDP2 = {  # the other names of torch.distributed.fsdp
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Without annotations: ours have fewer private types."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


def methods(cls: type) -> dict[str, Any]:
    """What the class itself defines for users."""
    names = (name for name in vars(cls) if not name.startswith("_") or name in ("__init__", "_unshard"))
    return {name: inspect.getattr_static(cls, name) for name in names}


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the list of names is that of torch 2.13")
def test_all_names_are_there() -> None:
    assert set(THEIRS.__all__) - OF_FSDP2 <= set(OURS.__all__)
    assert set(wrap.__all__) <= set(OURS.wrap.__all__)
    assert set(THEIRS.__all__) >= OF_FSDP2
    assert set(THEIRS.__all__) & OF_FSDP2 <= set(fsdp2.__all__) | {"UnshardHandle"}


IN_TORCH = methods(THEIRS.FullyShardedDataParallel)


@pytest.mark.parametrize("name", sorted(IN_TORCH))
def test_methods_take_what_those_of_torchs_class_take(name) -> None:
    cls = OURS.FullyShardedDataParallel
    expected, found = IN_TORCH[name], inspect.getattr_static(cls, name, None)
    assert type(found) is type(expected), f"{name}: {found} and {expected}"
    if isinstance(expected, property):
        return
    passes_on = name in ("named_parameters", "named_buffers")  # torch's class: to nn.Module, with *args
    of_torch = nn.Module if passes_on else THEIRS.FullyShardedDataParallel
    assert parameters(getattr(cls, name)) == parameters(getattr(of_torch, name))


def test_policies_are_torchs_and_the_scaler_and_extensions_take_what_torchs_take() -> None:
    assert all(getattr(OURS.wrap, name) is getattr(wrap, name) for name in (*wrap.__all__, "_or_policy"))
    assert parameters(OURS.ShardedGradScaler) == parameters(sharded_grad_scaler.ShardedGradScaler)
    assert OURS.FSDPExtensions.__abstractmethods__ == FSDPExtensions.__abstractmethods__
    for name in FSDPExtensions.__abstractmethods__:
        assert parameters(getattr(OURS.FSDPExtensions, name)) == parameters(getattr(FSDPExtensions, name)), name


BY_LINEARS = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}


def refused(ctx: RankContext, error: type[Exception], match: str, module: nn.Module | None = None, **options) -> None:
    """Ours raises, and leaves the model as it was; torch's raises an error of the same type."""
    for front in (ours(ctx), theirs(ctx)):
        model = module or mlp()
        with pytest.raises(error) as found:
            front.wrap(model, **options)
        if front.is_ours:
            assert match in str(found.value), str(found.value)
            assert all(unit_of(each) is None for each in model.modules())
            assert not any(isinstance(each, front.cls) for each in model.modules())


@distributed(2)
def test_contradictions_are_refused(ctx: RankContext) -> None:
    mesh, params = ctx.mesh_1d(), list(mlp().parameters())
    group = mesh.get_group()
    refused(ctx, ValueError, "Pass device_mesh only", process_group=group, device_mesh=mesh)
    refused(ctx, ValueError, "ignored_states only", ignored_modules=[], ignored_states=[])
    refused(ctx, ValueError, "has Linear and Parameter", ignored_states=[params[0], nn.Linear(1, 1)])
    refused(ctx, ValueError, "expected modules only", ignored_modules=[params[0]])
    refused(ctx, ValueError, "a pair of groups (shard, replicate)", sharding_strategy=HYBRID)
    refused(ctx, ValueError, "two process groups", sharding_strategy=HYBRID, process_group=group)
    refused(ctx, ValueError, "expects two axes", sharding_strategy=HYBRID, device_mesh=mesh)


@distributed(2)
def test_what_one_flat_parameter_cannot_hold_is_refused_and_original_ones_can(ctx: RankContext) -> None:
    frozen, doubled, scalar = mlp(), mlp(), mlp()
    frozen[2].bias.requires_grad_(False)
    doubled[2].bias = nn.Parameter(doubled[2].bias.double())
    scalar[2].scale = nn.Parameter(torch.tensor(1.0))
    for options in ({}, BY_LINEARS):
        refused(ctx, ValueError, "requires_grad=True and Linear.bias has requires_grad=False", frozen, **options)
        refused(ctx, ValueError, "expects one dtype. Pass use_orig_params=True", doubled, **options)
        refused(ctx, ValueError, "Linear.scale is a scalar", scalar, **options)
    doubled, front = mlp(), ours(ctx)
    doubled[4] = doubled[4].double()
    doubled[0].bias.requires_grad_(False)
    doubled[3].register_forward_hook(lambda module, args, output: output.double())
    wrapped = front.wrap(doubled, use_orig_params=True)  # torch's class refuses two dtypes also here
    assert {param.dtype for param in wrapped.parameters()} == {torch.float32, torch.float64}
    assert len(front.train(wrapped)) == 3


class NoReset(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, device=device))


@with_ours(2)
def test_types_are_checked_and_models_may_not_stay_on_the_meta_device(front: Front) -> None:
    named, no_reset = "FullyShardedDataParallel: {} is a .*, expected a ", "NoReset has no reset_parameters"
    integers, partly = MixedPrecision(param_dtype=torch.int8), nn.Linear(2, 2, device="meta")
    refusals: list[tuple[type[Exception], Any, dict[str, Any], str]] = [
        (TypeError, mlp(), {"sharding_strategy": "FULL"}, named.format("sharding_strategy")),
        (TypeError, mlp(), {"mixed_precision": torch.bfloat16}, named.format("mixed_precision")),
        (TypeError, mlp(), {"cpu_offload": True}, named.format("cpu_offload")),
        (TypeError, "model", {}, r"expected an nn\.Module"),
        (TypeError, mlp(), {"auto_wrap_policy": {nn.Linear}}, "policy is a set"),
        (ValueError, mlp(), {"mixed_precision": integers}, r"\.param_dtype is torch\.int8, expected a floating-point"),
        (ValueError, mlp(), {"device_id": 0}, "device_id=0, but torch finds no accelerator"),
        (ValueError, nn.Sequential(front.wrap(nn.Linear(2, 2))), BY_LINEARS, r"sharded already\. Wrap by the policy"),
        (AttributeError, nn.Sequential(NoReset("meta")), {}, no_reset),
        (AttributeError, nn.Sequential(partly, NoReset("cpu")), BY_LINEARS, no_reset),
        (RuntimeError, partly, {"param_init_fn": lambda _: None}, "'weight' of a Linear is still on the meta device"),
    ]
    for error, model, options, match in refusals:
        with pytest.raises(error, match=match):
            front.wrap(model, **options)
    assert unit_of(partly) is None


@with_ours(2, both_modes=True)
def test_what_torchs_class_or_fully_shard_has_sharded_is_refused(front: Front) -> None:
    model = mlp()
    model[2] = theirs(front.ctx).wrap(model[2], use_orig_params=front.use_orig_params)
    values = [param.detach().clone() for param in model.parameters()]
    name = "weight" if front.use_orig_params else "_flat_param"
    for call in (
        lambda: front.wrap(model, use_orig_params=False, sync_module_states=True),
        lambda: front.wrap(model, use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({nn.ReLU})),
        lambda: fsdp2.fully_shard(model, mesh=front.mesh()),
        lambda: fsdp2.fully_shard([model[0], model[2]], mesh=front.mesh()),
    ):
        with pytest.raises(ValueError, match=rf"'(2|\[1\])\.{name}' was sharded by torch"):
            call()
        assert all(unit_of(module) is None for module in model.modules())
        assert type(model) is nn.Sequential
        assert all(map(torch.equal, model.parameters(), values))
    with pytest.raises(ValueError, match=r"fully_shard was called on this Sequential"):
        front.wrap(fsdp2.fully_shard(mlp(), mesh=front.mesh()))


@as_torchs(2, both_modes=True)
def test_a_wrapper_is_wrapped_again(front: Front) -> Any:
    """The outer one has no parameters of its own; names, state dicts and losses are those of one more module."""
    inner = front.wrap(mlp())
    outer = front.wrap(inner)
    assert outer.module is inner
    optimizer = torch.optim.AdamW(outer.parameters(), lr=1e-2)
    losses = front.train(outer, optimizer)
    names = [[name for name, _ in each.named_parameters()] for each in (outer, inner)]
    outer.load_state_dict(outer.state_dict())
    states = [dict(each.state_dict()) for each in (outer, inner)]
    moments = list(quiet(front.cls.full_optim_state_dict, outer, optimizer, rank0_only=False)["state"])
    with front.cls.summon_full_params(outer):
        whole = {name: param.detach().clone() for name, param in outer.named_parameters()}
    if front.is_ours:
        assert front.train(copy.deepcopy(outer)) == front.train(copy.deepcopy(inner))
    return [losses, names, states, sorted(moments), whole, len(front.cls.fsdp_modules(outer))]


@with_ours(2)
def test_what_a_wrapper_has_wrapped_trains_in_another_one(front: Front) -> None:
    """Torch's class makes the second wrapper, too, but its forward computes with shards."""
    losses = []
    for num_wrappers in (1, 2):
        torch.manual_seed(0)
        model = mlp()
        wrappers = [front.wrap(model, use_orig_params=True) for _ in range(num_wrappers)]
        optimizer = torch.optim.SGD(wrappers[-1].parameters(), lr=0.1)
        losses.append([*front.train(wrappers[-1], optimizer), *front.train(wrappers[0], optimizer)])
    assert losses[0] == losses[1]


@as_torchs(2)
def test_a_device_is_named_by_a_string(front: Front) -> Any:
    with pytest.raises(RuntimeError, match="nonsense"):
        front.wrap(mlp(), device_id="nonsense")
    with pytest.raises(TypeError):
        front.wrap(mlp(), device_id=1.5)
    model = front.wrap(mlp(), device_id="cpu", **BY_LINEARS)
    return [model.compute_device.type, *front.train(model)]


@as_torchs(2)
def test_settings_of_the_schedule_change_no_value_and_containers_get_a_warning(front: Front) -> Any:
    with pytest.warns(UserWarning, match="forward"):
        front.cls(nn.ModuleList([nn.Linear(2, 2)]), device_id=CPU)
    prefetches = [{"backward_prefetch": each} for each in (None, BackwardPrefetch.BACKWARD_POST)]
    others = [{"forward_prefetch": True}, {"limit_all_gathers": False}, {"mixed_precision": MixedPrecision()}]
    return [front.train(quiet(front.wrap, mlp(), **BY_LINEARS, **options)) for options in (*prefetches, *others)]


@with_ours(2)
def test_no_backward_prefetch_gathers_one_unit_at_a_time(front: Front) -> None:
    for prefetch, num_prefetches in ((None, 0), (BackwardPrefetch.BACKWARD_PRE, 2)):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        model = front.wrap(model, backward_prefetch=prefetch, **BY_LINEARS)
        for _ in range(2):
            loss = model(front.batch(2, 8)).sum()
            with fsdp2.report.trace.record(model) as recorded:
                loss.backward()
        assert str(recorded).count("prefetch") == num_prefetches
        assert "_fsdp_wrapped_module" not in str(recorded)


@pytest.mark.long
@with_ours(1)
def test_one_rank_shards_nothing(front: Front) -> None:
    model = front.wrap(mlp())
    assert model.sharding_strategy is NO_SHARD
    assert len(front.train(model)) == 3


class StoppedError(Exception):
    """What a function of the user raises."""


def model_of() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model[4].weight = nn.Parameter(model[4].weight.detach().clone())
    model[0].register_forward_hook(lambda *_: None)
    return model


def raising_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which raises instead when it is called for the ``call``-th time."""
    calls = itertools.count(1)

    def counted(*args: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise StoppedError(f"call {call}")
        return function(*args, **options)

    return counted


def failing(owner: Any, name: str, call: int) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, raising_at(call, getattr(owner, name)))


def fill(module: nn.Module) -> None:
    for name, param in module.named_parameters(recurse=False):
        setattr(module, name, nn.Parameter(torch.full_like(param, 0.1, device="cpu")))


def leave_the_last_one(module: nn.Module) -> None:
    if not (isinstance(module, nn.Linear) and module.out_features == 4):
        fill(module)


def overrides(module: nn.Module) -> bool | dict[str, object]:
    if isinstance(module, nn.Linear) and module.out_features == 4:
        return {"sharding_strategy": "no strategy"}
    return isinstance(module, nn.Linear)


@contextmanager
def failing_extension() -> Any:
    """All parameters are asked for once to check them, and once more unit by unit."""
    extensions = example().LogExtensions()
    extensions.pre_flatten_transform = raising_at(8 + 3, extensions.pre_flatten_transform)
    with extension_set(extensions):
        yield


def rows() -> dict[str, tuple[str, dict[str, Any], Callable[[], Any]]]:
    """What is raised, the arguments, and what to do meanwhile. What begins with "meta" has its model there."""
    synced = {**BY_LINEARS, "sync_module_states": True}
    in_fp32 = MixedPrecision(param_dtype=torch.bfloat16, _module_classes_to_ignore=[nn.LayerNorm])
    keeping = MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True)
    asking = raising_at(4, lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.Linear))
    broadcast, reset = failing(dist, "broadcast", 4), failing(nn.Linear, "reset_parameters", 3)
    return {
        "meta: param_init_fn": ("call 3", {**BY_LINEARS, "param_init_fn": raising_at(3, fill)}, nullcontext),
        "options of the policy": ("strategy", {"auto_wrap_policy": wrap.CustomPolicy(overrides)}, nullcontext),
        "the policy": ("call 4", {"auto_wrap_policy": asking}, nullcontext),
        "meta: a parameter left there": ("still on", {**BY_LINEARS, "param_init_fn": leave_the_last_one}, nullcontext),
        "meta: reset_parameters": ("call 3", BY_LINEARS, reset),
        "sync_module_states": ("call 4", synced, broadcast),
        "an extension": ("call 11", BY_LINEARS, failing_extension),
        "in full precision": ("call 4", {**synced, "mixed_precision": in_fp32}, broadcast),
        "gradients that keep their dtype": ("call 4", {**synced, "mixed_precision": keeping}, broadcast),
        "the device": ("device", {**BY_LINEARS, "device_id": "nowhere"}, nullcontext),
    }


def described(model: nn.Module) -> list[Any]:
    """All that construction could change: modules, their attributes and hooks, parameters and buffers by identity."""
    found: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        found.append((name, module, type(module)))
        for attribute, value in vars(module).items():
            items = [(key, id(each)) for key, each in value.items()] if isinstance(value, dict) else value
            found.append((name, attribute, id(value), items))
    for param in model.parameters():
        is_own = getattr(param, "grad_dtype", None)
        found.append((vars(param).copy(), param.device, param.requires_grad, param.data_ptr(), is_own))
    return found


ROWS = [*rows()]


@pytest.mark.parametrize("row", [*ROWS[:2], *long(*ROWS[2:])])
@pytest.mark.parametrize("use_orig_params", [True, *long(False)])
@distributed(2)
def test_the_model_is_as_it_was_and_can_be_wrapped(ctx: RankContext, row: str, use_orig_params: bool) -> None:
    message, options, meanwhile = rows()[row]
    on_meta, front = row.startswith("meta"), Front(ctx, ours(ctx).names, use_orig_params)
    with torch.device("meta" if on_meta else "cpu"):
        model = model_of()
    before, values = described(model), [param.detach().clone() for param in model.parameters()]
    with meanwhile(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*get a wrapper of their own")
        with pytest.raises(Exception, match=message) as raised:
            front.wrap(model, **options)
    assert described(model) == before
    assert {slot.module for slot in groups_by_slot()}.isdisjoint(model.modules())  # the traceback keeps the groups
    del raised
    if not on_meta:
        assert all(map(torch.equal, model.parameters(), values))
        assert model(torch.ones(2, 8)).shape == (2, 4)
    again = front.wrap(model, param_init_fn=fill, **BY_LINEARS)
    other = front.wrap(model_of(), **BY_LINEARS)
    if on_meta:
        with again.summon_full_params(again), other.summon_full_params(other), torch.no_grad():
            for param, filled in zip(other.parameters(), again.parameters(), strict=True):
                param.copy_(filled)
    assert front.train(again) == front.train(other)


class Residual(MLP):
    def __init__(self, is_shared: bool = False) -> None:
        super().__init__(2, 8)
        self.blocks.append(self.blocks[0] if is_shared else nn.Identity())
        self.exit = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))


def by_size(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return nonwrapped_numel >= 100


def chosen(module: nn.Module) -> bool | dict[str, object]:
    if isinstance(module, Block):
        return {"sharding_strategy": GRAD_OP}
    return isinstance(module, nn.LayerNorm)


POLICIES = {
    "module classes": wrap.ModuleWrapPolicy({Block, nn.LayerNorm}),
    "custom": wrap.CustomPolicy(chosen),
    "transformer": partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "lambda": partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)),
    "size": partial(wrap.size_based_auto_wrap_policy, min_num_params=100),
    "always": wrap.always_wrap_policy,
    "plain function": by_size,
}


@pytest.mark.parametrize("use_orig_params", [True, *long(False)])
@pytest.mark.parametrize("policy", POLICIES)
@as_torchs(2)
def test_policies_wrap_what_torchs_class_wraps(front: Front, policy, use_orig_params) -> Any:
    model = front.wrap(Residual(), auto_wrap_policy=POLICIES[policy], use_orig_params=use_orig_params)
    wrapped = [name for name, module in model.named_modules() if isinstance(module, front.cls)]
    strategies = [module.sharding_strategy.name for module in front.cls.fsdp_modules(model)]
    return [wrapped, strategies, *front.train(model)]


@with_ours(2)
def test_shared_modules_are_wrapped_in_all_places(front: Front) -> None:
    """Torch's class wraps them in one place, and reads sharded parameters in the others."""
    torch.manual_seed(0)
    expected = front.train(front.wrap(Residual(is_shared=True)))
    torch.manual_seed(0)
    model = front.wrap(Residual(is_shared=True), auto_wrap_policy=POLICIES["module classes"])
    assert model.blocks[2] is model.blocks[0]
    assert isinstance(model.blocks[2], front.cls)
    assert front.train(model) == expected


@as_torchs(2)
def test_wrap_and_enable_wrap(front: Front) -> Any:
    options = {"wrapper_cls": front.cls, "device_id": torch.device("cpu"), "use_orig_params": True}
    with wrap.enable_wrap(**options):
        model = nn.Sequential(wrap.wrap(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4))
        model = wrap.wrap(model, sharding_strategy=GRAD_OP)
    assert isinstance(model[0], front.cls)
    return [model.sharding_strategy.name, *front.train(model)]


@pytest.mark.parametrize("what", ["parameters", "modules", "ignored_modules"])
@as_torchs(2)
def test_ignored_states_stay_as_they_are(front: Front, what) -> Any:
    model = Residual()
    left_alone = model.exit
    options = {
        "parameters": {"ignored_states": list(left_alone.parameters())},
        "modules": {"ignored_states": [left_alone]},
        "ignored_modules": {"ignored_modules": [left_alone]},
    }[what]
    wrapped = front.wrap(model, auto_wrap_policy=POLICIES["module classes"], use_orig_params=True, **options)
    assert type(left_alone[1].weight) is nn.Parameter
    return [isinstance(left_alone[0], front.cls), *front.train(wrapped), left_alone[1].weight.detach()]


@as_torchs(2)
def test_models_on_the_meta_device(front: Front) -> Any:
    losses = []
    for norm, options in ((nn.ReLU, {"param_init_fn": fill}), (partial(nn.BatchNorm1d, 8), {})):
        torch.manual_seed(1)
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 8), norm(), nn.Linear(8, 4))
        model = front.wrap(model, auto_wrap_policy=POLICIES["lambda"], use_orig_params=True, **options)
        losses += front.train(model)
    return losses


@with_ours(2)
def test_states_are_those_of_the_first_rank(front: Front) -> None:
    """Torch's class refuses CPU parameters for ``sync_module_states``; ours sends them."""
    losses = []
    for seed, options in ((0, {}), (front.ctx.rank, {"sync_module_states": True})):
        torch.manual_seed(seed)
        norm = nn.BatchNorm1d(8)
        norm.running_mean.fill_(float(seed))  # type: ignore[union-attr]
        model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 4))
        wrapped = front.wrap(model, auto_wrap_policy=POLICIES["lambda"], **options)
        assert norm.running_mean[0] == 0  # type: ignore[index]
        losses.append(front.train(wrapped))
    assert losses[0] == losses[1]


@with_ours(2)
def test_buffers_that_nobody_has_sent_are_those_of_the_first_rank(front: Front) -> None:
    """Of ignored modules, and of wrappers that were not told to send. Torch's class does it on accelerators only."""
    ignored, inner, outer = (nn.BatchNorm1d(8) for _ in range(3))
    for norm in (ignored, inner, outer):
        for buffer in (norm.running_mean, norm.running_var):
            buffer.fill_(1.0 + front.ctx.rank)
        nn.init.constant_(norm.weight, 1.0 + front.ctx.rank)
    model = nn.Sequential(nn.Linear(8, 8), ignored, front.wrap(inner), outer)
    front.wrap(model, ignored_modules=[ignored], sync_module_states=True)
    for norm in (ignored, inner, outer):
        assert [float(buffer[0]) for buffer in (norm.running_mean, norm.running_var)] == [1.0, 1.0]
    assert float(ignored.weight.detach()[0]) == 1.0 + front.ctx.rank  # parameters that are ignored stay


@as_torchs(2, both_modes=True)
def test_what_a_wrapper_inside_ignores_stays_tied_to_parameters_outside_of_it(front: Front) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    model[1].weight = model[0].weight
    model[0] = front.wrap(model[0], ignored_states=[model[1].weight])
    wrapped = front.wrap(model)
    assert type(model[1].weight) is nn.Parameter
    assert model[1].weight is model[0].module.weight
    return [*front.train(wrapped), model[1].weight.detach()]


def trained(front: Front, num_ranks: int, **options: Any) -> Any:
    model = front.wrap(mlp(), **BY_LINEARS, **options)
    assert model.process_group.size() == num_ranks
    return [*front.train(model), model.rank, model.world_size]


@pytest.mark.parametrize("strategy", [FULL_SHARD, GRAD_OP, NO_SHARD])
@pytest.mark.parametrize("given", ["process_group", "device_mesh"])
@as_torchs(2, 4, exact=ON_TWO_RANKS)
def test_one_group(front: Front, given: str, strategy: Any) -> Any:
    mesh = front.mesh()
    options = {given: mesh if given == "device_mesh" else mesh.get_group()}
    return trained(front, front.ctx.world_size, sharding_strategy=strategy, **options)


@pytest.mark.ci
@distributed(4)
def test_a_group_of_some_ranks(ctx: RankContext) -> None:
    """Each half of the ranks trains a model of its own."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    same(ctx, lambda front: trained(front, 2, process_group=halves[ctx.rank // 2]))


@pytest.mark.ci
@pytest.mark.parametrize("use_orig_params", [True, *long(False)])
@pytest.mark.parametrize("strategy", [HYBRID, *long(HYBRID_ZERO2)])
@pytest.mark.parametrize("given", ["device_mesh", *long("process_group")])
@as_torchs(4, exact=False)
def test_hybrid(front: Front, given: str, strategy: Any, use_orig_params: bool) -> Any:
    mesh = front.ctx.mesh_2d(2, 2)
    options = {given: mesh if given == "device_mesh" else (mesh.get_group(1), mesh.get_group(0))}
    return trained(front, 2, sharding_strategy=strategy, use_orig_params=use_orig_params, **options)


@pytest.mark.parametrize("has_names", [True, *long(False)])
@pytest.mark.parametrize("strategy", [FULL_SHARD, *long(GRAD_OP, NO_SHARD)])
@as_torchs(4, exact=False, both_modes=True)
def test_other_strategies_shard_over_the_first_axis_of_a_mesh(front: Front, strategy: Any, has_names: bool) -> Any:
    """Over the second one, nothing is communicated. Torch's class gives sharded values the whole mesh, with the shards
    on its second axis; ours have the first axis, where they are."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b") if has_names else None)
    model = front.wrap(mlp(), device_mesh=mesh, sharding_strategy=strategy, **BY_LINEARS)
    losses = front.train(model)
    ranks = [dist.get_process_group_ranks(each.process_group) for each in front.cls.fsdp_modules(model)]
    state = dict(quiet(model.state_dict))
    with front.of_kind(model, SHARDED):
        sharded = quiet(model.state_dict)
        quiet(model.load_state_dict, sharded)
    if front.is_ours and strategy is not NO_SHARD:
        assert all(value.placements == (Shard(0),) for value in sharded.values())
        assert all(map(torch.equal, state.values(), (value.full_tensor() for value in sharded.values())))
    return [losses, ranks, model.rank, model.world_size, state]


@with_ours(4)
def test_parts_of_dtensors_are_those_of_the_first_rank(front: Front) -> None:
    """``sync_module_states`` copies between the ranks that have the same part. Torch's class does it on accelerators
    only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data, model = mesh.get_local_rank("dp"), nn.Linear(8, 4)
    for place, value in (("weight", torch.randn(4, 8)), ("bias", torch.randn(4)), ("buffer", torch.randn(4))):
        cut = distribute_tensor(value + data, mesh["tp"], [Replicate() if place == "bias" else Shard(0)])
        if place == "buffer":
            model.register_buffer(place, cut)
        else:
            setattr(model, place, nn.Parameter(cut))
    expected = {name: value.to_local().detach() - data for name, value in model.state_dict().items()}
    wrapped = front.wrap(model, device_mesh=mesh["dp"], sync_module_states=True, use_orig_params=True)
    with front.cls.summon_full_params(wrapped):
        found: dict[str, Any] = dict(wrapped.named_parameters()) | dict(wrapped.named_buffers())
        for name, value in expected.items():
            torch.testing.assert_close(found[name].to_local().detach(), value, msg=name)


@as_torchs(2)
def test_hybrid_over_one_rank_of_an_axis(front: Front) -> Any:
    """With shards of one rank, torch's class forgets the replicas. Both shapes are a sum of two gradients."""
    meshes = [{"sharding_strategy": HYBRID, "device_mesh": front.ctx.mesh_2d(*shape)} for shape in ((2, 1), (1, 2))]
    return [front.train(front.wrap(mlp(), **BY_LINEARS, **(each if front.is_ours else {}))) for each in meshes]


@with_ours(2)
def test_hybrid_by_nodes(front: Front) -> None:
    """Torch's class takes each rank of the CPU for a node. Ours asks the launcher, and refuses to guess."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LOCAL_WORLD_SIZE", "2")
        found = []
        for strategy in (HYBRID, FULL_SHARD):
            torch.manual_seed(0)
            found.append(front.train(front.wrap(mlp(), sharding_strategy=strategy, **BY_LINEARS)))
        assert found[0] == found[1]
        environment.delenv("LOCAL_WORLD_SIZE")
        with pytest.raises(ValueError, match=r"no LOCAL_WORLD_SIZE for 2 ranks\. Start the job with torchrun"):
            front.wrap(mlp(), sharding_strategy=HYBRID, **BY_LINEARS)


@with_ours(4)
def test_wrappers_of_one_model_replicate_over_the_same_ranks(front: Front) -> None:
    model = mlp()
    model[0] = front.wrap(model[0], sharding_strategy=HYBRID, device_mesh=front.ctx.mesh_2d(2, 2))
    with pytest.raises(ValueError, match="expects the same process groups in all wrappers, but a Linear inside"):
        front.wrap(model, sharding_strategy=HYBRID, device_mesh=front.ctx.mesh_2d(1, 4))
