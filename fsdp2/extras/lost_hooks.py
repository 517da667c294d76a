"""Warns of gradient hooks that are never called, or are lost when a shard takes the place of a parameter.

Autograd computes gradients of the unsharded parameters only, which hooks on a shard never see.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from fsdp2.core import ShardedParam
from fsdp2.extras import torch_names


def warn_of_hooks(params: Sequence[ShardedParam], *, is_sharded: bool) -> None:
    """Warn of hooks on ``params``. ``is_sharded``: they have been sharded, and their gather is about to be bound."""
    for param in params:
        way = torch_names.way_of_hooks(param.sharded)
        if is_sharded and way == "register_hook":
            warnings.warn(
                f"parameter '{param.full_name}': hooks of register_hook are never called on a sharded parameter. "
                "Call register_post_accumulate_grad_hook instead; its hooks get the shard, with the reduced gradient.",
                stacklevel=2,
            )
        elif way is not None and not is_sharded:
            warnings.warn(
                f"fully_shard: parameter '{param.name}' has hooks of {way}, which are lost: a shard takes its "
                "place. Call register_post_accumulate_grad_hook on the sharded parameter, after fully_shard; its hooks "
                "get the shard, with the reduced gradient.",
                stacklevel=6,
            )
