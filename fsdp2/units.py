"""What the rooms below ``runtime`` know of a unit, the atom of the schedule: its name, groups and rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fsdp2.group import ParamGroup
from fsdp2.schedule import UnitRules


class GroupedUnit(Protocol):
    """One ``fully_shard`` call, as far as its groups are concerned. ``runtime.Unit`` is the only one."""

    @property
    def name(self) -> str: ...
    @property
    def groups(self) -> tuple[ParamGroup, ...]: ...
    @property
    def rules(self) -> UnitRules: ...
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
