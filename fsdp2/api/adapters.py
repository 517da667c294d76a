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

ADAPTERS: dict[str, Adapter] = {}  # by the name of a class, which starts with its module


def adapter_of(param: nn.Parameter) -> Adapter | None:
    """The adapter for the class of ``param``, or for one that it derives from."""
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(param).__mro__)
    return next((ADAPTERS[name] for name in names if name in ADAPTERS), None)


class ParamTypes:
    """How parameters lie on model axes, if a library has written that on plain ones."""

    def spec(self, name: str, param: torch.Tensor, dim: int, parallel: ParallelMesh) -> ParamSpec | None:
        """How ``param``, cut along ``dim``, lies on ``parallel``; None if nothing is written on it. Raises ValueError
        if that contradicts the mesh."""
        return None

    def agreed(self, parallel: ParallelMesh, resolve: Callable[[], _T]) -> _T:
        """What ``resolve`` returns, which calls ``spec``; if it raises on one rank, all ranks raise."""
        return resolve()


PARAM_TYPES: list[ParamTypes] = []  # the first who knows a parameter answers


def written_spec(name: str, param: torch.Tensor, dim: int, parallel: ParallelMesh) -> ParamSpec | None:
    """As ``ParamTypes.spec``, of all who may know the parameter."""
    answers = (types.spec(name, param, dim, parallel) for types in PARAM_TYPES)
    return next((spec for spec in answers if spec is not None), None)


def agreed(parallel: ParallelMesh, resolve: Callable[[], _T]) -> _T:
    """As ``ParamTypes.agreed``, of all."""
    for types in PARAM_TYPES:
        resolve = partial(types.agreed, parallel, resolve)
    return resolve()
