"""``NF4Tensor``: frozen weights in 4 bits, as QLoRA keeps its base model (Dettmers et al., arXiv 2305.14314).

A row of a weight is cut into blocks. A block has one float32 scale and a 4-bit code per weight. Shards hold scales and
codes, and the all-gather sends them. So every cut along dim 0 is exact, and cuts along other dims are impossible.
``quantise`` and ``dequantise`` are pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp2.extras.checked import Limit, checked
from fsdp2.tensors.packed import PackedTensor
from fsdp2.tensors.wrapper import DequantisedTensor, Tensors, aten, row_pieces


def codebook() -> tuple[float, ...]:
    """The 16 values of NF4, ascending from -1 to 1: zero, and eight positive and seven negative quantiles of the normal
    distribution, evenly spaced in probability between 1/2 and ``1 - delta``, divided by the largest. ``delta`` is the
    mean of 1/32 and 1/30, half a step of 16 and of 15 values.

    Source: arXiv 2305.14314, section 3 and appendix E.
    """
    outermost = 1 - (1 / 32 + 1 / 30) / 2

    def quantiles(count: int) -> list[float]:
        return [NormalDist().inv_cdf(outermost + (0.5 - outermost) * i / count) for i in range(count)]

    values = [*(-q for q in quantiles(7)), 0.0, *reversed(quantiles(8))]
    return tuple(value / values[-1] for value in values)


CODEBOOK = codebook()
MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(CODEBOOK))
MAX_ERROR = max(high - low for low, high in pairwise(CODEBOOK)) / 2
ZERO_CODE = CODEBOOK.index(0.0)

# The weights processed at a time on an accelerator: temporaries take 8 bytes per weight, and 20 to quantise.
_PIECE_NUMEL = 1 << 20


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
    @checked(block_size=Limit(2))
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
        if block_size % 2:
            raise ValueError(
                f"NF4Tensor.quantise: block_size is {block_size}, expected an even number of at least 2, because a "
                "byte holds two codes."
            )
        packed, scales = quantise(weight.detach().reshape(weight.size(0), row_numel), block_size)
        form = {"dtype": weight.dtype, "_block_size": block_size, "_row_numel": row_numel}
        return cls(packed, scales, shape=weight.shape, **form)

    @checked()
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


def quantise(weight: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute codes and scales of ``weight`` ``[rows, cols]``, of any floating-point dtype.

    Returns uint8 ``[rows, num_blocks * block_size / 2]``, the first code of two in a byte's high half, and float32
    ``[rows, num_blocks]`` with ``num_blocks = ceil(cols / block_size)``; a row's last block is padded with zeros. A
    scale is the block's largest absolute value in float32. It is exact, so quantising a dequantised weight again
    changes nothing.

    Raises:
        ValueError: ``weight`` has an entry that is not finite in float32.
    """
    rows, cols = weight.shape
    num_blocks = -(-cols // block_size)
    packed = torch.empty(rows, num_blocks * block_size // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, num_blocks, dtype=torch.float32, device=weight.device)
    midpoints = torch.tensor(MIDPOINTS, dtype=torch.float32, device=weight.device)
    for piece in row_pieces(weight, _PIECE_NUMEL):
        blocks = F.pad(weight[piece].float(), (0, num_blocks * block_size - cols))
        blocks = blocks.view(-1, num_blocks, block_size)
        scale = torch.amax(blocks.abs(), dim=-1, keepdim=True)
        codes = torch.bucketize(blocks / scale.where(scale > 0, 1.0), midpoints, out_int32=True)
        codes = codes.to(torch.uint8).flatten(1)
        packed[piece] = (codes[:, ::2] << 4) | codes[:, 1::2]
        scales[piece] = scale.squeeze(-1)
    if not scales.is_meta and not scales.isfinite().all():
        raise ValueError("NF4: the weight has infinite or NaN entries, expected entries that are finite in float32.")
    return packed, scales


def dequantise(packed: torch.Tensor, scales: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write the weight from which ``quantise`` made these into ``out`` ``[rows, cols]``, of any floating-point dtype.

    It differs from the original by at most ``MAX_ERROR`` (0.152) times the block's scale, plus the rounding to the
    dtype; zeros and the block's largest weight are exact.
    """
    num_blocks, cols = scales.size(1), out.size(1)
    is_traced = type(packed) is not torch.Tensor  # torch.compile's stand-ins cannot be mixed with a cached tensor
    table = (_values_of_bytes.__wrapped__ if is_traced else _values_of_bytes)(packed.device)
    for piece in row_pieces(out, _PIECE_NUMEL):
        values = table.index_select(0, packed[piece].reshape(-1).int()).view(torch.float32)
        values = values.view(-1, num_blocks, packed.size(1) * 2 // num_blocks)
        values *= scales[piece].unsqueeze(-1)
        out[piece].copy_(values.flatten(1)[:, :cols])


@cache
def _values_of_bytes(device: torch.device) -> torch.Tensor:
    """The two float32 values of each byte, as one int64 ``[256]``: one look-up for two weights."""
    pairs = [(high, low) for high in CODEBOOK for low in CODEBOOK]
    return torch.tensor(pairs, dtype=torch.float32, device=device).view(torch.int64).view(-1)
