"""What happens to the shards of a parameter outside of the all-gather: copies, casts, state dicts, the meta device,
optimizers. Each must leave shards of the same class, that send what they should.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.testing.findings import Findings, are_equal, check_equal, values_of
from fsdp2.testing.stand_in import StandInDTensor, local_of
from fsdp2.testing.subject import Case, gradient_names
from fsdp2.testing.world import World
from fsdp2.types import ExtensionError

Values = list[torch.Tensor]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    f"{cls.__name__}(foreach={foreach})": partial(cls, lr=0.5, foreach=foreach)
    for cls in (torch.optim.SGD, torch.optim.AdamW)
    for foreach in (True, False)
}


def check_handling(case: Case, world: World, findings: Findings) -> None:
    """``world`` is unsharded: what it holds is what the shards of every copy must make."""
    expected = _values(world)
    wrapped = bool(gradient_names(world.ranks[0].shard, _unsharded(world)))
    checks: dict[str, Callable[[], None]] = {
        "clone": partial(_check_operation, case, expected, "clone", lambda param: param.detach().clone()),
        "empty_like": partial(_check_operation, case, expected, "empty_like", _copied),
        "to": partial(_check_cast, case),
        "deepcopy": partial(_check_deepcopy, case, expected),
        "flatten": partial(_check_flatten, case, expected),
        "meta": partial(_check_meta, case, expected),
        "load": partial(_check_load, case, expected),
    }
    if case.subject.setting.trainable:
        for name, optimizer in OPTIMIZERS.items():
            checks[name] = partial(_check_optimizer, case, expected, optimizer, wrapped)
    for name, check in checks.items():
        findings.passes(name, case.where, check)


def _unsharded(world: World) -> nn.Parameter:
    unsharded = world.ranks[0].unsharded
    assert unsharded is not None
    return unsharded


def _values(world: World) -> Values:
    return values_of(_unsharded(world))


def _gathered(case: Case, shards: Sequence[torch.Tensor]) -> Values:
    world = case.world(shards)
    world.gather()
    return _values(world)


def _check_kept(found: torch.Tensor, like: torch.Tensor, operation: str) -> None:
    """The class and the shape are as before ``operation``."""
    if type(found) is not type(like) or found.shape != like.shape:
        raise ExtensionError(
            f"{operation} of a {type(like).__name__} of shape {tuple(like.shape)} gives a {type(found).__name__} of "
            f"shape {tuple(found.shape)}: its hooks would be lost. Let the operation keep the class."
        )


def _check_operation(
    case: Case, expected: Values, name: str, operation: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """``operation``, done to sharded parameters, copies them."""
    shards = case.shards()
    with torch.no_grad():
        found = [local_of(operation(param)) for param in case.params(shards)]
    for copied, shard in zip(found, shards, strict=True):
        _check_kept(copied, shard, name)
    _check_sends(case, found, expected)


def _check_sends(case: Case, shards: Sequence[torch.Tensor], expected: Values) -> None:
    problem = "what is gathered of the copies is not what was gathered before"
    remedy = "Let it copy the inner tensors and everything else that the hooks read."
    check_equal(_gathered(case, shards), expected, problem, remedy)


def _copied(param: torch.Tensor) -> torch.Tensor:
    """As ``to_empty`` and ``load_state_dict`` do it."""
    return torch.empty_like(param).copy_(param)


def _check_cast(case: Case) -> None:
    if not case.subject.dtype.is_floating_point:
        return
    dtype = torch.float32 if case.subject.dtype is torch.bfloat16 else torch.bfloat16
    for param in case.params(case.shards()):
        with torch.no_grad():
            cast = local_of(param.detach().to(dtype))
        _check_kept(cast, local_of(param), f"to({dtype})")
        if cast.dtype is not dtype:
            raise ExtensionError(f"to({dtype}) gives a {type(cast).__name__} of {cast.dtype}, expected {dtype}.")


def _check_deepcopy(case: Case, expected: Values) -> None:
    """As models are copied before they are sharded. A class may refuse to be copied; torch does so for subclasses made
    by ``as_subclass``."""
    param = nn.Parameter(case.subject.make(case.plain()), requires_grad=case.subject.setting.trainable)
    try:
        copied = copy.deepcopy(param)
    except Exception:
        return
    _check_kept(copied, param, "copy.deepcopy")
    with torch.no_grad():
        param.detach().copy_(case.subject.make(case.plain(seed=1)))
    problem = "a deep copy never equalled the tensor it was made of, or changed with it"
    check_equal(_gathered(case, case.cut(copied)), expected, problem, "Let clone copy the inner tensors.")


def _check_flatten(case: Case, expected: Values) -> None:
    shards = case.shards()
    names = _torch.inner_names(shards[0])
    if not names:
        return
    rebuilt = [_torch.rewrapped(shard, {name: getattr(shard, name) for name in names}) for shard in shards]
    for found, shard in zip(rebuilt, shards, strict=True):
        _check_kept(found, shard, "__tensor_unflatten__ of __tensor_flatten__")
    _check_sends(case, rebuilt, expected)


def _check_meta(case: Case, expected: Values) -> None:
    """A model is built on the meta device, sharded, given memory, and loaded."""
    made = case.subject.make(case.plain().to("meta"))
    if not made.is_meta:
        raise ExtensionError(f"make of a tensor on the meta device gives one on {made.device}. Let it stay there.")
    device = case.subject.setting.device
    found = []
    with torch.no_grad():
        for param, source in zip(case.params(case.cut(made)), case.params(case.shards()), strict=True):
            empty = torch.empty_like(param, device=device)
            _check_kept(local_of(empty), local_of(source), "empty_like on the meta device")
            if empty.device != device:
                raise ExtensionError(f"empty_like(device={device}) of a meta tensor gives one on {empty.device}.")
            found.append(local_of(empty.copy_(source)))
    _check_sends(case, found, expected)


def _check_load(case: Case, expected: Values) -> None:
    """Other values are copied into shards that have been gathered, as a checkpoint is loaded."""
    params = case.params(case.shards())
    world = World(params, case.layout, case.subject.setting)
    world.gather()
    world.release()
    with torch.no_grad():
        for param, other in zip(params, case.params(case.shards(seed=1)), strict=True):
            param.copy_(other)
    world.gather()
    loaded = _gathered(case, case.shards(seed=1))
    if are_equal(loaded, expected):
        raise ExtensionError("tensors of other values give the same unsharded parameter. Send the shard's values.")
    problem = "what is gathered after copy_ is not what was copied in"
    check_equal(_values(world), loaded, problem, "Let copy_ copy all that the hooks read, and hooks keep nothing.")


def _check_optimizer(
    case: Case, expected: Values, make_optimizer: Callable[[Any], torch.optim.Optimizer], wrapped: bool
) -> None:
    params = case.params(case.shards())
    classes = [type(local_of(param)) for param in params]
    world = World(params, case.layout, case.subject.setting)
    world.gather()
    world.release()
    for param in params:
        param.grad = StandInDTensor(_gradient(local_of(param), wrapped))
    make_optimizer(params).step()
    for param, cls in zip(params, classes, strict=True):
        if type(local_of(param)) is not cls:
            raise ExtensionError(f"the step made a {type(local_of(param)).__name__} of a {cls.__name__}.")
    world.gather()
    if are_equal(_values(world), expected):
        raise ExtensionError(
            "the step did not change what is gathered. Let in-place operations write the inner tensors, also on lists, "
            "and hooks keep nothing."
        )


def _gradient(shard: torch.Tensor, wrapped: bool) -> torch.Tensor:
    """As the runtime leaves it: plain, or of the class of the shard."""

    def ones() -> torch.Tensor:
        return torch.ones(shard.shape, dtype=shard.dtype, device=shard.device)

    if not wrapped:
        return ones()
    return _torch.rewrapped(shard, {name: ones() for name in _torch.inner_names(shard)})
