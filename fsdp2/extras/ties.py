"""Moves parameters that are tied across units to the nearest unit that contains all their uses.

Tied before ``fully_shard``: the first inner call takes the parameter, since it does not see the other use. A call on
another module that also uses the parameter leaves it out. The first call around both modules takes the parameter over,
if it is untouched since it was sharded. If a use belongs to no unit when the model runs, that is an error.

Tied after ``fully_shard``, as transformers does: sharded parameters of several units are bound as one. They move before
the first use. Ties that cannot move are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import nn

from fsdp2.core import GroupState, ParamGroup, ScheduleError, ShardedParam, Slot, Unit, marks, seams, units_under
from fsdp2.extras.plain_names import joined_name, plain_named_modules

# Tied before fully_shard


def divide_ties(
    found: Sequence[seams.Found], roots: Sequence[nn.Module]
) -> tuple[list[seams.Found], list[Slot], Callable[[], None]]:
    """The parameters that a call manages, the slots of tied parameters that it leaves to an outer call, and a function
    that makes inner units give up the parameters that move to this call."""
    inner = [unit for root in roots for _, unit in units_under(root)]
    items = {id(item.param): item for item in found}
    for unit in inner:
        for slot in unit.left_out:  # slots that inner calls have left to an outer call
            param = getattr(slot.module, slot.name)
            items.setdefault(id(param), seams.Found(_name_in(roots, slot), param)).slots[slot] = None
    owners = {
        id(origin): (unit, group, param)
        for unit in inner
        for group in unit.groups
        for param in group.params
        if (origin := param.origin()) is not None
    }
    managed: list[seams.Found] = []
    left_out: list[Slot] = []
    given_up: list[tuple[Unit, ParamGroup, ShardedParam]] = []
    for item in items.values():
        if hasattr(item.param, marks.SHARDED_AS) and not marks.is_shard(item.param):  # another unit has it
            owner = owners.get(id(item.param))
            if owner is None:
                left_out += item.slots
                continue
            _, group, param = owner
            if not group.may_give_up(param):
                raise ValueError(
                    f"fully_shard: parameter '{item.name}' is tied to '{param.name}' of a unit that is already "
                    "sharded. This call would break the tie. The parameter moves to the new unit only if the old unit "
                    "has not run and none of its parameters was written or replaced. Otherwise, call "
                    "fully_shard([a, b]) on the modules that share the parameter, to make one unit."
                )
            item = replace(item, slots=item.slots | dict.fromkeys(param.slots))
            given_up.append(owner)
        managed.append(item)

    def take_over() -> None:
        for unit, group, param in given_up:
            group.give_up(param)
            unit.groups = tuple(each for each in unit.groups if each.params)
        taken = {slot for item in managed for slot in item.slots}
        for unit in inner:
            unit.left_out = [slot for slot in unit.left_out if slot not in taken]

    return managed, left_out, take_over


def _name_in(roots: Sequence[nn.Module], slot: Slot) -> str:
    """The name of the slot, in the form that ``fully_shard`` uses for parameters that it finds itself."""
    for index, root in enumerate(roots):
        for path, module in plain_named_modules(root):
            if module is slot.module:
                return ("" if len(roots) == 1 else f"[{index}].") + joined_name(path, slot.name)
    raise AssertionError("a unit has left out a slot that is not inside it")


# Tied after fully_shard


class Member(NamedTuple):
    """One of several parameters that are bound as one, with its unit, and its name relative to the root."""

    unit: Unit
    group: ParamGroup
    param: ShardedParam
    name: str


def join_tie(members: Sequence[Member], unit: Unit, group: ParamGroup, name: str) -> None:
    """Let ``group`` of ``unit``, whose name is ``name``, manage all ``members`` as one parameter."""
    own = next((member for member in members if member.group is group), members[0])
    others = [member for member in members if member is not own]
    for member in (*others, own):  # the last one places the shard in its own buffers
        member.group.take_replaced()
    others = [member for member in others if member.param in member.group.params]  # others are joined already
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


def ties_inside(group: ParamGroup) -> dict[ShardedParam, ShardedParam]:
    """Maps each parameter of ``group`` that the user has replaced by another one of the group to that other one. This
    is refused if the group was used before, since autograd and optimizer states may know several parameters."""
    owners: dict[int, ShardedParam] = {}
    ties: dict[ShardedParam, ShardedParam] = {}
    for param in group.params:
        bound = param.bound()
        owner = param if bound is None else owners.setdefault(id(bound), param)
        if owner is not param:
            ties[param] = owner
            if group.unsharded.gather is not None:
                raise ScheduleError(
                    f"parameters '{owner.full_name}' and '{param.full_name}' were tied after the first use of unit "
                    f"'{group.name}'. Tie parameters before the first forward, and at best before fully_shard."
                )
    return ties


def ties_across(units: Sequence[tuple[Unit, str]]) -> list[Callable[[], None]]:
    """A function for each tie across ``units`` that joins it. Units are given with their names."""
    found: dict[int, list[Member]] = {}
    for unit, name in units:
        for group in unit.groups:
            for param in group.params if group.state is GroupState.SHARDED else ():
                bound = param.bound()
                if bound is not None:
                    member = Member(unit, group, param, joined_name(name, param.name))
                    found.setdefault(id(bound), []).append(member)
    # A tie inside a unit is handled by the group.
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
