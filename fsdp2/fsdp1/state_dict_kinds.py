"""Which kind of state dicts wrappers make: full, sharded or local."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fsdp2.fsdp1.search import Wrapper, wrappers_in
from fsdp2.fsdp1.state_values import is_replicated

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)

FULL_SETTINGS = StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig())  # of new wrappers

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    FULL: (FullStateDictConfig, FullOptimStateDictConfig),
    SHARDED: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    LOCAL: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def settings_of(wrapper: Wrapper) -> StateDictSettings:
    """The kind of state dicts that ``wrapper`` makes. ``_use_dtensor`` says whether sharded values are DTensors.

    Raises:
        RuntimeError: local state dicts, which cannot hold DTensors, are set on a wrapper with a device mesh.
    """
    found: StateDictSettings = wrapper._state_dict_settings
    if wrapper._settings.device_mesh is None:
        return found
    if found.state_dict_type is LOCAL and not is_replicated(wrapper):
        raise RuntimeError(
            "LOCAL_STATE_DICT is set on a FullyShardedDataParallel with a device_mesh. Local state dicts have "
            "ShardedTensors, which know no mesh. Set SHARDED_STATE_DICT, or do not pass device_mesh."
        )
    configs: list[Any] = [found.state_dict_config, found.optim_state_dict_config]
    model, optim = (replace(each, _use_dtensor=True) if hasattr(each, "_use_dtensor") else each for each in configs)
    return StateDictSettings(found.state_dict_type, model, optim)


def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
    """The settings of the wrappers in ``module``; None if there are none.

    Raises:
        RuntimeError: wrappers have different settings.
    """
    wrappers = wrappers_in(module)
    _check_alike(wrappers, "get_state_dict_type")
    return settings_of(wrappers[0]) if wrappers else None


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings | None:
    """Set the kind of state dicts of all wrappers in ``module``.

    Full state dicts, the default, have whole tensors. Sharded ones have this rank's shards: DTensors if the wrapper
    was given a ``device_mesh``, else ShardedTensors. Local ones have one ``_flat_param`` per wrapper, laid out as
    torch's class does; they load only with the same wrapping and number of ranks.

    Returns:
        What was set before; None if there are no wrappers.

    Raises:
        RuntimeError: a config is not of the kind ``state_dict_type``; wrappers have different settings.
    """
    kind = state_dict_type
    if kind not in _CONFIGS:
        raise TypeError(f"set_state_dict_type: state_dict_type must be a StateDictType, not {kind!r}.")
    expected, optim_expected = _CONFIGS[kind]
    made = StateDictSettings(kind, state_dict_config or expected(), optim_state_dict_config or optim_expected())
    for name, given, cls in (
        ("state_dict_config", made.state_dict_config, expected),
        ("optim_state_dict_config", made.optim_state_dict_config, optim_expected),
    ):
        if type(given) is not cls:
            raise RuntimeError(
                f"set_state_dict_type({kind.name}): {name} is a {type(given).__name__}, expected a {cls.__name__}."
            )
    wrappers = wrappers_in(module)
    _check_alike(wrappers, "set_state_dict_type")
    before = wrappers[0]._state_dict_settings if wrappers else None
    for wrapper in wrappers:
        wrapper._state_dict_settings = made
    return before


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Set the kind of state dicts inside the block: see :meth:`set_state_dict_type`. The earlier settings are
    restored afterwards, even after an exception."""
    wrappers = wrappers_in(module)
    before = [wrapper._state_dict_settings for wrapper in wrappers]
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for wrapper, settings in zip(wrappers, before, strict=True):
            wrapper._state_dict_settings = settings


def _check_alike(wrappers: Sequence[Wrapper], caller: str) -> None:
    for wrapper in wrappers[1:]:
        first, found = wrappers[0]._state_dict_settings, wrapper._state_dict_settings
        if first != found:
            inner = type(wrapper._fsdp_wrapped_module).__name__
            raise RuntimeError(
                f"{caller}: the wrapper of a {inner} has {found}, but the outermost one has "
                f"{first}. Call set_state_dict_type on the inner wrappers with the settings of the outermost one first."
            )


def effective_kind(wrapper: Wrapper) -> tuple[StateDictType, Any]:
    """The kind and the config that apply. Parameters that are not sharded are always saved as they are."""
    settings = settings_of(wrapper)
    if not is_replicated(wrapper):
        return settings.state_dict_type, settings.state_dict_config
    if settings.state_dict_type is not FULL or settings.state_dict_config != FullStateDictConfig():
        warnings.warn(
            "FullyShardedDataParallel with NO_SHARD: parameters are whole on each rank, so state dicts are always full "
            "and on all ranks, whatever set_state_dict_type says.",
            stacklevel=4,
        )
    return FULL, FullStateDictConfig()
