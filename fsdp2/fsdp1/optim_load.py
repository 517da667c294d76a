"""Converts optimizer state dicts, keyed by names and with whole or sharded values, to what an optimizer over wrapped
parameters loads, and changes the keys of state dicts of plain models. All values are copies, so that later steps do
not change the state dict that was loaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.tensor import DTensor

from fsdp2.core import _torch, door, map_tensors, plans
from fsdp2.extras.checked import checked
from fsdp2.extras.exchange import exchange, together
from fsdp2.extras.output import listed
from fsdp2.extras.plain_names import saved_name
from fsdp2.extras.torch_names import is_sharded_tensor
from fsdp2.fsdp1 import torch_names
from fsdp2.fsdp1.extensions import loaded_state, shown_shape
from fsdp2.fsdp1.optim_owners import Entry, OptimInput, Owner, Owners, States, groups_in
from fsdp2.fsdp1.optim_values import Fetch, broadcast_structure, copied, whole_of_pieces
from fsdp2.fsdp1.state_dict_kinds import FULL, get_state_dict_type
from fsdp2.fsdp1.state_values import is_replicated, local_value

_STEP = "step"  # a count, whatever the parameter's shape; Optimizer.load_state_dict treats this name specially, too


@door.entry
@checked()
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
    keys = {owner: key for key, owner in owners.by_key(model, is_named=is_named).items()}
    made: dict[str, Any] = {"state": {}}
    with together(axis):
        owners.check()
        state, groups = _checked(given)
        saved: dict[Entry, States] = {}
        for key, states in state.items():
            entry = owners.entry(key)
            if entry is not None and not saved.get(entry):
                saved[entry] = states
        _check_names(owners, [*state], groups)
        if groups is not None:
            made["param_groups"] = _param_groups(owners, groups, keys)
        _check_states(owners, saved)
        ways = _ways(owners, saved)
        if rank0_only and ways:
            raise ValueError(
                f"optim_state_dict_to_load: with rank0_only, the first rank has whole states, but {ways[0][1]!r} of "
                f"{ways[0][0]!r} is sharded. Set SHARDED_STATE_DICT to load sharded states."
            )
    _check_alike(exchange(axis, ways))
    with together(axis):
        problem: Exception | None = None
        for owner in owners.in_model_order:
            try:
                found = _states_of(owner, saved, fetch)
            except Exception as error:  # of a user's extension: other ranks wait for this rank in the next ones
                found, problem = {}, problem or error
            if found:
                made["state"][keys[owner]] = found
        others = {key: copied(map_tensors(fetch, each)) for key, each in state.items() if owners.entry(key) is None}
        made["state"] |= others
        if problem is not None:
            raise problem
    return made


def _unchanged(value: torch.Tensor) -> torch.Tensor:
    return value


def _check_alike(ways: Sequence[Any]) -> None:
    """Raise if ranks would communicate about different values. ``ways`` holds the result of ``_ways`` on each rank."""
    for rank, theirs in enumerate(ways):
        if theirs != ways[0]:
            names = sorted({str(way[0]) for way in {*theirs} ^ {*ways[0]}})
            raise ValueError(
                f"optim_state_dict_to_load: ranks 0 and {rank} have different sharded states of {listed(names)}. "
                "Pass what all ranks have saved or loaded together."
            )


def _ways(owners: Owners, saved: Mapping[Entry, States]) -> list[tuple[str, str, str]]:
    """The sharded values to load, and how they are sharded; some of them require communication."""
    ways = []
    for entry in (entry for owner in owners.in_model_order for entry in owner.entries):
        for name, value in sorted(saved.get(entry, {}).items()):
            if isinstance(value, DTensor):
                ways.append((entry.name, name, f"{value.placements} {value.device_mesh.shape}"))
            elif is_sharded_tensor(value):
                ways.append((entry.name, name, "ShardedTensor"))
    return ways


# Whether it fits. These functions do not communicate.


def _checked(given: Any) -> tuple[Mapping[Any, States], Sequence[Mapping[str, Any]] | None]:
    """The states and the groups of a state dict."""
    if isinstance(given, Mapping) and isinstance(given.get("state"), Mapping):
        return given["state"], given.get("param_groups")
    found = f"the keys {listed(given)}" if isinstance(given, Mapping) else f"a {type(given).__name__}"
    raise ValueError(
        f"optim_state_dict_to_load: expected a dict with 'state' and 'param_groups', found {found}. Pass what "
        "optim_state_dict returns; with rank0_only, on the first rank."
    )


def _check_names(owners: Owners, in_state: Sequence[Any], groups: Sequence[Mapping[str, Any]] | None) -> None:
    in_groups = [name for each in groups or () for name in each["params"]]
    if any(isinstance(name, int) for name in [*in_state, *in_groups]):
        raise ValueError(
            "optim_state_dict_to_load: the keys are numbers of parameters, expected names. Convert them by "
            "rekey_optim_state_dict(state_dict, OptimStateKeyType.PARAM_NAME, model, optim=optim), with the model and "
            "optimizer that it was saved with."
        )
    strange = [name for name in dict.fromkeys(in_groups) if owners.entry(name) is None]
    if strange:
        raise ValueError(
            f"optim_state_dict_to_load: the state dict has parameters that the model does not have: {listed(strange)}. "
            "It was saved with another model."
        )
    mine = {entry for owner in owners for entry in owner.entries}
    known = (name for name in dict.fromkeys([*in_groups, *in_state]) if owners.entry(name) is not None)
    extra = [name for name in known if owners.entry(name) not in mine]
    if extra:
        raise ValueError(
            "optim_state_dict_to_load: the state dict has parameters that the optimizer does not have: "
            f"{listed(extra)}. Pass them to the optimizer, too, or remove them from the state dict."
        )
    found = {owners.entry(name) for name in in_groups}
    # As in torch's class, states of unwrapped parameters may be missing: users add them to the result.
    managed = (entry for owner in owners if owner.is_managed for entry in owner.entries)
    missing = [entry.name for entry in managed if entry not in found]
    if groups is not None and missing:
        raise ValueError(
            f"optim_state_dict_to_load: parameters of the optimizer are not in the state dict: {listed(missing)}. "
            "Make the optimizer over the parameters that the saved one had."
        )


def _check_states(owners: Owners, saved: Mapping[Entry, States]) -> None:
    problems = []
    for owner in owners:
        for entry in owner.entries if owner.is_managed else ():
            for name, value in saved.get(entry, {}).items():
                shape = torch_names.shape_of(value)
                is_own = isinstance(value, DTensor) and not owner.is_flat  # optimizers may reduce states over dims
                if shape and shape not in _shapes(entry) and not is_own:
                    expected = tuple(entry.param.spec.sharded.shape)
                    problems.append(f"'{name}' of '{entry.name}' has shape {tuple(shape)}, expected {expected}")
    if problems:
        raise ValueError(f"optim_state_dict_to_load: states do not fit their parameters: {listed(problems)}.")
    for owner in owners:
        if owner.is_flat:
            _check_flat_states({entry.name: saved.get(entry) or {} for entry in owner.entries})


def _shapes(entry: Entry) -> set[torch.Size]:
    """The shapes that states of a parameter may have: its own, and that of the tensor that an extension shows."""
    return {torch.Size(entry.param.spec.sharded.shape), shown_shape(entry.param)}


def _check_flat_states(found: Mapping[str, States]) -> None:
    """A flat parameter has one set of states, so the states of its parameters, by name, must agree. Zeros stand for
    those of a parameter that has none."""
    for state in sorted({state for states in found.values() for state in states}):
        values: dict[str, Any] = {name: states.get(state) for name, states in found.items()}
        has_dims = any(torch_names.shape_of(value) for value in values.values())
        if has_dims:
            present = {name: value for name, value in values.items() if found[name]}
            values = {name: None if v is None else torch_names.dtype_of(v) for name, v in present.items()}
        first, *others = values.values()
        if any(_differ(value, first) for value in others):
            what = "the dtype of state" if has_dims else "state"
            raise ValueError(
                f"optim_state_dict_to_load: {what} '{state}' differs between parameters of one flat parameter: "
                f"{listed(f'{name!r}: {value}' for name, value in values.items())}. Load it with "
                "use_orig_params=True."
            )


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() != b.keys() or any(_differ(a[name], b[name]) for name in a)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (
            a.dtype != b.dtype or a.shape != b.shape or not torch.allclose(a.cpu(), b.cpu(), 0.0, 0.0, equal_nan=True)
        )
    if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
        return True
    return bool(a != b) and bool(a == a or b == b)  # NaN counts as equal to NaN


# The states of one parameter of the optimizer


def _states_of(owner: Owner, saved: Mapping[Entry, States], fetch: Fetch) -> States:
    found = [saved.get(entry) for entry in owner.entries]
    present = next((states for states in found if states), {})
    if not owner.is_managed:
        return {name: copied(map_tensors(fetch, value)) for name, value in sorted(present.items())}
    if not owner.is_flat:
        return {name: _loaded(owner.entries[0], name, value, fetch) for name, value in sorted(present.items())}
    made: States = {}
    for name, value in sorted(present.items()):
        if not torch_names.shape_of(value):
            made[name] = copied(value)
            continue
        flat = torch.zeros_like(owner.param, dtype=torch_names.dtype_of(value), requires_grad=False)
        made[name] = flat = flat.as_subclass(torch.Tensor)
        parts = dict(owner.param.parts(flat))  # type: ignore[attr-defined]
        for entry, states in zip(owner.entries, found, strict=True):
            if states:
                parts[entry.param].copy_(_local(entry, states[name], fetch))
    return made


def _loaded(entry: Entry, name: str, value: Any, fetch: Fetch) -> Any:
    """``value`` as the state of a sharded parameter. Values of other shapes are counts, or DTensors of optimizers that
    reduce states over dims."""
    shape = torch_names.shape_of(value)
    if shape not in _shapes(entry) or (not shape and name == _STEP):
        return copied(value)
    held = _torch.local_of(entry.param.sharded)
    local = _local(entry, value, fetch)
    return entry.param.spec.sharded.dtensor(local.to(held.device, copy=True).contiguous())


def _local(entry: Entry, value: torch.Tensor, fetch: Fetch) -> torch.Tensor:
    plain = loaded_state(entry.wrapper, entry.param, fetch(value))
    if is_sharded_tensor(plain) and is_replicated(entry.wrapper):
        plain = whole_of_pieces(plain, entry.wrapper)
    local = local_value(entry.param, plain)
    assert local is not None  # the shape was checked
    return local


# Groups and keys


def _param_groups(
    owners: Owners, groups: Sequence[Mapping[str, Any]], keys: Mapping[Owner, Any]
) -> list[dict[str, Any]]:
    """For each group of the optimizer, in the optimizer's order, return the options that were saved for its parameters,
    as far as any were saved. Torch's class keeps the order of the saved groups, and ``Optimizer.load_state_dict`` then
    mistakes one parameter's states for another's."""
    group_of = {owners.entry(name): i for i, group in enumerate(groups) for name in group["params"]}
    made = []
    for i, group in enumerate(owners.groups):
        in_both = [owner for owner in group if any(entry in group_of for entry in owner.entries)]
        saved = {group_of[entry]: None for owner in in_both for entry in owner.entries if entry in group_of}
        if not saved and i < len(groups):  # an empty group
            saved = {i: None}
        options = [_options(groups[number]) for number in saved] or [{}]
        if any(_differ(options[0], each) for each in options[1:]):
            raise ValueError(
                f"optim_state_dict_to_load: group {i} of the optimizer has parameters of {len(options)} saved groups "
                f"with different options, such as {listed(groups[number]['params'][0] for number in saved)}. Make the "
                "groups as they were saved."
            )
        made.append({**copy.deepcopy(options[0]), "params": [keys[owner] for owner in in_both]})
    return made


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``group`` without parameter names, since the optimizer keeps its own."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


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
