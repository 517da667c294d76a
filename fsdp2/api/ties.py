"""Weights tied across units: they move to the nearest unit that contains all their places.

Calls go bottom-up, so an inner call does not see the other end of a tie. It takes the parameter; a call on another
module that finds it there leaves it out; and the first call around both takes it over, as long as nothing has happened
to it. What nobody has taken when the model runs is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.api.resolve import Found
from fsdp2.group.group import ParamGroup
from fsdp2.group.param import SHARDED_AS, ShardedParam, Slot
from fsdp2.runtime.root import Unit, units_under
from fsdp2.types import TiedWeights


class _Owner(NamedTuple):
    """Where a parameter is managed so far."""

    unit: Unit
    group: ParamGroup
    param: ShardedParam


@dataclass
class SettledTies:
    """``found``: what a call manages. ``left_out``: where it leaves tied parameters to a call around it."""

    found: list[Found] = field(default_factory=list)
    left_out: list[Slot] = field(default_factory=list)
    _moving: list[_Owner] = field(default_factory=list)
    _inner: list[Unit] = field(default_factory=list)

    def commit(self) -> None:
        """Inner units give up what this call takes over."""
        for unit, group, param in self._moving:
            group.give_up(param)
            unit.groups = tuple(each for each in unit.groups if each.params)
        taken = {slot for item in self.found for slot in item.slots}
        for unit in self._inner:
            unit.left_out = [slot for slot in unit.left_out if slot not in taken]


def settle_ties(found: Sequence[Found], roots: Sequence[nn.Module], ties: TiedWeights) -> SettledTies:
    """Decide about parameters that other units manage; nothing changes so far. What cannot move stays in ``found`` as
    it was, and is refused there."""
    inner = [(name, unit) for root in roots for name, unit in units_under(root)]
    items = _with_left_out(found, inner)
    owners = {id(param): owner for _, unit in inner for param, owner in _origins(unit)}
    settled = SettledTies(_inner=[unit for _, unit in inner])
    for item in items:
        owner = owners.get(id(item.param))
        is_elsewhere = hasattr(item.param, SHARDED_AS) and not isinstance(item.param, DTensor)
        if not is_elsewhere or ties is TiedWeights.REFUSE:
            settled.found.append(item)
        elif owner is None:
            settled.left_out += item.slots
        elif owner.group.may_give_up(owner.param):
            settled._moving.append(owner)
            slots = list(dict.fromkeys([*item.slots, *owner.param.slots]))
            settled.found.append(replace(item, slots=slots, moves=True))
        else:
            settled.found.append(item)
    return settled


def _with_left_out(found: Sequence[Found], inner: Sequence[tuple[str, Unit]]) -> list[Found]:
    """``found``, and what inner calls have left to this one."""
    items = {id(item.param): item for item in found}
    for name, unit in inner:
        for slot in unit.left_out:
            param = getattr(slot.module, slot.name)
            item = items.setdefault(id(param), Found(f"{name}.{slot.name}" if name else slot.name, param))
            if slot not in item.slots:
                item.slots.append(slot)
    return list(items.values())


def _origins(unit: Unit) -> Iterator[tuple[nn.Parameter, _Owner]]:
    """The parameters that ``unit`` was given, as long as somebody else has them, too."""
    for group in unit.groups:
        for param in group.params:
            origin = param.origin()
            if origin is not None:
                yield origin, _Owner(unit, group, param)
