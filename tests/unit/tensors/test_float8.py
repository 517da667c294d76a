"""float8 keeps its error bounds, drops outdated scales, and computes like its dequantised values.

Refusals are in ``golden/float8.txt``.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp2.tensors import Float8AllGatherTensor, Float8Scaling, Float8Tensor, float8, precompute_float8_scales
from fsdp2.tensors.float8 import magnitude, quantise_float8, row_magnitudes, scale_from
from tests.harness.golden import texts_beside
from tests.harness.selection import in_ci
from tests.unit.tensors.shards import Refused, assert_refused, pre, random

TEXTS = texts_beside(__file__)
PER_ROW, PER_TENSOR = Float8Scaling.PER_ROW, Float8Scaling.PER_TENSOR
both = pytest.mark.parametrize("scaling", [PER_ROW, PER_TENSOR])
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def scale_of(data: torch.Tensor, scaling: Float8Scaling) -> torch.Tensor:
    return scale_from(row_magnitudes(data) if scaling is PER_ROW else magnitude(data))


def unsharded(data: torch.Tensor, scaling: Float8Scaling, dtype: torch.dtype = torch.bfloat16) -> Float8Tensor:
    scale = scale_of(data, scaling)
    return Float8Tensor(quantise_float8(data, scale), scale, dtype)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (5, 64), (4, 3, 2)], ids=str)
def test_error_is_a_sixteenth_or_one_step(shape: tuple[int, ...], dtype: torch.dtype, scaling: Float8Scaling) -> None:
    data = (random(*shape) * 10.0 ** random(*shape)).to(dtype)
    scale = scale_of(data, scaling)
    assert scale.dtype is torch.float32
    error = (quantise_float8(data, scale).double() * scale - data.double()).abs()
    assert torch.all(error <= torch.maximum(data.double().abs() / 16, scale.double() / 1024) * (1 + 1e-5))


@both
def test_the_largest_magnitude_is_met(scaling: Float8Scaling) -> None:
    data = random(6, 16)
    largest = row_magnitudes(data) if scaling is PER_ROW else magnitude(data)
    quantised = unsharded(data, scaling, torch.float32).dequantised()
    torch.testing.assert_close(row_magnitudes(quantised) if scaling is PER_ROW else magnitude(quantised), largest)


@both
def test_zeros_stay_zeros(scaling: Float8Scaling) -> None:
    data = random(3, 16)
    data[1] = 0
    data[2, 4] = 0
    assert torch.equal(unsharded(data, scaling).dequantised() == 0, data == 0)
    assert not unsharded(torch.zeros(2, 2), scaling).dequantised().any()
    assert torch.equal(magnitude(torch.ones(0, 4)), torch.zeros(1))
    assert row_magnitudes(torch.ones(0, 4)).shape == (0, 1)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_inf_and_nan_are_never_hidden(bad: float) -> None:
    data = random(3, 16)
    data[1, 2] = bad
    rows = unsharded(data, PER_ROW).dequantised()
    assert rows[1].isnan().all()
    assert rows[[0, 2]].isfinite().all()
    assert not unsharded(data, PER_TENSOR).dequantised().isfinite().any()
    beyond = torch.tensor([[1e6, -1e6, 1.0]])  # of an outdated scale
    assert quantise_float8(beyond, torch.ones(1)).tolist() == [[LARGEST, -LARGEST, 1.0]]


def test_what_arrives_is_the_unsharded_parameter_and_the_precomputed_scale_is_copied() -> None:
    data = random(4, 16)
    for scaling in (PER_ROW, PER_TENSOR):
        shard = Float8AllGatherTensor(data, scaling=scaling)
        scale = scale_of(data, PER_TENSOR)
        if scaling is PER_TENSOR:
            shard.precomputed(scale)
        outputs, metadata = pre(shard, 1, data)
        made, inner = shard.fsdp_post_all_gather(outputs, metadata, torch.bfloat16)
        assert (outputs[0].dtype, outputs[0].shape, inner) == (torch.uint8, data.shape, ())
        assert made._data.data_ptr() == outputs[0].data_ptr()
        assert made._scale.data_ptr() != scale.data_ptr()


def asks(shard: Float8AllGatherTensor) -> bool:
    """Whether a gather of two ranks communicates before it."""
    mesh = mock.Mock(**{"size.return_value": 2, "get_group.side_effect": InterruptedError})
    with suppress(InterruptedError):
        shard.fsdp_pre_all_gather(mesh, shard.shape, shard.stride(), None, None)
    return mesh.get_group.called


def step(shard: Any) -> None:
    shard.grad = torch.ones(4, 8)
    torch.optim.SGD([shard], lr=0.1, foreach=True).step()


DROPS: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "written": (True, lambda shard: shard.add_(1)),
    "written through .data": (True, lambda shard: shard.data.mul_(2)),
    "written through a view": (True, lambda shard: shard.detach()[1:].zero_()),
    "stepped": (True, step),
    "loaded": (True, lambda shard: shard.copy_(torch.ones(4, 8))),
    "read": (False, lambda shard: shard * 2),
    "saved": (False, lambda shard: torch.save(shard, io.BytesIO())),
    "copied and the copy written": (False, lambda shard: copy.deepcopy(shard).zero_()),
    "shown": (False, repr),
}


@pytest.mark.parametrize(("drops", "act"), DROPS.values(), ids=DROPS)
def test_a_precomputed_scale_is_used_until_the_shard_is_written(drops: bool, act: Any) -> None:
    shard = nn.Parameter(Float8AllGatherTensor(random(4, 8)))
    assert asks(shard)
    shard.precomputed(torch.ones(1))
    assert not asks(shard)
    assert not asks(shard)  # backward gathers a second time
    with torch.no_grad():
        act(shard)
    assert asks(shard) is drops


def test_a_scale_for_one_rank_is_not_asked_for() -> None:
    data = random(4, 8)
    (values,), metadata = pre(Float8AllGatherTensor(data), 1, data)
    assert torch.equal(metadata, scale_of(data, PER_TENSOR))
    assert torch.equal(values, quantise_float8(data, metadata).view(torch.uint8))


def test_precomputing_passes_over_what_is_not_sharded() -> None:
    module = nn.Linear(8, 4)
    module.weight = nn.Parameter(Float8AllGatherTensor(module.weight))
    precompute_float8_scales(module)
    assert asks(module.weight)


def _plain_and_float8(scaling: Float8Scaling) -> tuple[nn.Parameter, nn.Parameter]:
    weight = unsharded(random(6, 8), scaling)
    return nn.Parameter(weight.dequantised()), nn.Parameter(weight)


FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": lambda x, weight: F.linear(x, weight, torch.ones(6, dtype=x.dtype)),
    "linear of a batch": lambda x, weight: F.linear(x.expand(2, 5, 8), weight),
    "matmul": lambda x, weight: x @ weight.t(),
    "transpose": lambda x, weight: x @ weight.transpose(-1, -2),
    "left operand": lambda x, weight: weight @ x.t(),
    "checkpointed": lambda x, weight: checkpoint(F.linear, x, weight, use_reentrant=False),
    "embedding": lambda x, weight: F.embedding(torch.tensor([0, 5, 5]), weight) * x.sum(),
    "elementwise": lambda x, weight: (weight * 2 + weight.square()).sum() * x,
}
COMPILED = torch.compile(F.linear, backend="aot_eager", fullgraph=True)


@both
@pytest.mark.parametrize("function", [*FUNCTIONS.values(), *in_ci(COMPILED)], ids=[*FUNCTIONS, "compiled"])
def test_results_and_gradients_are_those_of_the_dequantised_values(function: Any, scaling: Float8Scaling) -> None:
    results = []
    for weight in _plain_and_float8(scaling):
        x = random(5, 8).bfloat16().requires_grad_()
        y = function(x, weight)
        y.square().sum().backward()
        assert type(y) is type(weight.grad) is torch.Tensor
        with torch.no_grad():
            without_autograd = function(x, weight)
        with torch.inference_mode():
            inferred = torch.cat([F.linear(x, weight), F.linear(x, weight, torch.ones(6, dtype=x.dtype))])
        results.append((y, x.grad, weight.grad, without_autograd, inferred))
    assert all(map(torch.equal, *results))


@both
def test_runtimes_cut_rows_of_padding_and_make_it_a_parameter(scaling: Float8Scaling) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = unsharded(random(6, 8), scaling, dtype)
        assert (weight.shape, weight.dtype, weight._data.nbytes) == ((6, 8), dtype, 48)  # a byte for each
        assert weight.dequantised().dtype is dtype
    cut = torch.as_strided(weight, (5, 8), (8, 1), 0)
    assert type(cut) is type(nn.Parameter(cut)) is Float8Tensor
    assert torch.equal(cut.dequantised(), weight.dequantised()[:5])
    assert cut._data.data_ptr() == weight._data.data_ptr()
    other = torch.as_strided(weight, (8, 6), (1, 8), 0)
    assert type(other) is torch.Tensor
    assert torch.equal(other, weight.dequantised().t())


def test_saving_writes_dequantised_values_and_zeros_like_reads_none_because_they_may_be_released() -> None:
    weight, stored = unsharded(random(6, 8), PER_ROW), io.BytesIO()
    torch.save(weight, stored)
    stored.seek(0)
    assert torch.equal(torch.load(stored, weights_only=True), weight.dequantised())
    weight._data.untyped_storage().resize_(0)
    zeros = torch.zeros_like(weight)
    assert (type(zeros), zeros.dtype, zeros.shape) == (torch.Tensor, torch.bfloat16, (6, 8))
    assert repr(weight) == "Float8Tensor(shape=(6, 8), dtype=torch.bfloat16, scale=(6, 1))"


@both
@pytest.mark.parametrize("with_bias", [True, False])
def test_where_the_device_multiplies_float8_forward_does_and_backward_does_not(
    with_bias: bool, scaling: Float8Scaling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float8, "_has_float8_matmul", lambda device: True)  # the CPU can, slowly
    products = []

    def scaled_mm(*args: Any, mm: Any = F.scaled_mm, **kwargs: Any) -> torch.Tensor:
        products.append(mm(*args, **kwargs))
        return products[-1]

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    data, x = random(32, 48), random(2, 5, 48).bfloat16().requires_grad_()
    bias = random(32).bfloat16() if with_bias else None
    weight = nn.Parameter(unsharded(data, scaling))
    y = F.linear(x, weight, bias)
    rounded = unsharded(x.detach().view(-1, 48), scaling, torch.float32).dequantised().view(2, 5, 48)
    expected = F.linear(rounded, unsharded(data, scaling, torch.float32).dequantised())
    torch.testing.assert_close(y.float(), expected + (0 if bias is None else bias.float()), rtol=2e-2, atol=2e-2)
    y.sum().backward()
    assert len(products) == 1
    plain = nn.Parameter(weight.dequantised())
    F.linear(x.detach(), plain, bias).sum().backward()
    assert torch.equal(weight.grad, plain.grad)


ROWS = Float8Scaling.PER_ROW
FLOAT8 = partial(unsharded, torch.ones(4, 8), ROWS)
REFUSED: Refused = {
    "float8 rows of single elements": (lambda: torch.ones(4), partial(Float8AllGatherTensor, scaling=ROWS)),
    "float8 scaling in words": (lambda: torch.ones(4), partial(Float8AllGatherTensor, scaling="per row")),
    "float8 written": (FLOAT8, lambda weight: weight.add_(1)),
    "float8 as out": (FLOAT8, lambda weight: torch.add(torch.ones(4, 8), 1, out=weight)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str) -> None:
    assert_refused(TEXTS, name, REFUSED)
