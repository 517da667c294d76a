"""State dicts of the model: saving and loading.

To save, ``nn.Module`` collects the shards; then each wrapper gives its parameters their clean names and replaces them
by values of its kind, unit by unit. To load, each module that holds parameters turns loaded values into shards just
before ``nn.Module`` copies them, so hooks may have renamed keys before that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core import GroupState, ParamGroup, ScheduleError, ShardedParam, Slot, _torch, plans
from fsdp2.extras.exchange import exchange, together
from fsdp2.extras.lending import all_ranks, check_idle
from fsdp2.extras.plain_names import IN_FSDP1, clean_name, collects_shards, joined_name, saved_name
from fsdp2.extras.torch_names import buffers_dict, is_sharded_tensor, non_persistent_buffers
from fsdp2.fsdp1 import extensions, torch_names
from fsdp2.fsdp1.search import FLAT, Wrapper, is_wrapper, named_slots, params_of
from fsdp2.fsdp1.state_dict_kinds import FULL, LOCAL, SHARDED, effective_kind
from fsdp2.fsdp1.state_values import (
    CPU,
    check_flat_value,
    flat_value,
    full_values,
    local_value,
    sharded_value,
    wholes_of_flat,
)
from fsdp2.fsdp1.undo import undone_on_error

# Saving


def save(wrapper: Wrapper, call: Callable[..., Any], args: Sequence[Any], given: dict[str, Any]) -> Any:
    """Run ``call``, which is ``nn.Module.state_dict``. It collects the parameters themselves, so ``replace_values`` can
    recognise them by identity even if hooks of the modules have renamed them."""
    given = {**dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)), **given}
    check_idle(wrapper._fsdp_wrapped_module, "state_dict")
    effective_kind(wrapper)  # may raise
    for group in wrapper._unit.groups:
        if group.state is not GroupState.LENT:
            group.take_replaced()
            if not collects_shards.get():
                group.shards.check_ready()
    with torch.no_grad():
        result = call(**{**given, "keep_vars": True})
    if not given.get("keep_vars", False):
        prefix = given.get("prefix", "")
        detached: dict[int, torch.Tensor] = {}
        for name, value in result.items():
            if name.startswith(prefix) and isinstance(value, torch.Tensor) and not is_sharded_tensor(value):
                result[name] = detached.setdefault(id(value), value.detach())  # ties stay ties
    return result


def replace_values(wrapper: Wrapper, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook that runs after ``nn.Module.state_dict``: entries of ``state_dict`` get clean names, and the values that
    the wrapper's settings ask for."""
    kind, config = effective_kind(wrapper)
    names = [name for name in state_dict if name.startswith(prefix)]
    found = {prefix + name.removeprefix(prefix).removeprefix(f"{IN_FSDP1}."): state_dict.pop(name) for name in names}
    if collects_shards.get():
        state_dict.update(found)
        return
    device = CPU if config.offload_to_cpu else None
    is_saved = kind is not FULL or not config.rank0_only or wrapper.rank == 0
    values = _buffer_values(wrapper, found, prefix, device if is_saved else None)
    for group in wrapper._unit.groups:
        bound = _bound_in(group, found)
        params = list(dict.fromkeys(bound.values()))
        if kind is FULL:
            wholes = _wholes(group, params, device if is_saved else None)  # all ranks take part
            if is_saved:
                wholes = list(map(extensions.shown_value, params, wholes))
            own: dict[ShardedParam, Any] = dict(zip(params, wholes, strict=True))
        elif kind is SHARDED:
            own = _sharded_values(wrapper, group, params, device, use_dtensor=config._use_dtensor)
        else:
            own = dict.fromkeys(params, _LEFT_OUT)
            if params:
                flat = flat_value(wrapper, group, _wholes(group, group.params, None), device)
                found = {f"{prefix}{FLAT}": flat, **found}
        values |= {name: own[param] for name, param in bound.items()}
    found |= values if is_saved else dict.fromkeys(values, _LEFT_OUT)
    state_dict.update((name, value) for name, value in found.items() if value is not _LEFT_OUT)
    metadata = getattr(state_dict, "_metadata", {})  # with the versions of modules, by which plain models load, too
    for name in [name for name in metadata if IN_FSDP1 in name and name.startswith(prefix[:-1])]:
        metadata[saved_name(name)] = metadata[name]


