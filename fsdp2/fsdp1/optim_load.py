"""Converts optimizer state dicts, keyed by names and with whole or sharded values, to what an optimizer over wrapped
parameters loads, and changes the keys of state dicts of plain models. All values are copies, so that later steps do
not change the state dict that was loaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.tensor import DTensor

from fsdp2.core import _torch, door, plans
from fsdp2.extras.exchange import exchange, together
from fsdp2.extras.output import listed
from fsdp2.extras.plain_names import saved_name, without
from fsdp2.extras.torch_names import is_sharded_tensor
from fsdp2.fsdp1 import torch_names
from fsdp2.fsdp1.extensions import loaded_state, shown_shape
from fsdp2.fsdp1.optim_owners import OptimInput, Owner, Owners, States, groups_in
from fsdp2.fsdp1.optim_values import Fetch, Remote, broadcast_structure, copied, whole_of_pieces
from fsdp2.fsdp1.state_dict import Entry
from fsdp2.fsdp1.state_dict_kinds import FULL, get_state_dict_type
from fsdp2.fsdp1.state_values import is_replicated, local_value

_STEP = "step"  # a count, whatever the parameter's shape; Optimizer.load_state_dict treats this name specially, too


@door.entry
def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Convert ``optim_state_dict``, full or sharded and of any wrapping, so that ``optim`` can load it. Collective.

    Args:
        is_named_optimizer: the keys of the result are names, as TorchRec's optimizers have them.
        load_directly: also load the result into ``optim``.
        group: with ``rank0_only``, its first rank has ``optim_state_dict``; the others may pass anything.

    Raises:
        ValueError: on some rank, it does not fit the model and the optimizer. No rank has loaded anything.
    """
    settings = get_state_dict_type(model)
    is_full = settings is not None and settings.state_dict_type is FULL
    rank0_only = is_full and getattr(settings.optim_state_dict_config, "rank0_only", False)  # type: ignore[union-attr]
    made = to_load(model, optim, optim_state_dict, rank0_only=rank0_only, is_named=is_named_optimizer, group=group)
    if load_directly:
        optim.load_state_dict(made)
    return made


@torch.no_grad()
def to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    given: Mapping[str, Any] | None,
    *,
    rank0_only: bool = False,
    is_named: bool = False,
    group: Any = None,
    optim_input: OptimInput = None,
    is_collective: bool = True,
) -> dict[str, Any]:
    """Convert the state dict ``given``, whose keys are names, to what ``optim`` loads. With ``is_collective``, this
    raises on all ranks or on none if ``given`` does not fit on some rank."""
    owners = Owners(model, groups_in(model, optim, optim_input))
    fetch: Fetch = _unchanged
    if rank0_only:
        given, fetch = broadcast_structure(given, group, owners.wrappers[0].compute_device)
    axis = owners.axis if is_collective else plans.NO_AXIS
    with together(axis):
        given = _named_as_here(owners, given)
        check(owners, given)
        assert given is not None
        ways = _ways(owners, given["state"])
        if rank0_only and ways:
            raise ValueError(
                f"optim_state_dict_to_load: with rank0_only, the first rank has whole states, but {ways[0][1]!r} of "
                f"{ways[0][0]!r} is sharded. Set SHARDED_STATE_DICT to load sharded states."
            )
    _check_alike(exchange(axis, ways))
    keys = {id(owner.param): key for key, owner in owners.by_key(model, is_named=is_named).items()}
    state: dict[Any, Any] = {}
    with together(axis):
        problem: Exception | None = None
        for owner in owners.in_model_order:
            try:
                found = _states_of(owner, given["state"], fetch)
            except Exception as error:  # of a user's extension: other ranks wait for this rank in the next ones
                found, problem = {}, problem or error
            if found:
                state[keys[id(owner.param)]] = found
        others = {key: _fetched(each, fetch) for key, each in given["state"].items() if key not in owners.known}
        if problem is not None:
            raise problem
    state |= others
    made: dict[str, Any] = {"state": state}
    if "param_groups" in given:
        made["param_groups"] = _param_groups(owners, given["param_groups"], keys)
    return made


def _unchanged(value: Any) -> Any:
    return value


