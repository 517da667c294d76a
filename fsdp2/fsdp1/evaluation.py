"""What differs in evaluation.

After a forward without gradients, modules hold their shards again, as with torch's class. Other modules then list the
shards, and ``zero_grad`` of a module around the wrapper finds their gradients.

With ``FSDP_USE_FULL_PREC_IN_EVAL=1``, read when a wrapper is made, it computes without mixed precision in ``eval()``.
The forward of the outermost wrapper checks ``training`` of each wrapped module before anything is gathered. Where it
has changed, the unit gets the other precision policy and its plans are recompiled. Other units pay nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fsdp2.core import FSDPModule, GroupState, TreeChecks, Unit, UnitTree, seams
from fsdp2.fsdp1.init_states import set_buffer_dtypes
from fsdp2.fsdp1.search import Wrapper, params_of, wrappers_in


class BindsShards(TreeChecks):
    """Reshards the units that stay unsharded after an evaluation, if the root is a wrapped module. Training steps are
    left alone, since their backward reshards."""

    def __init__(self, tree: UnitTree) -> None:
        self._tree = tree

    def end_forward(self, unit: Unit) -> None:
        if torch.is_grad_enabled() or isinstance(unit.modules[0], FSDPModule):
            return
        for each in self._tree.units:
            if any(group.state is GroupState.UNSHARDED for group in each.groups):
                self._tree.reshard(each)


def register() -> None:
    """Apply :class:`BindsShards` to every tree from now on."""
    seams.tree_checks.append(BindsShards)


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
        before = wrapper._policies_in_training = [param.policy for param in params]
        after = [replace(policy, param_dtype=None, reduce_dtype=None) for policy in before]
    else:
        after = wrapper._policies_in_training
    for param, policy in zip(params, after, strict=True):
        param.policy = policy
    for group in wrapper._unit.groups:  # the next use places shards and compiles plans again, as if a shard had moved
        group.take_replaced()
        group.shards.locals[0] = torch.empty(0, dtype=torch.bool, device="meta")  # differs from every shard
        group.is_stale = True
