"""After a forward without gradients, modules have their shards, as with torch's class: other modules list these, and
``zero_grad`` of a module around the wrapper finds their gradients."""

from __future__ import annotations

import torch

from fsdp2.api.module import FSDPModule
from fsdp2.runtime.unit import Unit
from fsdp2.runtime.unit_tree import PlugIns, TreeChecks, UnitTree
from fsdp2.schedule.states import GroupState


class BindsShards(TreeChecks):
    """Reshards what stays unsharded behind an evaluation, if a wrapped module is the root. A step that trains is left
    alone: its backward reshards."""

    def __init__(self, tree: UnitTree) -> None:
        self._tree = tree

    def end_forward(self, unit: Unit) -> None:
        if torch.is_grad_enabled() or isinstance(unit.modules[0], FSDPModule):
            return
        for each in self._tree.units:
            if any(group.state is GroupState.UNSHARDED for group in each.groups):
                self._tree.reshard(each)


def register() -> None:
    """Do so in every tree from now on."""
    PlugIns.checks.append(BindsShards)
