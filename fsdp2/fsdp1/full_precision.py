"""``FSDP_USE_FULL_PREC_IN_EVAL=1``, read when a wrapper is made: in ``eval()``, it computes without mixed precision.

The forward of the outermost wrapper checks ``training`` of each wrapped module before anything is gathered. Where it
has changed, the unit gets the other precision policy and its plans are recompiled. Other units pay nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fsdp2.core.group.group import ParamGroup
from fsdp2.core.types import MixedPrecisionPolicy
from fsdp2.fsdp1.init_states import set_buffer_dtypes
from fsdp2.fsdp1.search import Wrapper, params_of, wrappers_in

_POLICIES = "_policies_in_training"  # attribute of a wrapper in full precision; holds its parameters' policies


def follow_training(root: Wrapper) -> None:
    """Let all wrappers in ``root``, the outermost one, compute in the precision of their mode (train or eval)."""
    wrappers = wrappers_in(root)
    for wrapper in wrappers:
        is_full = not wrapper._fsdp_wrapped_module.training and wrapper._settings.full_precision_in_eval
        if is_full != wrapper._is_full_precision:
            wrapper._is_full_precision = is_full
            _switch(wrapper, is_full=is_full)
    with_params = [root] if root._unit.groups else [wrapper for wrapper in wrappers if wrapper._unit.groups]
    is_full = any(wrapper._is_full_precision for wrapper in with_params)
    for wrapper in wrappers:
        if wrapper._orig_buffer_dtypes:
            dtype = None if is_full else wrapper._settings.mixed_precision.buffer_dtype
            set_buffer_dtypes(wrapper._unit.modules[0], wrapper._ignored, wrapper._orig_buffer_dtypes, dtype)


def _switch(wrapper: Wrapper, *, is_full: bool) -> None:
    params = params_of(wrapper)
    if is_full:
        before: Sequence[MixedPrecisionPolicy] = [param.policy for param in params]
        wrapper.__dict__[_POLICIES] = before
        after = [replace(policy, param_dtype=None, reduce_dtype=None) for policy in before]
    else:
        after = wrapper.__dict__.pop(_POLICIES)
    for param, policy in zip(params, after, strict=True):
        param.policy = policy
    for group in wrapper._unit.groups:
        _compile_again(group)


def _compile_again(group: ParamGroup) -> None:
    """Make the next use of ``group`` place its shards and compile its plans again, as if a shard had moved."""
    group.take_replaced()
    group.shards.locals[0] = torch.empty(0, dtype=torch.bool, device="meta")  # differs from every shard
    group.is_stale = True
