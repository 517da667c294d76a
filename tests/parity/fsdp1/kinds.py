"""torch's strategies and kinds of state dicts, by short names."""

from __future__ import annotations

from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, ShardingStrategy, StateDictType

FULL_SHARD, GRAD_OP, NO_SHARD, HYBRID, HYBRID_ZERO2 = ShardingStrategy
FULL, LOCAL, SHARDED = StateDictType


def rank0_only() -> tuple[FullStateDictConfig, FullOptimStateDictConfig]:
    return FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
