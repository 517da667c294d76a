"""Parameters that are all-gathered as MXFP8: blocks of 32 float8 elements that share a power of two as their scale.

Rule: the payload is what quantising the unsharded parameter gives, bit for bit. So where ranks share blocks, they agree
on the scales of these blocks before they quantise. Scales are found with integer operations, which are exact.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.tensors.wire import WireFormatTensor
from fsdp2.tensors.wrapper import DequantisedTensor, Tensors, row_pieces

BLOCK_SIZE = 32
_WIRE = torch.float8_e4m3fn  # its largest number is 1.75 * 2**8
_EXPONENT_SHIFT, _MANTISSA = 23, (1 << 23) - 1  # of float32
_MANTISSA_OF_LARGEST, _EXPONENT_OF_LARGEST = 3 << 21, 8
_NO_NUMBER = 255  # as a scale: NaN in e8m0


class MXBlocks(Enum):
    """Along which dim of a matrix the elements of a block lie."""

    ROWS = "1 x 32"
    COLUMNS = "32 x 1"


class MXFP8AllGatherTensor(DequantisedTensor, WireFormatTensor):
    """A parameter that is all-gathered as MXFP8: float8 (e4m3), and a scale of one byte (e8m0) for each block of 32.

    Forward and backward compute with the values of :func:`quantise_mxfp8`, which bfloat16 and wider dtypes hold
    exactly. The gradient ignores the rounding. Results do not depend on the number of ranks.

    - ``ROWS``: a block lies within a row, the dim that a linear layer sums over in forward.
    - ``COLUMNS``: a block is 32 entries of a column, the dim that its backward sums over. Unless the number of rows of
      a shard is a multiple of 32, ranks share blocks. Each all-gather then begins with an all-reduce of one byte per
      column and shared block.

    Args:
        data: master values ``[rows, ...]`` of at least two dims, usually float32. The tensor shares their memory. All
            dims but the first count as columns.
        blocks: where blocks lie.

    Raises:
        TypeError, ValueError: see :meth:`WireFormatTensor.make`; ``blocks`` is not an ``MXBlocks``, or ``data`` has
            one dim.

    Source: Rouhani et al., "Microscaling Data Formats for Deep Learning", arXiv 2310.10537. Scales that clamp nothing
    are those of Mishra et al., "Recipes for Pre-training LLMs with MXFP8", arXiv 2506.08027.
    """

    blocks: MXBlocks

    def __new__(cls, data: torch.Tensor, *, blocks: MXBlocks = MXBlocks.ROWS) -> MXFP8AllGatherTensor:
        if not isinstance(blocks, MXBlocks):
            raise TypeError(f"{cls.__name__}: blocks must be an MXBlocks, found {blocks!r}.")
        made = cls.make(data, blocks=blocks)
        if data.dim() < 2:
            raise ValueError(
                f"{cls.__name__}: a tensor of shape {tuple(data.shape)} has no rows to cut into blocks. Leave the "
                "tensor plain."
            )
        return made

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[Tensors, None]:
        """Float8 bits as uint8 in the shard's shape, and the scales as in :func:`quantise_mxfp8`: for ``COLUMNS``,
        those of the blocks that begin in this shard."""
        self.check_cut_along_rows(outer_size)
        if self.blocks is MXBlocks.ROWS:
            scales = _scales(self._data, self.blocks)
            return (_codes(self._data, scales, self.blocks), scales), None
        chunk = -(-outer_size[0] // mesh.size())
        start = min(mesh.get_local_rank() * chunk, outer_size[0]) if mesh.size() > 1 else 0
        scales = _scales(self._data, self.blocks, start)
        first = start // BLOCK_SIZE  # the block of the first scale
        _agree_on_shared(scales, first, range(chunk, outer_size[0], max(chunk, 1)), mesh)
        codes = _codes(self._data, scales, self.blocks, start)
        return (codes, scales[-(-start // BLOCK_SIZE) - first :]), None

    def _dequantise(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        dequantise_mxfp8(codes, scales, self.blocks, out=out)


def _agree_on_shared(scales: torch.Tensor, first: int, cuts: range, mesh: DeviceMesh) -> None:
    """Make the scales of blocks of columns that ranks share the largest among these. ``scales``: those of this rank,
    whose first block is ``first``. ``cuts``: the first rows of the shards."""
    shared = sorted({row // BLOCK_SIZE for row in cuts if row % BLOCK_SIZE})
    if not shared:
        return
    mine = {place: block - first for place, block in enumerate(shared) if 0 <= block - first < scales.size(0)}
    agreed = scales.new_zeros(len(shared), scales.size(1))
    for place, row in mine.items():
        agreed[place] = scales[row]
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=mesh.get_group())
    for place, row in mine.items():
        scales[row] = agreed[place]


def quantise_mxfp8(data: torch.Tensor, blocks: MXBlocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert floating-point ``data`` ``[rows, ...]`` to float8 bits as uint8, of the same shape, and e8m0 scales as
    uint8: ``[rows, num_blocks]`` for ``ROWS``, ``[num_blocks, columns]`` for ``COLUMNS``. The last block of a row or
    column may be shorter.

    A scale is the smallest power of two with which no element of the block exceeds 448, the largest float8, but at
    least ``2 ** -126``. ``abs(data - dequantise_mxfp8(...))`` is at most ``abs(data) / 16`` or ``scale / 1024``,
    whichever is larger. A block with inf or NaN has no finite element after dequantising.
    """
    scales = _scales(data, blocks)
    return _codes(data, scales, blocks), scales


