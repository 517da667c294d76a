"""The base of frozen weights that are packed in rows. Each row has its codes and scales, so cuts along dim 0 are exact.

Rule: operations that copy, move, and cut keep the packed rows. Others read ``_plain``, or are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.tensors.wrapper import ALIASES, Tensors, WrapperTensor, aten, each


class PackedTensor(WrapperTensor):
    """``_ZERO_ROW`` has, for each inner tensor that is cut, the entries of a row of zeros. All shards hold the inner
    tensors that follow."""

    _ZERO_ROW: ClassVar[tuple[int, ...]] = (0, 0)

    @property
    def _cut(self) -> Tensors:
        return self._inner[: len(self._ZERO_ROW)]

    @property
    def _shared(self) -> Tensors:
        return self._inner[len(self._ZERO_ROW) :]

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[Tensors, None]:
        """Codes and scales of this rank's rows. Under torch's own FSDP2, ranks must divide dim 0 evenly."""
        return self._cut, None

    def _before_write(self, func: Any) -> None:
        raise TypeError(
            f"{func} would write a frozen {type(self).__name__}. Pass only parameters that require gradients to the "
            "optimizer, or dequantise the weight first."
        )

    def _can_have(self, dtype: torch.dtype, size: Sequence[int] | None = None) -> bool:
        """Whether rows like these can be a tensor of this dtype and size. If not, it has to be plain."""
        raise NotImplementedError

    def _check_cut(self, dim: int) -> None:
        """Raise a ValueError unless a cut along ``dim`` lies between rows."""
        raise NotImplementedError

    def _packed_from(self, source: torch.Tensor) -> Tensors:
        """The inner tensors for the values of ``source``, which are copied into this weight."""
        raise NotImplementedError

    def _viewed(self, size: Sequence[int]) -> torch.Tensor:
        """A view of another shape. By default, it is one of what operations read."""
        return self._plain().view(size)


def _on_rows(op: Callable[..., Any], weight: PackedTensor, *args: Any) -> Any:
    """``op`` of the inner tensors that are cut: one wrapper of the results, or a list."""
    results = [op(inner, *args) for inner in weight._cut]
    if isinstance(results[0], torch.Tensor):
        return weight._like(*results, *weight._shared)
    return [weight._like(*parts, *weight._shared) for parts in zip(*results, strict=True)]


def _is_pinned(weight: PackedTensor, device: torch.device | None = None) -> bool:
    return all(inner.is_pinned() for inner in weight._inner if inner.numel())


def _to_copy(
    weight: PackedTensor, *, dtype: torch.dtype | None = None, memory_format: object = None, **options: Any
) -> torch.Tensor:
    dtype = dtype or weight.dtype
    if not weight._can_have(dtype):
        return aten._to_copy.default(weight._plain(), dtype=dtype, **options)
    return weight._like(*(aten._to_copy.default(inner, **options) for inner in weight._inner), dtype=dtype)


def _zeros_like(weight: PackedTensor, *, memory_format: object = None, **options: Any) -> torch.Tensor:
    return _new_zeros(weight, weight.shape, **options)


def _new_zeros(
    weight: PackedTensor, size: Sequence[int], *, dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:
    """Also used for empty tensors, since all bytes are valid codes. Shared tensors are copied."""
    dtype = dtype or weight.dtype
    if not weight._can_have(dtype, size):
        return weight._inner[0].new_zeros(size, dtype=dtype, **options)
    pairs = zip(weight._cut, weight._ZERO_ROW, strict=True)
    cut = [inner.new_full((size[0], *inner.shape[1:]), entry, **options) for inner, entry in pairs]
    shared = [_copied_to(cut[0].device, inner) for inner in weight._shared]
    return weight._like(*cut, *shared, shape=tuple(size), dtype=dtype)


def _copied_to(device: torch.device, inner: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(inner, device=device) if inner.is_meta else inner.to(device, copy=True)


def _slice(weight: PackedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    size = weight.size(dim)
    if slice(start, end, step).indices(size) == (0, size, 1):
        return weight._like(*weight._inner)
    weight._check_cut(dim)
    return _on_rows(aten.slice.Tensor, weight, 0, start, end, step)


def _split(op: Callable[..., Any], weight: PackedTensor, sizes: int | list[int], dim: int = 0) -> Any:
    weight._check_cut(dim)
    return _on_rows(op, weight, sizes)


def _view(weight: PackedTensor, size: Sequence[int]) -> torch.Tensor:
    """``DTensor.to_local`` makes a view of the same shape."""
    return weight._like(*weight._inner) if tuple(size) == tuple(weight.shape) else weight._viewed(size)


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(target, PackedTensor):
        return NotImplemented  # source is read like by any other operation
    for inner, new in zip(target._inner, target._packed_from(source), strict=True):
        inner.copy_(new, non_blocking)
    return target


PackedTensor._OPS = {
    **ALIASES,
    **each(aten.clone.default, aten._pin_memory.default),
    aten.is_pinned.default: _is_pinned,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _zeros_like,
    aten.zeros_like.default: _zeros_like,
    aten.new_empty.default: _new_zeros,
    aten.new_zeros.default: _new_zeros,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: partial(_split, aten.split.Tensor),
    aten.split_with_sizes.default: partial(_split, aten.split_with_sizes.default),
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.copy_.default: _copy_,
}
