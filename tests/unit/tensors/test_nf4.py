"""NF4: its values and errors, cuts by rows, what stays packed, and what dequantises. Refusals: ``golden/nf4.txt``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp2.tensors import NF4Tensor, nf4, wrapper
from tests.harness.golden import texts_beside
from tests.harness.selection import in_ci
from tests.unit.tensors.shards import Refused, assert_refused

TEXTS = texts_beside(__file__)


def _weight(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)


def nf4_of(*shape: int, dtype: torch.dtype = torch.float32, block_size: int = 8) -> NF4Tensor:
    return NF4Tensor.quantise(_weight(*shape, dtype=dtype), block_size=block_size)


def _same(left: NF4Tensor, right: NF4Tensor) -> bool:
    """Equal in what they hold, not only in what they dequantise to."""
    return torch.equal(left._packed, right._packed) and torch.equal(left._scales, right._scales)


# Appendix E of arXiv 2305.14314, rounded.
PUBLISHED = [
    *(-1.0, -0.69619, -0.52507, -0.39492, -0.28444, -0.18477, -0.09105, 0.0),
    *(0.07958, 0.16093, 0.24611, 0.33792, 0.44071, 0.56262, 0.72296, 1.0),
]


def _dequantised(packed: torch.Tensor, scales: torch.Tensor, cols: int) -> torch.Tensor:
    out = torch.empty(packed.size(0), cols)
    nf4.dequantise(packed, scales, out=out)
    return out


def test_codebook_is_the_published_one_cut_at_even_steps_of_probability_on_either_side_of_zero() -> None:
    assert list(nf4.CODEBOOK) == pytest.approx(PUBLISHED, abs=6e-6)
    normal = torch.distributions.Normal(0.0, 1.0)
    values = torch.tensor(nf4.CODEBOOK, dtype=torch.float64)
    outermost = torch.tensor(1 - (1 / 32 + 1 / 30) / 2, dtype=torch.float64)
    probabilities = normal.cdf(values * normal.icdf(outermost))
    negative, positive = probabilities[:8].diff(), probabilities[7:].diff()
    torch.testing.assert_close(negative, ((outermost - 0.5) / 7).expand(7), rtol=0, atol=1e-6)
    torch.testing.assert_close(positive, ((outermost - 0.5) / 8).expand(8), rtol=0, atol=1e-6)


def test_each_codebook_value_has_its_own_code() -> None:
    packed, scales = nf4.quantise(torch.tensor([nf4.CODEBOOK]) * 3, 16)
    assert packed.shape == (1, 8)
    assert packed[0, 0] == 0x01
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten(-2)
    assert codes.tolist() == [list(range(16))]
    assert scales.tolist() == [[3.0]]


@pytest.mark.parametrize("cols", [1, 7, 64, 65, 200])
@pytest.mark.parametrize("block_size", [2, 64])
def test_error_stays_below_half_of_the_largest_gap(cols: int, block_size: int) -> None:
    weight = _weight(9, cols)
    packed, scales = nf4.quantise(weight, block_size)
    assert packed.shape == (9, scales.size(1) * block_size // 2)
    assert scales.shape == (9, -(-cols // block_size))
    bound = nf4.MAX_ERROR * scales.repeat_interleave(block_size, dim=1)[:, :cols]
    error = (_dequantised(packed, scales, cols) - weight).abs()
    assert (error <= bound * (1 + 1e-6)).all()  # 1e-6: float32's own rounding


def test_error_bound_is_reached_between_the_two_values_furthest_apart() -> None:
    assert abs(nf4.MAX_ERROR - (1 - 0.69619) / 2) < 1e-5
    middle = -1 + nf4.MAX_ERROR
    packed, scales = nf4.quantise(torch.tensor([[1.0, middle]]), 2)
    error = _dequantised(packed, scales, 2)[0, 1] - middle
    assert abs(error.item()) == pytest.approx(nf4.MAX_ERROR, rel=1e-6)


def test_zeros_and_the_largest_weight_of_a_block_are_exact() -> None:
    weight = _weight(4, 16)
    weight[0] = 0
    weight[1, 3] = 0
    weight[2, 5] = -7.3
    dense = NF4Tensor.quantise(weight, block_size=8).dequantise()
    assert dense[0].tolist() == [0.0] * 16
    assert dense[1, 3] == 0
    assert dense[2, 5] == weight[2, 5]


def test_long_weights_are_treated_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = nf4_of(50, 20)
    monkeypatch.setattr(wrapper, "_CPU_PIECE_NUMEL", 130)
    assert _same(nf4_of(50, 20), whole)
    pieces = whole.dequantise()
    monkeypatch.undo()
    assert torch.equal(pieces, whole.dequantise())


def test_shape_and_dtype_are_the_weights_and_it_takes_4_bits_and_its_share_of_a_scale() -> None:
    weight = nf4_of(6, 4, 5, dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # quantising again changes nothing
        once = nf4_of(6, 20, dtype=dtype)
        assert _same(NF4Tensor.quantise(once.dequantise(), block_size=8), once)
    assert weight.shape == weight.dequantise().shape == (6, 4, 5)
    assert weight.dtype == weight.dequantise().dtype == torch.bfloat16
    assert weight._row_numel == 20
    weight = nf4_of(16, 256, block_size=64)
    assert weight._packed.nbytes + weight._scales.nbytes == 16 * 256 * 0.5625
    assert torch.equal(weight.dequantise(torch.bfloat16), weight.dequantise().bfloat16())  # rounded once


@pytest.mark.parametrize(
    "rows", [slice(2, 5), slice(5, 99), slice(-2, None), slice(7, None), slice(0, 7), slice(1, 6, 2)]
)
def test_slices_of_rows_are_exact_and_share_memory(rows: slice) -> None:
    weight = nf4_of(7, 20)
    cut = weight[rows]
    assert isinstance(cut, NF4Tensor)
    assert torch.equal(cut.dequantise(), weight.dequantise()[rows])
    cut.copy_(torch.ones(20))
    assert torch.equal(weight.dequantise()[rows], torch.ones(cut.shape))


def test_flattened_view_keeps_the_rows_for_the_way_back() -> None:
    weight = nf4_of(7, 20)
    flat = weight.view(-1)
    assert isinstance(flat, NF4Tensor)
    assert torch.equal(flat.dequantise(), weight.dequantise().view(-1))
    assert _same(flat.view(7, 20)[2:4], weight[2:4])
    assert _same(weight.view(7, 4, 5)[2:4].view(2, 20), weight[2:4])
    assert _same(weight.narrow(1, 0, 20), weight)
    assert _same(weight.as_strided((7, 20), (20, 1)), weight)


def test_new_zeros_are_packed_and_positive() -> None:
    weight = nf4_of(7, 20)
    for zeros in (weight.new_zeros(3, 20), torch.zeros_like(weight[:3])):
        assert isinstance(zeros, NF4Tensor)
        assert torch.equal(zeros.dequantise(), torch.zeros(3, 20))
        assert not zeros.dequantise().signbit().any()


def test_copies_move_codes_quantise_and_dequantise() -> None:
    source, target = nf4_of(7, 20), nf4_of(7, 20).new_zeros(7, 20)
    assert target.copy_(source) is target
    assert _same(target, source)
    assert torch.equal(torch.zeros(7, 20).copy_(source), source.dequantise())
    target.copy_(_weight(7, 20))
    assert _same(target, source)
    other = nf4_of(7, 20, block_size=4)
    target.copy_(other)
    assert _same(target, NF4Tensor.quantise(other.dequantise(), block_size=8))


def test_cast_changes_what_it_dequantises_to_and_nothing_else() -> None:
    weight = nf4_of(7, 20)
    cast = weight.to(torch.bfloat16)
    assert isinstance(cast, NF4Tensor)
    assert cast.dequantise().dtype == torch.bfloat16
    assert _same(cast, weight)
    assert torch.equal(weight.to(torch.int32), weight.dequantise().to(torch.int32))
    results = [weight + 1, weight.t(), weight[2], weight.sum(), torch.ones(7, 20).mul_(weight)]
    results += [weight.new_zeros(3, 21), weight.new_empty(0), torch.zeros_like(weight, dtype=torch.int64)]
    assert {type(result) for result in results} == {torch.Tensor}


@pytest.mark.parametrize("compiled", [False, *in_ci(True)])
def test_linear_layer_computes_with_the_dense_weight(compiled: bool) -> None:
    layer = nn.Linear(20, 7)
    layer.weight = nn.Parameter(nf4_of(7, 20), requires_grad=False)
    x = _weight(3, 20).requires_grad_()
    result = torch.compile(layer, backend="aot_eager", fullgraph=True)(x) if compiled else layer(x)
    result.sum().backward()
    dense = layer.weight.dequantise()
    torch.testing.assert_close(result, F.linear(x, dense, layer.bias))
    torch.testing.assert_close(x.grad, dense.sum(0).expand(3, 20))


@pytest.mark.parametrize("copied", [copy.deepcopy, torch.clone, lambda given: given.to(torch.float32, copy=True)])
def test_copies_of_codes_share_no_memory(copied: Callable[[Any], Any]) -> None:
    weight = nn.Parameter(nf4_of(7, 20), requires_grad=False)
    made = copied(weight)
    assert _same(made, weight)
    made.copy_(torch.zeros(7, 20))
    assert _same(weight, nf4_of(7, 20))


NF4 = partial(nf4_of, 7, 20)


def _frozen() -> nn.Parameter:
    weight = nn.Parameter(nf4_of(7, 20), requires_grad=False)
    weight.grad = torch.ones(7, 20)
    return weight


def _quantising(weight: torch.Tensor, **options: int) -> Any:
    return lambda: weight, lambda given: NF4Tensor.quantise(given, **options)


REFUSED: Refused = {
    "NF4 parameter that is trained": (NF4, nn.Parameter),
    "NF4 requires_grad_": (NF4, lambda weight: weight.requires_grad_()),
    "NF4 requires_grad": (NF4, lambda weight: setattr(weight, "requires_grad", True)),
    "NF4 in a module that is trained": (lambda: nn.ParameterList([_frozen()]), lambda module: module.requires_grad_()),
    "NF4 columns": (NF4, lambda weight: weight[:, :8]),
    "NF4 chunks of columns": (NF4, lambda weight: weight.chunk(2, dim=-1)),
    "NF4 narrow columns": (NF4, lambda weight: weight.narrow(1, 8, 8)),
    "NF4 cut of a flattened view": (NF4, lambda weight: weight.view(-1)[:20]),
    "NF4 as_strided": (NF4, lambda weight: weight.as_strided((3, 20), (20, 1), 40)),
    "NF4 written": (NF4, lambda weight: weight.add_(1)),
    "NF4 zeroed": (NF4, lambda weight: weight.zero_()),
    "NF4 as out": (NF4, lambda weight: torch.add(torch.ones(7, 20), 1, out=weight)),
    "NF4 in a list": (NF4, lambda weight: torch._foreach_add_([torch.ones(7, 20), weight], 1)),
    "NF4 slice filled": (NF4, lambda weight: weight[1:2].fill_(0)),
    "NF4 in an optimizer": (_frozen, lambda weight: torch.optim.SGD([weight], lr=0.1, foreach=False).step()),
    "NF4 of a vector": _quantising(torch.zeros(7)),
    "NF4 of empty rows": _quantising(torch.zeros(7, 0)),
    "NF4 odd blocks": _quantising(torch.zeros(7, 20), block_size=7),
    "NF4 without blocks": _quantising(torch.zeros(7, 20), block_size=0),
    "NF4 of NaN": _quantising(torch.full((7, 20), float("nan"))),
    "NF4 beyond float32": _quantising(torch.full((7, 20), 1e300, dtype=torch.float64)),
    "NF4 of int8": _quantising(torch.zeros(7, 20, dtype=torch.int8)),
    "NF4 of NF4": _quantising(NF4()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str) -> None:
    assert_refused(TEXTS, name, REFUSED)
