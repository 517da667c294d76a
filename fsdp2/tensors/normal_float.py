"""NF4: weights as 4-bit codes and one scale per block. Pure functions on plain tensors.

Rule: a block lies within one row of dim 0, so a cut along dim 0 never changes a value.

Source: QLoRA, Dettmers et al., arXiv 2305.14314, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import NormalDist

import torch
import torch.nn.functional as F


def codebook() -> tuple[float, ...]:
    """The 16 values of NF4, ascending from -1 to 1: quantiles of the normal distribution, as trained weights are about
    normally distributed.

    Eight positive ones and seven negative ones, evenly spaced in probability between 1/2 and ``1 - delta``, and zero,
    exactly. ``delta`` is the mean of 1/32 and 1/30, half a step of 16 and of 15 values. Divided by the largest.

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

# Weights treated at a time; temporaries take 8 bytes per weight (quantise: 20). 2**18 to 2**20 were the quickest on a
# CPU core, 0.5 ns per weight; 2**16 and 2**22 took up to 2 times as long. Of these the largest: fewest launches.
_CHUNK_NUMEL = 1 << 20


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes in a byte, the first one in the high half: uint8 ``[..., 2n]``, values 0 to 15, to ``[..., n]``."""
    return (codes[..., ::2] << 4) | codes[..., 1::2]


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack``: uint8 ``[..., n]`` to ``[..., 2n]``."""
    return torch.stack([packed >> 4, packed & 15], dim=-1).flatten(-2)


def quantise(weight: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of ``weight`` ``[rows, cols]``, of any floating dtype.

    Returns uint8 ``[rows, num_blocks * block_size / 2]`` and float32 ``[rows, num_blocks]`` with ``num_blocks =
    ceil(cols / block_size)``; a row's last block is filled up with zeros. A scale is the block's largest absolute
    value. It is float32, not bfloat16, although that is 0.25 bit per weight more with blocks of 64: so it is exact,
    the largest weight is reproduced, and quantising again what was dequantised changes nothing.

    Raises:
        ValueError: ``weight`` has an entry that is not finite in float32.
    """
    rows, cols = weight.shape
    num_blocks = -(-cols // block_size)
    packed = torch.empty(rows, num_blocks * block_size // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, num_blocks, dtype=torch.float32, device=weight.device)
    midpoints = torch.tensor(MIDPOINTS, dtype=torch.float32, device=weight.device)
    for start, stop in _row_chunks(rows, cols):
        blocks = F.pad(weight[start:stop].float(), (0, num_blocks * block_size - cols))
        blocks = blocks.view(-1, num_blocks, block_size)
        scale = torch.amax(blocks.abs(), dim=-1, keepdim=True)
        codes = torch.bucketize(blocks / scale.where(scale > 0, 1.0), midpoints, out_int32=True)
        packed[start:stop] = pack(codes.to(torch.uint8).flatten(1))
        scales[start:stop] = scale.squeeze(-1)
    if not scales.is_meta and not scales.isfinite().all():
        raise ValueError("NF4: the weight has entries that are infinite or not a number; its scales would be, too.")
    return packed, scales


def dequantise(
    packed: torch.Tensor, scales: torch.Tensor, cols: int, dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The weight ``[rows, cols]`` of ``quantise``'s results, in ``dtype``, or written into ``out`` in its own dtype.

    Codes times scales, in float32, rounded once. It differs from what was quantised by at most ``MAX_ERROR`` (0.152)
    times the block's scale, and the rounding to ``dtype``; zeros and the block's largest weight are exact.
    """
    rows, num_blocks = scales.shape
    out = packed.new_empty(rows, cols, dtype=dtype) if out is None else out
    table = _values_of_bytes(packed)
    for start, stop in _row_chunks(rows, cols):
        index = packed[start:stop].reshape(-1).int()
        values = table.index_select(0, index).view(torch.float32).view(stop - start, num_blocks, -1)
        values *= scales[start:stop].unsqueeze(-1)
        out[start:stop].copy_(values.flatten(1)[:, :cols])
    return out


def _row_chunks(rows: int, cols: int) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_NUMEL // max(cols, 1))
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


_tables: dict[torch.device, torch.Tensor] = {}


def _values_of_bytes(packed: torch.Tensor) -> torch.Tensor:
    """The two float32 values of each byte, as one int64 ``[256]``: one look-up for two weights took 0.4 of the time of
    a look-up for each."""
    traced = type(packed) is not torch.Tensor  # torch.compile passes stand-ins, which cannot meet a cached tensor
    if traced or packed.device not in _tables:
        pairs = [(high, low) for high in CODEBOOK for low in CODEBOOK]
        table = torch.tensor(pairs, dtype=torch.float32, device=packed.device).view(torch.int64).view(-1)
        if traced:
            return table
        _tables[packed.device] = table
    return _tables[packed.device]