_LEFT_OUT = object()  # stands for a value that is not saved on this rank


def _buffer_values(
    wrapper: Wrapper, found: Mapping[str, Any], prefix: str, device: torch.device | None
) -> dict[str, Any]:
    """Copies of the buffers in ``found``, in the dtypes that they had before ``MixedPrecision(buffer_dtype)`` cast
    them."""
    buffers = {id(buffer) for buffer in wrapper._fsdp_wrapped_module.buffers()}
    made: dict[int, torch.Tensor] = {}  # ties stay ties
    values = {}
    for name, buffer in found.items():
        if id(buffer) in buffers:
            if id(buffer) not in made:
                dtype = wrapper._orig_buffer_dtypes.get(name.removeprefix(prefix), buffer.dtype)
                made[id(buffer)] = buffer.to(device=device or buffer.device, dtype=dtype, copy=True)
            values[name] = made[id(buffer)]
    return values


def _sharded_values(
    wrapper: Wrapper,
    group: ParamGroup,
    params: Sequence[ShardedParam],
    device: torch.device | None,
    *,
    use_dtensor: bool,
) -> dict[ShardedParam, Any]:
    if wrapper._extension is not None:
        wholes = zip(params, _wholes(group, params, None), strict=True)
        return {param: extensions.chunked_value(wrapper, param, whole, device) for param, whole in wholes}
    values = {}
    for param in params:
        lent = _lent_value(group, param)
        local = _torch.local_of(param.sharded).detach() if lent is None else param.shard_of(lent)
        values[param] = sharded_value(param, local, wrapper, device=device, use_dtensor=use_dtensor)
    return values


def _bound_in(group: ParamGroup, found: Mapping[str, Any]) -> dict[str, ShardedParam]:
    """The names in ``found`` of parameters of ``group``, or of what ``summon_full_params`` has bound instead."""
    known = {
        id(_torch.parameters_dict(slot.module).get(slot.name)): param for param in group.params for slot in param.slots
    }
    known.pop(id(None), None)
    return {name: known[id(value)] for name, value in found.items() if id(value) in known}


def _wholes(group: ParamGroup, params: Sequence[ShardedParam], device: torch.device | None) -> list[torch.Tensor]:
    """Copies of whole ``params``: of what ``summon_full_params`` has bound, or gathered. None means their device."""
    lent = [value for param in params if (value := _lent_value(group, param)) is not None]
    if lent:
        return [value.to(device or value.device, copy=True) for value in lent]
    return full_values(group, params, [_torch.local_of(param.sharded).detach() for param in params], device)


def _lent_value(group: ParamGroup, param: ShardedParam) -> torch.Tensor | None:
    """The whole parameter, if ``summon_full_params`` has bound it here."""
    if group.state is not GroupState.LENT:
        return None
    bound = param.bound()
    if bound is param.sharded:
        raise ScheduleError(
            f"state_dict: parameter '{param.full_name}' is whole only on the first rank, in "
            "summon_full_params(rank0_only=True). Call state_dict outside of the block."
        )
    return extensions.plain_value(param, cast(torch.Tensor, bound).detach())


# Loading


