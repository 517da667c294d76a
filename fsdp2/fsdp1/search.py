"""Finds wrappers in a module tree, and the parameters that they manage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import nn

from fsdp2.core import ShardedParam, Slot, _torch
from fsdp2.extras.plain_names import IN_FSDP1, joined_name, saved_name
from fsdp2.fsdp1.settings import Settings

FLAT = "_flat_param"  # torch's name of the parameter that stands for all parameters of a unit

Wrapper: TypeAlias = Any  # a FullyShardedDataParallel; importing the class would be circular


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is a FullyShardedDataParallel."""
    return isinstance(vars(module).get("_settings"), Settings)


def wrappers_in(module: nn.Module) -> list[Wrapper]:
    """The wrappers in ``module``, ``module`` included, outer ones first."""
    return [each for each in module.modules() if is_wrapper(each)]


def params_of(wrapper: Wrapper) -> list[ShardedParam]:
    """The parameters of the unit of ``wrapper``."""
    return [param for group in wrapper._unit.groups for param in group.params]


def flat_params_in(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The flat parameters in ``module`` that optimizers step, with their names."""
    for path, each in module.named_modules():
        if is_wrapper(each) and (flat := each._listed_flat_param) is not None:
            yield joined_name(path, f"{IN_FSDP1}.{FLAT}"), flat


def named_slots(module: nn.Module) -> Iterator[tuple[str, Slot]]:
    """Where parameters are bound in ``module``, each with its name in state dicts. Shared modules come repeatedly."""
    for path, child in module.named_modules(remove_duplicate=False):
        for name in _torch.parameters_dict(child):
            yield saved_name(joined_name(path, name)), Slot(child, name)
