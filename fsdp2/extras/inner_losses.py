"""Losses on values inside a unit rather than on its output: for example, on an activation that the user kept.

A unit's backward begins at the gradient of the unit's output. If a loss reached a value inside the unit first, or
reached nothing else, backward would find freed parameters. The first node that saved a parameter belongs to the forward
of a submodule with parameters. So gradients of the outputs of these submodules start the unit's backward, too.

Operations on a parameter outside such a submodule call are not seen: ``self.scale * x`` in the unit's own forward, or
``F.linear(x, self.proj.weight)``. A loss on only their results raises if the unit is resharded (I16). If the unit is
not resharded, the gradients that arrive start the unit's reduction.

Compiled graphs are left alone: each graph is one node, and the unit's output is among its results.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from fsdp2.core import ParamGroup, Unit, _torch, find_tensors, schedules, tree_of, units_under
from fsdp2.extras import torch_names
from fsdp2.extras.outside_calls import called_with

# The units for which each submodule is watched. Both are weak, since what watches a submodule refers to its unit.
_watched: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Unit]] = weakref.WeakKeyDictionary()


def allow_inner_losses(module: nn.Module) -> None:
    """Let losses begin inside the units of ``module``, too: on an activation that the user has kept, without the unit's
    output, or in a backward that reaches the activation first. Call it once, after all calls of ``fully_shard``.

    From then on, each call of a submodule with parameters costs a few microseconds. Losses that also depend on the
    unit's output do not need this if the output was computed last, since autograd reaches it first. All ranks must use
    the same losses.

    Call it again for a copy of the module, and after tying sharded parameters, since these move in the next
    forward.
    """
    for _, unit in units_under(module):
        _watch(unit)


def _watch(unit: Unit) -> None:
    @_torch.runs_between_graphs
    def on_gradient(_: torch.Tensor) -> None:
        """Begin the unit's backward, unless it has begun at the unit's output, or the gradient arises in forward."""
        tree = unit.tree
        phase = schedules.Phase.IDLE if tree is None else tree.passes.phases[unit.index]
        if phase is not schedules.Phase.BACKWARD and phase is not schedules.Phase.FORWARD:
            (tree or tree_of(unit)).pre_backward(unit)

    @_torch.runs_between_graphs
    def has_begun() -> bool:
        return unit.tree is not None and unit.tree.passes.phases[unit.index] is schedules.Phase.BACKWARD

    hook = _torch.GradientHook(on_gradient)
    holders = [slot.module for group in unit.groups for param in group.params for slot in param.slots]
    for submodule in called_with(unit.modules, holders):
        units = _watched.setdefault(submodule, weakref.WeakSet())
        if unit not in units:
            units.add(unit)
            torch_names.watch_calls(submodule, hook, find_tensors, has_begun)

    def watch_own(group: ParamGroup) -> None:
        """Add the hook to the parameters of ``group`` that the unit's modules hold themselves."""
        for param in group.params:
            unsharded, is_own = param.unsharded, any(slot.module in unit.modules for slot in param.slots)
            if is_own and unsharded is not None and unsharded.requires_grad:
                hook.add_to(unsharded)

    for group in unit.groups:
        if any(module in unit.modules for module in holders):
            group.on_parameters = watch_own
            watch_own(group)
