"""Parameters of other libraries: those whose classes have no all-gather hooks, and those with types.

An adapter knows one class, by its name: so nothing is imported before a model has such a parameter. The adapter makes a
tensor subclass with hooks, which is sharded instead. ``ParamTypes`` reads what else is written on a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from fsdp2.group.param import Slot
from fsdp2.plan.mesh import ParallelMesh
from fsdp2.plan.placements import ParamSpec


@dataclass(frozen=True)
class Adapted:
    """What an adapter makes of a parameter. Nothing has changed yet.

    Attributes:
        tensor: has all-gather hooks, and is sharded in place of the parameter.
        commit: called once when the parameter is sharded; may change the modules that hold the parameter.
    """

    tensor: torch.Tensor
    commit: Callable[[], None]


_T = TypeVar("_T")

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


class ParamTypes:
    """How parameters lie on model axes, if a library has written that on plain ones. Here, none has."""

    def spec(self, name: str, param: torch.Tensor, dim: int, parallel: ParallelMesh) -> ParamSpec | None:
        """How ``param``, cut along ``dim``, lies on ``parallel``; None if nothing is written on it. Raises ValueError
        if that contradicts the mesh."""
        return None

    def agreed(self, parallel: ParallelMesh, resolve: Callable[[], _T]) -> _T:
        """What ``resolve`` returns, which calls ``spec``; if it raises on one rank, all ranks raise."""
        return resolve()


class _Several(ParamTypes):
    """Asks several in turn; the first who knows a parameter answers."""

    def __init__(self) -> None:
        self.types: list[ParamTypes] = []

    def spec(self, name: str, param: torch.Tensor, dim: int, parallel: ParallelMesh) -> ParamSpec | None:
        answers = (each.spec(name, param, dim, parallel) for each in self.types)
        return next((spec for spec in answers if spec is not None), None)

    def agreed(self, parallel: ParallelMesh, resolve: Callable[[], _T]) -> _T:
        for each in self.types:
            resolve = partial(each.agreed, parallel, resolve)
        return resolve()


_registered = _Several()


def register_param_types(types: ParamTypes) -> None:
    """Ask ``types`` about each parameter that is sharded, after those who were registered before."""
    _registered.types.append(types)


def param_types() -> ParamTypes:
    return _registered
