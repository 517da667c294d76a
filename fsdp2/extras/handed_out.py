"""Refuses a unit whose forward returns one of the unit's parameters, if resharding then frees that parameter. Reading
it would read address 0 on the CPU: torch's ``fully_shard`` ends with a segmentation fault."""

from __future__ import annotations

import torch

from fsdp2.core import ScheduleError, Unit, marks


def check_handed_out(unit: Unit, memory: torch.Tensor) -> None:
    """Check ``memory``, which the forward of ``unit`` returns, itself or as a view, before the unit is resharded.

    Raises:
        ScheduleError: ``memory`` is an unsharded parameter of the unit.
    """
    groups = [group for group in unit.groups if group.unsharded.versioned and not group.keeps_storage]
    if any(memory is each for group in groups for each in group.unsharded.parameters):
        assert unit.hooks is not None
        unit.hooks.note_raised()
        name = getattr(memory, marks.NAME_IN_PASS)
        raise ScheduleError(
            f"forward of unit '{unit.name}' returned parameter '{name}', or a view of it, but the unit is resharded "
            "after its forward, which frees this memory. Return a copy, with clone(). Or pass "
            "reshard_after_forward=False to fully_shard for this unit, or leave out that call, so that the unit around "
            "it has the parameter."
        )
