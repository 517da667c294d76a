"""Explains why what a user has bound, or loads, cannot replace a sharded parameter, or what is lost if it does.

torch's ``load_state_dict`` refuses plain tensors for DTensors, parameter by parameter. Here, whole plain tensors are
cut, which is what users mean. What cannot be cut is refused by one error that names all parameters, before anything is
loaded. Rule: where other code may change values while they are loaded, such as a hook that cuts them, torch alone
decides.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fsdp2.core import ExtensionError, ParamGroup, ShardedParam, Slot, _torch, comms, groups_by_slot, is_plain
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


def prepare_loaded(module: nn.Module, state: dict[str, Any], prefix: str, is_assigned: bool) -> None:
    """Replace whole tensors in ``state`` by this rank's shards of them, for the parameters under ``module``, whose keys
    begin with ``prefix``. If a plain one cannot be cut, raise the same type as ``load_state_dict``; nothing changes.
    Those of another shape are left to ``load_state_dict``."""
    if not is_assigned and torch_names.replicates_plain_tensors():
        return
    found = {
        key: slot
        for key, slot in _loaded_slots(module, prefix)
        if isinstance(getattr(*slot), DTensor) and _is_unlike_shards(state.get(key), slot)
    }
    if not found:
        return
    managed = {} if is_assigned else groups_by_slot()
    cut = {key: _cut(state[key], slot, managed) for key, slot in found.items()}
    refused = [
        key
        for key, slot in found.items()
        if cut[key] is None
        and _is_plain(state[key], is_assigned=is_assigned)
        and not _has_other_shape(state[key], slot)
    ]
    if not refused:
        state.update({key: shard for key, shard in cut.items() if shard is not None})
        return
    names = listed((f"'{key}'" for key in refused), _MAX_NAMES)
    remedy = (
        "parameters. {} Whole tensors can be loaded without assign=True."
        if is_assigned
        else "parameters, or whole plain tensors for parameters whose shards are plain. {} Load before fully_shard."
    )
    raise RuntimeError(
        f"load_state_dict: found plain tensors for {names}, expected DTensors that are sharded like these "
        f"{remedy.format(f'Nothing was loaded into this {type(module).__name__}.')} Or give each value as "
        "distribute_tensor(value, parameter.device_mesh, parameter.placements)."
    )


def _loaded_slots(module: nn.Module, prefix: str) -> Iterator[tuple[str, Slot]]:
    """The parameters under ``module`` with their keys, except those whose values other code may change."""
    if torch_names.changes_what_it_loads(module, _is_own_hook):
        return
    for name, param in _torch.parameters_dict(module).items():
        if param is not None:
            yield prefix + name, Slot(module, name)
    for name, child in module.named_children():
        yield from _loaded_slots(child, f"{prefix}{name}.")


def _is_own_hook(hook: object) -> bool:
    return getattr(hook, "__module__", None) in _CHANGE_NOTHING


def _is_unlike_shards(value: object, slot: Slot) -> bool:
    """Whether ``value`` is a tensor that does not lie on the mesh of the parameter in ``slot``."""
    if not isinstance(value, torch.Tensor) or torch_names.is_sharded_tensor(value):
        return False
    return not isinstance(value, DTensor) or value.device_mesh != getattr(*slot).device_mesh


def _is_plain(value: torch.Tensor, *, is_assigned: bool) -> bool:
    """Whether ``value`` cannot be loaded without being cut. torch copies a single element into any DTensor."""
    return not isinstance(value, DTensor) and (is_assigned or value.numel() != 1)


def _has_other_shape(value: torch.Tensor, slot: Slot) -> bool:
    """Whether ``value`` is neither whole nor a shard: torch then names both shapes."""
    bound = getattr(*slot)
    return value.shape not in (bound.shape, _torch.local_of(bound).shape)


def _cut(value: torch.Tensor, slot: Slot, managed: Mapping[Slot, tuple[ParamGroup, int]]) -> DTensor | None:
    """This rank's shard of the parameter in ``slot``, whose whole values are ``value``; a view, if that is plain. None
    if it cannot be cut: parameters that fsdp2 does not manage, subclasses, and other shapes."""
    bound = getattr(*slot)
    local = _torch.local_of(bound)
    if slot not in managed or value.shape != bound.shape or not is_plain(local):
        return None
    group, index = managed[slot]
    param = group.params[index]
    before, part = param.spec.unsharded, value.detach()
    if before is not None:
        if not isinstance(part, DTensor):
            part = distribute_tensor(part, before.mesh, before.placements, src_data_rank=None)
        if (part.device_mesh, tuple(part.placements)) != (before.mesh, before.placements):
            return None
        part = _torch.local_of(part)
        if part.numel() and not part.untyped_storage().nbytes():
            raise RuntimeError(
                f"load_state_dict: the state dict has the unsharded parameter '{param.full_name}' itself, which "
                "load_state_dict has resharded. Call model.reshard() before the function that made the state dict, "
                "such as set_model_state_dict."
            )
    if not is_plain(part):
        return None
    if part.dim():
        start, stop = param.layout.interval(param.mesh.shard.rank)
        part = part.narrow(param.layout.dim, start, stop - start)
    return _torch.dtensors_like([bound], [part])[0] if part.shape == local.shape else None