def _named_as_here(owners: Owners, given: Any) -> Any:
    """Rename parameters in ``given`` as in this model: those of compiled modules may have other names there."""
    here = {without(name): name for name in owners.known}

    def renamed(key: Any) -> Any:
        is_strange = isinstance(key, str) and key not in owners.known
        return here.get(without(key), key) if is_strange else key

    if not isinstance(given, Mapping) or not isinstance(given.get("state"), Mapping):
        return given  # check reports it
    made = {**given, "state": {renamed(key): value for key, value in given["state"].items()}}
    if groups := given.get("param_groups"):
        made["param_groups"] = [{**each, "params": list(map(renamed, each["params"]))} for each in groups]
    return made


def _check_alike(ways: Sequence[Any]) -> None:
    """Raise if ranks would communicate about different values. ``ways`` holds the result of ``_ways`` on each rank."""
    for rank, theirs in enumerate(ways):
        if theirs != ways[0]:
            names = sorted({str(way[0]) for way in {*theirs} ^ {*ways[0]}})
            raise ValueError(
                f"optim_state_dict_to_load: ranks 0 and {rank} have different sharded states of {listed(names)}. "
                "Pass what all ranks have saved or loaded together."
            )


# Whether it fits


def check(owners: Owners, given: Any) -> None:
    """Raise ValueError if ``given`` does not fit the model and the optimizer. Does not communicate."""
    if owners.problem is not None:
        raise ValueError(owners.problem)
    if not isinstance(given, Mapping) or not isinstance(given.get("state"), Mapping):
        found = f"the keys {listed(given)}" if isinstance(given, Mapping) else f"a {type(given).__name__}"
        raise ValueError(
            f"optim_state_dict_to_load: expected a dict with 'state' and 'param_groups', found {found}. Pass what "
            "optim_state_dict returns; with rank0_only, on the first rank."
        )
    state, groups = given["state"], given.get("param_groups")
    names_in_groups = [name for each in groups or () for name in each["params"]]
    if any(isinstance(name, int) for name in [*state, *names_in_groups]):
        raise ValueError(
            "optim_state_dict_to_load: the keys are numbers of parameters, expected names. Convert them by "
            "rekey_optim_state_dict(state_dict, OptimStateKeyType.PARAM_NAME, model, optim=optim), with the model and "
            "optimizer that it was saved with."
        )
    strange = [name for name in dict.fromkeys(names_in_groups) if name not in owners.known]
    if strange:
        raise ValueError(
            f"optim_state_dict_to_load: the state dict has parameters that the model does not have: {listed(strange)}. "
            "It was saved with another model."
        )
    mine = {name for owner in owners for names in owner.names for name in names}
    extra = [name for name in [*names_in_groups, *state] if name in owners.known and name not in mine]
    if extra:
        raise ValueError(
            "optim_state_dict_to_load: the state dict has parameters that the optimizer does not have: "
            f"{listed(dict.fromkeys(extra))}. Pass them to the optimizer, too, or remove them from the state dict."
        )
    if groups is not None:
        has = set(names_in_groups)
        # As in torch's class, states of unwrapped parameters may be missing: users add them to the result.
        managed = [names for owner in owners if owner.entries for names in owner.names]
        missing = [names[0] for names in managed if has.isdisjoint(names)]
        if missing:
            raise ValueError(
                f"optim_state_dict_to_load: parameters of the optimizer are not in the state dict: {listed(missing)}. "
                "Make the optimizer over the parameters that the saved one had."
            )
        _param_groups(owners, groups, {id(owner.param): 0 for owner in owners})
    problems = [problem for owner in owners for problem in _shape_problems(owner, state)]
    if problems:
        raise ValueError(f"optim_state_dict_to_load: states do not fit their parameters: {listed(problems)}.")
    for owner in owners:
        if owner.is_flat:
            _check_flat_states(owner, _states_by_name(owner, state))


def _shape_problems(owner: Owner, state: Mapping[str, States]) -> list[str]:
    problems = []
    found = _states_by_name(owner, state)
    for entry, names, states in zip(owner.entries, owner.names, found, strict=bool(owner.entries)):
        expected = tuple(entry.param.spec.sharded.shape)
        for name, value in (states or {}).items():
            shape = _shape(value)
            is_own = isinstance(value, DTensor) and not owner.is_flat  # optimizers may reduce states over dims
            if shape and shape not in _shapes(entry) and not is_own:
                problems.append(f"'{name}' of '{names[0]}' has shape {shape}, expected {expected}")
    return problems


def _shapes(entry: Entry) -> set[tuple[int, ...]]:
    """The shapes that states of a parameter may have: its own, and that of the tensor that an extension shows."""
    return {tuple(entry.param.spec.sharded.shape), tuple(shown_shape(entry.wrapper, entry.param))}


