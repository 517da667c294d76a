"""Names in a module tree that contains wrappers, and the search for these wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import nn

from fsdp2.extras.plain_names import IN_CHECKPOINT, IN_FSDP1, without
from fsdp2.fsdp1.settings import Settings

WRAPPED = IN_FSDP1  # torch's name: it is part of the names of parameters
FLAT = "_flat_param"  # torch's name of the parameter that stands for all parameters of a unit

Wrapper: TypeAlias = Any  # a FullyShardedDataParallel; importing the class would be circular


def clean_name(name: str) -> str:
    """Remove the names of wrappers from ``name``, which is that of a parameter, buffer or module."""
    return without(name, (IN_FSDP1,))


def saved_name(name: str) -> str:
    """The clean name that state dicts use, as with torch's class: it also lacks the names of ``checkpoint_wrapper``,
    but keeps that of ``torch.compile``."""
    return without(name, (IN_FSDP1, IN_CHECKPOINT))


def wrappers_in(module: nn.Module) -> list[Wrapper]:
    """The wrappers in ``module``, ``module`` included, outer ones first."""
    return [each for each in module.modules() if is_wrapper(each)]


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is a FullyShardedDataParallel."""
    return isinstance(vars(module).get("_settings"), Settings)


def flat_params_in(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The flat parameters in ``module`` that optimizers step, with their names."""
    for name, each in module.named_modules():
        if is_wrapper(each):
            flat = each._listed_flat_param
            if flat is not None:
                yield f"{name}.{WRAPPED}.{FLAT}".removeprefix("."), flat
