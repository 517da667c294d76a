"""Marks by which the core recognises a tensor or a module: attributes that it sets, and hooks that users define."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

UNIT = "_fsdp2_unit"  # on a module: its unit

# Set on the original parameter when it is sharded, where it reveals a tie across units. Also set on the sharded
# parameter, where it reveals that an inner module was sharded after an outer one.
SHARDED_AS = "_fsdp2_sharded_as"
# On sharded parameters; all those of a group share one list. It holds how often optimizers have stepped them, and over
# how many ranks their gradients are reduced. It is plain data, because it is saved with a parameter.
STEPS = "_fsdp2_steps"
NAME_IN_PASS = "_fsdp2_name_in_pass"  # on a form bound in a pass: the name of its parameter
STANDS_FOR = "_fsdp2_stands_for"  # on a form bound in a pass: the sharded parameter
LEFT_ALONE = "_fsdp2_left_alone"  # on plain parameters: no warning is needed any more

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"  # the hooks of tensor subclasses


def is_shard(param: torch.Tensor) -> bool:
    """Whether ``param`` is a sharded parameter, not an original that was replaced. Both may be DTensors."""
    return hasattr(param, STEPS)


def has_hooks(local: torch.Tensor) -> bool:
    """Whether ``local``, or its class, defines one of the two hooks."""
    return hasattr(local, PRE) or hasattr(local, POST)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is an ordinary tensor without hooks, which can lie in a flat buffer."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and not has_hooks(tensor)


def leave_alone(params: Iterable[torch.Tensor | None]) -> None:
    """Note that others reduce the gradients of ``params``, or that the user knows that they stay unreduced."""
    for param in params:
        if param is not None:
            setattr(param, LEFT_ALONE, True)
