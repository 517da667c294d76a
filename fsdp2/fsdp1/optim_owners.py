"""Maps the parameters of an optimizer to the parameters, and their names, of a model with wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import nn

from fsdp2.core import Axis, ParamGroup, ShardedParam, Slot
from fsdp2.extras.kept_optimizers import take_over
from fsdp2.extras.lending import all_ranks
from fsdp2.extras.output import listed
from fsdp2.extras.plain_names import without
from fsdp2.fsdp1.flat_param import FlatParameter
from fsdp2.fsdp1.search import Wrapper, named_slots, wrappers_in

OptimInput: TypeAlias = Sequence[dict[str, Any]] | Iterable[nn.Parameter] | None
States: TypeAlias = dict[str, Any]  # the states of one parameter, by the optimizer's names


@dataclass(frozen=True, eq=False)
class Entry:
    """A parameter of the model. ``names`` are its clean names in the order of the model; a tied parameter has several.
    The rest says where a wrapper manages it, if one does."""

    names: tuple[str, ...]
    wrapper: Wrapper = None
    group: Any = None  # a ParamGroup
    param: Any = None  # a ShardedParam

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, eq=False)
class Owner:
    """A parameter of an optimizer. ``entries`` are the parameters of the model that it stands for: several if it is
    flat."""

    param: nn.Parameter
    entries: tuple[Entry, ...]

    @property
    def is_flat(self) -> bool:
        return isinstance(self.param, FlatParameter)

    @property
    def is_managed(self) -> bool:
        return self.is_flat or any(entry.param is not None for entry in self.entries)


class Owners:
    """The parameters of an optimizer in a model, group by group.

    Attributes:
        groups: the parameters by group, in the order of this rank's optimizer.
        in_model_order: all parameters in the order of the model, which is the same on all ranks. All collectives
            follow it (I4).
    """

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self.wrappers = wrappers_in(model)
        if not self.wrappers:
            raise ValueError(
                f"optimizer state dict: there is no FullyShardedDataParallel in the {type(model).__name__}. Pass the "
                "wrapped model."
            )
        entries = _entries_of(model, self.wrappers)
        by_held: dict[int, list[Entry]] = {}  # by what an optimizer may hold; a flat parameter counts as its group
        for held, entry in entries:
            by_held.setdefault(id(held), []).append(entry)
            if entry.group is not None:
                by_held.setdefault(id(entry.group), []).append(entry)
        self._by_name = {without(name): entry for _, entry in entries for name in entry.names}
        self._by_name |= {name: entry for _, entry in entries for name in entry.names}
        self.groups = [
            [
                Owner(param, tuple(by_held.get(id(param._group if isinstance(param, FlatParameter) else param), ())))
                for param in group
            ]
            for group in groups
        ]
        # Ranks may have given their optimizers the parameters in different orders, but must communicate in one.
        rank = {entry: i for i, (_, entry) in enumerate(entries)}
        self.in_model_order = sorted(self, key=lambda owner: rank[owner.entries[0]] if owner.entries else -1)

    def __iter__(self) -> Iterator[Owner]:
        return (owner for group in self.groups for owner in group)

    def check(self) -> None:
        """Raise ValueError if the optimizer has parameters of another model."""
        unknown = [
            f"parameter {j} of group {i} with shape {tuple(owner.param.shape)}"
            for i, group in enumerate(self.groups)
            for j, owner in enumerate(group)
            if not owner.entries
        ]
        if unknown:
            raise ValueError(
                f"optimizer state dict: {listed(unknown)} of the optimizer are not parameters of this model. Pass the "
                "model whose parameters() the optimizer got, and make the optimizer after the model is wrapped."
            )

    def entry(self, name: object) -> Entry | None:
        """The parameter of the model that a state dict calls ``name``. Parameters of compiled modules may have other
        names there."""
        if not isinstance(name, str):
            return None
        return self._by_name.get(name) or self._by_name.get(without(name))

    def by_key(self, model: nn.Module, *, is_named: bool) -> dict[Any, Owner]:
        """The parameters by their keys in a state dict of the optimizer: numbers, or names if it uses names."""
        if not is_named:
            return dict(enumerate(self))
        names = {id(param): name for name, param in model.named_parameters()}
        return {names.get(id(owner.param), owner.entries[0].name): owner for owner in self if owner.entries}

    @cached_property
    def axis(self) -> Axis:
        """All ranks that have the model, which are those of the largest mesh. The first use is collective."""
        meshes = dict.fromkeys(each._settings.parallel for each in self.wrappers)
        return max(map(all_ranks, meshes), key=lambda axis: axis.size)


def _entries_of(model: nn.Module, wrappers: Sequence[Wrapper]) -> list[tuple[nn.Parameter, Entry]]:
    """All parameters of ``model`` in its order. Of those that ``wrappers`` manage, the shards."""
    managed: dict[Slot, tuple[Wrapper, ParamGroup, ShardedParam]] = {
        slot: (wrapper, group, param)
        for wrapper in wrappers
        for group in wrapper._unit.groups
        for param in group.params
        for slot in param.slots
    }
    names: dict[nn.Parameter, list[str]] = {}
    places: dict[nn.Parameter, tuple[Any, ...]] = {}
    for name, slot in named_slots(model):
        place = managed.get(slot, ())
        held = place[2].sharded if place else slot.module._parameters[slot.name]
        if held is not None:
            names.setdefault(held, []).append(name)
            places[held] = place
    return [(held, Entry(tuple(names[held]), *place)) for held, place in places.items()]


def groups_in(model: nn.Module, optim: torch.optim.Optimizer | None, given: OptimInput) -> list[list[nn.Parameter]]:
    """The parameters of an optimizer, group by group. An optimizer that has parameters from before wrapping switches to
    the shards. If ``optim`` itself is not known, ``given`` is what was passed to it; None means the parameters of
    ``model``."""
    if optim is not None:
        take_over(optim)
    elif given is not None:  # torch's optimizers accept the same, and check it
        optim = torch.optim.SGD(given)
    return [list(model.parameters())] if optim is None else [list(group["params"]) for group in optim.param_groups]
