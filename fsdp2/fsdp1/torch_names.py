"""Names of torch's FSDP1 that are private there: the only file of this folder that has any."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import (
    _module_wrap_policy,
    _or_policy,
    _Policy,
    _recursive_wrap,
    _wrap_module_cls_individually,
)

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
KEEPS_PARAMETERS = (
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy._HYBRID_SHARD_ZERO2,
    ShardingStrategy.NO_SHARD,
)
# What user code imports from torch.distributed.fsdp.wrap, private or not.
PRIVATE_POLICIES: dict[str, Any] = {
    "_Policy": _Policy,
    "_module_wrap_policy": _module_wrap_policy,
    "_or_policy": _or_policy,
    "_recursive_wrap": _recursive_wrap,
    "_wrap_module_cls_individually": _wrap_module_cls_individually,
}


def run_policy(policy: Any, model: nn.Module, ignored: set[nn.Module]) -> dict[nn.Module, dict[str, Any]] | None:
    """The modules that a policy object chooses, with what it overrides; None if ``policy`` is no such object."""
    return policy._run_policy(model, ignored, {}) if isinstance(policy, _Policy) else None


def inside_checkpoint(module: nn.Module) -> nn.Module:
    """The module inside a ``checkpoint_wrapper``; another module itself."""
    return getattr(module, "_checkpoint_wrapped_module", module)
