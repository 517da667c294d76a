"""Parameters that are all-gathered in float8 and stay float8 while unsharded.

``Float8AllGatherTensor`` is the shard with master values; ``Float8Tensor`` is the unsharded parameter. Rule: all ranks
use the same scale, or each row has its own, so the gathered values do not depend on the rank that quantised them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2.core import _torch
from fsdp2.tensors.wire import WireFormatTensor
from fsdp2.tensors.wrapper import ALIASES, Tensors, WrapperTensor, aten, row_pieces

_WIRE = torch.float8_e4m3fn  # 3 bits of mantissa: weights need precision more than range
_WIRE_MAX = torch.finfo(_WIRE).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # smaller scales lose precision in float32; zeros need a scale, too


class Float8Scaling(Enum):
    """How many elements share a scale."""

    PER_TENSOR = "per tensor"
    PER_ROW = "per row"


class Float8AllGatherTensor(WireFormatTensor):
    """A parameter that is all-gathered in float8 (e4m3), half the bytes of bfloat16, and stays float8 while unsharded.

    The unsharded parameter is a :class:`Float8Tensor` on the gathered memory, 1 byte per element. Its values are those
    of :func:`quantise_float8`. The gradient ignores the rounding.

    - ``PER_ROW``: each row is sent with its scale, which takes 4 bytes per row.
    - ``PER_TENSOR``: the scale comes from the largest magnitude on all ranks. Call :func:`precompute_float8_scales`
      after ``optimizer.step()``. If a shard has no scale, or was written since, each all-gather asks the other ranks
      for their magnitudes. So all ranks must write their shards, and precompute, at the same times. After an undetected
      write (see ``write_stamp``), values beyond the outdated scale are clamped to the largest float8.

    Args:
        data: master values, usually float32; ``[rows, ...]`` of at least two dims for ``PER_ROW``. The tensor shares
            their memory.
        scaling: which elements share a scale.

    Raises:
        TypeError, ValueError: see :meth:`WireFormatTensor.make`; rows of one element with ``PER_ROW``.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433; all-gathering float8 with
    precomputed scales is torchao's idea.
    """

    scaling: Float8Scaling
    _scale: torch.Tensor | None = None
    _scale_stamp: tuple[int, ...] | None = None

    def __new__(cls, data: torch.Tensor, *, scaling: Float8Scaling = Float8Scaling.PER_TENSOR) -> Float8AllGatherTensor:
        if not isinstance(scaling, Float8Scaling):
            raise TypeError(f"{cls.__name__}: scaling must be a Float8Scaling, found {scaling!r}.")
        made = cls.make(data, scaling=scaling)
        if scaling is Float8Scaling.PER_ROW and data.dim() < 2:
            raise ValueError(
                f"{cls.__name__}: rows of a tensor of shape {tuple(data.shape)} are single elements, so a scale per "
                "row costs more bytes than float8 saves. Use Float8Scaling.PER_TENSOR, or leave the tensor plain."
            )
        return made

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[Tensors, torch.Tensor | None]:
        """The float8 bits as uint8 in the shard's shape, since some collectives do not support float8. Also the scales
        ``[rows, 1, ...]``, or the single scale ``[1]`` as metadata."""
        if self.scaling is Float8Scaling.PER_ROW:
            self.check_cut_along_rows(outer_size)
            scales = scale_from(row_magnitudes(self._data))
            return (quantise_float8(self._data, scales).view(torch.uint8), scales), None
        scale = self._scale if self._scale_stamp == self.write_stamp else None
        if scale is None:
            largest = magnitude(self._data)
            if mesh.size() > 1:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
            scale = scale_from(largest)
        return (quantise_float8(self._data, scale).view(torch.uint8),), scale

    def fsdp_post_all_gather(
        self, all_gather_outputs: Tensors, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Tensors] | None:
        """A :class:`Float8Tensor` on the gathered memory, whose dtype is ``param_dtype``."""
        values = all_gather_outputs[0].view(_WIRE)
        scale = all_gather_outputs[1] if metadata is None else metadata
        if not isinstance(out, Float8Tensor):  # a copy of the scale: refresh() writes it
            return Float8Tensor(values, scale if metadata is None else scale.clone(), param_dtype), ()
        out.refresh(values, scale)
        return None

    def precomputed(self, scale: torch.Tensor) -> None:
        """Use ``scale`` ``[1]`` until the shard is written."""
        self._scale, self._scale_stamp = scale, self.write_stamp


class Float8Tensor(WrapperTensor):
    """An unsharded parameter in float8: ``data * scale``, as a read-only tensor of ``dtype``.

    ``linear``, ``mm`` and ``addmm`` with its transpose as second operand run in float8 if the device supports it:
    CUDA with compute capability 8.9 or higher, bfloat16, sizes that are multiples of 16. The first operand is then
    scaled and rounded in the same way. Every other operation reads a dequantised copy. Gradients are plain
    tensors of ``dtype``.

    Args:
        data: float8, ``[rows, ...]``. ``data`` and ``scale`` are shared, not copied.
        scale: float32, ``[1]``, or ``[rows, 1, ...]``.
        dtype: the dtype of the tensor.
    """

    _data: torch.Tensor
    _scale: torch.Tensor
    _INNER = ("_data", "_scale")
    _option_names = ("dtype",)

    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Float8Tensor:
        return cls._of(data, scale, dtype=dtype)

    def dequantised(self) -> torch.Tensor:
        """A plain tensor of the same shape and dtype. The product is computed in float32 and rounded once."""
        return self._data.to(self.dtype).mul_(self._scale)

    def refresh(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        """Copy newly gathered ``data`` and ``scale``, unless they are already in this tensor's memory."""
        for mine, new in ((self._data, data), (self._scale, scale)):
            if mine.data_ptr() != new.data_ptr():
                mine.data.copy_(new[: mine.size(0)])  # .data has its own version counter: autograd must not see a write

    def _plain(self) -> torch.Tensor:
        return self.dequantised()

    def _before_write(self, func: Any) -> None:
        raise RuntimeError(
            f"{func}: a Float8Tensor is read-only. "
            "Write the sharded parameter instead. The next gather reads the new values."
        )

    def __repr__(self) -> str:  # type: ignore[override]  # no values: their memory may be freed
        return f"Float8Tensor(shape={tuple(self.shape)}, dtype={self.dtype}, scale={tuple(self._scale.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dequantised().__reduce_ex__(protocol)


