"""What a sharded model takes on this rank beside its shards, in bytes from plans: ``print(fsdp2.memory_plan(model))``.

Arithmetic on plans: nothing runs, nothing is allocated, and no allocator is asked. Sizes are the same on all ranks, and
so is every decision that ``memory_limit`` takes by them. Not counted are shards and their gradients, activations, and
gradients that the user keeps unreduced.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from torch import nn

from fsdp2 import _torch
from fsdp2.api.module import sharded_unit
from fsdp2.comm.backends import ReduceComm
from fsdp2.group.group import ParamGroup
from fsdp2.plan.layout import ShardLayout
from fsdp2.plan.plan import GatherStep, Lifetime, Origin, ReducePlan, Route
from fsdp2.runtime.root import Root, Unit, parents_of
from fsdp2.schedule.rank_skipping import nested
from fsdp2.schedule.schedule import Action, Actions, Schedule


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
        columns = ("unit", "shards", "unsharded", "staging", "post-forward", "gradients", "copies")
        rows: list[tuple[str, ...]] = [columns]
        for unit in self.units:
            sizes = unit.bytes
            figures = (unit.shards, sizes.unsharded, sizes.arriving, sizes.post_forward, sizes.gradients, sizes.copies)
            rows.append((unit.name, *map(str, figures)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        return "\n".join([*lines, f"peak of a step: {self.peak} bytes; smallest limit: {self.at_least} bytes"])


def memory_plan(module: nn.Module) -> MemoryPlan:
    """What ``module``, the root of a sharded model, takes beside activations. What all-gather hooks send and make is
    counted once a unit has been gathered.

    Raises:
        ValueError: ``module`` is not sharded.
    """
    root = sharded_unit(module, "fsdp2.memory_plan").form_root()
    units = tuple(UnitMemory(unit.name, _shards_nbytes(unit), unit_bytes(unit)) for unit in root.units)
    return MemoryPlan(units, _peak(root, overlaps=True), _peak(root, overlaps=False))


def _shards_nbytes(unit: Unit) -> int:
    return sum(_torch.local_of(param.sharded).nbytes for group in unit.groups for param in group.params)


def _peak(root: Root, *, overlaps: bool) -> int:
    """The most that a step holds; without overlap, if nothing is prefetched and reductions land at once."""
    units = root.units
    rules = root.schedule.rules
    if not overlaps:
        rules = [replace(rule, forward_prefetch=(), backward_prefetch=()) for rule in rules]
    schedule, sizes = Schedule(rules), [unit_bytes(unit) for unit in units]
    order, parents = root.schedule.last_order or range(len(units)), parents_of(units)
    simulate(schedule, order, parents, Ledger(sizes), overlaps=overlaps)  # records the order
    ledger = Ledger(sizes)
    simulate(schedule, order, parents, ledger, overlaps=overlaps)
    return ledger.peak


# Bytes of plans


@dataclass(frozen=True)
class UnitBytes:
    """What one unit takes, in bytes."""

    unsharded: int = 0  # parameters
    arriving: int = 0  # what their gather takes beside them
    post_forward: int = 0  # shards on the post-forward mesh
    gradients: int = 0  # what autograd makes in its backward
    copies: int = 0  # what a reduction makes of them: buckets, casts, and room to receive
    sent: int = 0  # of gradients and copies, what is held while the reduction is in flight

    def __add__(self, other: UnitBytes) -> UnitBytes:
        return UnitBytes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def gather(self) -> int:
        """The parameters while they are on their way."""
        return self.unsharded + self.arriving

    def backward(self, *, reshards: bool) -> int:
        """What backward adds to the unsharded parameters, up to the start of the reduction; ``reshards``: they are
        freed before that makes its copies."""
        return self.gradients + max(self.copies - (self.unsharded if reshards else 0), 0)

    @property
    def alone(self) -> int:
        """What a step of this unit alone takes."""
        return max(self.gather, self.unsharded + self.backward(reshards=True))


def group_bytes(group: ParamGroup) -> UnitBytes:
    """What ``group`` takes beside its shards, in bytes that all ranks agree on; what hooks send is counted from the
    first gather on."""
    trainable = [i for i, requires_grad in enumerate(group.requires_grad()) if requires_grad]
    plans, comm = group.gradients.plans(trainable)
    return _gather_bytes(group) + reduce_bytes(plans, comm)


def unit_bytes(unit: Unit) -> UnitBytes:
    """What the groups of ``unit`` take."""
    return sum(map(group_bytes, unit.groups), UnitBytes())


def _gather_bytes(group: ParamGroup) -> UnitBytes:
    unsharded = group.unsharded
    if unsharded.is_local:
        return UnitBytes()
    plan, smaller = unsharded.plan(), unsharded.post_forward_mesh
    passing = sum(step.padded_nbytes for step in plan.steps if step.lifetime is Lifetime.ARRIVAL)
    travelling = sum(step.padded_nbytes for step in plan.steps)
    staged = sum(flat.nbytes for flat in group.shards.flats.values()) if group.home.is_staged else 0
    return UnitBytes(
        unsharded=plan.unsharded_nbytes + unsharded.made_by_hooks_nbytes,
        arriving=plan.staging_nbytes + passing + staged + unsharded.carrier.gather_buffer_nbytes(travelling),
        post_forward=0 if smaller is None else sum(_post_forward_nbytes(s, smaller.shard.size) for s in plan.steps),
    )


def reduce_bytes(plans: Sequence[ReducePlan], comm: ReduceComm) -> UnitBytes:
    """What reducing takes: buckets, casts, what the comm itself takes, and the sums, which are gradients only once they
    have landed. Gradients that are sent as they are stay while the reduction is in flight."""
    gradients = copies = sent_as_they_are = packing = 0
    for plan in plans:
        param, reduce = plan.dtypes.param, plan.dtypes.reduce
        direct = sum(step.layout.numel for step in plan.steps if step.route is Route.DIRECT)
        bucketed = sum(step.layout.padded_numel for step in plan.steps if step.route is not Route.DIRECT)
        travelling = sum(step.layout.padded_numel for step in plan.steps) * reduce.itemsize
        cast = direct if param is not reduce else 0
        gradients += sum(step.layout.numel for step in plan.steps) * param.itemsize
        copies += (bucketed + cast + plan.flat_numel) * reduce.itemsize + comm.reduce_buffer_nbytes(travelling)
        sent_as_they_are += (direct - cast) * param.itemsize
        for step in plan.steps:
            if step.route is Route.ROWS:  # on the CPU, ``pack_rows`` pads and casts one after the other
                padded = 0 if step.layout.is_even else step.layout.padded_numel * param.itemsize
                row = 0 if param is reduce else step.layout.chunk_numel * reduce.itemsize
                packing = max(packing, padded + row)
    return UnitBytes(gradients=gradients, copies=copies + packing, sent=copies + sent_as_they_are)


def _post_forward_nbytes(step: GatherStep, num_ranks: int) -> int:
    shape, dim = (step.layout.shape, step.layout.dim) if step.origin is Origin.SHARD else ((step.layout.numel,), 0)
    return ShardLayout(shape, dim, num_ranks).chunk_numel * step.dtype.itemsize


# Who holds how much


@dataclass(frozen=True)
class Room:
    """How room is made: ``landings`` of the oldest reductions, then gathers in flight of ``dropped`` units."""

    landings: int = 0
    dropped: tuple[int, ...] = ()


class Ledger:
    """Who holds how much, in bytes: ``held`` now, ``peak`` at most, under ``limit``. Each method is told what happens,
    or asked before it does. ``sizes``: of each unit; replaced by the owner when plans are compiled anew."""

    def __init__(self, sizes: Sequence[UnitBytes], limit: float = math.inf) -> None:
        self.sizes = list(sizes)
        self.limit = limit
        self.held = 0
        self.peak = 0
        self._params = [0] * len(self.sizes)
        self._unsharded: set[int] = set()  # or on the way there
        self._arriving: dict[int, None] = {}  # oldest first
        self._backwards = [0] * len(self.sizes)
        self._reductions: deque[int] = deque()

    @property
    def num_reductions(self) -> int:
        """How many reductions are in flight, as far as all ranks agree: some may have landed earlier on this one."""
        return len(self._reductions)

    # Questions

    def to_unshard(self, unit: int) -> int:
        """What gathering ``unit`` adds."""
        return 0 if unit in self._unsharded else self.sizes[unit].gather

    def to_run_backward(self, unit: int, *, gathers: bool, reshards: bool) -> int:
        """What the backward of ``unit`` adds: its parameters, if it ``gathers`` them, and then its gradients."""
        sizes = self.sizes[unit]
        params = sizes.unsharded if gathers or unit in self._unsharded else self._params[unit]
        at_most = max(self._params[unit] + self.to_unshard(unit) * gathers, params + sizes.backward(reshards=reshards))
        return max(at_most - self._params[unit] - self._backwards[unit], 0)

    def fits(self, nbytes: int) -> bool:
        return self.held + nbytes <= self.limit

    def stays(self, unit: int) -> dict[int, int]:
        """Who holds how much that would not go for ``unit``."""
        params = [0 if i in self._arriving and i != unit else n for i, n in enumerate(self._params)]
        held = [a + b for a, b in zip(params, self._backwards, strict=True)]
        return {i: n for i, n in enumerate(held) if n}

    def room_for(self, nbytes: int, unit: int) -> Room | None:
        """What has to go so that ``unit`` can take ``nbytes`` more; None if all that can go is not enough."""
        missing = self.held + nbytes - self.limit
        landings = 0
        while missing > 0 and landings < len(self._reductions):
            missing -= self._reductions[landings]
            landings += 1
        dropped = []
        for other in reversed(self._arriving):  # the latest was predicted to be needed last
            if missing > 0 and other != unit:
                missing -= self._params[other]
                dropped.append(other)
        return None if missing > 0 else Room(landings, tuple(dropped))

    # Events

    def unshard(self, unit: int) -> None:
        self._set_params(unit, self._params[unit] + self.to_unshard(unit))
        if unit not in self._unsharded:
            self._arriving[unit] = None
            self._unsharded.add(unit)

    def wait(self, unit: int) -> None:
        self._arriving.pop(unit, None)
        self._unsharded.add(unit)
        self._set_params(unit, self.sizes[unit].unsharded)

    def reshard(self, unit: int, leaves: int = 0) -> None:
        """``leaves``: bytes that stay."""
        self._arriving.pop(unit, None)
        self._unsharded.discard(unit)
        self._set_params(unit, leaves)

    def run_backward(self, unit: int, *, gathers: bool, reshards: bool) -> None:
        if gathers or unit in self._unsharded:
            self.unshard(unit)
            self.wait(unit)
        self._set_backward(unit, self.sizes[unit].backward(reshards=reshards))

    def keep(self, unit: int) -> None:
        """Its gradients stay with the user's consent, unreduced."""
        self._set_backward(unit, 0)

    def reduce(self, unit: int, max_in_flight: int) -> None:
        """Its reduction starts, behind the landing of those that are too many."""
        while len(self._reductions) >= max_in_flight:
            self.land(1)
        self._set_backward(unit, 0)
        self._reductions.append(self.sizes[unit].sent)
        self._add(self.sizes[unit].sent)

    def land(self, count: int | None = None) -> None:
        """The oldest ``count`` reductions land, or all."""
        for _ in range(len(self._reductions) if count is None else count):
            self._add(-self._reductions.popleft())

    def count(self, action: Action, unit: int, max_in_flight: int = 1) -> None:
        """``action`` is performed on ``unit``."""
        if action in (Action.UNSHARD, Action.PREFETCH):
            self.unshard(unit)
        elif action is Action.WAIT:
            self.wait(unit)
        elif action in (Action.RESHARD, Action.RESHARD_POST_FORWARD):
            self.reshard(unit, self.sizes[unit].post_forward if action is Action.RESHARD_POST_FORWARD else 0)
        elif action in (Action.REDUCE, Action.REDUCE_JOINTLY):
            self.reduce(unit, max_in_flight)
        elif action is Action.KEEP:
            self.keep(unit)
        else:
            self.land()

    def _set_params(self, unit: int, nbytes: int) -> None:
        self._add(nbytes - self._params[unit])
        self._params[unit] = nbytes

    def _set_backward(self, unit: int, nbytes: int) -> None:
        self._add(nbytes - self._backwards[unit])
        self._backwards[unit] = nbytes

    def _add(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)


def simulate(
    schedule: Schedule, order: Sequence[int], parents: Sequence[int | None], ledger: Ledger, *, overlaps: bool
) -> None:
    """Run a forward and a backward over the units in ``order``, from the root on, each inside its parent's forward, and
    have ``ledger`` count. If the step ``overlaps``, a reduction stays in flight until the next one starts."""

    def replay(actions: Actions) -> None:
        for action, unit in actions:
            ledger.count(action, unit)

    events = nested(order, parents)
    for unit, is_start in events:
        before = schedule.pre_forward(unit, in_backward=False, grad_enabled=True) if is_start else ()
        replay(before if is_start else schedule.post_forward(unit))
    for unit, is_start in reversed(events):
        if is_start:
            if unit != order[0]:  # the root's own backward ends with all of it
                replay(schedule.post_backward(unit))
            continue
        rules = schedule.rules[unit]
        actions = schedule.pre_backward(unit)
        if not overlaps:
            ledger.land()
        ledger.run_backward(unit, gathers=rules.unshard_in_backward, reshards=rules.reshard_after_backward)
        replay(actions)
    replay(schedule.end_backward())
