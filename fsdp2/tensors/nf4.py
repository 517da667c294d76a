"""``NF4Tensor``: frozen weights in 4 bits, as QLoRA keeps its base model (Dettmers et al., arXiv 2305.14314).

A row of a weight is cut into blocks; a block is one float32 scale and a 4-bit code per weight. Shards hold, and the
all-gather carries, codes and scales; the post-hook turns them into the dense weight that compute reads.
Rule: a block never leaves its row of dim 0. So every cut along dim 0 is exact, and no other cut is possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp2.plan.trees import find_tensors, map_tensors
from fsdp2.tensors.normal_float import ZERO_CODE, dequantise, quantise

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

aten = torch.ops.aten


class NF4Tensor(torch.Tensor):
    """A frozen weight of shape ``(rows, ...)`` in 4 bits. Its dtype is the one it dequantises to.

    Make one with ``quantise``, and bind it as ``nn.Parameter(nf4, requires_grad=False)``. Reading ops dequantise and
    run, so that ``F.linear(x, nf4)`` works without sharding, too (autograd then keeps the dense weight for backward).
    It can be copied, moved, saved, and cut along dim 0; ``copy_`` into it quantises. Casting changes what it
    dequantises to, not what it holds. Other in-place ops are refused.
    """

    _packed: torch.Tensor
    _scales: torch.Tensor
    _block_size: int
    _row_numel: int

    # nn.Parameter's: torch functions go straight to __torch_dispatch__. torch.Tensor's would make plain results ours.
    __torch_function__ = nn.Parameter.__torch_function__

    def __new__(
        cls,
        packed: torch.Tensor,
        scales: torch.Tensor,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype,
        block_size: int,
        row_numel: int,
    ) -> NF4Tensor:
        """Takes over ``quantise``'s results for a weight ``[rows, row_numel]``, seen as ``shape`` of the same size."""
        self: NF4Tensor = cls._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)
        self._packed = packed
        self._scales = scales
        self._block_size = block_size
        self._row_numel = row_numel
        return self

    @classmethod
    def quantise(cls, weight: torch.Tensor, *, block_size: int = 64) -> NF4Tensor:
        """``weight`` ``(rows, ...)`` in 4 bits. The trailing dims are a row, cut into blocks of ``block_size``.

        A row takes ``ceil(row / block_size) * (block_size / 2 + 4)`` bytes: 0.5625 per weight where 64 divides it.

        Raises:
            ValueError: fewer than two dims, rows of size 0, an odd ``block_size``, or entries that are not finite.
            TypeError: ``weight`` is not a plain floating-point tensor.
        """
        if not weight.is_floating_point() or type(weight) not in (torch.Tensor, nn.Parameter):
            raise TypeError(f"NF4Tensor.quantise: expected plain floating-point weights, found {_described(weight)}.")
        row_numel = math.prod(weight.shape[1:])
        if weight.dim() < 2 or row_numel == 0:
            raise ValueError(
                f"NF4Tensor.quantise: expected rows to cut into blocks, found shape {tuple(weight.shape)}. "
                "Leave biases and norms as they are."
            )
        if block_size < 2 or block_size % 2:
            raise ValueError(f"NF4Tensor.quantise: block_size is {block_size}; a byte holds two codes: make it even.")
        packed, scales = quantise(weight.detach().reshape(weight.size(0), row_numel), block_size)
        return cls(packed, scales, weight.shape, dtype=weight.dtype, block_size=block_size, row_numel=row_numel)

    def dequantise(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight as a new dense tensor of our shape, in ``dtype``, or in our own. See the function of that name."""
        return dequantise(self._packed, self._scales, self._row_numel, dtype or self.dtype).view(self.shape)

    def requires_grad_(self, requires_grad: bool = True) -> NF4Tensor:
        """Refuses True, with a ValueError; ``nn.Parameter`` and ``nn.Module.requires_grad_`` call this, too."""
        self.requires_grad = requires_grad
        return self

    @property
    def requires_grad(self) -> bool:
        """Always False."""
        return False

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        if requires_grad:
            raise ValueError(
                f"{_described(self)}: requires_grad=True, but 4-bit codes cannot follow a gradient. "
                "Bind it as nn.Parameter(weight, requires_grad=False), and train an adapter beside it."
            )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{_described(self)}, block_size={self._block_size}, on {self.device}>"

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["_packed", "_scales"], self._form

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], form: dict[str, Any], outer_size: torch.Size, outer_stride: Any
    ) -> NF4Tensor:
        return cls(inner["_packed"], inner["_scales"], outer_size, **form)

    @property
    def _form(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "block_size": self._block_size, "row_numel": self._row_numel}

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _handlers:
            return _handlers[func](*args, **kwargs)
        written = args[:1] if func.__name__.partition(".")[0].endswith("_") else kwargs.get("out")
        if _holds_nf4(written):
            raise TypeError(
                f"{func} would write an NF4Tensor, which is frozen: an optimizer must not get it. "
                "Pass those parameters only that require gradients, or dequantise() first."
            )
        return func(*map_tensors(_dense, args), **map_tensors(_dense, kwargs))

    # All-gather hooks

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], None]:
        """Codes and scales of this rank's rows. Under torch's own FSDP2, ranks must divide dim 0 evenly."""
        return (self._packed, self._scales), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The dense weight in ``param_dtype``, in memory of its own."""
        packed, scales = all_gather_outputs
        if out is None:
            dense = dequantise(packed, scales, self._row_numel, param_dtype)
            dense = dense.view(-1, *self.shape[1:])
            return dense, (dense,)
        # .data: the values are those that autograd saved, so it must not see a write.
        dequantise(packed, scales, self._row_numel, out.dtype, out=out.data.view(-1, self._row_numel))
        return None

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        """Always: the dense weight shares no memory with what was gathered."""
        return True


torch.serialization.add_safe_globals([NF4Tensor])  # for torch.load(weights_only=True), which checkpoints use


# Operations that do not dequantise


_handlers: dict[Any, Callable[..., Any]] = {}


def _handles(*funcs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        _handlers.update(dict.fromkeys(funcs, handler))
        return handler

    return register


def _like(
    weight: NF4Tensor, fn: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...] | None = None, **form: Any
) -> NF4Tensor:
    """``fn`` of both inner tensors, in the form of ``weight`` but for ``form``."""
    shape = tuple(weight.shape) if shape is None else shape
    return type(weight)(fn(weight._packed), fn(weight._scales), shape, **{**weight._form, **form})


@_handles(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(weight: NF4Tensor) -> NF4Tensor:
    return _like(weight, torch.Tensor.detach)


@_handles(aten.clone.default)
def _clone(weight: NF4Tensor, *, memory_format: torch.memory_format | None = None) -> NF4Tensor:
    return _like(weight, torch.clone)


@_handles(aten._pin_memory.default)
def _pin_memory(weight: NF4Tensor, device: torch.device | None = None) -> NF4Tensor:
    return _like(weight, torch.Tensor.pin_memory)


@_handles(aten.is_pinned.default)
def _is_pinned(weight: NF4Tensor, device: torch.device | None = None) -> bool:
    return weight._packed.is_pinned() and weight._scales.is_pinned()


@_handles(aten._to_copy.default)
def _to_copy(
    weight: NF4Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    pin_memory: bool = False,
    non_blocking: bool = False,
    **layout: Any,
) -> torch.Tensor:
    dtype = dtype or weight.dtype
    if not dtype.is_floating_point:
        return weight.dequantise().to(dtype=dtype, device=device, non_blocking=non_blocking)
    moved = _like(weight, lambda inner: inner.to(device=device, non_blocking=non_blocking, copy=True), dtype=dtype)
    return moved.pin_memory() if pin_memory else moved


@_handles(aten.empty_like.default, aten.zeros_like.default)
def _zeros_like(weight: NF4Tensor, **options: Any) -> torch.Tensor:
    return _new_zeros(weight, weight.shape, **options)


@_handles(aten.new_empty.default, aten.new_zeros.default)
def _new_zeros(
    weight: NF4Tensor,
    size: tuple[int, ...],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    pin_memory: bool = False,
    **layout: Any,
) -> torch.Tensor:
    """Of our kind if the rows are alike, else dense. Empty ones are zeros, too: no bytes are without a meaning."""
    dtype, device, shape = dtype or weight.dtype, device or weight.device, tuple(size)
    if not dtype.is_floating_point or len(shape) < 2 or math.prod(shape[1:]) != weight._row_numel:
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pin_memory)
    packed_shape, scales_shape = (shape[0], weight._packed.size(1)), (shape[0], weight._scales.size(1))
    packed = torch.full(
        packed_shape, ZERO_CODE << 4 | ZERO_CODE, dtype=torch.uint8, device=device, pin_memory=pin_memory
    )
    scales = torch.zeros(scales_shape, dtype=torch.float32, device=device, pin_memory=pin_memory)
    return NF4Tensor(packed, scales, shape, **{**weight._form, "dtype": dtype})


@_handles(aten.slice.Tensor)
def _slice(
    weight: NF4Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> NF4Tensor:
    size = weight.size(dim)
    if slice(start, end, step).indices(size) == (0, size, 1):
        return _alias(weight)
    _check_cut(weight, dim)
    rows = range(size)[start:end:step]
    return _like(weight, lambda inner: inner[start:end:step], (len(rows), *weight.shape[1:]))


@_handles(aten.split.Tensor, aten.split_with_sizes.default)
def _split(weight: NF4Tensor, sizes: int | list[int], dim: int = 0) -> list[NF4Tensor]:
    _check_cut(weight, dim)
    pieces = zip(weight._packed.split(sizes), weight._scales.split(sizes), strict=True)
    rest = weight.shape[1:]
    return [NF4Tensor(packed, scales, (packed.size(0), *rest), **weight._form) for packed, scales in pieces]


@_handles(aten.view.default, aten._unsafe_view.default)
def _view(weight: NF4Tensor, size: list[int]) -> NF4Tensor:
    """Another shape on the same rows: runtimes flatten shards. Such a view can be read, but not cut."""
    shape = torch.empty(weight.shape, device="meta").view(size).shape
    return _like(weight, torch.Tensor.detach, tuple(shape))


@_handles(aten.as_strided.default)
def _as_strided(weight: NF4Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> NF4Tensor:
    if tuple(size) == tuple(weight.shape) and tuple(stride) == weight.stride() and not storage_offset:
        return _alias(weight)
    raise ValueError(
        f"{_described(weight)}: as_strided to shape {tuple(size)}, strides {tuple(stride)}, offset {storage_offset}, "
        "but packed weights do not lie in memory one by one. Cut along dim 0, or dequantise() first."
    )


@_handles(aten.copy_.default)
def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(target, NF4Tensor):
        return target.copy_(_dense(source), non_blocking)
    rows, row_numel, block_size = target._packed.size(0), target._row_numel, target._block_size
    same = isinstance(source, NF4Tensor) and (source._row_numel, source._block_size) == (row_numel, block_size)
    if isinstance(source, NF4Tensor) and same and source.shape == target.shape:
        packed, scales = source._packed, source._scales
    else:
        packed, scales = quantise(_dense(source).expand(target.shape).reshape(rows, row_numel), block_size)
    target._packed.copy_(packed, non_blocking)
    target._scales.copy_(scales, non_blocking)
    return target


def _check_cut(weight: NF4Tensor, dim: int) -> None:
    if dim % weight.dim() != 0:
        raise ValueError(
            f"{_described(weight)}: cut along dim {dim}, but blocks of {weight._block_size} weights lie within the "
            "rows of dim 0, so only cuts along dim 0 are exact. Shard it by Shard(0), or dequantise() first."
        )
    if math.prod(weight.shape[1:]) != weight._row_numel:
        raise ValueError(
            f"{_described(weight)}: cut along dim 0, but this is a view of rows of {weight._row_numel} weights, which "
            "are no longer dim 0. Cut the tensor that it is a view of."
        )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantise() if isinstance(tensor, NF4Tensor) else tensor


def _holds_nf4(value: Any) -> bool:
    return any(isinstance(tensor, NF4Tensor) for tensor in find_tensors(value, []))


def _described(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__name__} of shape {tuple(tensor.shape)}, {tensor.dtype}"
