"""Checks the units of a tree when they are known: before the first pass, and whenever something has changed.

Ties made after ``fully_shard`` move to a unit around them, or are refused (``ties``). Only the root may have settings
of a root. Plain parameters that were added to a sharded module cause a warning, once.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from threading import get_ident

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core import ScheduleError, Slot, TreeChecks, Unit, UnitTree, _torch, marks
from fsdp2.extras.managed_groups import average
from fsdp2.extras.output import listed
from fsdp2.extras.plain_names import joined_name, plain_named_modules, plain_paths
from fsdp2.extras.ties import ties_across

_MAX_NAMES = 4


class UnitChecks(TreeChecks):
    """The checks of the units of one tree."""

    def __init__(self, tree: UnitTree) -> None:
        self._tree = tree

    def check_units(self, units: Sequence[tuple[Unit, str]]) -> None:
        """Check ``units``, and move ties to the units where they belong."""
        root = self._tree.root
        if not root.mesh.has_this_rank:
            raise ScheduleError(
                f"rank {dist.get_rank()} is not in the mesh of unit '{root.name}', which has the ranks "
                f"{sorted(root.mesh.mesh.mesh.flatten().tolist())}: its shards are empty. Run the model only on ranks "
                "where fsdp2.checkpoint.reshard_to returned True, or bring this rank in: call it on all ranks with a "
                "mesh that has it."
            )
        joins = ties_across(units)
        _check_tree(self._tree.class_name, units)
        for join in joins:
            join()

    def begin_pass(self) -> None:
        hooks = self._tree.root.hooks
        if hooks is not None and hooks.thread != get_ident():
            _note_thread(self._tree.units)

    def end_collection(self) -> None:
        units, root = self._tree.units, self._tree.root
        _note_thread(units)
        for unit in units:
            average(unit)
        _name_by_modules(root, [unit for unit in units[1:] if len(unit.modules) > 1])
        params = [param for unit in units for group in unit.groups for param in group.params]
        known = {slot for param in params for slot in param.slots}.union(*(unit.left_alone for unit in units))
        warned = _warn_of_unsharded(root.modules, known)
        root.left_alone.update(warned)
        marks.leave_alone(getattr(slot.module, slot.name) for slot in warned)


class ChecksWithoutRoot(UnitChecks):
    """The checks of a tree whose root is several modules of one unit: no module around them ever ran."""

    def begin_pass(self) -> None:
        names = ", ".join(type(module).__name__ for module in self._tree.root.modules)
        raise ScheduleError(
            f"fully_shard([{names}]) made one unit without a root, and one of these modules ran alone. "
            "Call fully_shard also on the module that contains these modules, and run that module first."
        )


def _note_thread(units: Iterable[Unit]) -> None:
    """Note that this thread runs the passes of ``units``: state dicts that others make must not reshard them."""
    for hooks in (unit.hooks for unit in units):
        if hooks is not None:
            hooks.thread = get_ident()


def checks_of_units(tree: UnitTree) -> TreeChecks:
    """The checks of the units of ``tree``. The usual ones only note the thread in a pass."""
    return (ChecksWithoutRoot if len(tree.root.modules) > 1 else UnitChecks)(tree)


def finalizes_by_hand(unit: Unit) -> bool:
    """Whether ``unit``, as a root, leaves the end of backward to the user."""
    return unit.tree is not None and unit.tree.root is unit and unit.tree.schedule.finalizes_by_hand


def _check_tree(root_class: str, units: Sequence[tuple[Unit, str]]) -> None:
    """Check that ``units`` with their names, the root first, can work in one tree, whose root is a ``root_class``: they
    neither have settings that only a root may have nor leave out tied parameters."""
    for unit, name in units[1:]:
        for is_set, method, default in (
            (finalizes_by_hand(unit), "set_manual_backward_finalization", "False"),
            (unit.config.memory_limit is not None, "set_temporary_memory_limit", "None"),
        ):
            if is_set:
                raise ScheduleError(
                    f"{method} was called on unit '{name}', but the root is {root_class}. "
                    f"Call {method}({default}) on '{name}'. Then call {method} on the root."
                )
    for unit, name in units:
        for slot in unit.left_out:
            where = f"a {type(slot.module).__name__} in unit '{name or '(root)'}'"
            raise ScheduleError(
                f"parameter '{slot.name}' of {where} is tied to a parameter of another unit, but fully_shard was not "
                "called on a module that contains both. Call fully_shard on the outermost module, too, or list the "
                "parameter in ignored_params."
            )


def _name_by_modules(root: Unit, units: Sequence[Unit]) -> None:
    """Name each parameter of ``units``, which have several modules, after its own module, not after the first one."""
    paths = plain_paths(root.modules) if units else {}
    for param in (param for unit in units for group in unit.groups for param in group.params):
        module, name = param.slots[0]
        if module in paths:  # else the root no longer contains it
            param.full_name = f"{paths[module]}.{name}".removeprefix(".")


def _warn_of_unsharded(roots: Iterable[nn.Module], known: Collection[Slot]) -> list[Slot]:
    """Warn about trainable plain parameters under ``roots`` that are in none of the ``known`` slots: their gradients
    are not reduced, so ranks diverge. Returns the slots of these parameters."""
    found = {
        joined_name(prefix, name): slot
        for root in roots
        for prefix, module in plain_named_modules(root)
        for name, param in _torch.parameters_dict(module).items()
        if param is not None
        and param.requires_grad
        and not isinstance(param, DTensor)
        and (slot := Slot(module, name)) not in known
    }
    if found:
        names = listed((f"'{name}'" for name in found), _MAX_NAMES)
        warnings.warn(
            f"parameters were added to a sharded module after fully_shard: {names}. These parameters are not sharded, "
            "and their gradients are not reduced, so the ranks will differ. Call fully_shard on the new modules, then "
            "build the optimizer. Or freeze these parameters with requires_grad_(False).",
            stacklevel=2,
        )
    return list(found.values())
