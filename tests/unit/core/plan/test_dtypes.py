"""Which dtype goes where, and that dividing before and after a sum makes the asked factor."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from fsdp2.core._torch import GradDtype
from fsdp2.core.plan.dtypes import ParamDtypes, cast_floating, divide_factors, own_policy, param_dtypes
from fsdp2.core.types import MixedPrecisionPolicy
from tests.harness.golden import Check

WORLD_SIZES = [1, 2, 3, 4, 6, 7, 8, 12, 16, 24, 64, 100, 256, 1000, 1024, 4096]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_dtypes_with_range_to_spare_divide_once_after_the_sum_and_fp16_before_and_after(world_size: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        factors = divide_factors(dtype, world_size)
        assert (factors.before, factors.after) == (1.0, world_size)
    factors = divide_factors(torch.float16, world_size)
    assert factors.before * factors.after == world_size
    assert factors.before >= 1
    if world_size > 2 and world_size & (world_size - 1) == 0:  # a power of two, near its square root
        assert 1 < factors.before < world_size
        assert 1 / 2 <= factors.after / factors.before <= 2


def test_fp16_mean_of_large_gradients_does_not_overflow() -> None:
    world_size = 64
    factors = divide_factors(torch.float16, world_size)
    total = torch.zeros((), dtype=torch.float16)
    for _ in range(world_size):
        total += torch.tensor(4000.0, dtype=torch.float16) / factors.before
    assert float(total / factors.after) == pytest.approx(4000, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 0.5, 3.0, 8.0, 100.0])
def test_factor_of_the_user_replaces_the_world_size(dtype: torch.dtype, factor: float) -> None:
    factors = divide_factors(dtype, 16, factor)
    assert factors.before * factors.after == pytest.approx(factor)


BF16, FP16, FP32, FP64, INT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64


@pytest.fixture(params=[False, True], ids=["before 2.15", "since 2.15"])
def since_2_15(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Which torch is installed."""
    monkeypatch.setattr(sys.modules[param_dtypes.__module__], "GRADIENTS_FOLLOW_SHARDS", request.param)
    param_dtypes.cache_clear()
    yield request.param
    param_dtypes.cache_clear()


def test_reduction_follows_torch_unless_told_otherwise(since_2_15: bool) -> None:
    found = param_dtypes(FP32, MixedPrecisionPolicy(BF16))
    assert found == ParamDtypes(FP32, BF16, FP32 if since_2_15 else BF16, FP32)
    for reduce in (BF16, FP32):
        assert param_dtypes(FP32, MixedPrecisionPolicy(BF16, reduce)) == ParamDtypes(FP32, BF16, reduce, FP32)


@pytest.mark.parametrize("orig", [FP32, BF16, FP64, INT64, torch.uint8, torch.bool], ids=str)
def test_dtypes_of(orig: torch.dtype, golden: Check) -> None:
    """For each policy, and each ``grad_dtype`` that the user has set: those of parameter, reduction and gradient. Where
    all of that leaves the reduction open, see above."""
    said = []
    for param, reduce, grad in itertools.product((None, BF16), (None, BF16, FP32, FP64), (FP32, BF16, None, ...)):
        if (param, reduce, grad) not in ((BF16, None, None), (BF16, None, ...)):
            found = param_dtypes(orig, MixedPrecisionPolicy(param, reduce), None if grad is ... else GradDtype(grad))
            assert found.orig is orig
            said.append(f"{param}, {reduce}, {grad}: {found.param}, {found.reduce}, {found.grad}")
    golden("\n".join(said).replace("torch.", "").replace("Ellipsis", "not set"))


@pytest.mark.parametrize(("returned", "expected"), [(FP32, FP32), (BF16, BF16), (None, BF16)])
def test_override_chooses_the_dtype_of_parameter_or_policy(returned: torch.dtype | None, expected: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    override = mock.Mock(return_value=returned)
    policy = MixedPrecisionPolicy(BF16, FP16, FP32, False, param_dtype_override_fn=override)
    assert own_policy("weight", param, policy) == MixedPrecisionPolicy(expected, FP16, FP32, False)
    (call,) = override.call_args_list
    assert call.args[0] is param
    policy = MixedPrecisionPolicy(reduce_dtype=FP32, param_dtype_override_fn=lambda given: given.dtype)
    assert own_policy("weight", param, policy) == MixedPrecisionPolicy(FP32, FP32)  # needs no other dtype in the policy


def test_cast_floating_casts_floats_and_keeps_the_rest() -> None:
    x, index, flag = torch.ones(2, requires_grad=True), torch.arange(2), torch.tensor(True)
    assert cast_floating(value := ({"x": x}, [index]), torch.float32) is value
    cast = cast_floating({"x": [x], "index": index, "flag": flag, "label": "a"}, torch.bfloat16)
    assert cast["x"][0].dtype is torch.bfloat16
    assert cast["index"] is index
    assert cast["flag"] is flag
    assert cast["label"] == "a"
    cast["x"][0].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32
