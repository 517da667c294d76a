"""Backwards that enter a unit elsewhere than at its outputs: a loss on an activation that somebody kept.

A unit's parameters must be there before the first node runs that saved one. Such nodes are in the forward of a
submodule that has parameters, so gradients of what those submodules return lead to the unit's backward, too.

Not seen are operations on a parameter outside of such a call: ``self.scale * x`` in the unit's own forward, or
``F.linear(x, self.proj.weight)``. A loss on what they return, and on nothing behind it in the unit, raises when the
unit is resharded (I16). Where it is not, gradients that arrive lead to the unit's reduction.

Compiled graphs are left alone: each is one node, with the unit's output among its results.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp2 import _torch
from fsdp2.group.group import ParamGroup
from fsdp2.plan.trees import find_tensors
from fsdp2.runtime.hooks import register_installer
from fsdp2.runtime.root import Unit
from fsdp2.schedule.schedule import Phase


def _install(unit: Unit, holders: list[nn.Module]) -> None:
    """Watch what submodules of ``unit`` return that hold parameters. ``holders``: all modules with parameters."""
    begin = torch.compiler.disable(lambda: (unit.root or unit.form_root()).pre_backward(unit))

    def on_gradient(_: torch.Tensor) -> None:
        """Most often the unit's own output has come first. In its forward, the user takes gradients on the way."""
        root = unit.root
        phase = Phase.IDLE if root is None else root.schedule.phases[unit.index]
        if phase is not Phase.BACKWARD and phase is not Phase.FORWARD:
            begin()

    around = {child: module for each in unit.modules for module in each.modules() for child in module.children()}
    hook = _torch.GradientHook(on_gradient)
    for module in _called(unit.modules, holders, around):
        _torch.watch_calls(module, hook, find_tensors)
    for group in unit.groups:
        if any(slot.module in unit.modules for param in group.params for slot in param.slots):
            group.on_parameters = _OwnGradients(unit.modules, on_gradient)


class _OwnGradients:
    """Has ``on_gradient`` called for the gradients of parameters that a unit's own ``modules`` hold."""

    def __init__(self, modules: tuple[nn.Module, ...], on_gradient: Callable[[torch.Tensor], None]) -> None:
        self._modules, self._on_gradient = modules, on_gradient
        self._handles: list[RemovableHandle] = []

    def __call__(self, group: ParamGroup) -> None:
        alive = weakref.ref(self._on_gradient)  # autograd keeps hooks where the garbage collector does not look

        def tell(gradient: torch.Tensor) -> None:
            if (on_gradient := alive()) is not None:
                on_gradient(gradient)

        for handle in self._handles:
            handle.remove()
        own = [param for param in group.params if any(slot.module in self._modules for slot in param.slots)]
        self._handles = [
            param.unsharded.register_post_accumulate_grad_hook(tell)
            for param in own
            if param.unsharded is not None and param.unsharded.requires_grad
        ]


def _called(
    modules: tuple[nn.Module, ...], holders: Iterable[nn.Module], around: Mapping[nn.Module, nn.Module]
) -> list[nn.Module]:
    """What computes with the parameters of ``holders``, below ``modules``: a list of parameters has no forward, so that
    is a module ``around`` it."""
    found: dict[nn.Module, None] = {}
    for holder in holders:
        module: nn.Module | None = holder
        while module is not None and module not in modules and type(module).forward is nn.Module.forward:
            module = around.get(module)
        if module is not None and module not in modules:
            found[module] = None
    return list(found)


def register() -> None:
    """Install this with every new unit."""
    register_installer(_install)