def dequantise_mxfp8(codes: torch.Tensor, scales: torch.Tensor, blocks: MXBlocks, *, out: torch.Tensor) -> None:
    """Dequantise the result of :func:`quantise_mxfp8` into ``out``, which has the shape of ``codes``, and may have any
    floating-point dtype."""
    for rows in row_pieces(codes):
        values = codes[rows].view(_WIRE).to(torch.float32).flatten(1)
        out[rows].copy_(values.mul_(_factors(scales, values, rows.start, blocks)).view(out[rows].shape))


def _scales(data: torch.Tensor, blocks: MXBlocks, start: int = 0) -> torch.Tensor:
    """The scales of all blocks with elements in ``data``, whose first row is row ``start`` of the parameter."""
    flat = data.flatten(1)
    dim = 1 if blocks is MXBlocks.ROWS else 0
    before = start % BLOCK_SIZE if dim == 0 else 0
    after = -(before + flat.size(dim)) % BLOCK_SIZE
    if before or after:  # zeros change no scale
        flat = F.pad(flat, (0, after) if dim else (0, 0, before, after))
    flat = flat.unflatten(dim, (flat.size(dim) // BLOCK_SIZE, BLOCK_SIZE))
    largest = torch.maximum(flat.amax(dim + 1), flat.amin(dim + 1).neg()).to(torch.float32)
    bits = largest.view(torch.int32)
    exponents = bits >> _EXPONENT_SHIFT  # biased, as those of scales; 255 for inf and NaN
    exponents += (bits & _MANTISSA) > _MANTISSA_OF_LARGEST
    found = (exponents - _EXPONENT_OF_LARGEST).clamp_(min=1)
    return found.masked_fill_(~largest.isfinite(), _NO_NUMBER).to(torch.uint8)


def _codes(data: torch.Tensor, scales: torch.Tensor, blocks: MXBlocks, start: int = 0) -> torch.Tensor:
    """``data``, whose first row is row ``start`` of the parameter, in float8. ``scales``: those of ``_scales``."""
    codes = torch.empty(data.shape, dtype=torch.uint8, device=data.device)
    for rows in row_pieces(data):
        values = data[rows].to(torch.float32).flatten(1)
        factors = _factors(scales, values, start % BLOCK_SIZE + rows.start, blocks)
        codes[rows].view(_WIRE).copy_((values / factors).view(codes[rows].shape))
    return codes


def _factors(scales: torch.Tensor, values: torch.Tensor, first_row: int, blocks: MXBlocks) -> torch.Tensor:
    """The scale of each of ``values`` ``[rows, columns]`` as float32; inf for NaN, which makes no element finite.
    ``first_row`` counts from the first block of ``scales``."""
    num_rows, num_columns = values.shape
    if blocks is MXBlocks.ROWS:
        spread = scales[first_row : first_row + num_rows, :, None].expand(-1, -1, BLOCK_SIZE)
        spread = spread.flatten(1)[:, :num_columns]
    else:
        first, skipped = divmod(first_row, BLOCK_SIZE)
        spread = scales[first : -(-(first_row + num_rows) // BLOCK_SIZE), None].expand(-1, BLOCK_SIZE, -1)
        spread = spread.flatten(0, 1)[skipped : skipped + num_rows]
    return (spread.to(torch.int32) << _EXPONENT_SHIFT).view(torch.float32)
