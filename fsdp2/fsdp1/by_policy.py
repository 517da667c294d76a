"""FSDP1's wrapping policies for ``fully_shard``, without wrappers."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp2.core.api.fully_shard import fully_shard
from fsdp2.core.api.module import FSDPModule
from fsdp2.core.plan.mesh import default_mesh
from fsdp2.fsdp1.auto_wrap import chosen_by, inner_first


def shard_by_policy(model: nn.Module, policy: Any, **options: Any) -> FSDPModule:
    """Shard ``model`` as :func:`fsdp2.auto_shard` does when it is given a ``policy``."""
    params = frozenset(options.get("ignored_params") or ())
    chosen = chosen_by(policy, model, ignored_params=params)
    if not chosen:
        classes = ", ".join(sorted({type(module).__name__ for module in inner_first(model)} - {type(model).__name__}))
        raise ValueError(
            f"auto_shard: the policy chooses no module inside this {type(model).__name__}, which has modules of the "
            f"classes {classes or 'none'}. Choose one of them, or call fully_shard(model) for a single unit."
        )
    options = {"mesh": default_mesh(), **options}
    for module, overrides in chosen.items():
        fully_shard(module, **{**options, **overrides})
    return fully_shard(model, **options)
