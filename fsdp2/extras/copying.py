"""``copy.deepcopy`` of sharded modules: each unit gets a copy, with its own shards, groups and hooks.

Meshes, process groups and custom comms are shared; gradients are not copied. The copied shards are added to
``deepcopy``'s memo first, so that a copied optimizer refers to the copied parameters.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from fsdp2.core import ParamGroup, ShardedParam, Slot, Unit, _torch, is_plain, marks, tree_of, unit_of
from fsdp2.extras import torch_names
from fsdp2.extras.forward_methods import FORWARD_METHOD, like_forward
from fsdp2.extras.lending import check_idle, take_shards
from fsdp2.extras.unit_checks import finalizes_by_hand

Memo = dict[Any, Any]

# The memo key for the prefetch lists of copied units. Units in these lists may be copied later.
_PENDING = "fsdp2 prefetch lists"


@torch.inference_mode(False)  # as in the commit phase of fully_shard
def copied_module(module: nn.Module, memo: Memo) -> nn.Module:
    """Copy ``module``, on which ``fully_shard`` was called, and all modules of its unit."""
    unit = unit_of(module)
    assert unit is not None
    if id(unit) not in memo:
        check_idle(module, "deepcopy")
        for group in unit.groups:
            take_shards(group)
            for param in group.params:
                if id(param.sharded) in memo:  # something that refers to it, such as an optimizer, was copied first
                    memo[id(param.sharded)].grad = None
                else:
                    memo[id(param.sharded)] = _copied_parameter(param, memo)
        memo[id(unit)] = None  # this call makes the copy; nested copies of the unit's modules must not
        modules = tuple(_copied_attributes(each, memo) for each in unit.modules)
        memo[id(unit)] = _copied_unit(unit, modules, memo)
        _resolve_prefetch(memo)
    return _copied_attributes(module, memo)


def _copied_attributes(module: nn.Module, memo: Memo) -> nn.Module:
    """Copy ``module`` as ``deepcopy`` copies a plain module, attribute by attribute. A ``__deepcopy__`` of the module's
    own class is not called, since its result would not be sharded. The ``__getstate__`` of such a class may raise, so
    it is not called either."""
    if id(module) not in memo:
        memo[id(module)] = made = object.__new__(type(module))
        has_own = sum("__deepcopy__" in vars(each) for each in type(module).__mro__) > 1  # besides FSDPModule's
        cls = nn.Module if has_own else type(module)
        state = dict(cls.__getstate__(module))  # omits what compile() has added
        del state[marks.UNIT]
        cls.__setstate__(made, copy.deepcopy(state, memo))
    return cast(nn.Module, memo[id(module)])


def _copied_parameter(param: ShardedParam, memo: Memo) -> nn.Parameter:
    """The copied DTensor. A plain shard is copied later, when its group takes the shard into a flat buffer."""
    with torch.no_grad():
        local = _torch.local_of(param.sharded)
        local = local if is_plain(local) else copy.deepcopy(local, memo)
        made = param.sharded_parameter(local, requires_grad=param.sharded.requires_grad)
    for name, value in vars(param.sharded).items():
        if name not in vars(made):
            setattr(made, name, copy.deepcopy(value, memo))
    return made


def _copied_unit(unit: Unit, modules: tuple[nn.Module, ...], memo: Memo) -> Unit:
    groups = tuple(_copied_group(group, memo) for group in unit.groups)
    config = replace(unit.config, forward_units=None, backward_units=None)
    made = Unit(modules, groups, unit.mesh, unit.policy, config)
    made.left_alone = {Slot(memo[id(slot.module)], slot.name) for slot in unit.left_alone if id(slot.module) in memo}
    made.left_out = [Slot(memo[id(slot.module)], slot.name) for slot in unit.left_out]
    for name in ("forward_units", "backward_units"):
        if (listed := getattr(unit.config, name)) is not None:
            memo.setdefault(_PENDING, []).append((made, name, listed))
    _renew_hooks(unit, made, memo)
    if finalizes_by_hand(unit):
        tree_of(made).schedule.finalizes_by_hand = True
    return made


def _copied_group(group: ParamGroup, memo: Memo) -> ParamGroup:
    params = []
    for param in group.params:
        sharded: nn.Parameter = memo[id(param.sharded)]
        slots = tuple(Slot(copy.deepcopy(slot.module, memo), slot.name) for slot in param.slots)
        params.append(replace(param, sharded=sharded, slots=slots, local=_torch.local_of(sharded), is_cut=True))
    made = ParamGroup(params, group.mesh, group.home)
    made.set_up_like(group)
    made.unsharded.post_forward_mesh = group.unsharded.post_forward_mesh
    return made


def _renew_hooks(unit: Unit, made: Unit, memo: Memo) -> None:
    """Replace the copied hooks, which report to ``unit``, with hooks of ``made``."""
    assert unit.hooks is not None
    for module in unit.hooks.modules:
        if id(module) in memo:
            torch_names.remove_hooks(memo[id(module)], unit.hooks)
    made.hooks = type(unit.hooks)(made)
    for module in made.modules:
        for name, value in list(vars(module).items()):
            method = getattr(value, FORWARD_METHOD, None)
            if method is not None:
                setattr(module, name, like_forward(made, module, copy.deepcopy(method, memo)))


def _resolve_prefetch(memo: Memo) -> None:
    """Set each prefetch list once all its units are copied. A list with a unit outside the copy is never set."""
    for made, name, units in memo.get(_PENDING, ()):
        if all(memo.get(id(unit)) is not None for unit in units):
            made.configure(**{name: tuple(memo[id(unit)] for unit in units)})
