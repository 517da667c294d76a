"""Values of optimizer state dicts that are sharded differently from parameters, or held by the first rank alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2.core import map_tensors, plans
from fsdp2.extras.torch_names import is_sharded_tensor
from fsdp2.fsdp1 import torch_names
from fsdp2.fsdp1.search import Wrapper


def copied(value: Any, device: torch.device | None = None) -> Any:
    """Copy any value to memory of its own. The copy of a tensor is on ``device``."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = value.detach()
    return value.clone() if device is None else value.to(device, copy=True)


def chunked_value(whole: torch.Tensor, wrapper: Wrapper, device: torch.device | None) -> torch.Tensor:
    """This rank's part of ``whole``, which all ranks of ``wrapper`` have. It is a DTensor if there is a device mesh,
    else a ShardedTensor. Not collective."""
    layout = plans.shard_layout(tuple(whole.shape), 0, wrapper.world_size)
    start, stop = layout.interval(wrapper.rank)
    own = whole[start:stop].detach().to(device or whole.device, copy=True)
    mesh = wrapper._settings.device_mesh
    if mesh is not None:
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        return DTensor.from_local(own, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    return torch_names.sharded_tensor(own, layout, wrapper.process_group)


def whole_of_pieces(value: Any, wrapper: Wrapper) -> torch.Tensor:
    """The whole value of a ShardedTensor over the ranks of ``wrapper``. Collective."""
    metadata = value.metadata()
    whole = torch.zeros(metadata.size, dtype=metadata.tensor_properties.dtype, device=wrapper.compute_device)
    for shard in value.local_shards():
        part = whole
        for dim, (start, size) in enumerate(zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)):
            part = part.narrow(dim, start, size)
        part.copy_(shard.tensor.detach())
    # Sum bytes: one rank has each element, and the others have zeros. A sum of floats would lose the sign of zeros.
    dist.all_reduce(whole.view(-1).view(torch.uint8), group=wrapper.process_group)
    return whole


Fetch: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # turns a tensor of the first rank into one on all ranks


def broadcast_structure(
    given: Mapping[str, Any] | None, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[Any, Fetch]:
    """Broadcast the first rank's state dict, with tensors on the meta device for those that have dims. Returns it and
    a function that fetches the values of a tensor. All ranks must fetch the same ones in the same order."""
    is_first = dist.get_rank(group) == 0
    described: list[Any] = [map_tensors(_described, given) if is_first else None]
    dist.broadcast_object_list(described, group=group, group_src=0)

    def fetch(value: torch.Tensor) -> torch.Tensor:
        if not value.dim():
            return value
        sent = value.detach().to(device).contiguous() if is_first else torch.empty_like(value, device=device)
        dist.broadcast(sent, group=group, group_src=0)
        return sent

    return given if is_first else described[0], fetch


def _described(value: torch.Tensor) -> Any:
    if isinstance(value, DTensor) or is_sharded_tensor(value):
        return str(type(value))  # the first rank will refuse it
    return value.detach().cpu() if not value.dim() else torch.empty(value.shape, dtype=value.dtype, device="meta")