def load(
    wrapper: Wrapper, call: Callable[..., Any], state_dict: Mapping[str, Any], *, strict: bool, assign: bool
) -> Any:
    """Run ``call``, which is ``nn.Module.load_state_dict``, on the outermost wrapper. Collective. If it fails on any
    rank, it raises on all ranks, and no rank has loaded anything."""
    axis = all_ranks(wrapper._settings.parallel)
    with together(axis):
        check_idle(wrapper._fsdp_wrapped_module, "load_state_dict")
        given = _with_metadata_of_wrappers(wrapper, state_dict)
        _check_local(wrapper, given)
        is_doubtful = _doubt(wrapper, given, strict=strict)
    if not any(exchange(axis, is_doubtful)):
        return call(given, strict=strict, assign=assign)
    with _values_kept_on_error(wrapper), undone_on_error(wrapper), together(axis):
        return call(given, strict=strict, assign=assign)


@contextmanager
def _values_kept_on_error(wrapper: Wrapper) -> Iterator[None]:
    """If the block raises, restore the values of the parameters and buffers of ``wrapper``."""
    places = [each for module in wrapper.modules() for each in (_torch.parameters_dict(module), buffers_dict(module))]
    tensors: list[torch.Tensor] = [each for place in places for each in place.values() if each is not None]
    kept = [(part, part.clone()) for part in map(plans.local_part, tensors)]
    try:
        yield
    except Exception:
        with torch.no_grad():
            for part, before in kept:
                part.copy_(before)
        raise


