"""Parameters that are all-gathered, and gradients that are reduced, as blocks of int8, each with a scale.

``quantise`` and ``dequantise`` are pure. Rule: a block lies within one row of dim 0, so blocks and values do not
depend on how dim 0 is cut over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.extras.checked import AT_LEAST_1, checked
from fsdp2.tensors.wire import WireFormatTensor
from fsdp2.tensors.wrapper import DequantisedTensor, Tensors, row_pieces

_INT8_MAX = 127
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # smaller scales lose precision; a block of zeros needs a scale, too


class Int8AllGatherTensor(DequantisedTensor, WireFormatTensor):
    """A parameter that is all-gathered in int8: a quarter of float32's bytes, plus 4 bytes per block for the scale.

    Forward and backward compute with the values of :func:`quantise`. The gradient ignores the rounding.
    Results do not depend on the number of ranks.

    Args:
        data: master values ``[rows, ...]`` of at least two dims, usually float32. The tensor shares their memory.
        block_size: number of elements of a flattened row that share a scale.

    Raises:
        TypeError, ValueError: see :meth:`WireFormatTensor.make`; ``data`` has one dim (its rows would be single
            elements), or ``block_size`` is not positive.

    Source: quantised weight communication (qwZ) of ZeRO++, Wang et al., arXiv 2306.10013, section 3.1. In ZeRO++,
    blocks run through the flat shard; here, along rows.
    """

    block_size: int

    @checked(block_size=AT_LEAST_1)
    def __new__(cls, data: torch.Tensor, *, block_size: int = 256) -> Int8AllGatherTensor:
        made = cls.make(data, block_size=block_size)
        if data.dim() < 2:
            raise ValueError(
                f"{cls.__name__}: blocks run along rows, but rows of a tensor of shape {tuple(data.shape)} are single "
                "elements. Leave the tensor plain."
            )
        return made

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[Tensors, None]:
        """int8 of the shard's shape ``[rows, ...]``, and float32 scales ``[rows, num_blocks]``."""
        self.check_cut_along_rows(outer_size)
        return quantise(self._data, self.block_size), None

    def _dequantise(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        dequantise(codes, scales, self.block_size, out=out)


@checked(block_size=AT_LEAST_1)
@dataclass(frozen=True)
class Int8Wire:
    """A ``reduce_wire``: gradients travel in int8, a quarter of float32's bytes, plus 4 bytes per block for the scale.

    Args:
        block_size: number of elements of a gradient that share a scale.
        error_feedback: whether each rank keeps what its payloads have lost and adds it to the next gradients, so that
            the losses of many steps do not add up. This takes 2 bytes per parameter of the whole model on every rank.
            For checkpoints, see :func:`wire_residuals`.

    Raises:
        ValueError: ``block_size`` is not positive.

    Source: quantised gradients (qgZ) of ZeRO++, Wang et al., arXiv 2306.10013; error feedback: Karimireddy et al.,
    ICML 2019.
    """

    block_size: int = 256
    error_feedback: bool = field(default=True, kw_only=True)

    def fsdp_pre_reduce_scatter(self, pieces: torch.Tensor) -> Tensors:
        """int8 ``[rows, n]``, and float32 scales ``[rows, n / block_size]``."""
        codes, scales = quantise(pieces.reshape(-1, self.block_size), self.block_size)
        return codes.view(pieces.shape), scales.view(pieces.size(0), -1)

    def fsdp_post_reduce_scatter(self, received: Tensors, reduce_dtype: torch.dtype) -> torch.Tensor:
        """The values in ``reduce_dtype``, ``[rows, n]``."""
        codes, scales = received
        values = torch.empty(codes.shape, dtype=reduce_dtype, device=codes.device)
        blocks = (codes.view(-1, self.block_size), scales.view(-1, 1))
        dequantise(*blocks, self.block_size, out=values.view(-1, self.block_size))
        return values


def quantise(data: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert contiguous floating-point ``data`` ``[rows, ...]`` to int8 of the same shape and float32 scales
    ``[rows, num_blocks]``; the last block of a row may be shorter.

    A block's scale is ``max(abs(block)) / 127``, but at least float32's smallest normal number, so
    ``abs(data - dequantise(...)) <= scale / 2``, up to 1e-5 of ``scale`` for float32 arithmetic. After
    dequantising, a block with inf or NaN has no finite element.
    """
    values = torch.empty(data.shape, dtype=torch.int8, device=data.device)
    num_blocks = -(-math.prod(data.shape[1:]) // block_size)
    scales = torch.empty((data.size(0), num_blocks), dtype=torch.float32, device=data.device)
    for rows in row_pieces(data):
        for block, value, scale in _blocks(data[rows].to(torch.float32), values[rows], scales[rows], block_size):
            largest = torch.maximum(block.amax(-1, keepdim=True), block.amin(-1, keepdim=True).neg_())
            scale.copy_(largest.div_(_INT8_MAX).clamp_(min=_SMALLEST_SCALE))
            value.copy_((block / scale).round_())
    return values, scales


def dequantise(values: torch.Tensor, scales: torch.Tensor, block_size: int, *, out: torch.Tensor) -> None:
    """Dequantise the result of ``quantise`` into ``out``, which is contiguous, has the shape of ``values``, and may
    have any floating-point dtype."""
    for rows in row_pieces(values):
        for target, value, scale in _blocks(out[rows], values[rows], scales[rows], block_size):
            if out.device.type == "cpu":  # the CPU converts mixed dtypes one by one: 15 times slower
                target.copy_(value.to(torch.float32).mul_(scale))
            else:
                torch.mul(value, scale, out=target)


def _blocks(
    floats: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, block_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Two views ``[rows, blocks, block]`` and one ``[rows, blocks, 1]``: first full blocks, then shorter blocks."""
    num_rows = floats.size(0)
    floats, values, scales = floats.view(num_rows, -1), values.view(num_rows, -1), scales.unsqueeze(-1)
    num_full, rest = divmod(floats.size(1), block_size)
    end = num_full * block_size
    if num_full:
        shape = (num_full, block_size)
        yield floats[:, :end].unflatten(1, shape), values[:, :end].unflatten(1, shape), scales[:, :num_full]
    if rest:
        yield floats[:, end:].unsqueeze(1), values[:, end:].unsqueeze(1), scales[:, num_full:]
