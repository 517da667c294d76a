"""The base class of the tensor subclasses here: a tensor that is made of inner tensors.

Each class has a table of operations. Rule: an operation that is not in the table reads a plain tensor instead of the
wrapper and returns plain results. The wrapper is notified before a write, and counts or refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from fsdp2.core import find_tensors, map_tensors

aten = torch.ops.aten

# On the CPU, rows are converted in pieces of this many elements, so that temporaries stay in the cache. With 16M
# elements on one core, int8 takes 5 ms instead of 37.
_CPU_PIECE_NUMEL = 1 << 18

W = TypeVar("W", bound="WrapperTensor")
Tensors = tuple[torch.Tensor, ...]


class WrapperTensor(torch.Tensor):
    """``_INNER`` names the attributes that hold inner tensors, ``_option_names`` those that views, copies and
    ``torch.compile`` preserve with them. ``_OPS`` has functions for operations that do not read a plain tensor; if one
    returns ``NotImplemented``, the rule applies."""

    _INNER: ClassVar[tuple[str, ...]] = ("_data",)
    _OPS: ClassVar[dict[Any, Callable[..., Any]]] = {}
    _option_names: tuple[str, ...] = ()

    # The same as in nn.Parameter. With torch's default for subclasses, every result would become a wrapper again.
    __torch_function__ = nn.Parameter.__torch_function__

    def __new__(cls: type[W], *inner: torch.Tensor, **options: Any) -> W:
        return cls._of(*inner, **options)

    @classmethod
    def _of(
        cls: type[W],
        *inner: torch.Tensor,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> W:
        """Make a wrapper of ``inner``. Shape, strides and dtype are those of the first, unless a contiguous ``shape``
        is given. There is no storage offset: with one, copy.deepcopy would look for the wrapper's own memory."""
        like = inner[0]
        size, strides = (like.shape, like.stride()) if shape is None else (shape, None)
        self: W = cls._make_wrapper_subclass(cls, size, strides=strides, dtype=dtype or like.dtype, device=like.device)
        vars(self).update(zip(cls._INNER, inner, strict=True), **options)
        return self

    @property
    def _inner(self) -> Tensors:
        return tuple(getattr(self, name) for name in self._INNER)

    @property
    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._option_names}

    def _like(self, *inner: torch.Tensor, **changes: Any) -> torch.Tensor:
        """A wrapper of ``inner`` with the same options, except for ``changes``."""
        return type(self)._of(*inner, **{**self._options, **changes})

    def _plain(self) -> torch.Tensor:
        """The tensor that operations read instead of the wrapper."""
        return self

    def _before_write(self, func: Any) -> None:
        """``func`` will write the result of ``_plain``. Raises to refuse the write."""

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return list(self._INNER), self._options

    @classmethod
    def __tensor_unflatten__(
        cls: type[W], inner: dict[str, torch.Tensor], options: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> W:
        return cls._of(*(inner[name] for name in cls._INNER), **options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared as a static method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in cls._OPS and (result := cls._OPS[func](*args, **kwargs)) is not NotImplemented:
            return result
        written: dict[int, torch.Tensor] = {}  # written wrappers, by the identity of their plain tensors
        for tensor in written_by(func, args, kwargs):
            if isinstance(tensor, WrapperTensor):
                tensor._before_write(func)
                written[id(tensor._plain())] = tensor
        result = func(*map_tensors(_plain, args), **map_tensors(_plain, kwargs))
        return map_tensors(lambda tensor: written.get(id(tensor), tensor), result)

    def _stable_hash_for_caching(self) -> str:
        """The key, besides the class, by which torch's cache of compiled graphs distinguishes inputs."""
        inner = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in self._inner]
        return f"{self.shape} {self.stride()} {self.dtype} {self.device} {self.requires_grad} {self._options} {inner}"

    def __repr__(self) -> str:  # type: ignore[override]
        shown = [*map(repr, self._inner), *(f"{name}={value}" for name, value in self._options.items())]
        return f"{type(self).__name__}({', '.join(shown)})"


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._plain() if isinstance(tensor, WrapperTensor) else tensor


class DequantisedTensor(WrapperTensor):
    """Is sent as codes and scales, and is unsharded into a dense tensor in its own memory."""

    def _dequantise(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write the dequantised values into ``out``, which has the same number of rows."""
        raise NotImplementedError

    def fsdp_post_all_gather(
        self, all_gather_outputs: Tensors, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Tensors] | None:
        """The dequantised parameter in ``param_dtype``, or in the dtype and memory of ``out``."""
        codes, scales = all_gather_outputs
        if out is None:
            made = codes.new_empty((codes.size(0), *self.shape[1:]), dtype=param_dtype)
            self._dequantise(codes, scales, made)
            return made, (made,)
        # .data has its own version counter: autograd must not see a write.
        self._dequantise(codes[: out.size(0)], scales[: out.size(0)], out.data)
        return None

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        """True: the post-hook always copies the outputs."""
        return True


# Operations


def on_each(op: Callable[..., Any], tensor: WrapperTensor, *args: Any, **kwargs: Any) -> Any:
    """``op`` of each inner tensor: wrappers like ``tensor`` of the results, one or a list of them."""
    results = [op(inner, *args, **kwargs) for inner in tensor._inner]
    if isinstance(results[0], torch.Tensor):
        return tensor._like(*results)
    return [tensor._like(*parts) for parts in zip(*results, strict=True)]


def as_strided(tensor: WrapperTensor, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """Offsets count from the start of the wrapper, whose own offset is always 0, unlike those of inner tensors."""
    return on_each(lambda inner: inner.as_strided(size, stride, inner.storage_offset() + (storage_offset or 0)), tensor)


def each(*ops: Any) -> dict[Any, Callable[..., Any]]:
    """Entries for a table: operations that run on each inner tensor."""
    return {op: partial(on_each, op) for op in ops}


# The same inner tensors, so also the same write counts: .data, state_dict().
ALIASES: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (aten.alias.default, aten.detach.default, aten.lift_fresh.default), lambda tensor: tensor._like(*tensor._inner)
)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that ``func`` writes, by its name: in-place operations end in ``_`` and write their first argument,
    others write ``out``. No others: ranks have to agree on whether shards were written."""
    written = [value for name, value in kwargs.items() if name.startswith("out")]
    if func.__name__.partition(".")[0].endswith("_"):
        written += args[:1] or list(kwargs.values())
    return find_tensors(written, [])


def row_pieces(tensor: torch.Tensor, max_numel: int | None = None) -> Iterator[slice]:
    """Slices of the rows (dim 0) of ``tensor`` to convert at a time: small ones on the CPU; elsewhere of ``max_numel``
    elements, or all of them."""
    num_rows, numel = tensor.size(0), tensor.numel()
    if numel == 0:
        return
    limit = _CPU_PIECE_NUMEL if tensor.device.type == "cpu" else max_numel or numel
    step = max(1, limit * num_rows // numel)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
