"""NF4 on plain tensors: the codebook by its rule, and errors by their bound."""

from __future__ import annotations

import pytest
import torch

from fsdp2.tensors import normal_float

# Appendix E of arXiv 2305.14314, rounded.
PUBLISHED = [
    *(-1.0, -0.69619, -0.52507, -0.39492, -0.28444, -0.18477, -0.09105, 0.0),
    *(0.07958, 0.16093, 0.24611, 0.33792, 0.44071, 0.56262, 0.72296, 1.0),
]


def _weight(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)


def _dequantised(packed: torch.Tensor, scales: torch.Tensor, cols: int) -> torch.Tensor:
    out = torch.empty(packed.size(0), cols)
    normal_float.dequantise(packed, scales, out=out)
    return out


def test_codebook_is_the_published_one_cut_at_even_steps_of_probability_on_either_side_of_zero() -> None:
    assert list(normal_float.CODEBOOK) == pytest.approx(PUBLISHED, abs=6e-6)
    normal = torch.distributions.Normal(0.0, 1.0)
    values = torch.tensor(normal_float.CODEBOOK, dtype=torch.float64)
    outermost = torch.tensor(1 - (1 / 32 + 1 / 30) / 2, dtype=torch.float64)
    probabilities = normal.cdf(values * normal.icdf(outermost))
    negative, positive = probabilities[:8].diff(), probabilities[7:].diff()
    torch.testing.assert_close(negative, ((outermost - 0.5) / 7).expand(7), rtol=0, atol=1e-6)
    torch.testing.assert_close(positive, ((outermost - 0.5) / 8).expand(8), rtol=0, atol=1e-6)


def test_each_codebook_value_has_its_own_code() -> None:
    packed, scales = normal_float.quantise(torch.tensor([normal_float.CODEBOOK]) * 3, 16)
    assert packed.shape == (1, 8)
    assert packed[0, 0] == 0x01
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten(-2)
    assert codes.tolist() == [list(range(16))]
    assert scales.tolist() == [[3.0]]


@pytest.mark.parametrize("cols", [1, 7, 64, 65, 200])
@pytest.mark.parametrize("block_size", [2, 64])
def test_error_stays_below_half_of_the_largest_gap(cols: int, block_size: int) -> None:
    weight = _weight(9, cols)
    packed, scales = normal_float.quantise(weight, block_size)
    assert packed.shape == (9, scales.size(1) * block_size // 2)
    assert scales.shape == (9, -(-cols // block_size))
    bound = normal_float.MAX_ERROR * scales.repeat_interleave(block_size, dim=1)[:, :cols]
    error = (_dequantised(packed, scales, cols) - weight).abs()
    assert (error <= bound * (1 + 1e-6)).all()  # 1e-6: float32's own rounding


def test_error_bound_is_reached_between_the_two_values_furthest_apart() -> None:
    assert abs(normal_float.MAX_ERROR - (1 - 0.69619) / 2) < 1e-5
    middle = -1 + normal_float.MAX_ERROR
    packed, scales = normal_float.quantise(torch.tensor([[1.0, middle]]), 2)
    error = _dequantised(packed, scales, 2)[0, 1] - middle
    assert abs(error.item()) == pytest.approx(normal_float.MAX_ERROR, rel=1e-6)
