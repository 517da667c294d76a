"""A parameter that keeps one dtype in memory and travels in another: what all wire formats have in common.

A ``WireFormatTensor`` holds one plain tensor, the master values, and behaves as that tensor. Only the all-gather
differs: subclasses say by ``fsdp_pre_all_gather`` what is sent, and by ``fsdp_post_all_gather`` what becomes of it.
Rule: a wire format is not part of the value. Arithmetic gives plain tensors, so optimizer states are plain, and what is
pickled is the plain tensor, so checkpoints load anywhere. Only operations by which runtimes place, cut, copy and move
parameters keep the class; they are listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.plan.trees import find_tensors, map_tensors

aten = torch.ops.aten

# Share the memory of their first argument: sharding and checkpoints cut and flatten.
_VIEWS = frozenset(
    {
        aten.as_strided.default,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.view.default,
    }
)
# The same memory as a whole. They share the plain tensor itself, hence its count of writes: .data, state_dict().
_ALIASES = frozenset({aten.alias.default, aten.detach.default})
# Make new memory of the same kind: padding, deepcopy, Module.to, to_empty, pinning. ``zeros_like`` is not among them:
# optimizers make their states by it.
_COPIES = frozenset(
    {
        aten._pin_memory.default,
        aten._to_copy.default,
        aten.clone.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.new_zeros.default,
    }
)

# Conversions on the CPU go through the rows in pieces of this many elements, so that temporaries stay in the cache and
# no fresh pages are mapped for them. Measured with 16M elements on one core: int8 in 5 ms instead of 37, back in 4
# instead of 62.
_CPU_PIECE_NUMEL = 1 << 18

W = TypeVar("W", bound="WireFormatTensor")


class WireFormatTensor(torch.Tensor):
    """A floating-point parameter with a format of its own on the wire. Subclass it, and define both all-gather hooks.

    Shape, strides, dtype and device are those of the plain tensor that it was made from, whose memory it shares. A
    subclass calls ``make`` in its ``__new__``; keyword arguments given to ``make`` become attributes, and they travel
    through views, copies, ``copy.deepcopy`` and ``torch.compile``.

    - In-place operations write the plain tensor and return the wrapper.
    - The operations that place and copy parameters return the same class: see ``_VIEWS`` and ``_COPIES``.
    - Every other operation returns plain tensors.
    - ``pickle``, ``torch.save`` and distributed checkpoints write the plain tensor. Loading one copies it in.

    Hooks send a shard's own rows, and fsdp2 pads them. ``torch.distributed.fsdp`` wants padded ones where dim 0 is not
    divisible by the number of ranks; only ``BFloat16AllGatherTensor(pad=True)`` sends those.

    Attributes:
        quantise_once: whether a runtime that can (fsdp2) keeps what ``fsdp_pre_all_gather`` returned until the shard is
            written, instead of calling it for each all-gather. Costs the payload's memory.

    Source: the all-gather hooks are those of ``torch.distributed.fsdp.fully_shard``; the wrapper protocol is the one of
    PyTorch's notes on extending it with ``__torch_dispatch__``.
    """

    _data: torch.Tensor
    _options: dict[str, Any]
    _origin: torch.Tensor  # the plain tensor of the wrapper that this one is a view of, or its own
    quantise_once: bool = False

    # As nn.Parameter does it. With torch's default for subclasses, every result would become a wrapper again.
    __torch_function__ = nn.Parameter.__torch_function__

    @classmethod
    def make(cls: type[W], data: torch.Tensor, **options: Any) -> W:
        """A wrapper on the memory of ``data``: plain, floating-point, of at least 16 bits and one dim.

        Raises:
            TypeError: ``data`` is no plain tensor, or not of such a dtype.
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
            raise ValueError(f"{name}: a scalar has no dim to cut over ranks. Give it shape (1,), or leave it plain.")
        return cls._wrapped(data.detach(), options)

    @classmethod
    def _wrapped(cls: type[W], data: torch.Tensor, options: dict[str, Any], origin: torch.Tensor | None = None) -> W:
        # No storage offset: with one, data_ptr() is not 0, and copy.deepcopy looks for memory of the wrapper's own.
        self: W = cls._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device, layout=data.layout
        )
        self._data = data
        self._options = options
        self._origin = data if origin is None else origin
        vars(self).update(options)
        return self

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["_data"], self._options

    @classmethod
    def __tensor_unflatten__(
        cls: type[W], inner: dict[str, torch.Tensor], options: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> W:
        return cls._wrapped(inner["_data"], options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared as a static method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        wrappers: dict[int, torch.Tensor] = {}  # by the identity of their plain tensors

        def plain(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, WireFormatTensor):
                return tensor
            wrappers.setdefault(id(tensor._data), tensor)  # the first: what in-place operations write
            return tensor._data

        for tensor in written_by(func, args, kwargs):
            if isinstance(tensor, WireFormatTensor):
                tensor._count_write()
        first = args[0] if args else None
        if isinstance(first, WireFormatTensor) and func in _ALIASES:
            return first._like(first._data, first._origin)
        if func is aten.as_strided.default:
            args, kwargs = args[:1], _from_the_wrappers_start(*args, **kwargs)
        result = func(*map_tensors(plain, args), **map_tensors(plain, kwargs))
        if isinstance(first, WireFormatTensor) and func in _VIEWS:
            return map_tensors(lambda view: first._like(view, first._origin), result)
        if isinstance(first, WireFormatTensor) and func in _COPIES:
            return first._like(result, None)
        return map_tensors(lambda tensor: wrappers.get(id(tensor), tensor), result)  # in-place: the wrapper itself

    def _like(self, data: torch.Tensor, origin: torch.Tensor | None) -> torch.Tensor:
        """``data`` in the same class with the same options; integers, as ``Tensor.to`` makes them, stay plain."""
        return type(self)._wrapped(data, self._options, origin) if data.is_floating_point() else data

    def _count_write(self) -> None:
        """torch counts a write for the object that is written: the DTensor around a wrapper, or a view of it. And for
        nobody if it is a list of DTensors, as optimizers with foreach or fused write it."""
        torch.autograd.graph.increment_version([self._data, self._origin])

    @property
    def fsdp_keep_all_gather_inputs(self) -> bool:
        """``quantise_once``, by the name that fsdp2 asks for. torch has no such thing."""
        return self.quantise_once

    @property
    def write_stamp(self) -> tuple[int, ...]:
        """Differs from an earlier one if the values were written in between, through this wrapper, a view of it or a
        DTensor. Not noticed: what a graph compiled by Inductor writes through a DTensor, what is written through other
        plain tensors on the same memory, and custom operations that write but are not named like it."""
        counted = () if self._data.is_inference() else (self, self._data, self._origin)
        return tuple(tensor._version for tensor in counted)

    def check_cut_along_rows(self, outer_size: torch.Size) -> None:
        """Refuse a shard that is no slice of rows of a parameter of ``outer_size``.

        Raises:
            ValueError: it was cut along another dim.
        """
        if self.shape[1:] != outer_size[1:]:
            raise ValueError(
                f"{type(self).__name__} travels in whole rows, but a parameter of shape {tuple(outer_size)} was cut "
                f"into shards of shape {tuple(self.shape)}. Cut it along dim 0."
            )

    def _stable_hash_for_caching(self) -> str:
        """What torch's cache of compiled graphs tells inputs apart by, besides their class."""
        return f"{self.shape} {self.stride()} {self.dtype} {self.device} {self.requires_grad} {self._options}"

    def __repr__(self) -> str:  # type: ignore[override]
        options = "".join(f", {name}={value}" for name, value in self._options.items())
        return f"{type(self).__name__}({self._data!r}{options})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        data = self._data
        if isinstance(self, nn.Parameter):
            data = nn.Parameter(data, requires_grad=self.requires_grad)
        return data.__reduce_ex__(protocol)


def row_pieces(tensor: torch.Tensor) -> Iterator[slice]:
    """Slices of the rows (dim 0) of ``tensor`` to convert at a time: small ones on the CPU, all of them elsewhere."""
    num_rows, numel = tensor.size(0), tensor.numel()
    if numel == 0:
        return
    step = max(1, _CPU_PIECE_NUMEL * num_rows // numel) if tensor.device.type == "cpu" else num_rows
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that ``func`` writes, by its name: in-place operations end in ``_`` and write their first argument,
    others write ``out``. What only reads must not be among them: a rank that gathers whole shards reads its shard, one
    that pads them does not, and ranks have to agree on whether shards were written."""
    written = [value for name, value in kwargs.items() if name.startswith("out")]
    if func.__name__.partition(".")[0].endswith("_"):
        written += args[:1] or list(kwargs.values())
    return find_tensors(written, [])


def _from_the_wrappers_start(
    tensor: WireFormatTensor, size: Any, stride: Any, storage_offset: int | None = None
) -> dict[str, Any]:
    """Arguments of ``as_strided`` for the plain tensor. The wrapper reports no offset, so offsets count from it."""
    offset = tensor._data.storage_offset() + (storage_offset or 0)
    return {"size": size, "stride": stride, "storage_offset": offset}
