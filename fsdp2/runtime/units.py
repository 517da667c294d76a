"""What the rooms below ``runtime`` know of a unit, the atom of the schedule: its name, groups, rules and settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fsdp2.group.group import ParamGroup
from fsdp2.group.param import Slot
from fsdp2.schedule.schedule import UnitRules
from fsdp2.types import ScheduleError


class GroupedUnit(Protocol):
    """One ``fully_shard`` call, as far as its groups are concerned. ``runtime.Unit`` is the only one."""

    @property
    def name(self) -> str: ...
    @property
    def groups(self) -> tuple[ParamGroup, ...]: ...
    @property
    def rules(self) -> UnitRules: ...
    @property
    def finalizes_by_hand(self) -> bool: ...
    @property
    def memory_limit(self) -> int | None: ...
    @property
    def left_out(self) -> Sequence[Slot]: ...
    def is_in_tree(self) -> bool: ...


def parents_of(units: Sequence[GroupedUnit]) -> list[int | None]:
    """For each unit the innermost one around it, by their names; units[0] is the root, and each is followed by those
    inside it."""
    parents: list[int | None] = [None]
    around = [0]
    for index, unit in enumerate(units[1:], 1):
        while len(around) > 1 and not unit.name.startswith(f"{units[around[-1]].name}."):
            around.pop()
        parents.append(around[-1])
        around.append(index)
    return parents


def reshard_outdated(unit: GroupedUnit) -> None:
    """Have parameters gathered again whose shards were written since."""
    for group in unit.groups:
        if group.is_outdated():
            group.reshard()


def check_tree(root_class: str, units: Sequence[tuple[GroupedUnit, str]]) -> None:
    """``units`` with their names, the root first, go under one root of class ``root_class``.

    Raises:
        ScheduleError: one has settings that only a root may have, or parameters tied to another's.
    """
    for index, (unit, name) in enumerate(units):
        if index > 0 and unit.finalizes_by_hand:
            raise ScheduleError(_not_of_a_root("set_manual_backward_finalization", "False", name, root_class))
        if index > 0 and unit.memory_limit is not None:
            raise ScheduleError(_not_of_a_root("set_temporary_memory_limit", "None", name, root_class))
    for unit, name in units:
        for slot in unit.left_out:
            where = f"a {type(slot.module).__name__} in unit '{name or '(root)'}'"
            raise ScheduleError(
                f"parameter '{slot.name}' of {where} is tied to one of another unit, and fully_shard was not called on "
                "a module that contains both. Call it on the outermost module, too, or list the parameter in "
                "ignored_params."
            )


def _not_of_a_root(method: str, default: str, name: str, root_class: str) -> str:
    return (
        f"{method} was called on '{name}', which is no root: {root_class} runs around it. Call it on the root instead, "
        f"after {method}({default}) on '{name}'."
    )
