"""Warns of plain parameters that an optimizer steps beside shards, though nothing reduces their gradients.

It happens if ``fully_shard`` was called on the blocks of a model and not on the model, or on one of two tied modules.
Rule: parameters of ``ignored_params``, of torch's ``replicate`` and of ``DistributedDataParallel`` are left alone.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp2.group.param import SHARDED_AS

_KNOWN = "_fsdp2_known_as_plain"  # attribute of plain parameters that are not to be warned of, or have been


def leave_alone(params: Iterable[torch.Tensor | None]) -> None:
    """Somebody else reduces ``params``, or the user knows that nobody does."""
    for param in params:
        if param is not None:
            setattr(param, _KNOWN, True)


def warn_of_plain(optimizer: torch.optim.Optimizer, plain: Sequence[torch.Tensor], *, has_ranks: bool) -> None:
    """``optimizer``, which has shards, has stepped ``plain``, too. Each parameter is warned of once. ``has_ranks``:
    gradients of the shards are reduced over several ranks.

    Tied originals of shards are an error on one rank, too: the model has the parameter twice.
    """
    found = [
        param
        for param in plain
        if param.grad is not None
        and (has_ranks or SHARDED_AS in vars(param))
        and not isinstance(param, DTensor)
        and _KNOWN not in vars(param)
    ]
    if not found:
        return
    leave_alone(found)
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]  # no object of users is asked
    reduced = {
        id(param) for each in modules if isinstance(each, DistributedDataParallel) for param in _reduced_by(each)
    }
    found = [param for param in found if id(param) not in reduced]
    ties = [param for param in found if SHARDED_AS in vars(param)]
    kind = type(optimizer).__name__
    if ties:
        warnings.warn(
            f"{kind}.step(): {_name_of(ties[0], modules)} is the original of a parameter that fully_shard has "
            "sharded in another module, and the optimizer has both. The modules are no longer tied, and each trains "
            "its own copy. Call fully_shard on a module around both, or as fully_shard([a, b]), before the optimizer "
            "is built.",
            stacklevel=4,
        )
    elif found:
        names = _name_of(found[0], modules) + (f" and {len(found) - 1} more" if len(found) > 1 else "")
        warnings.warn(
            f"{kind}.step(): the optimizer has shards, but also plain parameters: {names}. "
            "Nothing reduces their gradients, so the ranks will differ. Call fully_shard on the outermost module, too, "
            "before the optimizer is built. If you reduce these gradients yourself, list the parameters in "
            "ignored_params of a fully_shard call.",
            stacklevel=4,
        )


def _reduced_by(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    return [param for name, param in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore]


def _name_of(param: torch.Tensor, modules: Iterable[nn.Module]) -> str:
    """The name of ``param`` in the outermost of ``modules`` that has it, quoted."""
    names = [name for module in modules for name, each in module.named_parameters() if each is param]
    return f"'{max(names, key=len)}'" if names else f"one of shape {tuple(param.shape)} that no module has"
