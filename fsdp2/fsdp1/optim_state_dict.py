"""Saves state dicts of optimizers over wrapped models, keyed by parameter names, with whole or sharded values.

Each flat parameter is first split into its parameters. Then a state that is sharded like its parameter is a DTensor
with the parameter's spec, which is saved whole or sharded; other states are copied. All values are copies, so later
steps do not change a saved state dict.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
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
from fsdp2.fsdp1.optim_owners import Entry, Owner, Owners, States, groups_in
from fsdp2.fsdp1.optim_values import chunked_value, copied
from fsdp2.fsdp1.state_dict_kinds import FULL, get_state_dict_type
from fsdp2.fsdp1.state_values import CPU, full_values, is_replicated, sharded_value


class Part(NamedTuple):
    """A sharded parameter, and its states on this rank. States that are sharded like the parameter are DTensors with
    its spec."""

    owner: Owner
    entry: Entry
    states: States


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
    with together(owners.axis):
        owners.check()
        found = {keys[key]: states for key, states in given["state"].items() if key in keys}
        parts = [
            Part(owner, entry, states)
            for owner in owners.in_model_order
            if owner.is_managed
            for entry, states in zip(owner.entries, _split(owner, found.get(owner, {})), strict=True)
        ]
    parts = _agreed(owners, parts)
    is_saved = not (is_full and rank0_only) or dist.get_rank(group) == 0
    device = CPU if offload else None
    results = _results(parts, device, is_full=is_full, is_saved=is_saved)
    if not is_saved:
        return {}
    for key, states in given["state"].items():
        if key not in keys:
            warnings.warn(
                f"optim_state_dict: state {key!r} belongs to no parameter of the optimizer. It is saved as it is.",
                stacklevel=4,
            )
            results[key] = copy.deepcopy(states)
        elif not keys[key].is_managed:
            results[keys[key].entries[0].name] = {name: copied(value, device) for name, value in states.items()}
    made: dict[str, Any] = {"state": results}
    if "param_groups" in given:
        made["param_groups"] = [
            {**copy.deepcopy(each), "params": [entry.name for key in each["params"] for entry in keys[key].entries]}
            for each in given["param_groups"]
        ]
    return made


def _split(owner: Owner, states: States) -> list[States]:
    """The states of each parameter that ``owner`` stands for."""
    results: list[States] = [{} for _ in owner.entries]
    for name, value in states.items():
        if not owner.is_flat:
            results[0][name] = _like_param(owner.entries[0], value)
        elif isinstance(value, torch.Tensor) and value.dim():
            if value.shape != owner.param.shape:
                names = listed(entry.name for entry in owner.entries)
                raise ValueError(
                    f"optim_state_dict: state '{name}' of the flat parameter of {names} has shape "
                    f"{tuple(value.shape)}, expected {tuple(owner.param.shape)}, that of the flat parameter. "
                    "Use use_orig_params=True with optimizers whose states have other shapes."
                )
            parts = dict(owner.param.parts(value))  # type: ignore[attr-defined]
            for result, entry in zip(results, owner.entries, strict=True):
                result[name] = entry.param.spec.sharded.dtensor(parts[entry.param])
        else:
            for result in results:
                result[name] = value
    return results


def _like_param(entry: Entry, value: Any) -> Any:
    """``value``, as a DTensor if it is a plain tensor of the shape of the shard."""
    is_local = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dim()
    if is_local and tuple(value.shape) == tuple(entry.param.shard_shape):
        return entry.param.spec.sharded.dtensor(value)
    return value


def _is_like_param(entry: Entry, value: Any) -> bool:
    spec = entry.param.spec.sharded
    return isinstance(value, DTensor) and value.shape == spec.shape and value.placements == spec.placements


def _agreed(owners: Owners, parts: list[Part]) -> list[Part]:
    """Add to ``parts`` the states that other ranks have where this rank's shard is empty. Afterwards all ranks have
    the same states, or all of them raise."""
    kinds = {
        part.entry.name: {state: _kind(part.entry, value) for state, value in part.states.items()} for part in parts
    }
    found: list[dict[str, dict[str, Any]]] = exchange(owners.axis, kinds)
    if all(each == kinds for each in found):
        return parts
    wanted: dict[str, dict[str, Any]] = {}
    for each in found:
        for name, states in each.items():
            wanted.setdefault(name, {}).update(states)
    empty = {part.entry.name for part in parts if 0 in part.entry.param.shard_shape}
    plain = {
        part.entry.name: {
            state: value.detach().cpu() if isinstance(value, torch.Tensor) else value
            for state, value in part.states.items()
            if not isinstance(value, DTensor)
        }
        for part in parts
    }
    on_ranks: list[tuple[set[str], dict[str, States]]] = exchange(owners.axis, (empty, plain))
    lacking: dict[str, list[int]] = {}
    for rank, (its, (its_empty, _)) in enumerate(zip(found, on_ranks, strict=True)):
        for name, states in wanted.items():
            lacks = states.keys() - its.get(name, {}).keys()
            if lacks and (name not in its_empty or any(states[state] == "DTensor" for state in lacks)):
                lacking.setdefault(name, []).append(rank)
    if lacking:
        ranks = listed(f"'{name}' (ranks {listed(each)})" for name, each in lacking.items())
        raise RuntimeError(
            f"optim_state_dict: ranks lack optimizer states that other ranks have, of {ranks}. Step the optimizer on "
            "all ranks, with the same parameters."
        )
    for _, entry, states in parts:
        for state, kind in wanted[entry.name].items():
            if state not in states and isinstance(kind, torch.dtype):
                local = torch.empty(entry.param.shard_shape, dtype=kind, device=entry.group.mesh.device)
                states[state] = entry.param.spec.sharded.dtensor(local)
            elif state not in states:
                having = (values[entry.name] for _, values in on_ranks if state in values.get(entry.name, {}))
                states[state] = next(having)[state]
    return parts


def _kind(entry: Entry, value: Any) -> Any:
    """What ranks compare: the dtype of a state that is sharded like its parameter, or whether it is a DTensor."""
    return value.dtype if _is_like_param(entry, value) else "DTensor" if isinstance(value, DTensor) else "other"


def _results(parts: Sequence[Part], device: torch.device | None, *, is_full: bool, is_saved: bool) -> dict[Any, States]:
    """The states to save, by name. Those that are sharded like their parameter are gathered for full state dicts, and
    for a user's extension, which shards them itself: all states of one name and unit in one launch."""
    results: dict[Any, States] = {part.entry.name: {} for part in parts if part.states}
    launches: dict[tuple[int, str], list[Part]] = {}
    for part in parts:
        for state, value in _in_order(part):
            if _is_like_param(part.entry, value) and (is_full or _is_extended(part)):
                results[part.entry.name][state] = None  # the place
                launches.setdefault((id(part.entry.group), state), []).append(part)
            else:
                results[part.entry.name][state] = _saved_state(part, value, device, is_full=is_full)
    for (_, state), each in launches.items():
        params = [part.entry.param for part in each]
        locals_ = [_torch.local_of(part.states[state]) for part in each]
        wholes = full_values(each[0].entry.group, params, locals_, device if is_full and is_saved else None)
        for (_, entry, _), whole in zip(each, wholes, strict=True) if is_saved else ():
            if is_full:
                results[entry.name][state] = shown_value(entry.param, whole)
            else:
                results[entry.name][state] = extended_value(entry.wrapper, entry.param, whole, device)
    return results


