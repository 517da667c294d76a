"""``auto_shard``: FSDP1's wrapping policies for ``fully_shard``, without wrappers."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp2.api.fully_shard import fully_shard
from fsdp2.api.module import FSDPModule
from fsdp2.fsdp1.auto_wrap import chosen_by, inner_first
from fsdp2.plan.mesh import default_mesh


def auto_shard(model: nn.Module, policy: Any, **options: Any) -> FSDPModule:
    """Call :func:`fsdp2.fully_shard` on every module that ``policy`` chooses, inner modules first, then on ``model``.

    Args:
        model: the model. It is changed in place.
        policy: a policy of ``torch.distributed.fsdp.wrap``, such as ``ModuleWrapPolicy({Block})``, or a function
            ``(module, recurse, nonwrapped_numel)``. What a ``CustomPolicy`` returns for a module overrides ``options``.
        options: arguments of ``fully_shard``, such as ``mesh`` and ``mp_policy``.

    Returns:
        ``model``.

    Raises:
        TypeError: ``policy`` is neither a policy nor a function; ``fully_shard`` has no such option.
        ValueError: ``policy`` chooses no module; ``fully_shard`` refuses a module. Modules inside of it stay sharded.
    """
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
