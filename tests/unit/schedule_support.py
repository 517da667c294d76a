"""A step as plain lists of unit numbers. Unit 0 is the root; its forward surrounds the others."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2.schedule.schedule import Action, Actions, AfterForward, Schedule, UnitRules


def schedule_of(num_units: int = 4, **rules: UnitRules) -> Schedule:
    """``unit2=UnitRules(...)`` replaces the default rules of unit 2."""
    root = UnitRules(after_forward=AfterForward.KEEP)
    return Schedule([rules.get(f"unit{i}", root if i == 0 else UnitRules()) for i in range(num_units)])


def prefetches(actions: Actions) -> list[int]:
    return [unit for action, unit in actions if action is Action.PREFETCH]


def reshards(actions: Actions) -> list[int]:
    return [unit for action, unit in actions if action is Action.RESHARD]


def pre_forward(schedule: Schedule, unit: int, grad_enabled: bool = True) -> list[int]:
    return prefetches(schedule.pre_forward(unit, in_backward=False, grad_enabled=grad_enabled))


def forward(schedule: Schedule, order: Sequence[int], grad_enabled: bool = True) -> dict[int, list[int]]:
    """One complete forward. Returns what the last use of each unit prefetched."""
    prefetched = {0: pre_forward(schedule, 0, grad_enabled)}
    for unit in order:
        prefetched[unit] = pre_forward(schedule, unit, grad_enabled)
        schedule.post_forward(unit)
    schedule.post_forward(0)
    return prefetched


def backward(schedule: Schedule, order: Sequence[int], *, with_root: bool = True) -> dict[int, list[int]]:
    """One complete backward over ``order``. Returns what the last use of each unit prefetched."""
    prefetched = {0: prefetches(schedule.pre_backward(0))} if with_root else {}
    for unit in order:
        prefetched[unit] = prefetches(schedule.pre_backward(unit))
        schedule.post_backward(unit)
    schedule.end_backward()
    return prefetched


def text(actions: Actions) -> str:
    return ", ".join(f"{action.value} {unit}" for action, unit in actions)
