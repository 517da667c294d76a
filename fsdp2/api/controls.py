"""The way from a sharded module to what its setters change: options of groups, rules of units, what the root holds.

Also for what only looks at it.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from fsdp2.runtime.root import Unit, unit_of, units_under
from fsdp2.types import ScheduleError


def sharded_unit(module: nn.Module, caller: str) -> Unit:
    """The unit of ``module``, for what looks at sharded models.

    Raises:
        ValueError: ``module`` is not sharded.
    """
    unit = unit_of(module)
    if unit is None:
        raise ValueError(
            f"{caller}: this {type(module).__name__} was not given to fully_shard. Pass the root of the sharded model."
        )
    return unit


class Controls:
    """A module that ``fully_shard`` was called on."""

    def _configure(self, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse):
            for group in unit.groups:
                group.configure(**changes)

    def _set_rules(self, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse):
            unit.configure(**changes)

    def _check_root(self, caller: str) -> None:
        unit = self._unit()
        if not unit.is_root:
            raise ScheduleError(
                f"{caller} on '{unit.name}', which is no root. Call it on the {unit.form_root().class_name} around it."
            )

    def _units(self, recurse: bool) -> list[Unit]:
        if not recurse:
            return [self._unit()]
        return [unit for _, unit in units_under(cast(nn.Module, self))]

    def _unit(self) -> Unit:
        unit = unit_of(cast(nn.Module, self))
        assert unit is not None  # fully_shard swaps the class and sets the unit together
        return unit
