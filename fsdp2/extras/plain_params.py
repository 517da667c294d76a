"""Warns about plain parameters that an optimizer steps, although nothing reduces their gradients or shards have
replaced them.

This happens if ``fully_shard`` was called on the blocks of a model but not on the model, on one of two tied modules, or
after the optimizer was built. Rule: parameters in ``ignored_params``, and those of torch's ``replicate`` and of
``DistributedDataParallel``, are left alone.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp2.core import marks, unit_of
from fsdp2.extras.output import listed
from fsdp2.extras.plain_names import plain_name


def warn_of_plain(optimizer: torch.optim.Optimizer, plain: list[torch.Tensor], num_ranks: int) -> None:
    """Warn once about each of the parameters ``plain`` that ``optimizer`` has stepped. ``num_ranks``: over how many
    ranks the gradients of its shards are reduced; 0 if it has no shards.

    Tied originals of shards are an error even on one rank, since the model then has the parameter twice.
    """
    if num_ranks == 0:
        _warn_of_replaced(optimizer, plain)
        return
    found = [
        param
        for param in plain
        if param.grad is not None
        and (num_ranks > 1 or marks.SHARDED_AS in vars(param))
        and not isinstance(param, DTensor)
        and not marks.is_left_alone(param)
    ]
    if not found:
        return
    marks.leave_alone(found)
    modules = modules_in_process()
    reduced = {
        id(param) for each in modules if isinstance(each, DistributedDataParallel) for param in _reduced_by(each)
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


def _warn_of_replaced(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
    """``optimizer`` has no sharded parameter. Warn if it has originals and has stepped without any gradient. If there
    is a gradient, other code trains the originals."""
    name = next((vars(param)[marks.SHARDED_AS] for param in params if marks.SHARDED_AS in vars(param)), None)
    if name is not None and all(param.grad is None for param in params):
        warnings.warn(
            f"{type(optimizer).__name__}.step() trained nothing: none of its parameters has a gradient. fully_shard "
            f"has replaced some of them, for example '{name}'. Build the optimizer after fully_shard.",
            stacklevel=6,
        )


def _reduced_by(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    return [param for name, param in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore]


def modules_in_process() -> list[nn.Module]:
    """All modules in this process, found without calling any of them."""
    return [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in vars(each)]


def name_of(param: torch.Tensor, modules: Iterable[nn.Module]) -> str:
    """The name of ``param`` in the outermost of ``modules`` that has it, quoted."""
    names = [plain_name(root, name) for root in modules for name, each in root.named_parameters() if each is param]
    return f"'{max(names, key=len)}'" if names else f"one of shape {tuple(param.shape)} that no module has"
