"""Why what a user has bound cannot take the place of a sharded parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fsdp2 import _torch
from fsdp2.group.param import ShardedParam


def why_not(param: ShardedParam, bound: object) -> str:
    """What is expected in the place of ``param``, that ``bound`` was found there, and the remedy."""
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
