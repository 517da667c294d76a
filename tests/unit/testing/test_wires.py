"""The conformance check passes wires that keep the protocol, and names what is wrong with others, in golden texts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2.extras.gradient_wires import CastWire
from fsdp2.tensors import Int8Wire
from fsdp2.testing import check_gradient_wire
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of

TEXTS = texts_beside(__file__)
SHIPPED = {"bf16": CastWire(torch.bfloat16), "int8": Int8Wire(), "small blocks": Int8Wire(block_size=3)}


@pytest.mark.parametrize("wire", SHIPPED.values(), ids=SHIPPED.keys())
def test_shipped_wires_pass(wire: Any) -> None:
    check_gradient_wire(wire)


class _Wire(Int8Wire):
    """Correct. Broken wires differ in one thing each."""

    tolerance = 0.02

    def __init__(self) -> None:
        super().__init__(block_size=4)


class _NoTuple(_Wire):
    def fsdp_pre_reduce_scatter(self, pieces: Tensor) -> Any:
        return pieces


class _Sparse(_Wire):
    """Sends nothing for zeros."""

    def fsdp_pre_reduce_scatter(self, pieces: Tensor) -> Any:
        return (pieces.to(torch.bool if not pieces.any() else torch.float32),)

    def fsdp_post_reduce_scatter(self, received: Any, reduce_dtype: torch.dtype) -> Tensor:
        return received[0].to(reduce_dtype)


class _InPlace(_Wire):
    def fsdp_pre_reduce_scatter(self, pieces: Tensor) -> Any:
        return super().fsdp_pre_reduce_scatter(pieces.add_(1.0))


class _Coarse(_Wire):
    def fsdp_pre_reduce_scatter(self, pieces: Tensor) -> Any:
        codes, scales = super().fsdp_pre_reduce_scatter(pieces)
        return codes // 16 * 16, scales


class _OneScale(_Wire):
    """All rows have the scale of the first."""

    def fsdp_post_reduce_scatter(self, received: Any, reduce_dtype: torch.dtype) -> Tensor:
        codes, scales = received
        return super().fsdp_post_reduce_scatter((codes, scales[:1].expand_as(scales).contiguous()), reduce_dtype)


class _ForgivesRows(_OneScale):
    """As if every rank had the same gradients: only values of other ranks are wrong."""

    def fsdp_pre_reduce_scatter(self, pieces: Tensor) -> Any:
        largest = pieces.abs().amax().clamp(min=1e-30) / 127
        codes = (pieces / largest).round().to(torch.int8)
        return codes, largest.expand(pieces.size(0), pieces.size(1) // 4).contiguous()


class _Offset(_Wire):
    def fsdp_post_reduce_scatter(self, received: Any, reduce_dtype: torch.dtype) -> Tensor:
        return super().fsdp_post_reduce_scatter(received, reduce_dtype) + 1e-9


class _Clamped(_Wire):
    def fsdp_pre_reduce_scatter(self, pieces: Tensor) -> Any:
        return super().fsdp_pre_reduce_scatter(pieces.nan_to_num(0.0, 1e30, -1e30))


class _Limited(_Wire):
    """Sends values up to a limit, so that what is lost may grow for ever."""

    tolerance = 1.0

    def fsdp_pre_reduce_scatter(self, pieces: Tensor) -> Any:
        return super().fsdp_pre_reduce_scatter(torch.where(pieces.isfinite(), pieces.clamp(-1e-4, 1e-4), pieces))


BROKEN = (_NoTuple, _Sparse, _InPlace, _Coarse, _OneScale, _ForgivesRows, _Offset, _Clamped, _Limited)


@pytest.mark.parametrize("wire", BROKEN)
def test_broken_wire_is_named(wire: Any) -> None:
    check = partial(check_gradient_wire, wire(), world_sizes=[2], num_blocks=[2], tolerance=wire.tolerance)
    TEXTS.check(wire.__name__, error_of(check))