def _in_order(part: Part) -> list[tuple[str, Any]]:
    """The states of a parameter in torch's order: sharded ones, other tensors, others. For original parameters, these
    kinds come in the reverse order. States of one kind are sorted by name."""

    def place(item: tuple[str, Any]) -> tuple[int, str]:
        kind = 2 if _is_like_param(part.entry, item[1]) else isinstance(item[1], torch.Tensor)
        return (-kind if part.owner.is_flat else kind), item[0]

    return sorted(part.states.items(), key=place)


def _saved_state(part: Part, value: Any, device: torch.device | None, *, is_full: bool) -> Any:
    """``value`` as a state dict has it: whole, if it is sharded otherwise than its parameter and ``is_full``."""
    owner, entry, _ = part
    if not isinstance(value, torch.Tensor):
        return copied(value)
    if _is_like_param(entry, value):
        local = _torch.local_of(value)
        if not is_replicated(entry.wrapper):
            return sharded_value(entry.param, local, entry.wrapper, device=device)
        if owner.is_flat:  # as with torch's class, each rank saves a part of the whole value
            return chunked_value(local, entry.wrapper, device)
        return copied(local, device)
    if isinstance(value, DTensor) and (is_full or not value.dim()):
        value = value.full_tensor()
    if not value.dim() and not owner.is_flat:
        device = CPU  # counts of original parameters, as with torch's class
    return copied(value, device)


def _is_extended(part: Part) -> bool:
    """Whether a user's extension shards the states of ``part``. As with torch's class, this includes states of flat
    parameters that are whole on each rank."""
    wrapper = part.entry.wrapper
    return wrapper._extension is not None and (part.owner.is_flat or not is_replicated(wrapper))
