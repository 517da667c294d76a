"""``torch.distributed.optim._apply_optimizer_in_backward``: optimizers that step a parameter inside backward.

Torch's function stores them on the parameter and hooks into the autograd node that accumulates its gradient. Shards
have no such node, so here the optimizers step once the reduced gradient has arrived. Rule: as with torch's class, only
optimizers that were applied before the first forward count.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp2.fsdp1.flat_param import IN_BACKWARD
from fsdp2.fsdp1.search import Wrapper, params_of

_KNOWN = "_fsdp2_steps_in_backward"  # attribute of a parameter whose optimizers step in backward


def check_or_join(wrapper: Wrapper) -> None:
    """At the first forward, refuse optimizers of a flat parameter, and let those of original parameters step."""
    flat = wrapper._listed_flat_param
    if flat is not None:
        flat.close_to_optimizers_in_backward()
        return
    for param in params_of(wrapper):
        attributes = vars(param.sharded)
        if IN_BACKWARD in attributes and _KNOWN not in attributes:
            attributes[_KNOWN] = True
            param.sharded.register_post_accumulate_grad_hook(_step)


def _step(param: torch.Tensor) -> None:
    optimizers: list[Any] = vars(param)[IN_BACKWARD]
    for optimizer in optimizers:
        optimizer.step()
    param.grad = None
