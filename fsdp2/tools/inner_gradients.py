"""Backwards that enter a unit elsewhere than at its outputs: a loss on an activation that somebody kept.

A unit's parameters must be there before the first node runs that saved one. Most such nodes are in the forward of a
submodule that has parameters, so gradients of what those submodules return lead to the unit's backward, too. Autograd
runs the node that was made last first: what such a submodule returns comes ahead of what it computed with, and torch's
own layers hand out nothing else. Where other code uses parameters, each operation on them is watched (``direct_uses``).

Compiled graphs are left alone. Each is one node, with the unit's output among its results; and the compiler traces
parameters of torch's own class best, so it finds no others. What cannot be watched (parameters that all-gather hooks
made, functions of ``torch.autograd.Function``) is told by gradients that are there. That is too late to gather, but
nothing that was kept unsharded stays unreduced.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.group.param import ShardedParam
from fsdp2.plan.trees import find_tensors
from fsdp2.runtime.root import Unit
from fsdp2.schedule.schedule import Pass, Phase


class InnerGradients:
    """Watches what submodules of one unit return, installed once."""

    def __init__(self, unit: Unit, holders: Iterable[nn.Module]) -> None:
        self._unit = unit
        self._begin = torch.compiler.disable(self._begin_backward)
        self._hook = _torch.GradientHook(self._on_gradient)
        self._uncalled: dict[ShardedParam, set[nn.Module]] = {}
        around = {child: module for root in unit.modules for module in root.modules() for child in module.children()}
        for group in unit.groups:
            group.watch_own(unit.modules, weakref.WeakMethod(self._begin_if_outside))
            for param in group.params if group.mesh.shard.size > 1 else ():
                self._watch_uses(param, around)
        _watching.add(self)
        _torch.at_start_of_compilation(_leave_parameters_to_the_compiler)
        awaited = set().union(*self._uncalled.values())
        on_first_call = torch.compiler.disable(self._on_first_call)
        for module in _called(unit.modules, holders, around):
            on_first = partial(on_first_call, module) if module in awaited else None
            _torch.watch_calls(module, self._handed_out, on_first)

    def _watch_uses(self, param: ShardedParam, around: Mapping[nn.Module, nn.Module]) -> None:
        """Watch operations on ``param``, unless it is torch's modules alone that use it. Those that other code reaches
        into without a call have to be called first."""
        holders = {slot.module for slot in param.slots}
        if all(map(_is_torchs, holders)):
            uncalled = {holder for holder in holders - set(self._unit.modules) if not _is_torchs(around[holder])}
            if not uncalled:
                return
            self._uncalled[param] = uncalled
        param.watch_uses(self._hook)

    def stop_watching_uses(self) -> None:
        """From now on, watch what submodules return, only."""
        self._uncalled.clear()
        for group in self._unit.groups:
            for param in group.params:
                param.watch_uses(None)

    @property
    def is_running(self) -> bool:
        """Whether its unit is part of a pass that is under way."""
        return self._unit.running is not Pass.IDLE

    def _on_first_call(self, module: nn.Module) -> None:
        """Its parameters are used by calls of it, then."""
        for param, uncalled in list(self._uncalled.items()):
            uncalled.discard(module)
            if not uncalled:
                del self._uncalled[param]
                param.watch_uses(None)

    def _handed_out(self, output: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return output
        if type(output) is torch.Tensor:  # most
            if output.requires_grad:
                self._hook.add_to(output)
        else:
            for tensor in find_tensors(output, []):
                if tensor.requires_grad:
                    self._hook.add_to(tensor)
        return output

    def _on_gradient(self, _: torch.Tensor) -> None:
        self._begin_if_outside()

    def _begin_if_outside(self) -> None:
        """Most often the unit's own output has come first. In its forward, the user takes gradients on the way."""
        unit = self._unit
        phase = unit.context.schedule.phases[unit.index]
        if phase is not Phase.BACKWARD and phase is not Phase.FORWARD:
            self._begin()

    def _begin_backward(self) -> None:
        self._unit.context.pre_backward(self._unit)


_watching: weakref.WeakSet[InnerGradients] = weakref.WeakSet()


def _leave_parameters_to_the_compiler() -> None:
    """In all units of the root at once: blocks that are alike share their graphs, if their parameters are alike."""
    for each in list(_watching):
        if each.is_running:
            each.stop_watching_uses()


def _called(
    modules: tuple[nn.Module, ...], holders: Iterable[nn.Module], around: Mapping[nn.Module, nn.Module]
) -> list[nn.Module]:
    """What computes with the parameters of ``holders``, below ``modules``: a list of parameters has no forward, so that
    is a module ``around`` it."""
    found: dict[nn.Module, None] = {}
    for holder in holders:
        module: nn.Module | None = holder
        while module is not None and module not in modules and not _has_forward(module):
            module = around.get(module)
        if module is not None and module not in modules:
            found[module] = None
    return list(found)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _is_torchs(module: nn.Module) -> bool:
    """Whether it is one of torch's layers. Those use their parameters, and those of modules inside, in calls only."""
    is_container = isinstance(module, nn.Sequential) or not _has_forward(module)
    return type(module).__module__.startswith("torch.nn.modules.") and not is_container
