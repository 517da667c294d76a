"""After a forward without gradients, modules hold their shards again, as with torch's class. Other modules then list
the shards, and ``zero_grad`` of a module around the wrapper finds their gradients."""

from __future__ import annotations

import torch

from fsdp2.core import seams
from fsdp2.core.api.module import FSDPModule
from fsdp2.core.runtime.unit import Unit
from fsdp2.core.runtime.unit_tree import TreeChecks, UnitTree
from fsdp2.core.schedule.states import GroupState


class BindsShards(TreeChecks):
    """Reshards the units that stay unsharded after an evaluation, if the root is a wrapped module. Training steps are
    left alone, since their backward reshards."""

    def __init__(self, tree: UnitTree) -> None:
        self._tree = tree

    def end_forward(self, unit: Unit) -> None:
        if torch.is_grad_enabled() or isinstance(unit.modules[0], FSDPModule):
            return
        for each in self._tree.units:
            if any(group.state is GroupState.UNSHARDED for group in each.groups):
                self._tree.reshard(each)


def register() -> None:
    """Apply :class:`BindsShards` to every tree from now on."""
    seams.tree_checks.append(BindsShards)