# Float8Tensor's operations. An operation that is missing, or returns NotImplemented, reads a dequantised copy


def _transposed(tensor: Float8Tensor, *dims: int) -> Any:
    if tensor.dim() != 2 or (dims and {dim % 2 for dim in dims} != {0, 1}):
        return NotImplemented
    scale = tensor._scale
    return tensor._like(tensor._data.t(), scale.t() if scale.dim() > 1 else scale)


def _cut_rows(tensor: Float8Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """``as_strided`` as runtimes use it: the first rows, or all of them."""
    rows = tensor._data[: size[0]] if len(size) == tensor.dim() else tensor._data
    if rows.shape != torch.Size(size) or rows.stride() != tuple(stride) or storage_offset:
        return NotImplemented
    scale = tensor._scale
    return tensor._like(rows, scale[: size[0]] if scale.dim() > 1 else scale)


def _without_values(op: Callable[..., Any], tensor: Float8Tensor, *args: Any, **kwargs: Any) -> Any:
    """Reads only the shape, since the values may have been released."""
    return op(tensor._data, *args, **{**kwargs, "dtype": kwargs.get("dtype") or tensor.dtype})


def _product(*operands: torch.Tensor, **factors: Any) -> Any:
    """``mm(x, weight)`` and ``addmm(bias, x, weight)``."""
    x, weight = operands[-2:]
    if factors or not isinstance(weight, Float8Tensor) or not _runs_in_float8(x, weight):
        return NotImplemented
    per_row = weight._scale.dim() > 1
    scale = scale_from(row_magnitudes(x) if per_row else magnitude(x))
    recipe = F.ScalingType.RowWise if per_row else F.ScalingType.TensorWise
    values = _to_float8(x, scale).contiguous()
    product = F.scaled_mm(values, weight._data, scale, recipe, weight._scale, recipe, output_dtype=x.dtype)
    return product.add_(operands[0]) if len(operands) == 3 else product


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Called only in inference mode: otherwise autograd decomposes ``linear`` first."""
    rows = x.reshape(-1, x.size(-1))
    product = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return product.view(*x.shape[:-1], weight.size(0))


def _runs_in_float8(x: torch.Tensor, weight: Float8Tensor) -> bool:
    """Whether the device can multiply ``x @ weight`` in float8. The second operand must be column-major: in forward,
    the transposed weight is; in backward, the weight itself is not."""
    return (
        not isinstance(x, Float8Tensor)
        and x.dtype == weight.dtype == torch.bfloat16
        and weight.stride() == (1, weight.size(0))
        and x.size(1) % 16 == 0
        and weight.size(1) % 16 == 0
        and x.size(0) > 0
        and _has_float8_matmul(x.device)
    )


def _has_float8_matmul(device: torch.device) -> bool:
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 9)


Float8Tensor._OPS = {
    **ALIASES,
    aten.t.default: _transposed,
    aten.transpose.int: _transposed,
    aten.as_strided.default: _cut_rows,
    aten.mm.default: _product,
    aten.addmm.default: _product,
    aten.linear.default: _linear,
    **{
        op: partial(_without_values, op)
        for op in (aten.empty_like.default, aten.zeros_like.default, aten.new_empty.default, aten.new_zeros.default)
    },
}


# Scales


def magnitude(data: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of ``data``, float32 ``[1]``; 0 if it is empty, NaN if it contains NaN."""
    if data.numel() == 0:
        return torch.zeros(1, device=data.device)
    low, high = torch.aminmax(data)
    return torch.maximum(high, low.neg()).to(torch.float32).view(1)


def row_magnitudes(data: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of each row of ``data`` ``[rows, ...]``, float32 ``[rows, 1, ...]``."""
    dims = tuple(range(1, data.dim()))
    return torch.maximum(data.amax(dims, keepdim=True), data.amin(dims, keepdim=True).neg()).to(torch.float32)


def scale_from(magnitudes: torch.Tensor) -> torch.Tensor:
    """The scales that map the largest float8 value to ``magnitudes``, in the same shape and in float32."""
    return (magnitudes / _WIRE_MAX).clamp_(min=_SMALLEST_SCALE)


def quantise_float8(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Convert ``data / scale`` to float8 (e4m3) of the same shape; ``scale`` is float32 ``[1]`` or ``[rows, 1, ...]``.

    ``abs(data - float8 * scale)`` is at most ``abs(data) / 16`` or ``scale / 1024``, whichever is larger. Values beyond
    448 times ``scale`` become 448. NaN stays NaN; an inf among the values that gave the scale makes all of them NaN.
    """
    values = torch.empty(data.shape, dtype=_WIRE, device=data.device)
    for rows in row_pieces(data):
        values[rows].copy_(_to_float8(data[rows], scale[rows] if scale.dim() > 1 else scale))
    return values


def _to_float8(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (data / scale).clamp_(-_WIRE_MAX, _WIRE_MAX).to(_WIRE)


@torch.no_grad()
def precompute_float8_scales(model: nn.Module) -> None:
    """Compute the scales of all sharded ``Float8AllGatherTensor`` parameters that are scaled per tensor, in one
    all-reduce per mesh. Call it after each ``optimizer.step()``, on all ranks. A scale is used until its shard is
    written.

    Source: torchao's precomputation of dynamic float8 scales for FSDP.
    """
    waiting: dict[tuple[DeviceMesh, tuple[int, ...]], list[Float8AllGatherTensor]] = {}
    for param in (param for param in model.parameters() if isinstance(param, DTensor)):
        shard = _torch.local_of(param)
        if isinstance(shard, Float8AllGatherTensor) and shard.scaling is Float8Scaling.PER_TENSOR:
            # is_shard() is False for strided shards, which FSDP makes from dims that tensor parallelism has sharded.
            axes = tuple(axis for axis, placement in enumerate(param.placements) if not placement.is_replicate())
            waiting.setdefault((param.device_mesh, axes), []).append(shard)
    for (mesh, axes), shards in waiting.items():
        largest = torch.cat([magnitude(shard._data) for shard in shards])
        for axis in axes:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(axis))
        for shard, scale in zip(shards, scale_from(largest).split(1), strict=True):
            shard.precomputed(scale)
