"""A wrapper that cannot be made leaves the model as it was, whichever phase of construction raises."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision, wrap

import fsdp2.fsdp1
from fsdp2.group.group import groups_by_slot
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import Front, train
from tests.parity.fsdp1.test_extensions import example, extension_set

LINEARS = wrap.ModuleWrapPolicy({nn.Linear})


class StoppedError(Exception):
    """What a function of the user raises."""


def model_of(ctx: RankContext) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model[4].weight = nn.Parameter(model[4].weight.detach().clone())
    model[0].register_forward_hook(lambda *_: None)
    return model


def raising_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which raises instead when it is called for the ``call``-th time."""
    count = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            raise StoppedError(f"call {call}")
        return function(*args, **options)

    return counted


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
def failing_broadcast() -> Iterator[None]:
    with mock.patch.object(dist, "broadcast", raising_at(4, dist.broadcast)):
        yield


@contextmanager
def failing_extension() -> Iterator[None]:
    """All parameters are asked for once to check them, and once more unit by unit."""
    extensions = example().LogExtensions()
    extensions.pre_flatten_transform = raising_at(8 + 3, extensions.pre_flatten_transform)
    with extension_set(extensions):
        yield


@contextmanager
def failing_reset() -> Iterator[None]:
    with mock.patch.object(nn.Linear, "reset_parameters", raising_at(3, nn.Linear.reset_parameters)):
        yield


def rows() -> dict[str, tuple[bool, dict[str, Any], Callable[[], Any], str]]:
    """Whether the model is on the meta device, the arguments, what to do meanwhile, and what is raised."""
    policy = {"auto_wrap_policy": LINEARS}
    in_fp32 = MixedPrecision(param_dtype=torch.bfloat16, _module_classes_to_ignore=[nn.LayerNorm])
    keeping = MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True)

    def asking(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or isinstance(module, nn.Linear)

    return {
        "the policy": (False, {"auto_wrap_policy": raising_at(4, asking)}, nullcontext, "call 4"),
        "options of the policy": (False, {"auto_wrap_policy": wrap.CustomPolicy(overrides)}, nullcontext, "strategy"),
        "param_init_fn": (True, {**policy, "param_init_fn": raising_at(3, fill)}, nullcontext, "call 3"),
        "a parameter left on meta": (True, {**policy, "param_init_fn": leave_the_last_one}, nullcontext, "still on"),
        "reset_parameters": (True, policy, failing_reset, "call 3"),
        "sync_module_states": (False, {**policy, "sync_module_states": True}, failing_broadcast, "call 4"),
        "an extension": (False, policy, failing_extension, "call 11"),
        "in full precision": (
            False,
            {**policy, "mixed_precision": in_fp32, "sync_module_states": True},
            failing_broadcast,
            "call 4",
        ),
        "gradients that keep their dtype": (
            False,
            {**policy, "mixed_precision": keeping, "sync_module_states": True},
            failing_broadcast,
            "call 4",
        ),
        "the device": (False, {**policy, "device_id": "nowhere"}, nullcontext, "device"),
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


SHORT = ["param_init_fn", "options of the policy"]


@pytest.mark.parametrize("row", [*SHORT, *long(*(row for row in rows() if row not in SHORT))])
@pytest.mark.parametrize("use_orig_params", [True, *long(False)])
@distributed(2)
def test_the_model_is_as_it_was_and_can_be_wrapped(ctx: RankContext, row, use_orig_params) -> None:
    on_meta, options, meanwhile, message = rows()[row]
    front = Front(ctx, fsdp2.fsdp1)
    with torch.device("meta" if on_meta else "cpu"):
        model = model_of(ctx)
    before, values = described(model), [param.detach().clone() for param in model.parameters()]
    with meanwhile(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*get a wrapper of their own")
        with pytest.raises(Exception, match=message) as raised:
            front.wrap(model, use_orig_params=use_orig_params, **options)
    assert described(model) == before
    assert {slot.module for slot in groups_by_slot()}.isdisjoint(model.modules())  # the traceback keeps the groups
    del raised
    for param, value in zip(model.parameters(), values, strict=True):
        assert on_meta or torch.equal(param, value)
    if not on_meta:
        assert model(torch.ones(2, 8)).shape == (2, 4)
    again = front.wrap(model, use_orig_params=use_orig_params, auto_wrap_policy=LINEARS, param_init_fn=fill)
    other = front.wrap(model_of(ctx), use_orig_params=use_orig_params, auto_wrap_policy=LINEARS)
    if on_meta:
        with again.summon_full_params(again), other.summon_full_params(other), torch.no_grad():
            for param, filled in zip(other.parameters(), again.parameters(), strict=True):
                param.copy_(filled)
    assert train(ctx, again) == train(ctx, other)
