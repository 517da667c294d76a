"""Sharded parameters of several units that the user has bound as one, after ``fully_shard``: transformers does so.

They move to the nearest unit around all of them, before the first use, as parameters do that were tied before
``fully_shard``. Where they cannot move, each unit gathers the parameter for itself: then all these units must stay
unsharded until backward, and each copies the parameter into its own shards whenever another unit has done so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Tie:
    """Parameters that can move to ``unit``, into ``group``. ``name``: of the unit."""

    members: Sequence[Member]
    unit: Unit
    group: ParamGroup
    name: str

    def join(self) -> None:
        """Let ``group`` manage all of them as one parameter."""
        own = next((member for member in self.members if member.group is self.group), self.members[0])
        others = [member for member in self.members if member is not own]
        for member in (*others, own):  # the last one places the shard in its own buffers
            member.group.take_replaced()
        others = [member for member in others if member.param in member.group.params]  # else joined in its own group
        for member in others:
            member.group.give_up(member.param)
        if own.group is not self.group:
            self.group.take_replaced()
            own.group.give_up(own.param)
            own.param.name = own.name.removeprefix(f"{self.name}.")
        moved = [slot for member in self.members if member.group is not self.group for slot in member.param.slots]
        self.group.hold(own.param, [slot for member in others for slot in member.param.slots])
        assert self.unit.hooks is not None
        self.unit.hooks.hold([slot.module for slot in moved])
        for member in self.members:
            member.unit.groups = tuple(group for group in member.unit.groups if group.params)


def movable_ties(units: Sequence[tuple[Unit, str]], keeps: Callable[[Unit], bool]) -> list[Tie]:
    """The ties across ``units``, given with their names, that can move. ``keeps``: whether a unit stays unsharded until
    backward.

    Raises:
        ScheduleError: a tie cannot move, and one of its units is resharded after forward.
    """
    found: dict[int, tuple[Unit, str, ParamGroup, ShardedParam]] = {}
    tied: dict[int, list[Member]] = {}
    for unit, name in units:
        for group in unit.groups:
            for param in group.params if group.state is GroupState.SHARDED else ():
                bound = param.bound()
                here = unit, name, group, param
                other = here if bound is None else found.setdefault(id(bound), here)
                if other is not here:
                    tied.setdefault(id(bound), [_member(*other)]).append(_member(*here))
    ties = []
    for members in tied.values():
        first = members[0]
        second = next((member for member in members if member.unit is not first.unit), None)
        if second is None:  # a tie inside a unit: its group sees to it
            continue
        tie = _tie(members, units)
        if tie is not None:
            ties.append(tie)
            continue
        if not all(keeps(member.unit) for member in members):
            raise ScheduleError(
                f"parameters '{first.name}' and '{second.name}' are in two units, and were tied after fully_shard. "
                "No unit around both can take the parameter, because one of the units was used before, or has another "
                "precision, mesh, offload policy or communication. And one of the units is resharded after forward, so "
                "backward would not find the parameter. Tie parameters before fully_shard, or pass "
                "reshard_after_forward=False for both units."
            )
    return ties


def _member(unit: Unit, unit_name: str, group: ParamGroup, param: ShardedParam) -> Member:
    return Member(unit, group, param, f"{unit_name}.{param.name}" if unit_name else param.name)


def _tie(members: Sequence[Member], units: Sequence[tuple[Unit, str]]) -> Tie | None:
    """``members`` as a tie that can move; None if it cannot."""
    holders = {slot.module for member in members for slot in member.param.slots}
    around = [each for each in units if holders <= {inner for module in each[0].modules for inner in module.modules()}]
    if not around:
        return None
    (unit, name), first = around[-1], members[0]
    group = next((group for group in unit.groups if _are_alike(group, first.group)), None)
    if group is None or not all(map(_is_fresh, [group, *(member.group for member in members)])):
        return None
    for member in members:
        param, own = member.param, first.param
        is_alike = (param.layout, param.dtypes, param.policy) == (own.layout, own.dtypes, own.policy)
        if not (is_alike and _are_alike(member.group, group)):
            return None
    return Tie(members, unit, group, name)


def _are_alike(group: ParamGroup, other: ParamGroup) -> bool:
    return group.mesh == other.mesh and group.home == other.home and group.options == other.options


def _is_fresh(group: ParamGroup) -> bool:
    return group.state is GroupState.SHARDED and group.unsharded.gather is None
