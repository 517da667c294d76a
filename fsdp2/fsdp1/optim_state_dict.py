"""Saves state dicts of optimizers over wrapped models, keyed by parameter names, with whole or sharded values.

A state that is sharded like its parameter (``Cut``) is saved whole or sharded; other states are copied. All
values are copies, so later steps do not change a saved state dict.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core import _torch, door
from fsdp2.extras.exchange import exchange, together
from fsdp2.extras.output import listed
from fsdp2.fsdp1.extensions import chunked_value as extended_value, shown_value
from fsdp2.fsdp1.optim_owners import Owner, Owners, States, groups_in
from fsdp2.fsdp1.optim_values import chunked_value, copied
from fsdp2.fsdp1.state_dict import Entry
from fsdp2.fsdp1.state_dict_kinds import FULL, get_state_dict_type
from fsdp2.fsdp1.state_values import CPU, full_values, is_replicated, sharded_value


class Part(NamedTuple):
    """One parameter of an optimizer's parameter, with its name and its states on this rank."""

    owner: Owner
    entry: Entry
    name: str
    states: States


@dataclass(frozen=True)
class Cut:
    """A state of this rank that is sharded like its parameter."""

    local: torch.Tensor


@door.entry
def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the state dict of ``optim``, keyed by clean parameter names, as the kind that
    :meth:`set_state_dict_type` has set. Collective. Later steps of ``optim`` do not change the returned values.

    Args:
        model: the module whose parameters ``optim`` has; it may have wrappers inside.
        optim_state_dict: what to convert; by default ``optim.state_dict()``.
        group: with ``rank0_only``, its first rank gets the result; the other ranks get an empty dict.

    Raises:
        ValueError: ``optim`` has parameters of another model.
        RuntimeError: a rank lacks states that other ranks have.
    """
    settings = get_state_dict_type(model)
    config = None if settings is None else settings.optim_state_dict_config
    return save(
        model,
        optim,
        optim_state_dict,
        is_full=settings is None or settings.state_dict_type is FULL,
        rank0_only=getattr(config, "rank0_only", False),
        offload=getattr(config, "offload_to_cpu", True),
        group=group,
    )


@torch.no_grad()
def save(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    given: Mapping[str, Any] | None = None,
    *,
    is_full: bool,
    rank0_only: bool = False,
    offload: bool = True,
    group: Any = None,
) -> dict[str, Any]:
    """Key the state dict ``given`` of ``optim``, by default its current one, by names. Collective."""
    given = optim.state_dict() if given is None else given
    owners = Owners(model, groups_in(model, optim, None))
    in_groups = (key for each in given.get("param_groups", ()) for key in each["params"])
    is_named = isinstance(next(chain(in_groups, given["state"]), None), str)
    keys = owners.by_key(model, is_named=is_named)
    by_key = {key: keys[key] for key in given["state"] if key in keys}
    others = {}
    with together(owners.axis):
        if owners.problem is not None:
            raise ValueError(owners.problem)
        cut = _cut_states(owners, by_key, given["state"])
    merged = _agreed(owners, cut)
    is_saved = not (is_full and rank0_only) or dist.get_rank(group) == 0
    device = CPU if offload else None
    results = _full(merged, device, is_saved=is_saved) if is_full else _sharded(merged, device)
    if not is_saved:
        return {}
    for key, states in given["state"].items():
        owner = by_key.get(key)
        if owner is None:
            warnings.warn(
                f"optim_state_dict: state {key!r} belongs to no parameter of the optimizer. It is saved as it is.",
                stacklevel=4,
            )
            others[key] = copy.deepcopy(states)
        elif not owner.entries:
            results[owner.names[0][0]] = {name: copied(value, device) for name, value in states.items()}
    made: dict[str, Any] = {"state": {**results, **others}}
    if "param_groups" in given:
        names = {key: [each[0] for each in owner.names] for key, owner in keys.items()}
        made["param_groups"] = [
            {**copy.deepcopy(each), "params": [name for key in each["params"] for name in names[key]]}
            for each in given["param_groups"]
        ]
    return made


def _cut_states(owners: Owners, by_key: Mapping[Any, Owner], states: Mapping[Any, States]) -> list[Part]:
    """The name and states of each wrapped parameter, in the model's order. States like its shard become ``Cut``."""
    found = {id(owner.param): states[key] for key, owner in by_key.items()}
    parts = []
    for owner in owners.in_model_order:
        if owner.entries:
            each = zip(owner.entries, owner.names, _split(owner, found.get(id(owner.param))), strict=True)
            parts += [Part(owner, entry, names[0], mine) for entry, names, mine in each]
    return parts


