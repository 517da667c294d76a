"""Observes what units do not report: the modules that compute around units, the model's inputs, and the steps of
optimizers.

A unit that holds other units has modules of its own, such as embeddings and the head. They have hooks while steps are
recorded. Compiled code does not call these; the time then belongs to the unit. Nothing here changes the graph: hooks
on its nodes tell when the backward of a module begins, and when that of its predecessor does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp2.core import UnitTree, _torch, find_tensors, unit_of
from fsdp2.extras.plain_names import plain_named_modules

OnModule = Callable[[str, str, str], None]  # the unit, the module, what happens
OnOptimizer = Callable[[torch.optim.Optimizer, bool], None]  # with True before a step


class ModuleHook:
    """A hook of a module that is recorded. In a copy of the module, it does nothing: a report is about one model."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook(lambda *_: None)


def modules_around_units(tree: UnitTree) -> Mapping[nn.Module, tuple[str, str]]:
    """The modules of units that hold other units or have several modules, each with the unit's name and its own. Only
    the outermost modules that hold no unit."""
    found: dict[nn.Module, tuple[str, str]] = {}
    for top in tree.root.modules:
        modules = list(plain_named_modules(top))
        named: dict[str, nn.Module] = {}
        for name, module in modules:
            named.setdefault(name, module)  # the outermost of wrappers
        units = {name: unit for name, module in modules if (unit := unit_of(module)) is not None}
        split = {around for name in units for around in _around(name)}  # whose children are told apart
        for name, module in named.items():
            if name in split or name.rpartition(".")[0] not in split:
                continue
            unit = units.get(name)
            has_forward = getattr(module.forward, "__func__", None) is not nn.Module.forward
            if unit is None and not has_forward:  # a list, which is never called
                split.add(name)
            elif unit is None:
                found[module] = next(units[each].name for each in _around(name) if each in units), name
            elif len(unit.modules) > 1:
                found[module] = unit.name, name
    return found


def _around(name: str) -> Iterator[str]:
    """The names of the modules around the one with that name, the innermost first; the outermost one's is empty."""
    while name:
        name = name.rpartition(".")[0]
        yield name


@contextmanager
def inputs_noted(tree: UnitTree, found: list[str]) -> Iterator[None]:
    """Put the dtype and shape of each tensor that the first forward of the model is given into ``found``."""

    def note(_: nn.Module, args: Any, kwargs: Any = None) -> None:  # as in ``_before``
        if not found and not torch.compiler.is_compiling():
            for each in find_tensors((args, kwargs), []):
                found.append(f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}")

    (module, *_) = tree.root.modules
    hook = module.register_forward_pre_hook(ModuleHook(note), with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def watched(tree: UnitTree, on_module: OnModule, on_optimizer: OnOptimizer) -> Iterator[None]:
    """Report events until the block ends."""
    hooks = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: on_optimizer(optimizer, True)),
        register_optimizer_step_post_hook(lambda optimizer, *_: on_optimizer(optimizer, False)),
    ]
    for module, names in modules_around_units(tree).items():
        tell = partial(on_module, *names)
        hooks.append(module.register_forward_pre_hook(ModuleHook(partial(_before, tell)), with_kwargs=True))
        hooks.append(module.register_forward_hook(ModuleHook(partial(_after, tell)), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _before(tell: Callable[[str], None], _: nn.Module, args: Any, kwargs: Any = None) -> None:
    """``kwargs`` are missing if another hook of this call has ended the report, and so removed this one."""
    if torch.compiler.is_compiling():
        return
    _on_gradients((args, kwargs), partial(tell, "backward_end"))
    tell("forward")


def _after(tell: Callable[[str], None], _: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    tell("forward_end")
    _on_gradients(output, partial(tell, "backward"))


def _on_gradients(tensors: Any, tell: Callable[[], None]) -> None:
    """Call ``tell`` before each node of the graph that made one of ``tensors``: their gradients are known then."""
    if not torch.is_grad_enabled() or _torch.in_transform():
        return
    for node in {tensor.grad_fn for tensor in find_tensors(tensors, []) if tensor.grad_fn is not None}:
        node.register_prehook(lambda _: tell())
