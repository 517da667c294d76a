"""Explains why what a user has bound, or loads, cannot replace a sharded parameter, or what is lost if it does.

``load_state_dict`` would copy plain tensors into shards, although nothing says which rank's they are. torch refuses
them too, parameter by parameter. Here, one error names them all, before anything is loaded. Rule: where other code may
change values while they are loaded, such as a hook that cuts them, torch alone decides.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fsdp2.core import ExtensionError, ShardedParam, _torch, comms
from fsdp2.extras import torch_names
from fsdp2.extras.output import listed

_MAX_NAMES = 4
_CHANGE_NOTHING = "fsdp2.core.runtime.hooks", "fsdp2.optim.host_adamw.optimizer"  # their hooks change no values


def why_not(param: ShardedParam, bound: object) -> str:
    """A message that says what is expected in place of ``param``, that ``bound`` was found there, and the remedy."""
    text = f"parameter '{param.full_name}': "
    if bound is None:
        return text + (
            "the parameter was removed after fully_shard. Put the parameter back. To train without this parameter, "
            "call requires_grad_(False) on it, or remove it before fully_shard."
        )
    spec = param.spec.sharded
    text += f"expected a parameter that is a {_described_dtensor(spec.shape, spec.placements, spec.mesh)}, found "
    text += f"{_described(bound)}. "
    if isinstance(bound, torch.Tensor) and not isinstance(bound, nn.Parameter):
        return text + (
            "Parametrize modules before fully_shard. Assign only nn.Parameters that are sharded like the old "
            "parameters, and pass only such parameters to torch.func.functional_call. Transforms, as torch.func.grad, "
            "take inputs."
        )
    return text + (
        f"Assign nn.Parameter(distribute_tensor(value, mesh, {spec.placements})) with that mesh. A state dict for "
        "load_state_dict(assign=True) must hold such DTensors."
    )


def _described(found: object) -> str:
    if not isinstance(found, torch.Tensor):
        return f"a {type(found).__name__}"
    shape, kind = tuple(found.shape), "" if isinstance(found, nn.Parameter) else " that is not an nn.Parameter"
    if not isinstance(found, DTensor):
        return f"a plain {type(found).__name__} of shape {shape}{kind}"
    local = tuple(_torch.local_of(found).shape)
    own = _described_dtensor(shape, found.placements, found.device_mesh)
    return f"a {own}, with a shard of shape {local} here{kind and ','}{kind}"


def _described_dtensor(shape: tuple[int, ...], placements: Sequence[Placement], mesh: DeviceMesh) -> str:
    return f"DTensor of shape {shape} with placements {tuple(placements)} on {mesh}"


def check_device(name: str, found: torch.device, home: comms.Home) -> None:
    """Refuse a shard that is neither where the shards of its group live nor on the meta device."""
    if found == home.device or found.type == "meta":
        return
    if home.is_staged:
        raise ValueError(
            f"parameter '{name}' is on {found}, but its shards are offloaded to the host. "
            "Materialise the model with model.to_empty(device='cpu'), move the model with model.to('cpu'), or load a "
            "state dict from the CPU."
        )
    raise ValueError(
        f"parameter '{name}' is on {found}, but its mesh is on {home.device}. "
        f"Move the model with model.to('{home.device}'), or load a state dict from that device."
    )


def warn_of_plain(param: ShardedParam, before: type) -> None:
    """Warn that a plain tensor has replaced a shard of the class ``before``, which has all-gather hooks."""
    warnings.warn(
        f"parameter '{param.full_name}' was a {before.__name__} with all-gather hooks. A plain tensor has replaced the "
        "parameter, and is now gathered without hooks. To keep the hooks, assign a tensor of that class, or set the "
        "hooks on the new local tensor.",
        stacklevel=2,
    )


def refuse_gradient(param: ShardedParam, grad: torch.Tensor) -> NoReturn:
    """Refuse a gradient of ``param`` that is a tensor subclass where a plain tensor is expected."""
    raise ExtensionError(
        f"parameter '{param.full_name}': the gradient is a {type(grad).__name__}, expected a plain tensor. A gradient "
        "may be a subclass only if the unsharded parameter is a wrapper of the same class, and all inner tensors have "
        "the shape and dtype of the parameter. Let the subclass compute plain gradients, or use the inner tensors of "
        "its activations."
    )


# Loaded values


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
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or torch_names.is_sharded_tensor(value):
        return False
    return is_assigned or value.numel() != 1
