"""Parameters of other libraries: those whose classes have no all-gather hooks, and those with types.

An adapter knows one class by name, so nothing is imported until a model has such a parameter. The adapter makes a
tensor subclass with hooks, which is sharded instead. A ``SpecReader`` reads other information attached to a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdp2.core.group.param import Slot
from fsdp2.core.plan.mesh import ParallelMesh
from fsdp2.core.plan.placements import ParamSpec


@dataclass(frozen=True)
class Adapted:
    """The result of an adapter for a parameter. Nothing has changed yet.

    Attributes:
        tensor: has all-gather hooks, and is sharded in place of the parameter.
        commit: called once when the parameter is sharded; may change the modules that hold the parameter.
    """

    tensor: torch.Tensor
    commit: Callable[[], None]


# Gets the name of a parameter, the parameter, and its slots. Raises ValueError if the parameter cannot be sharded.
Adapter = Callable[[str, nn.Parameter, Sequence[Slot]], Adapted]

ADAPTERS: dict[str, Adapter] = {}  # by the qualified name of a class, including its module


def adapter_of(param: nn.Parameter) -> Adapter | None:
    """The adapter for the class of ``param`` or one of its base classes."""
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(param).__mro__)
    return next((ADAPTERS[name] for name in names if name in ADAPTERS), None)


# Returns how a parameter lies on a mesh that cuts it along a dim, if a library has recorded that on the plain tensor;
# else None. Also gets the name of the parameter. Raises ValueError if the record contradicts the mesh.
SpecReader = Callable[[str, torch.Tensor, int, ParallelMesh], ParamSpec | None]

SPEC_READERS: list[SpecReader] = []  # the first one that knows a parameter answers


def written_spec(name: str, param: torch.Tensor, dim: int, parallel: ParallelMesh) -> ParamSpec | None:
    """The spec from the first of all readers that knows ``param``, or None."""
    answers = (read(name, param, dim, parallel) for read in SPEC_READERS)
    return next((spec for spec in answers if spec is not None), None)