def _split(owner: Owner, states: States | None) -> list[States]:
    """The states of each parameter that ``owner`` stands for."""
    results: list[States] = [{} for _ in owner.entries]
    for name, value in (states or {}).items():
        if not owner.is_flat:
            results[0][name] = _as_cut(owner.entries[0], value)
        elif isinstance(value, torch.Tensor) and value.dim():
            if value.shape != owner.param.shape:
                raise ValueError(
                    f"optim_state_dict: state '{name}' of the flat parameter of {listed(n[0] for n in owner.names)} "
                    f"has shape {tuple(value.shape)}, expected {tuple(owner.param.shape)}, that of the flat parameter. "
                    "Use use_orig_params=True with optimizers whose states have other shapes."
                )
            parts = dict(owner.param.parts(value))  # type: ignore[attr-defined]
            for result, entry in zip(results, owner.entries, strict=True):
                result[name] = Cut(parts[entry.param])
        else:
            for result in results:
                result[name] = value
    return results


def _as_cut(entry: Entry, value: Any) -> Any:
    spec = entry.param.spec.sharded
    if isinstance(value, DTensor):
        is_cut = tuple(value.shape) == tuple(spec.shape) and value.placements == spec.placements
        return Cut(_torch.local_of(value)) if is_cut else value
    is_local = isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) == tuple(entry.param.shard_shape)
    return Cut(value) if is_local else value


def _agreed(owners: Owners, cut: list[Part]) -> list[Part]:
    """Add to ``cut`` the states that other ranks have where this rank's shard is empty. Afterwards all ranks have the
    same states, or all of them raise."""
    mine = {
        name: (entry.param.shard_shape, {state: _kind(value) for state, value in states.items()})
        for _, entry, name, states in cut
    }
    found: list[Any] = exchange(owners.axis, mine)
    kinds = [{name: kind for name, (_, kind) in each.items()} for each in found]
    if all(each == kinds[0] for each in kinds):
        return cut
    wanted: dict[str, dict[str, str]] = {}
    for each in kinds:
        for name, kind in each.items():
            wanted.setdefault(name, {}).update(kind)
    _check_complete(found, wanted)
    plain = {
        part.name: {state: _plain(value) for state, value in part.states.items() if not isinstance(value, Cut)}
        for part in cut
    }
    values: list[dict[str, States]] = exchange(owners.axis, plain)
    result = []
    for owner, entry, name, states in cut:
        merged = dict(states)
        for state, kind in sorted(wanted[name].items()):
            if state not in merged and kind.startswith("cut "):
                dtype = getattr(torch, kind.removeprefix("cut torch."))
                merged[state] = Cut(torch.empty(entry.param.shard_shape, dtype=dtype, device=entry.group.mesh.device))
            elif state not in merged:
                merged[state] = next(each[name][state] for each in values if state in each.get(name, {}))
        result.append(Part(owner, entry, name, merged))
    return result


def _check_complete(found: Sequence[Mapping[str, Any]], wanted: Mapping[str, Mapping[str, str]]) -> None:
    """Raise if a rank lacks ``wanted`` states of a shard that it has. ``found`` has the shape of each shard and the
    kinds of its states, for each rank."""
    lacking: dict[str, list[int]] = {}
    for rank, each in enumerate(found):
        for name, kind in wanted.items():
            shape, has = each.get(name, ((1,), {}))
            lacks = kind.keys() - has.keys()
            if lacks and (0 not in shape or any(kind[state] == "DTensor" for state in lacks)):
                lacking.setdefault(name, []).append(rank)
    if lacking:
        ranks = listed(f"'{name}' (ranks {listed(each)})" for name, each in lacking.items())
        raise RuntimeError(
            f"optim_state_dict: ranks lack optimizer states that other ranks have, of {ranks}. Step the optimizer on "
            "all ranks, with the same parameters."
        )


