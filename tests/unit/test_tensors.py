"""NF4: the codebook by its rule, errors by their bound, cuts by rows; what stays packed, or dequantises. Two tensors:
every op on both, views and writes included. And what the tensor classes refuse, in ``golden/tensors.txt``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp2.core import _torch
from fsdp2.tensors import (
    BFloat16AllGatherTensor,
    Float8AllGatherTensor,
    Float8Scaling,
    Int8AllGatherTensor,
    NF4Tensor,
    TwoTensor,
    normal_float,
    wrap_parameters,
    wrapper,
)
from tests.harness.extensions import wrap
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of
from tests.harness.selection import in_ci
from tests.unit.test_wire_tensors import MAKERS, Tied, pre, unsharded

TEXTS = texts_beside(__file__)

# Appendix E of arXiv 2305.14314, rounded.
PUBLISHED = [
    *(-1.0, -0.69619, -0.52507, -0.39492, -0.28444, -0.18477, -0.09105, 0.0),
    *(0.07958, 0.16093, 0.24611, 0.33792, 0.44071, 0.56262, 0.72296, 1.0),
]


def _weight(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)


def nf4_of(*shape: int, dtype: torch.dtype = torch.float32, block_size: int = 8) -> NF4Tensor:
    return NF4Tensor.quantise(_weight(*shape, dtype=dtype), block_size=block_size)


def _same(left: NF4Tensor, right: NF4Tensor) -> bool:
    """Equal in what they hold, not only in what they dequantise to."""
    return torch.equal(left._packed, right._packed) and torch.equal(left._scales, right._scales)


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


# Two tensors


def two_of(*shape: int, seed: int = 0) -> TwoTensor:
    generator = torch.Generator().manual_seed(seed)
    return TwoTensor(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))


def _plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def _mlp() -> nn.Sequential:
    return wrap(_plain(), lambda value: two_of(*value.shape, seed=value.numel()), lambda *_: True)


def _linear(x: torch.Tensor) -> torch.Tensor:
    return F.linear(torch.arange(6.0).view(2, 3), x).relu()


def _write_into_views(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[1].mul_(3)
    y[2:].add_(x[2:])
    y.view(-1)[3:5].mul_(x.view(-1)[:2])
    return y * y


def _write_into_as_strided(x: torch.Tensor) -> torch.Tensor:
    y = (x * 1)[2:]
    y.as_strided((2, 2), (2, 1), y.storage_offset()).mul_(3)
    return y * y


def _join_and_cut(x: torch.Tensor) -> torch.Tensor:
    pieces = torch.cat([x, x * x]).split([1, 3, 4])
    return torch.stack([pieces[1].t(), pieces[2][:3].t()])


@pytest.mark.parametrize("fn", [_linear, _write_into_views, _write_into_as_strided, _join_and_cut])
def test_values_and_gradients_are_those_of_either_inner_tensor(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    both = two_of(4, 3)
    leaf = both.clone().requires_grad_()
    result = fn(leaf)
    result.sum().backward()
    assert isinstance(leaf.grad, TwoTensor)
    for which in "ab":
        expected_leaf = getattr(both, which).clone().requires_grad_()
        expected = fn(expected_leaf)
        expected.sum().backward()
        assert torch.equal(getattr(result.detach(), which), expected)
        assert torch.equal(getattr(leaf.grad, which), expected_leaf.grad)


def test_plain_tensors_meet_both_inner_tensors() -> None:
    both, plain = two_of(4, 3), torch.arange(12.0).view(4, 3)
    assert torch.equal(plain * both, TwoTensor(plain * both.a, plain * both.b))
    assert both.copy_(plain) is both
    assert torch.equal(both, TwoTensor(plain, plain))
    assert both.add_(1) is both
    assert torch.equal(both, TwoTensor(plain + 1, plain + 1))
    assert not torch.equal(both, TwoTensor(plain, plain + 1))
    assert not torch.equal(both, TwoTensor(plain + 1, plain))


def test_ops_on_lists_write_and_return_plain_tensors_among_them_once() -> None:
    both, step = two_of(4, 3), torch.zeros(())
    torch._foreach_add_([both, step], 1.0)
    assert torch.equal(both, two_of(4, 3) + 1)
    assert step.item() == 1

    products = torch._foreach_mul([two_of(4, 3), torch.ones(2)], [2.0, 3.0])
    assert torch.equal(products[0], two_of(4, 3) * 2)
    assert type(products[1]) is torch.Tensor
    assert products[1].tolist() == [3, 3]


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_adam_updates_each_inner_tensor_as_if_it_were_alone(options: dict[str, bool]) -> None:
    models = [_mlp(), _plain(), _plain()]
    for half, which in zip(models[1:], "ab", strict=True):
        half.load_state_dict({name: getattr(value, which) for name, value in models[0].state_dict().items()})
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1, **options) for each in models]
    for step in range(3):
        x = torch.randn(7, 3, generator=torch.Generator().manual_seed(step))
        for each, optimizer in zip(models, optimizers, strict=True):
            each(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for both, a, b in zip(*(each.parameters() for each in models), strict=True):
        assert torch.equal(both, TwoTensor(a, b))


@pytest.mark.parametrize("copied", [copy.deepcopy, torch.clone, lambda given: given.to(torch.float32, copy=True)])
def test_copies_share_no_memory(copied: Callable[[Any], Any]) -> None:
    both = two_of(4, 3)[1:]  # deepcopy refuses tensors with a storage offset
    made = copied(both)
    assert torch.equal(made, both)
    made.zero_()
    assert torch.equal(both, two_of(4, 3)[1:])
    weight = nn.Parameter(nf4_of(7, 20), requires_grad=False)
    made = copied(weight)
    assert _same(made, weight)
    made.copy_(torch.zeros(7, 20))
    assert _same(weight, nf4_of(7, 20))


@pytest.mark.ci
def test_compiled_block_gives_the_same_values_and_gradients() -> None:
    x, model = torch.randn(7, 3), _mlp()
    expected = model(x)
    expected.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    result = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    result.sum().backward()
    assert torch.equal(result, expected)
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), gradients, strict=True))


def test_unsharded_tensor_of_the_gathered_dtype_is_the_gathered_memory() -> None:
    shard = two_of(4, 3)
    outputs, _ = shard.fsdp_pre_all_gather(None, shard.size(), (), nn.Module(), None)  # type: ignore[arg-type]
    made = shard.fsdp_post_all_gather(outputs, None, torch.float32)
    assert made is not None
    assert made[1] == ()
    assert [made[0].a.data_ptr(), made[0].b.data_ptr()] == [output.data_ptr() for output in outputs]


ROWS = Float8Scaling.PER_ROW
FLOAT8, NF4 = partial(unsharded, torch.ones(4, 8), ROWS), partial(nf4_of, 7, 20)


def _frozen() -> nn.Parameter:
    weight = nn.Parameter(nf4_of(7, 20), requires_grad=False)
    weight.grad = torch.ones(7, 20)
    return weight


def _of_columns(shard: Any) -> Any:
    return pre(shard, 2, torch.ones(6, 8))


def _wrapping(make: Any) -> Any:
    return Tied, lambda model: wrap_parameters(model, make, select=lambda name, param: True)


def _quantising(weight: torch.Tensor, **options: int) -> Any:
    return lambda: weight, lambda given: NF4Tensor.quantise(given, **options)


# What is made, and the call on it that is refused.
REFUSED: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "wire format of a list": (lambda: None, lambda _: BFloat16AllGatherTensor([1.0])),  # type: ignore[arg-type]
    "wire format twice": (lambda: BFloat16AllGatherTensor(torch.ones(2, 2)), BFloat16AllGatherTensor),
    "wire format of integers": (lambda: torch.ones(2, dtype=torch.int32), BFloat16AllGatherTensor),
    "wire format of a scalar": (lambda: torch.ones(()), BFloat16AllGatherTensor),
    "wire format of complex numbers": (lambda: torch.ones(2, dtype=torch.complex64), BFloat16AllGatherTensor),
    **{f"{name} cut into columns": (partial(make, torch.ones(6, 4)), _of_columns) for name, make in MAKERS.items()},
    "wrapping into nothing": _wrapping(lambda data: None),
    "wrapping into another shape": _wrapping(lambda data: data.flatten()),
    "wrapping what the class refuses": _wrapping(Int8AllGatherTensor),
    "int8 of single elements": (lambda: torch.ones(4), Int8AllGatherTensor),
    "int8 without blocks": (lambda: torch.ones(4, 4), partial(Int8AllGatherTensor, block_size=0)),
    "float8 rows of single elements": (lambda: torch.ones(4), partial(Float8AllGatherTensor, scaling=ROWS)),
    "float8 scaling in words": (lambda: torch.ones(4), partial(Float8AllGatherTensor, scaling="per row")),
    "float8 written": (FLOAT8, lambda weight: weight.add_(1)),
    "float8 as out": (FLOAT8, lambda weight: torch.add(torch.ones(4, 8), 1, out=weight)),
    "two of unlike strides": (lambda: torch.zeros(2, 3), lambda a: TwoTensor(a, torch.zeros(3, 2).t())),
    "two values into a plain tensor": (lambda: torch.zeros(4, 3), lambda plain: plain.add_(two_of(4, 3))),
    "two values into plain tensors of a list": (
        lambda: torch.zeros(4, 3),
        lambda plain: torch._foreach_add_([plain, plain], [two_of(4, 3), two_of(4, 3)]),
    ),
    "two as one number": (lambda: TwoTensor(torch.tensor(1.0), torch.tensor(2.0)), lambda both: both.item()),
    "two transposed in place": (lambda: two_of(4, 3), lambda both: both.t_()),
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


def _held(subject: Any) -> list[Any]:
    tensors = [subject] if isinstance(subject, torch.Tensor) else list(subject.parameters() if subject else [])
    return [(id(t), t.shape, t.requires_grad, [str(leaf.tolist()) for leaf in _torch.leaves(t)]) for t in tensors]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str) -> None:
    make, call = REFUSED[name]
    subject = make()
    before = _held(subject)
    TEXTS.check(name, error_of(lambda: call(subject)), among=REFUSED)
    assert _held(subject) == before