def _with_metadata_of_wrappers(wrapper: Wrapper, state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A copy of ``state_dict`` whose metadata has the names of modules in wrappers. The original is left unchanged."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"load_state_dict: expected a dict of tensors, got a {type(state_dict).__name__}.")
    made: Any = OrderedDict(state_dict)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        made._metadata = OrderedDict((name, dict(value)) for name, value in metadata.items())
        for path, _ in wrapper.named_modules(remove_duplicate=False):
            if path not in metadata and saved_name(path) in metadata:
                made._metadata[path] = dict(metadata[saved_name(path)])
    return made


def _check_local(wrapper: Wrapper, state_dict: Mapping[str, Any]) -> None:
    """Raise RuntimeError if a local state dict does not fit. All ranks must know before its units communicate."""
    for name, inner in _local_flats(wrapper):
        for group in inner._unit.groups:
            check_flat_value(inner, group, name, state_dict.get(name))


def _local_flats(wrapper: Wrapper) -> Iterator[tuple[str, Wrapper]]:
    """The wrappers whose state dicts are local, with the names of their flat parameters there."""
    for path, module in wrapper.named_modules(remove_duplicate=False):
        if is_wrapper(module) and effective_kind(module)[0] is LOCAL and module._unit.groups:
            yield saved_name(joined_name(path, FLAT)), module


def _doubt(wrapper: Wrapper, state_dict: Mapping[str, Any], *, strict: bool) -> bool:
    """Whether names and shapes suggest that loading ``state_dict`` may fail. Hooks of modules may accept it anyway."""
    if any(map(is_sharded_tensor, state_dict.values())):  # they may be sharded differently
        return True
    expected = _expected_shapes(wrapper)
    if strict and set(expected) != set(state_dict):
        return True
    return any(
        name in state_dict and shape is not None and torch_names.shape_of(state_dict[name]) != shape
        for name, shape in expected.items()
    )


def _expected_shapes(wrapper: Wrapper) -> dict[str, torch.Size | None]:
    """The expected keys of a state dict, with tensor shapes; None if any shape may come, as for local values."""
    local: set[Slot] = set()
    expected: dict[str, torch.Size | None] = {}
    for name, inner in _local_flats(wrapper):
        local |= {slot for param in params_of(inner) for slot in param.slots}
        expected[name] = None
    for path, module in wrapper.named_modules(remove_duplicate=False):
        tensors, left_out = {**_torch.parameters_dict(module), **buffers_dict(module)}, non_persistent_buffers(module)
        for short, tensor in tensors.items():
            if tensor is not None and short not in left_out and Slot(module, short) not in local:
                expected[saved_name(joined_name(path, short))] = tensor.shape
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            expected[saved_name(joined_name(path, "_extra_state"))] = None
    return expected


def load_into_wrapper(
    wrapper: Wrapper, call: Callable[..., None], state_dict: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Run ``call``, a wrapper's ``nn.Module._load_from_state_dict``, with keys renamed to those inside the wrapper. The
    flat parameter of a local state dict is replaced by the whole parameters in it."""
    check_idle(wrapper._fsdp_wrapped_module, "load_state_dict")
    kind, _ = effective_kind(wrapper)
    for group in wrapper._unit.groups:
        if group.state is not GroupState.LENT:
            group.take_replaced()
        if kind is LOCAL:
            value = state_dict.pop(f"{prefix}{FLAT}", None)
            check_flat_value(wrapper, group, saved_name(f"{prefix}{FLAT}"), value)
            wholes = wholes_of_flat(wrapper, group, value)
            of_slot = {slot: whole for param, whole in wholes.items() for slot in param.slots}
            state_dict |= {f"{prefix}{name}": of_slot[slot] for name, slot in named_slots(wrapper) if slot in of_slot}
    *_, wrapper._load_errors = rest
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}{IN_FSDP1}.{name.removeprefix(prefix)}"] = state_dict.pop(name)
    call(state_dict, prefix, *rest)


def clean_up_load(wrapper: Wrapper, incompatible: Any) -> None:
    """A hook that runs after a wrapper has loaded: messages name keys as the user knows them."""
    for names in (incompatible.missing_keys, incompatible.unexpected_keys):
        names[:] = map(clean_name, names)
    wrapper._load_errors[:] = [error.replace(f"{IN_FSDP1}.", "") for error in wrapper._load_errors]


class CutLoaded:
    """A hook that runs before a module with parameters of ``wrapper`` loads: it turns loaded values into shards."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        slots = ((param, slot) for param in params_of(self._wrapper) for slot in param.slots)
        for param, name in [(param, slot.name) for param, slot in slots if slot.module is module]:
            key = f"{prefix}{name}"
            bound: object = _torch.parameters_dict(module).get(name)
            # Otherwise it is a whole parameter of summon_full_params, or one that the user removed.
            if isinstance(bound, DTensor) and key in state_dict:
                local = local_value(param, extensions.loaded_value(self._wrapper, param, state_dict[key]))
                if local is not None:  # otherwise nn.Module reports what is wrong
                    state_dict[key] = param.spec.sharded.dtensor(local.to(_torch.local_of(bound).device))


def names_for_checkpoints(wrapper: Wrapper) -> dict[str, str]:
    """Maps each name in the wrapped module to the wrapper's child that holds it, which is the wrapped module. Includes
    names that the wrapper itself has, such as ``module``."""
    inner = wrapper._fsdp_wrapped_module
    names = [*_torch.parameters_dict(inner), *buffers_dict(inner), *dict(inner.named_children())]
    found = {"": IN_FSDP1, **dict.fromkeys(names, IN_FSDP1)}
    return found if torch_names.takes_for_fsdp1(wrapper) else _WrappedNames(found)


class _WrappedNames(dict[str, str]):
    """Refuses the wrapper's own name, which torch's functions meet in parameter names. They leave it out only for
    classes that they know, and would otherwise save it."""

    def get(self, name: str, default: Any = None) -> Any:
        if name == IN_FSDP1:
            raise RuntimeError(
                "torch.distributed.checkpoint.state_dict does not know fsdp2's FullyShardedDataParallel. Call "
                "fsdp2.install() first, or use FullyShardedDataParallel.optim_state_dict and "
                "optim_state_dict_to_load."
            )
        return super().get(name, default)


def install(wrapper: Wrapper) -> None:
    """Register the state dict hooks of ``wrapper`` before users can register theirs."""
    wrapper.register_state_dict_post_hook(replace_values)
    wrapper.register_load_state_dict_post_hook(clean_up_load)
    hook = CutLoaded(wrapper)
    for module in dict.fromkeys(slot.module for param in params_of(wrapper) for slot in param.slots):
        module.register_load_state_dict_pre_hook(hook)
