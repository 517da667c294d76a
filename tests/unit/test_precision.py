"""Which dtype goes where, and that dividing before and after a sum makes the asked factor."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from fsdp2 import _torch
from fsdp2._torch import GradDtype
from fsdp2.plan.dtypes import ParamDtypes, cast_floating, divide_factors, own_policy, param_dtypes
from fsdp2.types import MixedPrecisionPolicy

WORLD_SIZES = [1, 2, 3, 4, 6, 7, 8, 12, 16, 24, 64, 100, 256, 1000, 1024, 4096]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_dtypes_with_range_to_spare_divide_once_after_the_sum(dtype: torch.dtype, world_size: int) -> None:
    factors = divide_factors(dtype, world_size)
    assert (factors.before, factors.after) == (1.0, world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_fp16_factors_multiply_to_the_world_size(world_size: int) -> None:
    factors = divide_factors(torch.float16, world_size)
    assert factors.before * factors.after == world_size
    assert factors.before >= 1


@pytest.mark.parametrize("world_size", [size for size in WORLD_SIZES if size > 2 and size & (size - 1) == 0])
def test_fp16_splits_a_power_of_two_near_its_square_root(world_size: int) -> None:
    factors = divide_factors(torch.float16, world_size)
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


def _dtypes(orig: torch.dtype, **policy: torch.dtype) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    found = param_dtypes(orig, MixedPrecisionPolicy(**policy))
    assert found.grad is orig
    return found.orig, found.param, found.reduce


@pytest.fixture(params=[False, True], ids=["before 2.15", "since 2.15"])
def since_2_15(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Which torch is installed."""
    monkeypatch.setattr(sys.modules[param_dtypes.__module__], "GRADIENTS_FOLLOW_SHARDS", request.param)
    param_dtypes.cache_clear()
    yield request.param
    param_dtypes.cache_clear()


def test_reduction_follows_torch_unless_told_otherwise(since_2_15: bool) -> None:
    reduce = torch.float32 if since_2_15 else torch.bfloat16
    assert _dtypes(torch.float32, param_dtype=torch.bfloat16) == (torch.float32, torch.bfloat16, reduce)
    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    assert _dtypes(torch.float32, **policy) == (torch.float32, torch.bfloat16, torch.bfloat16)
    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    assert _dtypes(torch.float32, **policy) == (torch.float32, torch.bfloat16, torch.float32)
    assert _dtypes(torch.float32, reduce_dtype=torch.float64) == (torch.float32, torch.float32, torch.float64)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("orig", "policy", "grad_dtype", "reduce", "grad"),
    [
        (BF16, {}, FP32, FP32, FP32),
        (FP32, {}, BF16, BF16, BF16),
        (FP32, {"param_dtype": BF16}, FP32, FP32, FP32),
        (FP32, {"param_dtype": BF16, "reduce_dtype": FP32}, BF16, FP32, BF16),
        (BF16, {"reduce_dtype": FP32}, None, FP32, FP32),
        (FP32, {"param_dtype": BF16, "reduce_dtype": BF16}, None, BF16, BF16),
        (torch.int64, {"reduce_dtype": FP32}, FP32, torch.int64, torch.int64),
    ],
)
def test_grad_dtype_of_the_user_is_that_of_the_gradient_and_of_its_reduction_but_for_a_reduce_dtype(
    orig: torch.dtype,
    policy: dict[str, torch.dtype],
    grad_dtype: torch.dtype | None,
    reduce: torch.dtype,
    grad: torch.dtype,
) -> None:
    found = param_dtypes(orig, MixedPrecisionPolicy(**policy), GradDtype(grad_dtype))
    param = policy.get("param_dtype", orig)
    assert found == ParamDtypes(orig, param, reduce, grad)


@pytest.mark.parametrize(("returned", "expected"), [(FP32, FP32), (BF16, BF16), (None, BF16)])
def test_override_chooses_between_the_dtype_of_the_parameter_and_that_of_the_policy(
    returned: torch.dtype | None, expected: torch.dtype
) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    seen = []

    def override(given: torch.nn.Parameter) -> torch.dtype | None:
        seen.append(given)
        return returned

    policy = MixedPrecisionPolicy(BF16, FP16, FP32, False, param_dtype_override_fn=override)
    assert own_policy("weight", param, policy) == MixedPrecisionPolicy(expected, FP16, FP32, False)
    assert len(seen) == 1
    assert seen[0] is param


def test_override_that_keeps_the_dtype_needs_no_other_dtype_in_the_policy() -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=BF16))
    policy = MixedPrecisionPolicy(reduce_dtype=FP32, param_dtype_override_fn=lambda given: given.dtype)
    assert param_dtypes(BF16, own_policy("weight", param, policy)) == ParamDtypes(BF16, BF16, FP32, BF16)


def test_grad_dtype_counts_as_set_if_it_differs_from_the_dtype() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    assert _torch.own_grad_dtype(param) is None
    param.grad_dtype = BF16
    assert _torch.own_grad_dtype(param) == GradDtype(BF16)
    param.grad_dtype = None
    assert _torch.own_grad_dtype(param) == GradDtype(None)
    param = torch.nn.Parameter(param.detach())
    param.data = param.data.bfloat16()
    assert _torch.own_grad_dtype(param) is None


def test_torch_that_says_whether_grad_dtype_was_set_is_believed() -> None:
    class Newer(torch.Tensor):
        _has_grad_dtype_override = True

    param = torch.ones(2).as_subclass(Newer)
    assert _torch.own_grad_dtype(param) == GradDtype(FP32)


def test_gradient_that_is_there_keeps_its_values_when_grad_dtype_is_set() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.tensor([1.0, 0.5])
    _torch.set_grad_dtype(param, BF16)
    assert param.grad_dtype is BF16
    assert torch.equal(param.grad, torch.tensor([1.0, 0.5], dtype=BF16))
    _torch.set_grad_dtype(param, None)
    assert param.grad.dtype is BF16


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        *((dtype, {}) for dtype in (FP32, BF16, torch.float64)),
        *((dtype, {"param_dtype": BF16, "reduce_dtype": FP32}) for dtype in (torch.int64, torch.uint8, torch.bool)),
    ],
)
def test_without_a_policy_all_dtypes_are_the_original_and_integers_are_never_cast(
    dtype: torch.dtype, policy: dict[str, torch.dtype]
) -> None:
    assert _dtypes(dtype, **policy) == (dtype, dtype, dtype)


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
