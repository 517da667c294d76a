"""Private names of torch that only this folder uses: those of FSDP1, and of the ShardedTensors in its state dicts."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard import sharded_tensor as shards
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.algorithms._comm_hooks import default_hooks as default_hooks
from torch.distributed.fsdp import ShardingStrategy, wrap
from torch.distributed.fsdp._fsdp_extensions import FSDPExtensions as FSDPExtensions

from fsdp2.core import plans
from fsdp2.extras.torch_names import is_sharded_tensor

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
KEEPS_PARAMETERS = (
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy._HYBRID_SHARD_ZERO2,
    ShardingStrategy.NO_SHARD,
)
# What user code imports from torch.distributed.fsdp.wrap, private or not.
PRIVATE_POLICIES: dict[str, Any] = {
    name: getattr(wrap, name)
    for name in ("_Policy", "_module_wrap_policy", "_or_policy", "_recursive_wrap", "_wrap_module_cls_individually")
}
post_order_apply = wrap._post_order_apply  # calls a function with each module, after the modules inside it


# ShardedTensors, which FSDP1 puts into sharded state dicts.


def sharded_tensor(
    local: torch.Tensor, layout: plans.Layout, group: dist.ProcessGroup, *, requires_grad: bool = False
) -> torch.Tensor:
    """Make a ShardedTensor from ``local``, the part of this rank of ``group``. ``layout`` is along dim 0. A rank with
    an empty part may pass any tensor of the right dtype and device."""
    kind = local.device.type
    num_devices = 1 if kind == "cpu" else torch.get_device_module(kind).device_count()
    rest = list(layout.shape[1:])
    metadata, locals_ = [], []
    for index, (start, stop) in enumerate(map(layout.interval, range(layout.num_shards))):
        if start == stop and index:  # the first part exists even if it is empty
            continue
        rank = dist.get_global_rank(group, index)
        place = f"rank:{rank}/{kind}" if kind == "cpu" else f"rank:{rank}/{kind}:{rank % num_devices}"
        metadata.append(ShardMetadata([start, *[0] * len(rest)], [stop - start, *rest], place))
        if index == group.rank():
            locals_.append(shards.Shard(local.requires_grad_(requires_grad), metadata[-1]))
    properties = shards.TensorProperties(
        dtype=local.dtype, requires_grad=requires_grad, memory_format=torch.contiguous_format
    )
    described = shards.ShardedTensorMetadata(metadata, torch.Size(layout.shape), properties)
    make = shards.ShardedTensor._init_from_local_shards_and_global_metadata
    return make(locals_, sharded_tensor_metadata=described, process_group=group)


def shape_of(value: object) -> torch.Size | None:
    """The shape of a tensor; None for anything else. Avoids the deprecation warning of ShardedTensors."""
    if not isinstance(value, torch.Tensor):
        return None
    return cast(Any, value).metadata().size if is_sharded_tensor(value) else value.shape


def dtype_of(value: torch.Tensor) -> torch.dtype:
    """The dtype of a tensor. Avoids the deprecation warning of ShardedTensors."""
    found = cast(Any, value).metadata().tensor_properties.dtype if is_sharded_tensor(value) else value.dtype
    return cast(torch.dtype, found)


def local_shards(value: Any) -> list[torch.Tensor]:
    """This rank's parts of a ShardedTensor."""
    return [shard.tensor.detach() for shard in value.local_shards()]


def pieces_of(value: Any) -> list[list[tuple[int, int]]]:
    """The interval along each dim, for each part of a ShardedTensor on any rank."""
    return [
        [(offset, offset + size) for offset, size in zip(part.shard_offsets, part.shard_sizes, strict=True)]
        for part in value.metadata().shards_metadata
        if all(part.shard_sizes)
    ]


def takes_for_fsdp1(module: nn.Module) -> bool:
    """Whether torch takes ``module`` for its own ``FullyShardedDataParallel``, as it does ours after ``install``."""
    return isinstance(module, vars(sys.modules["torch.distributed.fsdp"])["FullyShardedDataParallel"])
