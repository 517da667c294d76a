"""Units: each ``fully_shard`` call makes one ``Unit``.

A unit knows its modules, its parameter groups and what the user has configured. It does not know what follows an event:
its tree (``tree``) decides that. Before its first pass, a unit belongs to no tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from fsdp2.core import _torch, marks, seams
from fsdp2.core.group.group import ParamGroup
from fsdp2.core.group.param import Slot
from fsdp2.core.plan.mesh import ParallelMesh
from fsdp2.core.schedule.schedule import COMPUTING, UnitRules
from fsdp2.core.schedule.states import GroupState, Outcome
from fsdp2.core.types import MixedPrecisionPolicy, Observer

if TYPE_CHECKING:  # these import this module
    from fsdp2.core.runtime.hooks import ModuleHooks
    from fsdp2.core.runtime.unit_tree import UnitTree


class ModuleTrees:
    """State that all module trees share.

    Attributes:
        version: changes when some module tree may have gained units or parameters.
    """

    version = 0


def note_tree_change() -> None:
    """Note that some module tree may have gained units or parameters: each root checks its own before its next pass."""
    ModuleTrees.version += 1


@dataclass(frozen=True)
class UnitConfig(UnitRules):
    """What the user has configured for one unit. Setters replace it; the root completes the rules for the schedule.

    Attributes:
        stays_as_root: the user did not set ``reshard_after_forward``, so the unit stays unsharded only as root.
        post_forward_size: the number of ranks to shard over between forward and backward, if not all.
        forward_units, backward_units: the units that the user lists for prefetch; None: the predicted unit.
        max_reductions: how many reductions may be in flight; the largest value among all units applies.
        memory_limit: how many bytes of temporary memory are allowed, if the unit is the root.
    """

    stays_as_root: bool = True
    post_forward_size: int | None = None
    forward_units: tuple[Unit, ...] | None = None
    backward_units: tuple[Unit, ...] | None = None
    max_reductions: int = 1
    memory_limit: int | None = None


class Unit:
    """One ``fully_shard`` call: its modules and its parameter groups (none if it manages no parameters).

    Attributes:
        modules: the module that was given, or the modules that were given together.
        tree: the tree of all units under its root; None before its first use.
        missing_modules: if there are several modules, those whose forward has not run in this pass.
        leads_to: what the outputs of the running forward lead to, so far.
        left_alone: slots whose parameters stay plain, because the user asked for it or has been warned.
        left_out: slots whose tied parameters stay plain until a unit around this one takes them.
        observers: the observers of the unit, under any root.
        is_whole: inside ``fsdp2.unsharded``, whether all its parameters are whole on this rank; None outside.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        groups: tuple[ParamGroup, ...],
        mesh: ParallelMesh,
        policy: MixedPrecisionPolicy,
        config: UnitConfig,
    ) -> None:
        self.modules = modules
        self.groups = groups
        self.mesh = mesh
        self.policy = policy
        self.config = config
        self.missing_modules: set[nn.Module] = set()
        self.leads_to = Outcome.NOTHING
        self.left_alone: set[Slot] = set()
        self.left_out: list[Slot] = []
        self.observers: list[Observer] = []
        self.is_whole: bool | None = None
        self.hooks: ModuleHooks | None = None
        self.name = type(modules[0]).__name__
        self.index = 0
        self.tree: UnitTree | None = None
        for module in modules:
            module.__dict__[marks.UNIT] = self
            _torch.register_composable_api(module, "fully_shard")
        note_tree_change()

    @property
    def running(self) -> str:
        """Which pass its root is in: see ``Passes``."""
        return "" if self.tree is None else self.tree.passes.running

    @property
    def is_computing(self) -> bool:
        """Whether its forward is running, or is being recomputed for checkpointing."""
        return self.tree is not None and self.tree.passes.phases[self.index] in COMPUTING

    @property
    def is_root(self) -> bool:
        """Whether the unit is the root, as far as the forwards so far have shown."""
        return self.tree is None or self.tree.root is self

    def reshard(self) -> None:
        """Reshard because the user asks."""
        if self.tree is not None:  # else nothing was ever unsharded
            self.tree.reshard(self)

    def leave(self) -> None:
        """Leave the present root, because another one takes over or the unit was removed from the tree. Gradients in
        flight under the old root land first."""
        if self.tree is not None:
            self.tree.release(self)
            note_tree_change()  # the old root takes it back before its next pass, if it still has the module
        self.tree = None

    def join(self, tree: UnitTree, index: int, name: str) -> None:
        """Work in ``tree`` from now on. ``name`` is the module's name relative to the root."""
        self.tree, self.index, self.name = tree, index, name or "(root)"
        for group in self.groups:
            group.attach(name, tree.executor.story, tree.passes, tree.note_flags)

    def tell(self, observers: list[Observer]) -> None:
        """Tell ``observers`` what happens to the unit from now on. Without observers, groups have no callback."""
        self.observers = observers
        for group in self.groups:
            group.on_transition = self._tell_transition if observers else None

    def _tell_transition(self, before: GroupState, after: GroupState) -> None:
        for observer in self.observers:
            observer.on_transition(self.name, before.value, after.value)

    def configure(self, **changes: object) -> None:
        """Apply the user's ``changes`` to ``config``, and update the schedule."""
        self.config = replace(self.config, **changes)  # type: ignore[arg-type]
        if self.tree is not None:
            self.tree.schedule.rules[self.index] = self.tree.rules_of(self)

    def move_to(self, mesh: ParallelMesh, groups: tuple[ParamGroup, ...]) -> None:
        """Work on ``mesh`` with ``groups``, which have replaced the old ones, under a root to be determined later.
        Called only while no pass is running."""
        self.mesh, self.groups, self.tree = mesh, groups, None
        self.tell(self.observers)

    def mark_stale(self) -> None:
        """Note that parameters may have been replaced: they are checked before their next use."""
        for group in self.groups:
            group.is_stale = True
        note_tree_change()


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that ``fully_shard`` made of ``module``. For a wrapper, the unit of the wrapped module."""
    return module.__dict__.get(marks.UNIT)


def units_under(module: nn.Module) -> Iterator[tuple[str, Unit]]:
    """Yield each unit of ``module``'s tree once, with its name in the tree; outer units come first."""
    seen: set[int] = set()
    names: set[str] = set()
    for name, child in module.named_modules():
        unit = unit_of(child)
        if unit is not None and id(unit) not in seen:
            seen.add(id(unit))
            plain = seams.plain_name(module, name)
            yield (name if plain in names else plain), unit  # a wrapper may be a unit, too
            names.add(plain)


def parents_of(units: Sequence[Unit]) -> list[int | None]:
    """For each unit, the index of the innermost unit around it. units[0] is the root; the units inside a unit follow
    that unit. The forward of several modules lasts from the first to the last, so units between them are inside."""
    modules = [module for each in units[0].modules for module in each.modules()]
    position = {module: index for index, module in reversed(list(enumerate(modules)))}
    parents: list[int | None] = [None]
    ends = [len(modules)]
    for unit in units[1:]:
        inside = [position[module] for each in unit.modules for module in each.modules() if module in position]
        begin = min(inside)
        parents.append(next(index for index in reversed(range(len(ends))) if ends[index] >= begin))
        ends.append(max(inside))
    return parents
