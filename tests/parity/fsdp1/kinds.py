"""torch's strategies and kinds of state dicts, by short names."""

from __future__ import annotations

from torch.distributed.fsdp import ShardingStrategy, StateDictType

FULL_SHARD, GRAD_OP, NO_SHARD, HYBRID, HYBRID_ZERO2 = ShardingStrategy
FULL, LOCAL, SHARDED = StateDictType
