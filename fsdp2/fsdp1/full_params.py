"""Whole parameters and gradients: ``summon_full_params``, ``apply``, and the norm of all gradients.

``fsdp2.unsharded`` provides the parameters, and this module adds their gradients. With ``recurse=False``, a wrapper
stands for its own unit: the parameters in it that no inner wrapper manages.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from fsdp2.core import Axis, ParamGroup, ShardedParam, Slot, Unit, _torch, plans, units_under
from fsdp2.extras.exchange import exchange
from fsdp2.extras.lending import (
    all_ranks,
    check_idle,
    check_not_lent,
    entered_and_left,
    gathered_together,
    lent_whole,
    params_under,
)
from fsdp2.fsdp1 import extensions
from fsdp2.fsdp1.search import Wrapper, params_of, wrappers_in
from fsdp2.fsdp1.state_values import is_replicated
from fsdp2.optim.clip import clip_grad_norm_

_CALLER = "summon_full_params"

Lent = Mapping[ParamGroup, Sequence[ShardedParam]]


@entered_and_left
@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Inside the block, the parameters of the wrappers in ``module`` are whole and plain, and have their original
    names even with ``use_orig_params=False``. All ranks enter and leave the block together. If the block raises,
    nothing is written. See :func:`fsdp2.unsharded`.

    Args:
        module: any module; nothing happens if it contains no wrapper.
        recurse: if False, only the parameters of ``module`` itself, without those of inner wrappers.
        writeback: copy values into the shards when the block ends.
        rank0_only: only the first rank has whole parameters.
        offload_to_cpu: whole parameters are on the host.
        with_grads: parameters also have their whole gradients, which ``writeback`` writes as well.

    Raises:
        NotImplementedError: ``rank0_only`` with ``writeback``; ``with_grads`` with ``offload_to_cpu`` or with
            ``use_orig_params=False``.
        ScheduleError: a forward or backward runs; another block holds the parameters.
    """
    wrappers: list[Wrapper] = wrappers_in(module)
    if not recurse:
        wrappers = [wrapper for wrapper in wrappers if wrapper is module]
    _check_arguments(wrappers, writeback, rank0_only, offload_to_cpu, with_grads)
    if not any(wrapper._unit.groups for wrapper in wrappers):
        yield
        return
    params, units = _lent(module, [wrapper._unit for wrapper in wrappers], recurse=recurse)
    lent = {param for mine in params.values() for param in mine}
    extended = {param: known for param in lent if (known := extensions.extended(param)) is not None}
    if with_grads and extended:
        name = next(iter(extended)).full_name
        raise NotImplementedError(
            f"{_CALLER}: with_grads=True, but parameter '{name}' was transformed by FSDPExtensions. Read gradients "
            "from .grad of the shards."
        )
    grads: dict[ShardedParam, torch.Tensor | None] = {}
    ranks = {mesh: all_ranks(mesh) for mesh in dict.fromkeys(group.mesh for group in params)} if with_grads else {}
    kept = {} if offload_to_cpu else _replicated(wrappers, lent)
    with lent_whole(params, units, writeback, rank0_only, offload_to_cpu), _shown_in_place(kept, writeback=writeback):
        for group, mine in params.items() if with_grads else ():
            if not all(param in kept for param in mine):
                axis = ranks[group.mesh]
                _bind_gradients(group, mine, axis, is_here=not rank0_only or axis.rank == 0)
        extensions.bind_shown(extended)
        for param in lent:
            keep_attributes(vars(param.sharded), _bound(param))
        yield
        extensions.bind_plain(extended)
        if with_grads and writeback:
            grads = {param: _bound(param).grad for mine in params.values() for param in mine}
    _write_gradients(grads)


def keep_attributes(before: Mapping[str, object], after: object) -> None:
    """Copy to ``after``, which replaces a parameter with the attributes ``before``, the attributes that the user has
    set."""
    for name, value in before.items():
        if name != "_is_param" and not name.startswith("_fsdp2_"):  # torch's, and ours
            vars(after).setdefault(name, value)


def _lent(module: nn.Module, own: Sequence[Unit], *, recurse: bool) -> tuple[Lent, Sequence[Unit]]:
    """The parameters to lend, and their units."""
    if recurse:
        return params_under(module, _CALLER), [unit for _, unit in units_under(module)]
    check_idle(module, _CALLER)
    groups = [group for unit in own for group in unit.groups]
    check_not_lent(groups, _CALLER)
    return {group: group.params for group in groups}, own


