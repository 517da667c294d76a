"""What the rooms below ``runtime`` know of a unit, the atom of the schedule: its name, groups and rules."""

from __future__ import annotations

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
