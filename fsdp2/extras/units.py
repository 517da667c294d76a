"""The units of a sharded model, for tools that inspect it."""

from __future__ import annotations

from torch import nn

from fsdp2.core import Unit, units_under


def sharded_unit(module: nn.Module, caller: str) -> Unit:
    """The unit of ``module``, or of the module that the wrapper ``module`` contains."""
    unit = next((unit for name, unit in units_under(module) if not name), None)
    if unit is None:
        raise ValueError(
            f"{caller}: this {type(module).__name__} was not given to fully_shard. Pass the root of the sharded model."
        )
    return unit


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that ``module`` had before ``fully_shard`` (torch's or ours)."""
    return next(cls for cls in type(module).__mro__ if all(base.__name__ != "FSDPModule" for base in cls.__mro__))
