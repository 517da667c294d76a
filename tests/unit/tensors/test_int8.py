"""int8 keeps its error bounds. Refusals are in ``golden/int8.txt``."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from fsdp2.tensors import Int8AllGatherTensor, wrapper as pieces
from fsdp2.tensors.int8 import dequantise, quantise
from tests.harness.golden import texts_beside
from tests.unit.tensors.shards import Refused, assert_refused, random

TEXTS = texts_beside(__file__)
SHAPES = [(1, 1), (5, 256), (7, 300), (3, 40), (2, 3, 5), (4, 2, 3, 3), (0, 8), (3, 512)]
ROUNDING = 1e-5  # of a scale: float32 divides and multiplies numbers of up to 127 scales


def restored(data: torch.Tensor, block_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(data.shape, dtype=dtype)
    dequantise(*quantise(data, block_size), block_size, out=out)
    return out


@pytest.mark.parametrize("block_size", [1, 8, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_is_at_most_half_a_step_of_the_block(shape: tuple[int, ...], block_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        data = random(*shape, spread=dtype is not torch.float16).to(dtype)
        data[1:2] = 0
        data.view(-1)[3::5] = 0
        values, scales = quantise(data, block_size)
        steps = scales.repeat_interleave(block_size, dim=1)[:, : math.prod(shape[1:])].reshape(shape)
        assert (values.dtype, values.shape) == (torch.int8, data.shape)
        assert (scales.dtype, scales.shape) == (torch.float32, (shape[0], math.ceil(math.prod(shape[1:]) / block_size)))
        result = restored(data, block_size)
        assert torch.all((result.double() - data.double()).abs() <= steps * (0.5 + ROUNDING))
        assert torch.all(result[data == 0] == 0)
        assert torch.all(result * data >= 0)
        assert torch.equal(restored(data, block_size, dtype), result.to(dtype))  # rounded once


@pytest.mark.parametrize("block_size", [4, 256])
def test_a_step_is_the_largest_magnitude_of_the_block_over_127_or_the_smallest_scale(block_size: int) -> None:
    data = random(3, 512, spread=True)
    _, scales = quantise(data, block_size)
    torch.testing.assert_close(scales, data.view(3, -1, block_size).abs().amax(-1) / 127)
    data = torch.full((2, 8), 1e-40)
    smallest = torch.finfo(torch.float32).tiny
    assert torch.all((restored(data, 8) - data).abs() <= smallest / 2)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_make_their_block_non_finite_and_no_other(bad: float) -> None:
    data = random(2, 12, spread=True)
    data[0, 5] = bad
    finite = restored(data, 4).isfinite()
    expected = torch.ones(2, 12, dtype=torch.bool)
    expected[0, 4:8] = False
    assert torch.equal(finite, expected)


def test_pieces_that_fit_the_cache_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random(33, 50, spread=True)
    whole = (*quantise(data, 16), restored(data, 16, torch.bfloat16))
    monkeypatch.setattr(pieces, "_CPU_PIECE_NUMEL", 120)
    in_pieces = (*quantise(data, 16), restored(data, 16, torch.bfloat16))
    assert all(map(torch.equal, whole, in_pieces))


REFUSED: Refused = {
    "int8 of single elements": (lambda: torch.ones(4), Int8AllGatherTensor),
    "int8 without blocks": (lambda: torch.ones(4, 4), partial(Int8AllGatherTensor, block_size=0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str) -> None:
    assert_refused(TEXTS, name, REFUSED)
