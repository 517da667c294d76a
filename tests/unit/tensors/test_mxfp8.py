"""MXFP8 has the scales and the error bounds that it promises. Refusals are in ``golden/mxfp8.txt``."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from fsdp2.tensors import MXBlocks, MXFP8AllGatherTensor, wrapper as pieces
from fsdp2.tensors.mxfp8 import dequantise_mxfp8, quantise_mxfp8
from tests.harness.golden import texts_beside
from tests.unit.tensors.shards import Refused, assert_refused, random

TEXTS = texts_beside(__file__)
SHAPES = [(40, 70), (64, 32), (3, 5), (33, 1), (5, 3, 9)]


def restored(data: torch.Tensor, blocks: MXBlocks, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(data.shape, dtype=dtype)
    dequantise_mxfp8(*quantise_mxfp8(data, blocks), blocks, out=out)
    return out


def as_rows(data: torch.Tensor, blocks: MXBlocks) -> torch.Tensor:
    """``data`` as a matrix whose rows are cut into blocks."""
    return data.flatten(1) if blocks is MXBlocks.ROWS else data.flatten(1).t()


def smallest_exponent(block: list[float]) -> int:
    """Of the powers of two with which no element of ``block`` exceeds 448."""
    largest = max(map(abs, block))
    return next(e for e in range(-126, 128) if largest <= 448 * 2.0**e)


@pytest.mark.parametrize("blocks", MXBlocks)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_are_the_smallest_that_clamp_nothing_and_errors_are_within_the_bounds(
    shape: tuple[int, ...], blocks: MXBlocks
) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        data = random(*shape, spread=True).to(dtype)
        data[1:2] = 0
        data.view(-1)[::7] = 448.0  # a power of two times the largest float8
        codes, scales = quantise_mxfp8(data, blocks)
        assert (codes.dtype, codes.shape, scales.dtype) == (torch.uint8, data.shape, torch.uint8)
        rows = as_rows(data.float(), blocks)
        exponents = [[smallest_exponent(block.tolist()) for block in row.split(32)] for row in rows]
        assert (scales if blocks is MXBlocks.ROWS else scales.t()).int().sub(127).tolist() == exponents
        found = restored(data, blocks)
        steps = torch.tensor(exponents).double().exp2().repeat_interleave(32, -1)[:, : rows.size(-1)].view(rows.shape)
        errors = (as_rows(found, blocks) - rows).abs()
        assert torch.all(errors <= torch.maximum(rows.abs() / 16, steps / 1024))
        assert torch.equal(restored(data, blocks, torch.bfloat16).float(), found)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("blocks", MXBlocks)
def test_inf_and_nan_make_their_block_non_finite_and_no_other(blocks: MXBlocks, bad: float) -> None:
    data = random(70, 70)
    as_rows(data, blocks)[3, 40] = bad
    expected = torch.ones(70, 70, dtype=torch.bool)
    expected[3, 32:64] = False
    assert torch.equal(as_rows(restored(data, blocks).isfinite(), blocks), expected)


@pytest.mark.parametrize("blocks", MXBlocks)
def test_pieces_that_fit_the_cache_give_what_the_whole_gives(blocks: MXBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random(75, 50, spread=True)
    whole = (*quantise_mxfp8(data, blocks), restored(data, blocks))
    monkeypatch.setattr(pieces, "_CPU_PIECE_NUMEL", 120)
    assert all(map(torch.equal, whole, (*quantise_mxfp8(data, blocks), restored(data, blocks))))


REFUSED: Refused = {
    "mxfp8 of single elements": (lambda: torch.ones(4), MXFP8AllGatherTensor),
    "mxfp8 of other blocks": (lambda: torch.ones(4, 4), partial(MXFP8AllGatherTensor, blocks="1 x 32")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str) -> None:
    assert_refused(TEXTS, name, REFUSED)
