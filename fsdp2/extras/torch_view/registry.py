"""Shows our modules where clients look for torch's, after ``install``: in the registry of states, in the functions that
look up the state of a wrapper, and in the hooks of a module. Also warns clients that patch torch's runtime, which no
longer runs."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from fsdp2.core import DOCS, FSDPModule, ModuleHooks, TreeChecks, Unit, UnitTree, seams, units_under
from fsdp2.extras.torch_view import torch_names
from fsdp2.extras.torch_view.state import FSDPState, of_unit

_HOOKS: Sequence[Any] = (ModuleHooks.pre_forward, ModuleHooks.post_forward)


def show() -> Callable[[], None]:
    """Show our modules from now on. Returns a function that hides them again."""
    patches = Patches()
    guards_of = seams.guards_of

    def guards_and_state_of(unit: Unit, modules: Iterable[nn.Module]) -> list[seams.Guard]:
        """Register a new unit, which has just got its hooks."""
        _register(unit)
        return guards_of(unit, modules)

    def checks_of(tree: UnitTree) -> TreeChecks:
        for module in tree.root.modules:
            for _, unit in units_under(module):  # some may be older than install
                _register(unit)
        return patches

    modules_of_hooks = [hook.__module__ for hook in _HOOKS]

    def hide() -> None:
        patches.classes.clear()  # trees keep their checks
        seams.guards_of = guards_of
        seams.tree_checks.remove(checks_of)
        for hook, module in zip(_HOOKS, modules_of_hooks, strict=True):
            hook.__module__ = module
        for shown, state in list(torch_names.states_by_module.items()):
            if type(state()) is FSDPState:
                del torch_names.states_by_module[shown]

    seams.guards_of = guards_and_state_of
    seams.tree_checks.append(checks_of)
    for hook in _HOOKS:  # to run a module without them, clients look at where they are defined
        hook.__module__ = torch_names.STATE_MODULE
    return hide


def _register(unit: Unit) -> None:
    for module in unit.modules:
        if isinstance(module, FSDPModule):  # in a FullyShardedDataParallel, torch has no such state
            torch_names.states_by_module[module] = weakref.ref(of_unit(unit))


class Patches(TreeChecks):
    """Looks for attributes of torch's classes that a client has replaced since this object was made. Clients may patch
    classes temporarily, so it looks before every pass.

    Attributes:
        classes: the classes not yet warned about, with their original attributes, and the remedy in our runtime.
    """

    def __init__(self) -> None:
        found = [(torch_names.class_of_torch(module, name), remedy) for module, name, remedy in torch_names.PATCHED]
        self.classes: dict[type, tuple[Mapping[str, object], str]] = {
            cls: (dict(vars(cls)), remedy) for cls, remedy in found if cls is not None
        }

    def begin_pass(self) -> None:
        """Warn about each class once."""
        for cls, (before, remedy) in list(self.classes.items()):
            now = vars(cls)
            if now == before:
                continue
            changed = [name for name in now if not name.startswith("__") and now[name] is not before.get(name)]
            if changed:
                del self.classes[cls]
                warnings.warn(
                    f"fsdp2: somebody has replaced {cls.__name__}.{changed[0]} of torch since fsdp2.install(). fsdp2 "
                    f"does not use this class, so the change has no effect. {remedy}: see "
                    f"{DOCS}/clients.md#private-names.",
                    stacklevel=2,
                )
