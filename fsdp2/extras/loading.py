"""Refuses plain tensors that ``load_state_dict`` would copy into shards, since nothing says which rank's they are.

torch refuses them too, parameter by parameter. Here, one error names them all, before anything is loaded. Rule: where
other code may change values while they are loaded, such as a hook that cuts them, torch alone decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core import _torch
from fsdp2.extras import torch_names
from fsdp2.extras.output import listed
from fsdp2.extras.torch_names import is_sharded_tensor

_MAX_NAMES = 4
_CHANGE_NOTHING = "fsdp2.core.runtime.hooks", "fsdp2.optim.host_adamw.optimizer"  # their hooks change no values


def check_loaded(module: nn.Module, state: Mapping[str, Any], prefix: str, is_assigned: bool) -> None:
    """Check the values in ``state`` for the shards under ``module``, whose keys begin with ``prefix``. Raises the same
    type as ``load_state_dict``."""
    if not is_assigned and torch_names.replicates_plain_tensors():
        return
    plain = [
        key
        for key, param in _loaded_parameters(module, prefix)
        if isinstance(param, DTensor) and _is_plain(state.get(key), is_assigned=is_assigned)
    ]
    if not plain:
        return
    names = listed((f"'{key}'" for key in plain), _MAX_NAMES)
    raise RuntimeError(
        f"load_state_dict: found plain tensors for {names}, expected DTensors that are sharded like these "
        f"parameters. Nothing was loaded into this {type(module).__name__}. For a state dict of whole tensors, use "
        "torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state_dict, "
        "options=StateDictOptions(full_state_dict=True)), after model.reshard(); for safetensors files, "
        "fsdp2.checkpoint.load_safetensors(model, path). "
        "Or load before fully_shard, or give each value as distribute_tensor(value, parameter.device_mesh, "
        "parameter.placements)."
    )


def _loaded_parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters under ``module`` with their keys, except those whose values other code may change."""
    if torch_names.changes_what_it_loads(module, _is_own_hook):
        return
    for name, param in _torch.parameters_dict(module).items():
        if param is not None:
            yield prefix + name, param
    for name, child in module.named_children():
        yield from _loaded_parameters(child, f"{prefix}{name}.")


def _is_own_hook(hook: object) -> bool:
    return getattr(hook, "__module__", None) in _CHANGE_NOTHING


def _is_plain(value: object, *, is_assigned: bool) -> bool:
    """Whether ``value`` is a tensor that a shard cannot load. torch copies a single element into any DTensor."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or is_sharded_tensor(value):
        return False
    return is_assigned or value.numel() != 1
