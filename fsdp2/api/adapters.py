"""Parameters of other libraries whose classes have no all-gather hooks.

An adapter knows one class, by its name: so nothing is imported before a model has such a parameter. The adapter makes a
tensor subclass with hooks, which is sharded instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdp2.group.param import Slot


@dataclass(frozen=True)
class Adapted:
    """What an adapter makes of a parameter. Nothing has changed yet.

    Attributes:
        tensor: has all-gather hooks, and is sharded in place of the parameter.
        commit: called once when the parameter is sharded; may change the modules that hold the parameter.
    """

    tensor: torch.Tensor
    commit: Callable[[], None]


# Gets the name of a parameter, the parameter, and its slots. Raises ValueError if it cannot be sharded.
Adapter = Callable[[str, nn.Parameter, Sequence[Slot]], Adapted]

_ADAPTERS: dict[str, Adapter] = {}


def register_adapter(class_name: str, adapter: Adapter) -> None:
    """Use ``adapter`` for parameters of the class ``class_name``, which starts with its module."""
    _ADAPTERS[class_name] = adapter


def adapter_of(param: nn.Parameter) -> Adapter | None:
    """The adapter for the class of ``param``, or for one that it derives from."""
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(param).__mro__)
    return next((_ADAPTERS[name] for name in names if name in _ADAPTERS), None)
