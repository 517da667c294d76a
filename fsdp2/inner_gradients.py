"""Backwards that enter a unit elsewhere than at its outputs: a loss on an activation that somebody kept.

A unit's parameters must be there before the first node runs that saved one. Nearly all such nodes are in the forward of
a submodule that has parameters, so gradients of what those submodules return lead to the unit's backward, too. Autograd
runs the node that was made last first: what such a submodule returns comes ahead of what it computed with. Compiled
graphs are left alone; each is one node, with the unit's output among its results. Of parameters that a unit uses
itself, the gradients are watched: that is too late to gather, but nothing that was kept unsharded stays unreduced.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.nested import find_tensors
from fsdp2.runtime import Unit
from fsdp2.schedule import Phase


class InnerGradients:
    """Watches what submodules of one unit return, installed once."""

    def __init__(self, unit: Unit, holders: Iterable[nn.Module]) -> None:
        self._unit = unit
        self._begin = torch.compiler.disable(self._begin_backward)
        self._hook = _torch.GradientHook(self._on_gradient)
        for module in _called(unit.modules, holders):
            _torch.watch_calls(module, self._handed_out)
        for group in unit.groups:
            group.watch_own(unit.modules, weakref.WeakMethod(self._begin_if_outside))

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


def _called(modules: tuple[nn.Module, ...], holders: Iterable[nn.Module]) -> list[nn.Module]:
    """What computes with the parameters of ``holders``, below ``modules``: a list of parameters has no forward, so that
    is a module around it."""
    around = {child: module for root in modules for module in root.modules() for child in module.children()}
    found: dict[nn.Module, None] = {}
    for holder in holders:
        module: nn.Module | None = holder
        while module is not None and module not in modules and type(module).forward is nn.Module.forward:
            module = around.get(module)
        if module is not None and module not in modules:
            found[module] = None
    return list(found)
