"""The base of wire formats whose values are plain: a parameter has one dtype in memory and is sent in another one.

Rule: a wire format is not part of the value. Optimizer states and checkpoints are plain, and load anywhere. Only the
listed operations, with which runtimes place, cut, copy and move parameters, keep the class.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core import find_tensors
from fsdp2.tensors.wrapper import ALIASES, WrapperTensor, as_strided, aten, each

# Views of the first argument's memory, with which sharding and checkpoints cut and flatten.
_VIEWS = {
    **ALIASES,
    aten.as_strided.default: as_strided,
    **each(aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.view.default),
}
# Copies of the same class: for padding, deepcopy, Module.to, to_empty and pinning. ``zeros_like`` is left out because
# optimizers make their plain states with it.
_COPIES = each(
    aten._pin_memory.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_zeros.default,
)

W = TypeVar("W", bound="WireFormatTensor")


class WireFormatTensor(WrapperTensor):
    """A floating-point parameter with its own wire format. Subclass it, and define both all-gather hooks, or
    inherit the second one from ``DequantisedTensor``.

    It shares the memory of the plain tensor that it was made from. A subclass calls ``make`` in its ``__new__``;
    keyword arguments given to ``make`` become attributes, which views, copies and ``torch.compile`` preserve.

    - In-place operations write the plain tensor and return the wrapper.
    - Views, slices and copies are of the same class; every other operation returns plain tensors.
    - ``pickle``, ``torch.save`` and distributed checkpoints write the plain tensor. Loading one copies it in.

    Source: the all-gather hooks are those of ``torch.distributed.fsdp.fully_shard``; the wrapper protocol is the one of
    PyTorch's notes on extending it with ``__torch_dispatch__``.
    """

    _data: torch.Tensor
    _origin: torch.Tensor  # the plain tensor of the wrapper that this one is a view of, or its own
    _OPS = _VIEWS | _COPIES

    @classmethod
    def make(cls: type[W], data: torch.Tensor, **options: Any) -> W:
        """Make a wrapper on the memory of ``data``: plain, floating-point, of at least 16 bits and one dim.

        Raises:
            TypeError: ``data`` is not a plain tensor, or has another dtype.
            ValueError: ``data`` has no dim to cut.
        """
        name = cls.__name__
        if not isinstance(data, torch.Tensor) or isinstance(data, (WireFormatTensor, DTensor)):
            raise TypeError(
                f"{name}: expected a plain tensor, found {type(data).__name__}. Wrap each parameter once, and before "
                "fully_shard."
            )
        if not data.is_floating_point() or data.itemsize < 2:
            raise TypeError(
                f"{name}: expected master values of a floating-point dtype of at least 16 bits, found {data.dtype}."
            )
        if data.dim() == 0:
            raise ValueError(f"{name}: a scalar has no dim to shard. Reshape the scalar to (1,), or do not wrap it.")
        return cls._of(data.detach(), **options)

    @classmethod
    def _of(cls: type[W], *inner: torch.Tensor, **options: Any) -> W:
        self = super()._of(*inner, **options)
        self._origin = self._data
        self._option_names = tuple(options)
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared as a static method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for view in find_tensors(result, []) if func in _VIEWS else ():
            view._origin = args[0]._origin  # type: ignore[attr-defined]
        return result

    def _like(self, *inner: torch.Tensor, **changes: Any) -> torch.Tensor:
        """A wrapper like this one; integer tensors, as from ``Tensor.to``, stay plain."""
        return super()._like(*inner, **changes) if inner[0].is_floating_point() else inner[0]

    def _plain(self) -> torch.Tensor:
        return self._data

    def _before_write(self, func: Any) -> None:
        """Count the write. Torch counts it only for the written object, such as a view, and never in a DTensor list."""
        torch.autograd.graph.increment_version([self._data, self._origin])

    @property
    def write_stamp(self) -> tuple[int, ...]:
        """Differs from an earlier stamp if the values were written in between, through this wrapper, a view of it or a
        DTensor. Not detected are writes through a DTensor by a graph compiled by Inductor, through other plain tensors
        on the same memory, and by custom operations that are not named like writes."""
        counted = () if self._data.is_inference() else (self, self._data, self._origin)
        return tuple(tensor._version for tensor in counted)

    def check_cut_along_rows(self, outer_size: torch.Size) -> None:
        """Refuse a shard that is not a slice of rows of a parameter of ``outer_size``.

        Raises:
            ValueError: the shard was cut along another dim.
        """
        if self.shape[1:] != outer_size[1:]:
            raise ValueError(
                f"{type(self).__name__} is gathered in whole rows, but a parameter of shape {tuple(outer_size)} was "
                f"cut into shards of shape {tuple(self.shape)}. Shard the parameter along dim 0."
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        data = self._data
        if isinstance(self, nn.Parameter):
            data = nn.Parameter(data, requires_grad=self.requires_grad)
        return data.__reduce_ex__(protocol)
