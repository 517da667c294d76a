"""Dtype rules: the dtypes of a parameter, its reduction and its gradient, and the divisor of a reduced gradient.

Each parameter has its own dtypes; a group may contain any mix of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from fsdp2.core._torch import GradDtype
from fsdp2.core.trees import map_tensors
from fsdp2.core.types import MixedPrecisionPolicy

# By default, torch's own runtime accumulates and reduces gradients in the dtype of the shards since torch 2.15, and in
# the dtype of compute before that. Users get what their version of torch does.
GRADIENTS_FOLLOW_SHARDS = torch.__version__ >= "2.15.0.dev0"


@dataclass(frozen=True)
class ParamDtypes:
    """The dtypes of one parameter. ``orig``: its shard. ``param``: all-gather, compute and the unsharded gradient.
    ``reduce``: the reduction, and gradients accumulated without communication. ``grad``: its sharded gradient."""

    orig: torch.dtype
    param: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype

    @classmethod
    def uncast(cls, dtype: torch.dtype) -> ParamDtypes:
        """``dtype`` for all four."""
        return cls(dtype, dtype, dtype, dtype)


@lru_cache(maxsize=256)
def param_dtypes(orig: torch.dtype, policy: MixedPrecisionPolicy, grad: GradDtype | None = None) -> ParamDtypes:
    """The dtypes of a parameter of dtype ``orig`` under its :func:`own_policy`. ``grad``: its ``grad_dtype``, if the
    user has set it; ``GradDtype(None)`` keeps the dtype in which the gradient was reduced."""
    if not orig.is_floating_point:
        return ParamDtypes.uncast(orig)
    param = policy.param_dtype or orig
    unless_told = orig if GRADIENTS_FOLLOW_SHARDS else param
    if grad is None:
        return ParamDtypes(orig, param, policy.reduce_dtype or unless_told, orig)
    reduce = policy.reduce_dtype or grad.dtype or unless_told
    return ParamDtypes(orig, param, reduce, grad.dtype or reduce)


def own_policy(name: str, param: nn.Parameter, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """``policy`` for ``param`` alone: what ``param_dtype_override_fn`` returns becomes its ``param_dtype``.

    Raises:
        TypeError: the function returned neither a dtype nor None.
        ValueError: the function returned a dtype other than the parameter's and the policy's.
    """
    if policy.param_dtype_override_fn is None:
        return policy
    found = policy.param_dtype_override_fn(param)
    expected = f"expected {param.dtype} (to keep the dtype), or {policy.param_dtype} or None (for the policy's dtype)"
    if found is not None and not isinstance(found, torch.dtype):
        raise TypeError(f"fully_shard: param_dtype_override_fn returned {found!r} for parameter '{name}', {expected}.")
    if found not in (None, param.dtype, policy.param_dtype):
        raise ValueError(
            f"fully_shard: param_dtype_override_fn returned {found} for parameter '{name}', {expected}. "
            "For another dtype, call fully_shard on the module that holds the parameter, with a separate policy."
        )
    return replace(policy, param_dtype=found or policy.param_dtype, param_dtype_override_fn=None)


def check_grad_dtype(name: str, grad: GradDtype | None, policy: MixedPrecisionPolicy) -> None:
    """Refuse a ``grad_dtype`` of None without a reduce dtype, since ranks must agree on that before they compute."""
    if grad == GradDtype(None) and policy.reduce_dtype is None:
        raise ValueError(
            f"parameter '{name}' has grad_dtype=None, so its gradient may have any dtype, and the dtype of the "
            "reduction is unknown. Set reduce_dtype in the MixedPrecisionPolicy, or set grad_dtype to a dtype."
        )


@dataclass(frozen=True)
class DivideFactors:
    """Divide by ``before`` before the sum over all ranks, and by ``after`` after it.

    Attributes:
        behind_hook: divide by ``after`` after the user's all-reduce hook, which then sees a sum not fully divided.
        averages: the collectives themselves take the mean.
    """

    before: float
    after: float
    behind_hook: bool = False
    averages: bool = False


def divide_factors(
    reduce_dtype: torch.dtype, world_size: int, factor: float | None = None, *, behind_hook: bool = False
) -> DivideFactors:
    """How to turn a sum over ``world_size`` ranks into ``sum / factor`` (default: the mean) in ``reduce_dtype``.

    fp32 and bf16 have range to spare: one division after the sum suffices. fp16 may overflow in the sum or underflow
    before it, so the factor is split near its square root. A hook's sums must fit as well, so the hook runs in between.

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
    """``value`` with every floating-point tensor in it cast to ``dtype``, at any depth; differentiable."""

    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.dtype.is_floating_point else tensor, value)


def need_cast(tensors: Iterable[torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether ``cast_floating`` to ``dtype`` would change one of ``tensors``."""
    return any(tensor.dtype is not dtype and tensor.dtype.is_floating_point for tensor in tensors)
