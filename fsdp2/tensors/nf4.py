"""``NF4Tensor``: frozen weights in 4 bits, as QLoRA keeps its base model (Dettmers et al., arXiv 2305.14314).

A row of a weight is cut into blocks. A block has one float32 scale and a 4-bit code per weight. Shards hold scales and
codes, and the all-gather sends them. So every cut along dim 0 is exact, and cuts along other dims are impossible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fsdp2.tensors.normal_float import ZERO_CODE, dequantise, quantise
from fsdp2.tensors.packed import PackedTensor
from fsdp2.tensors.wrapper import DequantisedTensor, Tensors, aten


class NF4Tensor(DequantisedTensor, PackedTensor):
    """A frozen weight of shape ``(rows, ...)`` in 4 bits. Its dtype is the dtype of its dequantised values.

    Make one with ``quantise``, and bind it as ``nn.Parameter(nf4, requires_grad=False)``. Ops that read it dequantise,
    even without sharding. It can be copied, moved, saved, and cut along dim 0; ``copy_`` quantises. A cast changes
    the dtype of its dequantised values. Other in-place ops are refused. Under torch's own FSDP2, ranks must
    divide dim 0 evenly.
    """

    _packed: torch.Tensor
    _scales: torch.Tensor
    _block_size: int
    _row_numel: int
    _INNER = ("_packed", "_scales")
    _option_names = ("dtype", "_block_size", "_row_numel")
    _ZERO_ROW = (ZERO_CODE << 4 | ZERO_CODE, 0)

    @classmethod
    def quantise(cls, weight: torch.Tensor, *, block_size: int = 64) -> NF4Tensor:
        """Quantise ``weight`` ``(rows, ...)`` to 4 bits. The trailing dims are a row, cut into ``block_size`` blocks.

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
                f"NF4Tensor.quantise: expected at least two dims and rows that are not empty, found shape "
                f"{tuple(weight.shape)}. Do not quantise biases and norms."
            )
        if block_size < 2 or block_size % 2:
            raise ValueError(
                f"NF4Tensor.quantise: block_size is {block_size}, expected an even number of at least 2, because a "
                "byte holds two codes."
            )
        packed, scales = quantise(weight.detach().reshape(weight.size(0), row_numel), block_size)
        form = {"dtype": weight.dtype, "_block_size": block_size, "_row_numel": row_numel}
        return cls(packed, scales, shape=weight.shape, **form)

    def dequantise(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight as a new dense tensor of the same shape, in ``dtype`` (default: its own dtype)."""
        out = self._packed.new_empty(self.shape, dtype=dtype or self.dtype)
        self._dequantise(self._packed, self._scales, out)
        return out

    def requires_grad_(self, requires_grad: bool = True) -> NF4Tensor:
        """Raises a ValueError for True. ``nn.Parameter`` and ``nn.Module.requires_grad_`` also call this."""
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
                f"{_described(self)}: requires_grad=True, but 4-bit codes cannot be trained. "
                "Use nn.Parameter(weight, requires_grad=False), and train an adapter instead."
            )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{_described(self)}, block_size={self._block_size}, on {self.device}>"

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], options: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> NF4Tensor:
        return cls._of(inner["_packed"], inner["_scales"], shape=outer_size, **options)

    def _like(self, *inner: torch.Tensor, **changes: Any) -> torch.Tensor:
        """A wrapper of the same shape with the rows of ``inner``; ``changes`` may set another shape."""
        is_cut = inner[0].size(0) != self._packed.size(0)
        shape = (inner[0].size(0), *self.shape[1:]) if is_cut else tuple(self.shape)
        return super()._like(*inner, **{"shape": shape, **changes})

    def _plain(self) -> torch.Tensor:
        return self.dequantise()

    def _viewed(self, size: Sequence[int]) -> torch.Tensor:
        """The same rows, since runtimes flatten shards. The view can be read, but not cut."""
        shape = torch.empty(self.shape, device="meta").view(size).shape
        return self._like(*self._inner, shape=tuple(shape))

    def _can_have(self, dtype: torch.dtype, size: Sequence[int] | None = None) -> bool:
        has_rows = size is None or (len(size) > 1 and math.prod(size[1:]) == self._row_numel)
        return dtype.is_floating_point and has_rows

    def _check_cut(self, dim: int) -> None:
        if dim % self.dim() != 0:
            raise ValueError(
                f"{_described(self)}: cut along dim {dim}, but blocks of {self._block_size} weights lie within the "
                "rows of dim 0, so only cuts along dim 0 are exact. Use Shard(0), or call dequantise() first."
            )
        if math.prod(self.shape[1:]) != self._row_numel:
            raise ValueError(
                f"{_described(self)}: cut along dim 0, but dim 0 of this view no longer holds the rows of "
                f"{self._row_numel} weights. Cut the tensor before the view."
            )

    def _packed_from(self, source: torch.Tensor) -> Tensors:
        if isinstance(source, NF4Tensor):
            kinds = [(each.shape, each._row_numel, each._block_size) for each in (source, self)]
            if kinds[0] == kinds[1]:
                return source._inner
            source = source.dequantise()
        rows = source.expand(self.shape).reshape(self._packed.size(0), self._row_numel)
        return quantise(rows, self._block_size)

    def _dequantise(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        dequantise(codes, scales, out=out.view(-1, self._row_numel))


torch.serialization.add_safe_globals([NF4Tensor])  # for torch.load(weights_only=True), which checkpoints use


def _as_strided(weight: NF4Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> torch.Tensor:
    if tuple(size) == tuple(weight.shape) and tuple(stride) == weight.stride() and not storage_offset:
        return weight._like(*weight._inner)
    raise ValueError(
        f"{_described(weight)}: as_strided to shape {tuple(size)}, strides {tuple(stride)}, offset {storage_offset} "
        "is not possible, because the weights are packed. Cut along dim 0, or call dequantise() first."
    )


NF4Tensor._OPS = PackedTensor._OPS | {aten.as_strided.default: _as_strided}


def _described(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__name__} of shape {tuple(tensor.shape)}, {tensor.dtype}"
