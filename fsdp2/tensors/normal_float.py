"""NF4: weights as 4-bit codes and one scale per block. Pure functions on plain tensors.

Source: QLoRA, Dettmers et al., arXiv 2305.14314, section 3.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from statistics import NormalDist

import torch
import torch.nn.functional as F

from fsdp2.tensors.wrapper import row_pieces


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
