"""The state dict that tools read."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from torch import nn

from fsdp2.extras.plain_names import plain_name

collects_shards = ContextVar("collects_shards", default=False)  # whether ``bound_state`` runs


def bound_state(model: nn.Module) -> dict[str, Any]:
    """The state dict of ``model`` with the parameters and buffers themselves, under names without wrappers. Front ends
    whose state dicts normally hold other values check ``collects_shards``."""
    token = collects_shards.set(True)
    try:
        return {plain_name(model, name): value for name, value in model.state_dict(keep_vars=True).items()}
    finally:
        collects_shards.reset(token)
