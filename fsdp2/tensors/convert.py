"""Replaces parameters of a module by tensor subclasses, before the module is sharded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core import _torch, marks, plans
from fsdp2.extras.plain_names import plain_name


def is_matrix(name: str, param: nn.Parameter) -> bool:
    """Whether ``param`` has two dims and a floating-point dtype, like weights of linear layers and embeddings."""
    return param.dim() == 2 and param.is_floating_point()


def wrap_parameters(
    module: nn.Module,
    make: Callable[[torch.Tensor], torch.Tensor],
    *,
    select: Callable[[str, nn.Parameter], bool] = is_matrix,
) -> list[str]:
    """Replace parameters of ``module`` in place by the results of ``make``. Call it before ``fully_shard``, and
    after ``parallelize_module``.

    Tied parameters stay tied. ``requires_grad`` is kept. Attributes and hooks of the old parameter are lost.

    Args:
        module: the module whose parameters are replaced, including submodules.
        make: gets the detached parameter, or this rank's part of a DTensor, and returns a tensor of the same shape.
        select: gets the first name of a parameter and the parameter; returns whether to replace it.

    Returns:
        The first names of the parameters that were replaced, in the order of ``module.named_parameters()``.

    Raises:
        TypeError: ``make`` did not return a tensor.
        ValueError: a selected parameter is sharded already; ``make`` returned a tensor of another shape. The module
            is then unchanged, as it is if ``make`` raises.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    names = []
    for path, param in module.named_parameters():
        name = plain_name(module, path)
        if select(name, param):
            names.append(name)
            made[param] = _made(name, param, make)
    for owner in module.modules():
        slots = _torch.parameters_dict(owner)
        for name, slot in list(slots.items()):
            if slot is not None and slot in made:
                setattr(owner, name, made[slot])
    return names


def _made(name: str, param: nn.Parameter, make: Callable[[torch.Tensor], torch.Tensor]) -> nn.Parameter:
    if hasattr(param, marks.SHARDED_AS) or hasattr(param, marks.STANDS_FOR):  # also while it is unsharded
        raise ValueError(
            f"wrap_parameters: parameter '{name}' is already sharded. Call wrap_parameters before fully_shard."
        )
    local = plans.local_part(param)
    tensor = make(local)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"wrap_parameters: make returned a {type(tensor).__name__} for parameter '{name}', expected a tensor."
        )
    if tensor.shape != local.shape:
        raise ValueError(
            f"wrap_parameters: make returned a tensor of shape {tuple(tensor.shape)} for parameter '{name}' of shape "
            f"{tuple(local.shape)}. Return the same shape, because sharding and state dicts need this shape."
        )
    if isinstance(param, DTensor):
        (tensor,) = _torch.dtensors_like([param], [tensor])
    return nn.Parameter(tensor, requires_grad=param.requires_grad)
