"""Lets an optimizer continue with the shards if it holds parameters that shards have replaced.

Such an optimizer was built before ``fully_shard``, or while parameters were unsharded. Rule: a parameter is replaced
only if it is certain which shard it stands for. An original that has a gradient, or that a module still holds, is
trained elsewhere.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from fsdp2.core import _torch, marks, unit_of

_LEFT_ALONE = "_fsdp2_not_taken_over"  # attribute of originals


def take_over(*optimizers: Optimizer) -> None:
    """Replace parameters that stand for shards by these shards, and move the optimizers' states. The order of the
    parameters and the other entries of the parameter groups do not change.

    A state that has the shape of the whole parameter is cut like the parameter. Originals that no unit knows, or that
    a module still holds, are left alone from then on.
    """
    shards: dict[int, Any] = {}
    originals: dict[int, torch.Tensor] = {}
    for param in chain.from_iterable(map(params_of, optimizers)):
        if (shard := getattr(param, marks.STANDS_FOR, None)) is not None:
            shards[id(param)] = shard
        elif _is_original(param):
            originals[id(param)] = param
    if originals:
        shards.update(_shards_of(originals))
        for key in originals.keys() - shards.keys():
            setattr(originals[key], _LEFT_ALONE, True)
    for optimizer in optimizers:
        present = set(map(id, params_of(optimizer)))
        _replace(optimizer, {key: shard for key, shard in shards.items() if id(shard) not in present})


def take_over_all(params: Collection[torch.Tensor]) -> None:
    """Let all optimizers of this process that hold one of ``params``, originals of shards, continue with the shards."""
    wanted = set(map(id, params))
    found = [each for each in gc.get_objects() if issubclass(type(each), Optimizer) and "param_groups" in vars(each)]
    take_over(*(each for each in found if not wanted.isdisjoint(map(id, params_of(each)))))


def params_of(optimizer: Optimizer) -> list[Any]:
    """The parameters of all groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _is_original(param: torch.Tensor) -> bool:
    its = vars(param)
    return marks.SHARDED_AS in its and _LEFT_ALONE not in its and not marks.is_shard(param) and param.grad is None


def _shards_of(originals: Collection[int]) -> dict[int, nn.Parameter]:
    """Maps the identity of an original to its shard. Units keep a reference to the original of each parameter."""
    found = (each for each in gc.get_objects() if issubclass(type(each), nn.Module))  # calls no code of users' objects
    modules = [each for each in found if "_parameters" in vars(each)]
    units = {unit for module in modules if (unit := unit_of(module)) is not None}
    params = (param for unit in units for group in unit.groups for param in group.params)
    shards = {id(param.origin()): param.bound() for param in params}
    still_bound = {id(param) for module in modules for param in _torch.parameters_dict(module).values()}
    return {
        key: shard for key in originals if key not in still_bound and isinstance(shard := shards.get(key), nn.Parameter)
    }


def _replace(optimizer: Optimizer, shards: Mapping[int, nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        params = group["params"]
        for index, param in enumerate(params):
            shard = shards.get(id(param))
            if shard is None:
                continue
            params[index] = shard
            if param in optimizer.state:
                states = optimizer.state.pop(param)
                optimizer.state[shard] = {name: _of_shard(value, param, shard) for name, value in states.items()}


def _of_shard(value: object, before: torch.Tensor, shard: nn.Parameter) -> object:
    """The state ``value`` of the parameter ``before``, as one of ``shard``."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.dim() == 0:
        return value
    if isinstance(shard, DTensor) and value.shape == before.shape == shard.shape:
        return distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=None)
    return _torch.dtensors_like([shard], [value])[0] if value.shape == _torch.local_of(shard).shape else value
