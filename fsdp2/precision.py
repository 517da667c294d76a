"""Dtype rules: which dtype a parameter, its reduction and its gradient have, and by what a reduced gradient is divided.

Values only: nothing here moves data, but :func:`cast_floating`, which users see as input and output casts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fsdp2.api import MixedPrecisionPolicy
from fsdp2.nested import map_tensors


@dataclass(frozen=True)
class ParamDtypes:
    """The dtypes of one parameter. ``orig``: its shard and its sharded gradient. ``param``: all-gather, compute and
    the unsharded gradient. ``reduce``: the reduction, and gradients accumulated without communication."""

    orig: torch.dtype
    param: torch.dtype
    reduce: torch.dtype


def param_dtypes(orig: torch.dtype, policy: MixedPrecisionPolicy) -> ParamDtypes:
    """Resolve ``policy`` for a parameter of dtype ``orig``. Integer parameters keep their dtype throughout."""
    if not orig.is_floating_point:
        return ParamDtypes(orig, orig, orig)
    param = policy.param_dtype or orig
    return ParamDtypes(orig, param, policy.reduce_dtype or param)


@dataclass(frozen=True)
class DivideFactors:
    """Divide by ``before`` ahead of the sum over all ranks and by ``after`` behind it; ``behind_hook``: also behind the
    user's all-reduce hook, which sees a sum that is not fully divided then."""

    before: float
    after: float
    behind_hook: bool = False


def divide_factors(
    reduce_dtype: torch.dtype, world_size: int, factor: float | None = None, *, behind_hook: bool = False
) -> DivideFactors:
    """How to turn a sum over ``world_size`` ranks into ``sum / factor`` (default: the mean) in ``reduce_dtype``.

    fp32 and bf16 have range to spare: one division, after the sum, where there is least data. Other dtypes (fp16) may
    overflow in the sum or underflow before it, so the factor is split in two near its square root; a hook's sums have
    to fit as well, so the second division comes behind it.

    Source: the split of PyTorch's FSDP (Zhao et al., VLDB 2023).
    """
    factor = float(world_size) if factor is None else factor
    if reduce_dtype in (torch.float32, torch.bfloat16, torch.float64):
        return DivideFactors(1.0, factor, behind_hook)
    before = 1.0
    while factor % before == 0 and factor / before > before:
        before *= 2
    return DivideFactors(before, factor / before, behind_hook=True)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating-point tensor in it, however nested, cast to ``dtype``; differentiable."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype.is_floating_point else tensor

    return map_tensors(cast, value)
