"""Sharded parameters of several units that the user has bound as one, after ``fully_shard``: transformers does so.

They move to the nearest unit around all of them, before the first use, as parameters do that were tied before
``fully_shard``. Ties that cannot move are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fsdp2.group.group import ParamGroup
from fsdp2.group.param import ShardedParam
from fsdp2.runtime.unit import Unit
from fsdp2.schedule.states import GroupState
from fsdp2.types import ScheduleError


@dataclass(frozen=True)
class Member:
    """One of the parameters that are bound as one, with its unit, and its name from the root."""

    unit: Unit
    group: ParamGroup
    param: ShardedParam
    name: str


def join_tie(members: Sequence[Member], unit: Unit, group: ParamGroup, name: str) -> None:
    """Let ``group`` of ``unit``, which has ``name``, manage all ``members`` as one parameter."""
    own = next((member for member in members if member.group is group), members[0])
    others = [member for member in members if member is not own]
    for member in (*others, own):  # the last one places the shard in its own buffers
        member.group.take_replaced()
    others = [member for member in others if member.param in member.group.params]  # else joined in its own group
    for member in others:
        member.group.give_up(member.param)
    if own.group is not group:
        group.take_replaced()
        own.group.give_up(own.param)
        own.param.name = own.name.removeprefix(f"{name}.")
    moved = [slot for member in members if member.group is not group for slot in member.param.slots]
    group.hold(own.param, [slot for member in others for slot in member.param.slots])
    assert unit.hooks is not None
    unit.hooks.hold([slot.module for slot in moved])
    for member in members:
        member.unit.groups = tuple(each for each in member.unit.groups if each.params)


def ties_across(units: Sequence[tuple[Unit, str]]) -> list[Callable[[], None]]:
    """What joins each tie across ``units``, which are given with their names.

    Raises:
        ScheduleError: a tie cannot move.
    """
    found: dict[int, list[Member]] = {}
    for unit, name in units:
        for group in unit.groups:
            for param in group.params if group.state is GroupState.SHARDED else ():
                bound = param.bound()
                if bound is not None:
                    full_name = f"{name}.{param.name}" if name else param.name
                    found.setdefault(id(bound), []).append(Member(unit, group, param, full_name))
    # A tie inside a unit is for its group.
    return [_tie(members, units) for members in found.values() if len({member.unit for member in members}) > 1]


def _tie(members: Sequence[Member], units: Sequence[tuple[Unit, str]]) -> Callable[[], None]:
    holders = {slot.module for member in members for slot in member.param.slots}
    around = [each for each in units if holders <= {inner for module in each[0].modules for inner in module.modules()}]
    first = members[0]
    for unit, name in around[-1:]:
        for group in unit.groups:
            if _is_fresh(group) and all(_may_join(group, first.param, member) for member in members):
                return partial(join_tie, members, unit, group, name)
    second = next(member for member in members if member.unit is not first.unit)
    raise ScheduleError(
        f"parameters '{first.name}' and '{second.name}' are in two units, and were tied after fully_shard. "
        "No unit around both can take the parameter, because one of the units was used before, or has another "
        "precision, mesh, offload policy or communication. Tie parameters before fully_shard."
    )


def _may_join(group: ParamGroup, first: ShardedParam, member: Member) -> bool:
    """Whether ``group`` can manage the parameter of ``member`` together with ``first``."""
    param, other = member.param, member.group
    is_alike = (param.layout, param.dtypes, param.policy) == (first.layout, first.dtypes, first.policy)
    are_alike = (group.mesh, group.home, group.options) == (other.mesh, other.home, other.options)
    return is_alike and are_alike and _is_fresh(other)


def _is_fresh(group: ParamGroup) -> bool:
    return group.state is GroupState.SHARDED and group.unsharded.gather is None