def _kind(value: Any) -> str:
    if isinstance(value, Cut):
        return f"cut {value.local.dtype}"
    return "DTensor" if isinstance(value, DTensor) else "other"


def _plain(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) else value


def _full(merged: list[Part], device: torch.device | None, *, is_saved: bool) -> dict[str, States]:
    results: dict[str, States] = {part.name: {} for part in merged if part.states}
    cuts: list[tuple[Part, str, torch.Tensor]] = []
    for part in merged:
        for state, value in _in_order(part):
            results[part.name][state] = None  # the place
            if isinstance(value, Cut):
                cuts.append((part, state, value.local))
            elif isinstance(value, DTensor):
                whole = value.full_tensor()
                results[part.name][state] = copied(whole, device or (None if whole.dim() else CPU))
            else:
                results[part.name][state] = copied(value, _scalar_device(part.owner, value, device))
    for part, state, whole in _wholes(cuts, device if is_saved else None):
        if is_saved:
            results[part.name][state] = shown_value(part.entry.wrapper, part.entry.param, whole)
    return results


def _wholes(
    cuts: Sequence[tuple[Part, str, torch.Tensor]], device: torch.device | None
) -> Iterator[tuple[Part, str, torch.Tensor]]:
    """Make states whole, with one launch per unit and state for all parameters. Collective."""
    launches: dict[tuple[int, str], list[tuple[Part, torch.Tensor]]] = {}
    for part, state, local in cuts:
        launches.setdefault((id(part.entry.group), state), []).append((part, local))
    for (_, state), each in launches.items():
        params, locals_ = [part.entry.param for part, _ in each], [local for _, local in each]
        wholes = full_values(each[0][0].entry.group, params, locals_, device)
        for (part, _), whole in zip(each, wholes, strict=True):
            yield part, state, whole


def _sharded(merged: list[Part], device: torch.device | None) -> dict[str, States]:
    results: dict[str, States] = {part.name: {} for part in merged if part.states}
    extended: list[tuple[Part, str, torch.Tensor]] = []
    for part in merged:
        for state, value in _in_order(part):
            results[part.name][state] = None  # the place
            if isinstance(value, Cut) and _is_extended(part):
                extended.append((part, state, value.local))
            else:
                results[part.name][state] = _sharded_state(part.owner, part.entry, value, device)
    for part, state, whole in _wholes(extended, None):
        chunked = extended_value(part.entry.wrapper, part.entry.param, whole)
        results[part.name][state] = chunked if device is None else chunked.to(device)
    return results


def _is_extended(part: Part) -> bool:
    """Whether a user's extension shards the states of ``part``. As with torch's class, this includes states of flat
    parameters that are whole on each rank."""
    wrapper = part.entry.wrapper
    return wrapper._extension is not None and (part.owner.is_flat or not is_replicated(wrapper))


def _sharded_state(owner: Owner, entry: Entry, value: Any, device: torch.device | None) -> Any:
    if isinstance(value, DTensor):
        return copied(value) if value.dim() else copied(value.full_tensor(), CPU)
    if not isinstance(value, Cut):
        return copied(value, _scalar_device(owner, value, device))
    if not is_replicated(entry.wrapper):
        return sharded_value(entry.param, value.local, entry.wrapper, device=device)
    if owner.is_flat:  # as with torch's class, each rank saves a part of the whole value
        return chunked_value(value.local, entry.wrapper, device)
    return copied(value.local, device)


def _in_order(part: Part) -> list[tuple[str, Any]]:
    """The states of a parameter in torch's order: sharded ones, other tensors, others. For original parameters, these
    kinds come in the reverse order. States of one kind are sorted by name."""
    direction = 1 if part.owner.is_flat else -1

    def place(item: tuple[str, Any]) -> tuple[int, str]:
        name, value = item
        kind = 0 if isinstance(value, Cut) else 1 if isinstance(value, torch.Tensor) else 2
        return direction * kind, name

    return sorted(part.states.items(), key=place)


def _scalar_device(owner: Owner, value: Any, device: torch.device | None) -> torch.device | None:
    """Counts of original parameters are saved on the CPU, as torch's class does."""
    is_count = isinstance(value, torch.Tensor) and not value.dim() and not owner.is_flat
    return CPU if is_count else device