def _check_arguments(
    wrappers: Sequence[Wrapper], writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> None:
    if writeback and rank0_only:
        raise NotImplementedError(
            f"{_CALLER}: writeback=True with rank0_only=True is not supported, as in torch's class. Pass "
            "writeback=False to read values, or use fsdp2.unsharded(module, rank0_only=True), which writes the values "
            "of the first rank on all ranks."
        )
    if with_grads and offload_to_cpu:
        raise NotImplementedError(
            f"{_CALLER}: with_grads=True with offload_to_cpu=True is not supported, as in torch's class. Leave "
            "gradients on the device, and copy them inside the block."
        )
    flat = [wrapper for wrapper in wrappers if not wrapper._settings.use_orig_params]
    if with_grads and flat:
        raise NotImplementedError(
            f"{_CALLER}: with_grads=True, but the wrapper of a {type(flat[0]._fsdp_wrapped_module).__name__} has "
            "use_orig_params=False. Pass use_orig_params=True to FullyShardedDataParallel."
        )
    if offload_to_cpu and not rank0_only and any(wrapper.compute_device.type != "cpu" for wrapper in wrappers):
        warnings.warn(
            f"{_CALLER}: offload_to_cpu=True without rank0_only=True: each rank copies all parameters to the memory of "
            "its host. Pass rank0_only=True unless all ranks need them.",
            stacklevel=4,
        )


# Parameters that are whole on each rank anyway


def _replicated(wrappers: Sequence[Wrapper], lent: Collection[ShardedParam]) -> dict[ShardedParam, bool]:
    """The parameters in ``lent`` that are whole on each rank (``NO_SHARD``). With torch's class, users see the
    parameters themselves: in-place writes stay, and original parameters have their gradients, whatever the arguments.
    The value says whether the parameter has its gradient."""
    return {
        param: wrapper._settings.use_orig_params
        for wrapper in wrappers
        if is_replicated(wrapper)
        for param in params_of(wrapper)
        if param in lent
    }


@contextmanager
def _shown_in_place(kept: Mapping[ShardedParam, bool], *, writeback: bool) -> Iterator[None]:
    """Inside the block, ``kept``, the result of ``_replicated``, have their gradients. Afterwards, in-place writes to
    them and to their gradients are copied into the shards; with ``writeback``, ``lent_whole`` copies the parameters."""
    places = {param: _bound(param) for param in kept}
    shown = {
        param: _show_gradient(param, _torch.local_of(param.sharded.grad).clone())
        for param, shows_gradient in kept.items()
        if shows_gradient and param.sharded.grad is not None and places[param] is not param.sharded
    }
    yield
    with torch.no_grad():
        for param, whole in places.items() if not writeback else ():
            if whole is not param.sharded:
                _torch.local_of(param.sharded).copy_(param.shard_of(plans.local_part(whole)))
        for param, own in shown.items():
            if param.sharded.grad is not None:
                _torch.local_of(param.sharded.grad).copy_(own)


# Gradients


def _bound(param: ShardedParam) -> torch.Tensor:
    return cast(torch.Tensor, param.bound())


def _bind_gradients(group: ParamGroup, params: Sequence[ShardedParam], axis: Axis, *, is_here: bool) -> None:
    """Give the bound whole ``params`` their whole gradients. Ranks of ``axis`` without a gradient contribute zeros, if
    another rank has one."""
    mine = [None if param.sharded.grad is None else param.sharded.grad.dtype for param in params]
    for_each = zip(*exchange(axis, mine), strict=True)
    dtypes = [next((dtype for dtype in found if dtype is not None), None) for found in for_each]
    there = [i for i, dtype in enumerate(dtypes) if dtype is not None]
    locals_ = [_local_gradient(params[i], cast(torch.dtype, dtypes[i])) for i in there]
    wholes = gathered_together(group, [params[i] for i in there], locals_) if there else []
    if not is_here:
        return
    for i, whole, local in zip(there, wholes, locals_, strict=True):
        own = whole.clone() if whole.untyped_storage().data_ptr() == local.untyped_storage().data_ptr() else whole
        _show_gradient(params[i], own)


def _show_gradient(param: ShardedParam, own: torch.Tensor) -> torch.Tensor:
    """Give the bound whole ``param`` its gradient. Returns ``own``, which is this rank's part if model axes shard the
    parameter."""
    bound, grad = _bound(param), param.spec.unsharded_tensor(own)
    if grad.dtype is not bound.dtype:
        _torch.set_grad_dtype(bound, grad.dtype)
    bound.grad = grad
    return own


def _local_gradient(param: ShardedParam, dtype: torch.dtype) -> torch.Tensor:
    grad = param.sharded.grad
    if grad is None:
        return torch.zeros_like(_torch.local_of(param.sharded), dtype=dtype, requires_grad=False)
    return _torch.local_of(grad)


def _write_gradients(grads: Mapping[ShardedParam, torch.Tensor | None]) -> None:
    """Write the whole ``grads`` into the gradients of the shards. None removes the gradient."""
    for param, whole in grads.items():
        if whole is None:
            param.sharded.grad = None
            continue
        local = whole if param.spec.unsharded is None else param.spec.local_gradient(whole)
        shard = param.shard_of(local)
        if param.sharded.grad is not None:
            _torch.local_of(param.sharded.grad).copy_(shard)
        else:
            own = shard.clone().to(_torch.local_of(param.sharded).device)
            _torch.set_grads([param.sharded], [own])


# The norm of all gradients


def clip(wrapper: Wrapper, max_norm: float, norm_type: float) -> torch.Tensor:
    """See :meth:`FullyShardedDataParallel.clip_grad_norm_`."""
    if not wrapper.check_is_root():
        raise RuntimeError(
            "clip_grad_norm_: this FullyShardedDataParallel is inside another one, whose gradients count, too. Call "
            "clip_grad_norm_ on the outermost one."
        )
    check_idle(wrapper._fsdp_wrapped_module, "clip_grad_norm_")
    params = _all_params(wrapper)
    grads = [param.grad for param in params if param.grad is not None]
    total = clip_grad_norm_(params, float(max_norm), float(norm_type))
    if grads:
        return total.to(functools.reduce(torch.promote_types, (grad.dtype for grad in grads)))
    warnings.warn(
        f"clip_grad_norm_: there are no gradients on rank {wrapper.rank}, so the norm is returned as {total.dtype}.",
        stacklevel=3,
    )
    return total


def _all_params(wrapper: Wrapper) -> list[torch.Tensor]:
    """The shards of all parameters in ``wrapper``, and parameters that are not sharded; never the unsharded parameters
    that a unit which was kept has bound in their place."""
    sharded: dict[Slot, nn.Parameter] = {}
    for _, unit in units_under(wrapper):
        for group in unit.groups:
            sharded |= {slot: param.sharded for param in group.params for slot in param.slots}
    found = {
        sharded.get(Slot(module, name), param): None
        for module in wrapper.modules()
        for name, param in _torch.parameters_dict(module).items()
        if param is not None
    }
    return list(found)
