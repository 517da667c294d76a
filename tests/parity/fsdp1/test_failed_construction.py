"""A wrapper that cannot be made leaves the model as it was, whichever phase of construction raises."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision, wrap

from fsdp2.group.group import groups_by_slot
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import Front, ours
from tests.parity.fsdp1.test_extensions import example, extension_set

LINEARS = wrap.ModuleWrapPolicy({nn.Linear})


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
    policy = {"auto_wrap_policy": LINEARS}
    synced = {**policy, "sync_module_states": True}
    in_fp32 = MixedPrecision(param_dtype=torch.bfloat16, _module_classes_to_ignore=[nn.LayerNorm])
    keeping = MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True)
    asking = raising_at(4, lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.Linear))
    broadcast, reset = failing(dist, "broadcast", 4), failing(nn.Linear, "reset_parameters", 3)
    return {
        "meta: param_init_fn": ("call 3", {**policy, "param_init_fn": raising_at(3, fill)}, nullcontext),
        "options of the policy": ("strategy", {"auto_wrap_policy": wrap.CustomPolicy(overrides)}, nullcontext),
        "the policy": ("call 4", {"auto_wrap_policy": asking}, nullcontext),
        "meta: a parameter left there": ("still on", {**policy, "param_init_fn": leave_the_last_one}, nullcontext),
        "meta: reset_parameters": ("call 3", policy, reset),
        "sync_module_states": ("call 4", synced, broadcast),
        "an extension": ("call 11", policy, failing_extension),
        "in full precision": ("call 4", {**synced, "mixed_precision": in_fp32}, broadcast),
        "gradients that keep their dtype": ("call 4", {**synced, "mixed_precision": keeping}, broadcast),
        "the device": ("device", {**policy, "device_id": "nowhere"}, nullcontext),
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
    again = front.wrap(model, auto_wrap_policy=LINEARS, param_init_fn=fill)
    other = front.wrap(model_of(), auto_wrap_policy=LINEARS)
    if on_meta:
        with again.summon_full_params(again), other.summon_full_params(other), torch.no_grad():
            for param, filled in zip(other.parameters(), again.parameters(), strict=True):
                param.copy_(filled)
    assert front.train(again) == front.train(other)
