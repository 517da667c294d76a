"""A wrapper subclass that keeps the all-gather protocol, to be broken in one thing."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from fsdp2.plan.trees import map_tensors
from tests.harness.extensions import is_in_place

aten = torch.ops.aten


class Wrapper(torch.Tensor):
    """A wrapper of one plain tensor, sent multiplied by ``factor``. Broken classes differ in one thing each."""

    inner: Tensor
    factor: int
    keeps_class = frozenset(
        {
            aten.detach.default,
            aten.alias.default,
            aten.clone.default,
            aten._to_copy.default,
            aten.new_zeros.default,
            aten.empty_like.default,
        }
    )

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __init_subclass__(cls) -> None:
        torch.serialization.add_safe_globals([cls])
        if "<locals>" not in cls.__qualname__:  # pickle looks there, also for what type() has made
            setattr(sys.modules[cls.__module__], cls.__qualname__, cls)

    def __new__(cls, plain: Tensor, factor: int = 2) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(
            cls, plain.shape, strides=plain.stride(), dtype=plain.dtype, device=plain.device
        )
        made.inner, made.factor = plain, factor
        return made

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["inner"], self.factor

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], factor: int, size: Any, stride: Any) -> Wrapper:
        return cls(inner["inner"], factor)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = cls.before(func, args, kwargs or {})
        result = func(*map_tensors(_inner, args), **map_tensors(_inner, kwargs))
        if func in cls.keeps_class:
            return cls(result, args[0].factor)
        return args[0] if is_in_place(func) and isinstance(result, Tensor) else result

    @classmethod
    def before(cls, func: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        return (self.inner * self.factor,), self.factor

    def fsdp_post_all_gather(self, outputs: Any, factor: int, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is not None:
            return out.copy_(outputs[0]).div_(factor)
        made = outputs[0].to(param_dtype, copy=True).div_(factor)
        return made, (made,)

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


torch.serialization.add_safe_globals([Wrapper])


def _inner(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, Wrapper) else tensor
