"""Weights stored as logarithms, in ``FullyShardedDataParallel``: a tensor type, its extension, and a layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed.tensor import DTensor, Shard as OnDim, distribute_tensor

import fsdp2


class LogTensor(torch.Tensor):
    """Positive numbers, as their logarithms."""

    def value(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).exp()


class LogExtensions(fsdp2.fsdp1.FSDPExtensions):
    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any | None]:
        return tensor.as_subclass(torch.Tensor), "log" if isinstance(tensor, LogTensor) else None

    def post_unflatten_transform(self, tensor: torch.Tensor, param_extension: Any) -> torch.Tensor:
        return tensor.as_subclass(LogTensor)

    def chunk_tensor(self, tensor, rank, world_size, num_devices_per_node, pg, device=None):  # type: ignore[no-untyped-def]
        chunks = tensor.as_subclass(torch.Tensor).chunk(world_size)
        start = sum(len(chunk) for chunk in chunks[:rank])
        mine = [
            Shard.from_tensor_and_offsets(chunk.clone(), [start, *[0] * (tensor.dim() - 1)], dist.get_rank())
            for chunk in chunks[rank : rank + 1]
        ]
        return init_from_local_shards(mine, *tensor.shape, process_group=pg)

    def chunk_dtensor(self, tensor, rank, device_mesh):  # type: ignore[no-untyped-def]
        plain = tensor.as_subclass(torch.Tensor)
        return distribute_tensor(plain, device_mesh, [OnDim(0)], src_data_rank=None)

    def pre_load_state_dict_transform(self, tensor: ShardedTensor) -> tuple[ShardedTensor, list[Shard]]:  # type: ignore[override]
        return tensor, tensor.local_shards()

    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: Any) -> torch.Tensor:
        return tensor.full_tensor()


class PositiveLinear(nn.Module):
    """A linear layer whose weights stay positive."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_outputs, num_inputs).as_subclass(LogTensor))
        self.bias = nn.Parameter(torch.zeros(num_outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.value(), self.bias)  # type: ignore[attr-defined]
