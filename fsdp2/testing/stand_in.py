"""What stands in for a mesh and for a DTensor where all ranks are in one process, without a process group."""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
from torch import nn

from fsdp2.plan.trees import map_tensors
from fsdp2.types import ExtensionError


class StandInMesh:
    """A 1D mesh over ``size`` ranks as ``rank`` sees it. It has no process group."""

    ndim = 1
    mesh_dim_names = ("shard",)

    def __init__(self, size: int, rank: int, device_type: str) -> None:
        self._size, self._rank = size, rank
        self.device_type = device_type

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._size,)

    @property
    def mesh(self) -> torch.Tensor:
        return torch.arange(self._size)

    def size(self, mesh_dim: int | None = None) -> int:
        return self._size

    def get_rank(self) -> int:
        return self._rank

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return self._rank

    def get_coordinate(self) -> list[int]:
        return [self._rank]

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the ranks of this check share one process, and their mesh has no '{name}'. A hook that communicates must "
            "be able to do without: have prepare(shards) hand to every shard what the ranks would agree on"
        )


class StandInDTensor(torch.Tensor):
    """Holds a shard as a DTensor holds its local tensor: operations reach the shard from below autograd, where torch
    does not always count writes. What they return is held likewise."""

    local: torch.Tensor

    __torch_function__ = nn.Parameter.__torch_function__

    def __new__(cls, local: torch.Tensor) -> StandInDTensor:
        made: StandInDTensor = cls._make_wrapper_subclass(
            cls, local.shape, strides=local.stride(), dtype=local.dtype, device=local.device
        )
        made.local = local
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared as a static method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # DTensors run operations in C++, where no class but one with __torch_dispatch__ has a say.
        without_torch_function = nn.Parameter.__torch_function__
        result = without_torch_function(func, (), map_tensors(_local, args), map_tensors(_local, kwargs or {}))
        if func.__name__.partition(".")[0].endswith("_"):
            return None if result is None else args[0]
        return map_tensors(cls, result)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StandInDTensor({self.local!r})"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.local if isinstance(tensor, StandInDTensor) else tensor


def sharded_parameter(shard: torch.Tensor, *, trainable: bool) -> nn.Parameter:
    """``shard`` as optimizers and state dicts see it.

    Raises:
        ExtensionError: the class is lost on the way.
    """
    param = nn.Parameter(StandInDTensor(shard), requires_grad=trainable)
    if type(local_of(param)) is not type(shard):
        raise ExtensionError(
            f"detach of a DTensor makes a {type(local_of(param)).__name__} of a {type(shard).__name__}, so its hooks "
            "would be lost. Make it a wrapper subclass, whose __torch_dispatch__ keeps the class; as_subclass is not "
            "enough."
        )
    return param


def local_of(param: torch.Tensor) -> torch.Tensor:
    """The shard that ``sharded_parameter`` or an operation on it holds."""
    return cast(StandInDTensor, param).local
