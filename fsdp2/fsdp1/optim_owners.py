"""Maps the parameters of an optimizer to the parameters, and their names, of a model with wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import nn

from fsdp2.core import Axis
from fsdp2.extras.kept_optimizers import take_over
from fsdp2.extras.lending import all_ranks
from fsdp2.extras.output import listed
from fsdp2.fsdp1.flat_param import FlatParameter
from fsdp2.fsdp1.search import named_slots, wrappers_in
from fsdp2.fsdp1.state_dict import Entry, entries_of

OptimInput: TypeAlias = Sequence[dict[str, Any]] | Iterable[nn.Parameter] | None
States: TypeAlias = dict[str, Any]  # the states of one parameter, by the optimizer's names


@dataclass(frozen=True)
class Owner:
    """A parameter of an optimizer. ``entries`` are the sharded parameters that it stands for: several if it is flat,
    none if no wrapper manages it. ``names`` are their clean names; the first one of tied names comes first."""

    param: nn.Parameter
    entries: tuple[Entry, ...]
    names: tuple[tuple[str, ...], ...]

    @property
    def is_flat(self) -> bool:
        return isinstance(self.param, FlatParameter)


class Owners:
    """The parameters of an optimizer in a model, group by group.

    Attributes:
        groups: the parameters by group, in the order of this rank's optimizer.
        in_model_order: all parameters in the order of the model, which is the same on all ranks. All collectives
            follow it (I4).
        known: the names of all parameters of the model.
        problem: why the parameters cannot be in this model.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self.wrappers = wrappers_in(model)
        if not self.wrappers:
            raise ValueError(
                f"optimizer state dict: there is no FullyShardedDataParallel in the {type(model).__name__}. Pass the "
                "wrapped model."
            )
        places = [(name, slot.module._parameters[slot.name]) for name, slot in named_slots(model)]
        order = {name: param for name, param in places if param is not None}
        entries = [each for each in entries_of(model) if each.names]
        managed: dict[int, list[Entry]] = {}  # by what an optimizer may hold: a shard, or a flat parameter of a group
        for each in entries:
            managed[id(each.param.sharded)] = [each]
            managed.setdefault(id(each.group), []).append(each)
        by_param: dict[int, list[str]] = {}
        for name, param in order.items():
            by_param.setdefault(id(param), []).append(name)
        rank = {name: i for i, name in enumerate(order)}
        self.groups: list[list[Owner]] = []
        unknown = []
        for i, group in enumerate(groups):
            self.groups.append([])
            for j, param in enumerate(group):
                found = managed.get(id(param._group if isinstance(param, FlatParameter) else param), [])
                names = [tuple(sorted(each.names, key=rank.__getitem__)) for each in found]
                if not found and id(param) in by_param:
                    names = [tuple(by_param[id(param)])]
                if not names:
                    unknown.append(f"parameter {j} of group {i} with shape {tuple(param.shape)}")
                self.groups[-1].append(Owner(param, tuple(found), tuple(names)))
        # Ranks may have given their optimizers the parameters in different orders, but must communicate in one.
        self.in_model_order: list[Owner] = sorted(
            self, key=lambda owner: rank[owner.names[0][0]] if owner.names else -1
        )
        self.known = {name for each in entries for name in each.names} | order.keys()
        self.problem = None
        if unknown:
            self.problem = (
                f"optimizer state dict: {listed(unknown)} of the optimizer are not parameters of this model. Pass the "
                "model whose parameters() the optimizer got, and make the optimizer after the model is wrapped."
            )

    def __iter__(self) -> Iterator[Owner]:
        return (owner for group in self.groups for owner in group)

    def by_key(self, model: nn.Module, *, is_named: bool) -> dict[Any, Owner]:
        """The parameters by their keys in a state dict of the optimizer: numbers, or names if it uses names."""
        if not is_named:
            return dict(enumerate(self))
        names = {id(param): name for name, param in model.named_parameters()}
        return {names.get(id(owner.param), owner.names[0][0]): owner for owner in self if owner.names}

    @cached_property
    def axis(self) -> Axis:
        """All ranks that have the model, which are those of the largest mesh. The first use is collective."""
        meshes = dict.fromkeys(each._settings.parallel for each in self.wrappers)
        return max(map(all_ranks, meshes), key=lambda axis: axis.size)


def groups_in(model: nn.Module, optim: torch.optim.Optimizer | None, given: OptimInput) -> list[list[nn.Parameter]]:
    """The parameters of an optimizer, group by group. An optimizer that has parameters from before wrapping switches to
    the shards. If ``optim`` itself is not known, ``given`` is what was passed to it; None means the parameters of
    ``model``."""
    if optim is not None:
        take_over(optim)
        return [list(group["params"]) for group in optim.param_groups]
    if given is None:
        return [list(model.parameters())]
    try:
        values: list[Any] = list(given)
    except TypeError as error:
        raise TypeError(f"optim_input: expected parameters or groups of them, not {given!r}.") from error
    if not values:
        raise ValueError("optim_input: there are no parameters in it.")
    if all(isinstance(each, torch.Tensor) for each in values):
        return [values]
    if not all(isinstance(each, dict) and "params" in each for each in values):
        raise TypeError("optim_input: expected parameters, or dicts with 'params', and not both kinds.")
    return [list(each["params"]) for each in values]