def _shape(value: Any) -> tuple[int, ...] | None:
    found = value.shape if isinstance(value, Remote) else torch_names.shape_of(value)
    return None if found is None else tuple(found)


def _states_by_name(owner: Owner, state: Mapping[str, States]) -> list[States | None]:
    """The states of each parameter of ``owner``, found under any of its tied names; None if it has no states."""
    return [next((state[name] for name in names if state.get(name)), None) for names in owner.names]


def _check_flat_states(owner: Owner, found: Sequence[States | None]) -> None:
    """A flat parameter has one set of states, so the states of its parameters must agree."""
    present = [each for each in found if each is not None]
    names = [each[0] for each in owner.names]
    if not present:
        return
    if any(each.keys() != present[0].keys() for each in present):
        kinds = listed(f"'{name}': {sorted(each)}" for name, each in zip(names, found, strict=True) if each is not None)
        raise ValueError(
            f"optim_state_dict_to_load: parameters of one flat parameter have different states: {kinds}. Load them "
            "with use_orig_params=True."
        )
    for state in present[0]:
        values = [None if each is None else each[state] for each in found]
        if _shape(next((value for value in values if value is not None), None)):  # it has dims
            dtypes = {str(_dtype(value)) for value in values if value is not None}
            if len(dtypes) > 1:
                raise ValueError(
                    f"optim_state_dict_to_load: state '{state}' of parameters of one flat parameter has the dtypes "
                    f"{sorted(dtypes)}: {listed(names)}. Load it with use_orig_params=True."
                )
        elif any(_differ(value, values[0]) for value in values):
            raise ValueError(
                f"optim_state_dict_to_load: state '{state}' differs between parameters of one flat parameter: "
                f"{listed(f'{name!r}: {value}' for name, value in zip(names, values, strict=True))}. Load it with "
                "use_orig_params=True."
            )


def _dtype(value: Any) -> torch.dtype | None:
    return torch_names.dtype_of(value) if isinstance(value, torch.Tensor) else getattr(value, "dtype", None)


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (
            a.dtype != b.dtype or a.shape != b.shape or not torch.allclose(a.cpu(), b.cpu(), 0.0, 0.0, equal_nan=True)
        )
    if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
        return True
    return bool(a != b) and bool(a == a or b == b)  # NaN counts as equal to NaN


def _ways(owners: Owners, state: Mapping[str, States]) -> list[tuple[str, str, str]]:
    """The sharded values to load, and how they are sharded; some of them require communication."""
    ways = []
    for owner in owners.in_model_order:
        for names, states in zip(owner.names, _states_by_name(owner, state), strict=True):
            for name, value in sorted((states or {}).items()):
                if isinstance(value, DTensor):
                    ways.append((names[0], name, f"{value.placements} {value.device_mesh.shape}"))
                elif is_sharded_tensor(value):
                    ways.append((names[0], name, "ShardedTensor"))
    return ways


# The states of one parameter of the optimizer


def _states_of(owner: Owner, state: Mapping[str, States], fetch: Fetch) -> States:
    found = _states_by_name(owner, state)
    if not any(found):
        return {}
    present = next(each for each in found if each is not None)
    if not owner.entries:
        return {name: _fetched(value, fetch) for name, value in sorted(present.items())}
    if not owner.is_flat:
        return {name: _loaded(owner.entries[0], name, value, fetch) for name, value in sorted(present.items())}
    made: States = {}
    for name in sorted(present):
        values = [None if each is None else each[name] for each in found]
        first = next((value for value in values if value is not None), None)
        if not _shape(first):
            made[name] = copied(first)
            continue
        flat = torch.zeros_like(owner.param, dtype=_dtype(first), requires_grad=False)
        flat = flat.as_subclass(torch.Tensor)
        parts = dict(owner.param.parts(flat))  # type: ignore[attr-defined]
        for entry, value in zip(owner.entries, values, strict=True):
            if value is not None:
                parts[entry.param].copy_(_local(entry, value, fetch))
        made[name] = flat
    return made


def _loaded(entry: Entry, name: str, value: Any, fetch: Fetch) -> Any:
    """``value`` as the state of a sharded parameter."""
    shape = _shape(value)
    if shape is None or (not shape and (name == _STEP or entry.param.layout.shape)):
        return copied(value)
    if shape not in _shapes(entry):  # a DTensor of an optimizer whose states are reduced over dims
        return copied(value)
    held = _torch.local_of(entry.param.sharded)
    local = _local(entry, value, fetch)
    return entry.param.spec.sharded.dtensor(local.to(held.device, copy=True).contiguous())


