"""Backwards that do not enter a unit at its outputs: for example, a loss on an activation that the user kept.

A unit's parameters must be gathered before the first node runs that saved a parameter. Such nodes belong to the forward
of a submodule with parameters. So gradients of the outputs of these submodules start the unit's backward, too.

Operations on a parameter outside such a submodule call are not seen: ``self.scale * x`` in the unit's own forward, or
``F.linear(x, self.proj.weight)``. A loss only on their results raises if the unit is resharded (I16). If the unit is
not resharded, the gradients that arrive start the unit's reduction.

Compiled graphs are left alone: each graph is one node, and the unit's output is among its results.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp2 import _torch
from fsdp2.group.group import ParamGroup
from fsdp2.plan.trees import find_tensors
from fsdp2.runtime.outside_calls import explain_shards
from fsdp2.runtime.root import form_root
from fsdp2.runtime.unit import Unit
from fsdp2.schedule.schedule import Phase


def watch_submodules(unit: Unit, holders: Iterable[nn.Module]) -> None:
    """Let gradients of what the submodules ``holders`` return start the backward of ``unit``; and let their calls, if
    its parameters are shards, raise an error that says so. ``holders``: modules that hold parameters of the unit
    directly."""

    @_torch.runs_between_graphs
    def on_gradient(_: torch.Tensor) -> None:
        """Usually, backward began at the unit's output. In the unit's forward, the user computes gradients."""
        root = unit.root
        phase = Phase.IDLE if root is None else root.schedule.phases[unit.index]
        if phase is not Phase.BACKWARD and phase is not Phase.FORWARD:
            (root or form_root(unit)).pre_backward(unit)

    @_torch.runs_between_graphs
    def has_begun() -> bool:
        return unit.root is not None and unit.root.schedule.phases[unit.index] is Phase.BACKWARD

    around = {child: module for each in unit.modules for module in each.modules() for child in module.children()}
    hook = _torch.GradientHook(on_gradient)
    for module in _called(unit.modules, holders, around):
        _torch.watch_calls(module, hook, find_tensors, has_begun, partial(explain_shards, unit, module))
    for group in unit.groups:
        if any(slot.module in unit.modules for param in group.params for slot in param.slots):
            group.on_parameters = _OwnGradients(unit.modules, on_gradient)


class _OwnGradients:
    """Calls ``on_gradient`` for gradients of parameters that the unit's own ``modules`` hold directly."""

    def __init__(self, modules: tuple[nn.Module, ...], on_gradient: Callable[[torch.Tensor], None]) -> None:
        self._modules, self._on_gradient = modules, on_gradient
        self._handles: list[RemovableHandle] = []

    def __call__(self, group: ParamGroup) -> None:
        alive = weakref.ref(self._on_gradient)  # autograd keeps hooks where the garbage collector cannot see them

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
    """The modules below ``modules`` that compute with the parameters of ``holders``. The module ``around`` it replaces
    a holder without a forward, such as a list of parameters."""
    found: dict[nn.Module, None] = {}
    for holder in holders:
        module: nn.Module | None = holder
        while module is not None and module not in modules and type(module).forward is nn.Module.forward:
            module = around.get(module)
        if module is not None and module not in modules:
            found[module] = None
    return list(found)
