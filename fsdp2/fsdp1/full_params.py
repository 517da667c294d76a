"""Whole parameters and gradients: ``summon_full_params``, ``apply``, and the norm of all gradients.

``fsdp2.unsharded`` provides the parameters, and this module adds their gradients. With ``recurse=False``, a wrapper
stands for its own unit: the parameters in it that no inner wrapper manages.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import nn

from fsdp2.core import Axis, ParamGroup, ShardedParam, Slot, Unit, _torch, plans, units_under
from fsdp2.extras.checked import checked
from fsdp2.extras.exchange import exchange
from fsdp2.extras.lending import (
    all_ranks,
    check_idle,
    check_not_lent,
    entered_and_left,
    lent_whole,
    params_under,
)
from fsdp2.fsdp1 import extensions
from fsdp2.fsdp1.search import Wrapper, wrappers_in
from fsdp2.fsdp1.state_values import full_values, is_replicated
from fsdp2.optim.clip import clip_grad_norm_

_CALLER = "summon_full_params"

Lent = Mapping[ParamGroup, Sequence[ShardedParam]]


@checked()
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
    known = {param: extensions.extended(param) for mine in params.values() for param in mine}
    extended = {param: each for param, each in known.items() if each is not None}
    if with_grads and extended:
        name = next(iter(extended)).full_name
        raise NotImplementedError(
            f"{_CALLER}: with_grads=True, but parameter '{name}' was transformed by FSDPExtensions. Read gradients "
            "from .grad of the shards."
        )
    kept = {} if offload_to_cpu else _kept(wrappers, params)
    others = {group: mine for group, mine in params.items() if group not in kept}
    ranks = {mesh: all_ranks(mesh) for mesh in dict.fromkeys(group.mesh for group in others)} if with_grads else {}
    units_of_others = [unit for unit in units if kept.keys().isdisjoint(unit.groups)]
    with (
        lent_whole(others, units_of_others, writeback, rank0_only, offload_to_cpu),
        lent_whole({group: params[group] for group in kept}, [unit for unit in units if unit not in units_of_others]),
    ):
        for group, mine in params.items():
            if kept.get(group, with_grads):
                axis = ranks.get(group.mesh, plans.NO_AXIS)
                plain = [param for param in mine if param not in extended]
                _bind_gradients(group, plain, axis, is_here=group in kept or not rank0_only or axis.rank == 0)
        extensions.bind_shown(extended)
        for param in known:
            keep_attributes(vars(param.sharded), _bound(param))
        yield
        extensions.bind_plain(extended)
        grads = {
            param: _bound(param).grad
            for group, mine in params.items()
            if kept.get(group, with_grads and writeback)
            for param in mine
            if param not in extended
        }
    _write_gradients(grads)


def _kept(wrappers: Sequence[Wrapper], lent: Lent) -> dict[ParamGroup, bool]:
    """The groups in ``lent`` whose parameters are whole on each rank (``NO_SHARD``), and whether they have original
    parameters. With torch's class, users see these parameters themselves, whatever the arguments: what they write in
    place stays, and original parameters have their gradients."""
    replicated = [wrapper for wrapper in wrappers if is_replicated(wrapper)]
    found = {group: each._settings.use_orig_params for each in replicated for group in each._unit.groups}
    return {group: has_originals for group, has_originals in found.items() if group in lent}


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
    for i, whole in zip(there, full_values(group, [params[i] for i in there], locals_), strict=True):
        bound = _bound(params[i])
        if is_here and whole.dtype is not bound.dtype:
            _torch.set_grad_dtype(bound, whole.dtype)
        if is_here:
            bound.grad = whole


def _local_gradient(param: ShardedParam, dtype: torch.dtype) -> torch.Tensor:
    grad = param.sharded.grad
    if grad is None:
        return torch.zeros_like(_torch.local_of(param.sharded), dtype=dtype, requires_grad=False)
    return _torch.local_of(grad)


def _write_gradients(grads: Mapping[ShardedParam, torch.Tensor | None]) -> None:
    """Make the shards of the whole ``grads`` the gradients of the shards. None removes the gradient."""
    for param, whole in grads.items():
        if whole is None:
            param.sharded.grad = None
        else:
            local = whole if param.spec.unsharded is None else param.spec.local_gradient(whole)
            own = param.shard_of(local).to(_torch.local_of(param.sharded).device, copy=True)
            _torch.set_grads([param.sharded], [own])


# The norm of all gradients


def clip(wrapper: Wrapper, max_norm: float | torch.Tensor, norm_type: float | Literal["inf"]) -> torch.Tensor:
    """See :meth:`FullyShardedDataParallel.clip_grad_norm_`."""
    if not wrapper.check_is_root():
        raise RuntimeError(
            "clip_grad_norm_: this FullyShardedDataParallel is inside another one, whose gradients count, too. Call "
            "clip_grad_norm_ on the outermost one."
        )
    check_idle(wrapper._fsdp_wrapped_module, "clip_grad_norm_")
    params = _all_params(wrapper)
    grads = [param.grad for param in params if param.grad is not None]
    total = clip_grad_norm_(params, max_norm, norm_type)
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