def _local(entry: Entry, value: Any, fetch: Fetch) -> torch.Tensor:
    value = loaded_state(entry.wrapper, entry.param, fetch(value))
    if is_sharded_tensor(value) and is_replicated(entry.wrapper):
        value = whole_of_pieces(value, entry.wrapper)
    local = local_value(entry.param, value)
    assert local is not None  # the shape was checked
    return local


def _fetched(value: Any, fetch: Fetch) -> Any:
    """A copy of ``value``, the state of a parameter that no wrapper manages, or of none."""
    if isinstance(value, Mapping):
        return {key: _fetched(each, fetch) for key, each in value.items()}
    return copied(fetch(value))


# Groups and keys


def _param_groups(owners: Owners, groups: Sequence[Mapping[str, Any]], keys: Mapping[int, Any]) -> list[dict[str, Any]]:
    """For each group of the optimizer, in the optimizer's order, return the options that were saved for its parameters,
    as far as any were saved. Torch's class keeps the order of the saved groups, and ``Optimizer.load_state_dict`` then
    mistakes one parameter's states for another's."""
    by_name = {name: group for group in groups for name in group["params"]}
    made = []
    for i, group in enumerate(owners.groups):
        names = [[name for name in each if name in by_name] for owner in group for each in owner.names]
        saved = {id(by_name[each[0]]): by_name[each[0]] for each in names if each}
        options = [_options(each) for each in saved.values()]
        if not options:  # an empty group
            options = [_options(groups[i])] if i < len(groups) else [{}]
        if any(_options_differ(options[0], each) for each in options[1:]):
            firsts = [next(name for name in each["params"]) for each in saved.values()]
            raise ValueError(
                f"optim_state_dict_to_load: group {i} of the optimizer has parameters of {len(options)} saved groups "
                f"with different options, such as {listed(firsts)}. Make the groups as they were saved."
            )
        params = [keys[id(owner.param)] for owner in group if any(name in by_name for name in chain(*owner.names))]
        made.append({**copy.deepcopy(options[0]), "params": params})
    return made


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``group`` without parameter names, since the optimizer keeps its own."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _options_differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() != b.keys() or any(_differ(a[name], b[name]) for name in a)


# Other keys


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Change the keys of a full state dict to the parameter numbers that plain optimizers use, or to names.
    ``model`` and ``optim``, without wrappers, define the mapping. A dict with the right keys is returned as it is.

    Raises:
        ValueError: the keys are of both kinds, or the model or the optimizer lacks parameters of the state dict.
    """
    given, key_type = optim_state_dict, optim_state_key_type
    if not isinstance(key_type, OptimStateKeyType):
        raise TypeError(f"rekey_optim_state_dict: expected an OptimStateKeyType, not {key_type!r}.")
    keys = [*given["state"], *(key for group in given["param_groups"] for key in group["params"])]
    kinds = {type(key) for key in keys}
    if not kinds <= {str} and not kinds <= {int}:
        raise ValueError(
            f"rekey_optim_state_dict: keys must be all names or all numbers, found {listed(map(repr, keys))}."
        )
    wanted = str if key_type is OptimStateKeyType.PARAM_NAME else int
    if kinds <= {wanted}:
        return given
    params = [param for group in groups_in(model, optim, optim_input) for param in group]
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(saved_name(name))
    strange = [i for i, param in enumerate(params) if id(param) not in names]
    if strange:
        raise ValueError(
            f"rekey_optim_state_dict: parameters {listed(strange)} of the optimizer are not in the model. Pass the "
            "model that the optimizer was made for."
        )
    table: dict[Any, Any] = {}
    for i, param in enumerate(params):
        table |= {i: names[id(param)][0]} if wanted is str else dict.fromkeys(names[id(param)], i)
    missing = [key for key in dict.fromkeys(keys) if key not in table]
    if missing:
        raise ValueError(
            f"rekey_optim_state_dict: the optimizer of this model has no parameters {listed(map(repr, missing))}. Pass "
            "a model without wrappers, or with use_orig_params=True, and its optimizer."
        )
    return {
        "state": {table[key]: states for key, states in given["state"].items()},
        "param_groups": [
            {**copy.deepcopy(group), "params": sorted(table[key] for key in group["params"])}
            for group in given["param_groups"]
        ],
    }
