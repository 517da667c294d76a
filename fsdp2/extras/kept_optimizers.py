"""Optimizers that hold parameters other than shards: they continue with the shards, or a warning says what is wrong.

An optimizer that was built before ``fully_shard``, or while parameters were unsharded, holds parameters that shards
have replaced. Rule: a parameter is replaced only if it is certain which shard it stands for. An original that has a
gradient, or that a module still holds, is trained elsewhere.

A step warns if nothing reduces the gradients of plain parameters, or if shards have replaced them: ``fully_shard`` was
called on the blocks of a model but not on the model, on one of two tied modules, or after the optimizer was built.
Rule: parameters in ``ignored_params``, and those of torch's ``replicate`` and of ``DistributedDataParallel``, are left
alone.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdp2.core import _torch, groups_by_slot, marks, unit_of
from fsdp2.extras.output import listed
from fsdp2.extras.plain_names import plain_name

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
    params = (group.params[index] for group, index in groups_by_slot().values())
    shards = {id(param.origin()): param.bound() for param in params}
    still_bound = {id(param) for module in modules_in_process() for param in _torch.parameters_dict(module).values()}
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


# Warnings of a step


def warn_of_plain(optimizer: Optimizer, plain: list[torch.Tensor], num_ranks: int) -> None:
    """Warn once about each of the parameters ``plain`` that ``optimizer`` has stepped. ``num_ranks``: over how many
    ranks the gradients of its shards are reduced; 0 if it has no shards. Tied originals of shards are an error even on
    one rank, since the model then has the parameter twice."""
    if num_ranks == 0:
        _warn_of_replaced(optimizer, plain)
        return
    found = [
        param
        for param in plain
        if param.grad is not None
        and (num_ranks > 1 or marks.SHARDED_AS in vars(param))
        and not isinstance(param, DTensor)
        and not hasattr(param, marks.LEFT_ALONE)
    ]
    if not found:
        return
    marks.leave_alone(found)
    modules = modules_in_process()
    reduced = {
        id(param)
        for each in modules
        if isinstance(each, DistributedDataParallel)
        for name, param in each.module.named_parameters()
        if name not in each.parameters_to_ignore
    }
    # A parameter that is materialised after fully_shard replaces the one that was left alone.
    slots = [slot for each in modules if (unit := unit_of(each)) is not None for slot in unit.left_alone]
    reduced.update(id(getattr(slot.module, slot.name, None)) for slot in slots)
    found = [param for param in found if id(param) not in reduced]
    ties = [param for param in found if marks.SHARDED_AS in vars(param)]
    kind = type(optimizer).__name__
    if ties:
        warnings.warn(
            f"{kind}.step(): {name_of(ties[0], modules)} is the original of a parameter that fully_shard has "
            "sharded in another module, and the optimizer has both. The modules are no longer tied, and each trains "
            "its own copy. Call fully_shard on a module around both, or as fully_shard([a, b]), before the optimizer "
            "is built.",
            stacklevel=5,
        )
    elif found:
        names = listed([name_of(found[0], modules), *found[1:]], 1)
        warnings.warn(
            f"{kind}.step(): the optimizer has shards, but also plain parameters: {names}. "
            "Nothing reduces their gradients, so the ranks will differ. Call fully_shard on the outermost module, too, "
            "before the optimizer is built. If you reduce these gradients yourself, list the parameters in "
            "ignored_params of a fully_shard call.",
            stacklevel=5,
        )


def _warn_of_replaced(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    """``optimizer`` has no sharded parameter. Warn if it has originals and has stepped without any gradient. If there
    is a gradient, other code trains the originals."""
    name = next((vars(param)[marks.SHARDED_AS] for param in params if marks.SHARDED_AS in vars(param)), None)
    if name is not None and all(param.grad is None for param in params):
        warnings.warn(
            f"{type(optimizer).__name__}.step() trained nothing: none of its parameters has a gradient. fully_shard "
            f"has replaced some of them, for example '{name}'. Build the optimizer after fully_shard.",
            stacklevel=6,
        )


def modules_in_process() -> list[nn.Module]:
    """All modules in this process, found without calling code of users' objects."""
    return [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in vars(each)]


def name_of(param: torch.Tensor, modules: Iterable[nn.Module]) -> str:
    """The name of ``param`` in the outermost of ``modules`` that has it, quoted."""
    names = [plain_name(root, name) for root in modules for name, each in root.named_parameters() if each is param]
    return f"'{max(names, key=len)}'" if names else f"one of shape {tuple(param.shape)} that no module has"
