"""State dicts that one thread makes of a model while another thread trains it, as torchft does for lost replicas.

A state dict reshards units first, because it reads what the modules hold. In another thread, this would take parameters
away from the forward that computes with them. There, nothing is resharded, and each unsharded parameter is replaced in
the finished state dict by its shard. Shards change only when an optimizer steps, or when something is loaded, which
must not happen at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

from torch import nn

from fsdp2.core import GroupState, ModuleHooks, door


def hook_of_saving(hooks: ModuleHooks) -> Callable[..., None]:
    """The hook on state dicts of the modules that have ``hooks``. torch marks the hooks it gets, and cannot mark
    methods."""
    return partial(_save_shards, hooks)


@door.entry
def _save_shards(hooks: ModuleHooks, module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    """If this thread does not run the passes, put the shards of the unit in the place of what they have bound in
    ``module``, whose keys in ``state`` begin with ``prefix``. Parameters that are lent, or that the user has replaced,
    stay as they are."""
    if hooks.thread == get_ident():
        return
    groups = [group for group in hooks.unit.groups if group.state is not GroupState.LENT and not group.is_stale]
    for param in (param for group in groups for param in group.params):
        for key in (prefix + slot.name for slot in param.slots if slot.module is module):
            if key in state:
                keeps_vars = isinstance(state[key], nn.Parameter)
                state[key] = param.sharded if keeps_vars else param.sharded.detach()
