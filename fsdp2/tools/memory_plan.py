"""What a sharded model takes on this rank, unit by unit, from its plans: ``print(fsdp2.memory_plan(model))``.

Arithmetic on what the runtime would do; nothing runs, and nothing is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from fsdp2 import _torch
from fsdp2.api.module import sharded_unit
from fsdp2.runtime.root import Root, Unit
from fsdp2.runtime.units import parents_of
from fsdp2.schedule.schedule import Schedule
from fsdp2.tools.budget import Ledger, UnitBytes, simulate
from fsdp2.tools.memory_limit import footprint_of


@dataclass(frozen=True)
class UnitMemory:
    """One unit. ``shards``: bytes of its parameters' shards; their gradients take the same again, optimizers more."""

    name: str
    shards: int
    bytes: UnitBytes


@dataclass(frozen=True)
class MemoryPlan:
    """What a model takes on this rank beside activations, in bytes; ``str()`` shows it as a table.

    Attributes:
        units: in the order of the model's modules, the root first.
        peak: the most that a step holds beside shards and their gradients, if the units run in the order of the last
            forward, or of the modules. Gathers and reductions overlap with compute then.
        at_least: the smallest limit for :meth:`FSDPModule.set_temporary_memory_limit`: nothing overlaps then.
    """

    units: tuple[UnitMemory, ...]
    peak: int
    at_least: int

    def __str__(self) -> str:
        columns = ("unit", "shards", "unsharded", "staging", "resting", "gradients", "copies")
        rows: list[tuple[str, ...]] = [columns]
        for unit in self.units:
            sizes = unit.bytes
            figures = (unit.shards, sizes.unsharded, sizes.arriving, sizes.resting, sizes.gradients, sizes.copies)
            rows.append((unit.name, *map(str, figures)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        return "\n".join([*lines, f"peak of a step: {self.peak} bytes; smallest limit: {self.at_least} bytes"])


def memory_plan(module: nn.Module) -> MemoryPlan:
    """What ``module``, the root of a sharded model, takes beside activations.

    What all-gather hooks send and make is counted once a unit has been gathered.

    Raises:
        ValueError: ``module`` is not sharded.
    """
    context = sharded_unit(module, "fsdp2.memory_plan").context
    units = tuple(UnitMemory(unit.name, _shards_nbytes(unit), footprint_of(unit)) for unit in context.units)
    return MemoryPlan(units, _peak(context, overlaps=True), _peak(context, overlaps=False))


def _shards_nbytes(unit: Unit) -> int:
    return sum(_torch.local_of(param.sharded).nbytes for group in unit.groups for param in group.params)


def _peak(root: Root, *, overlaps: bool) -> int:
    """The most that a step holds; without overlap, if nothing is prefetched and reductions land at once."""
    units = context.units
    rules = root.schedule.rules
    if not overlaps:
        rules = [replace(rule, forward_prefetch=(), backward_prefetch=()) for rule in rules]
    schedule, sizes = Schedule(rules), [footprint_of(unit) for unit in units]
    order, parents = root.schedule.last_order or range(len(units)), parents_of(units)
    simulate(schedule, order, parents, Ledger(sizes), overlaps=overlaps)  # records the order
    ledger = Ledger(sizes)
    simulate(schedule, order, parents, ledger, overlaps=overlaps)
    return ledger.peak
