"""The bytes that a sharded model takes on this rank besides its shards: ``print(fsdp2.memory.memory_plan(model))``.

The sizes come from plans only: nothing runs or is allocated, and no allocator is queried. All ranks compute the same
sizes, so ``memory_limit`` decides the same on all ranks. Shards and their gradients, activations, and gradients that
the user keeps unreduced are not counted.

``Ledger`` counts the bytes of actions, for limits, reports and the planner. ``replay`` walks through a step for
``memory_plan`` and the planner, which add what they know of each moment.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from enum import Enum
from typing import Any, TypeVar

from torch import nn

from fsdp2.core import ParamGroup, Unit, UnitTree, _torch, plans, schedules, tree_of
from fsdp2.extras.output import aligned
from fsdp2.extras.skipped_units import nested
from fsdp2.extras.units import sharded_unit


@dataclass(frozen=True)
class UnitMemory:
    """One unit's memory. ``shards``: the bytes of its shards. Their gradients take as much again, optimizers more."""

    name: str
    shards: int
    bytes: UnitBytes


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes of a model on this rank, without activations, optimizer states and residuals of gradient wires;
    ``str()`` shows a table.

    Attributes:
        units: the units in the order of the model's modules, the root first.
        peak: the most that a step holds besides shards and their gradients, if gathers and reductions overlap with
            compute. The units run in the order of the last forward; before the first forward, in module order.
            Repeated uses of a unit in one forward are counted after the second step. Units that one activation
            checkpoint recomputes together are all unsharded in backward at once; that is not counted.
        at_least: the smallest limit for :meth:`FSDPModule.set_temporary_memory_limit`; with it, nothing overlaps.
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
        return f"{aligned(rows)}\npeak of a step: {self.peak} bytes; smallest limit: {self.at_least} bytes"


def memory_plan(module: nn.Module) -> MemoryPlan:
    """Compute the bytes of every unit on this rank, without activations. Payloads of all-gather hooks, and tensors that
    the hooks make, are counted after the first gather. ``module`` is the root of a sharded model.

    Raises:
        ValueError: ``module`` is not sharded.
    """
    tree = tree_of(sharded_unit(module, "fsdp2.memory.memory_plan"))
    sizes = [unit_bytes(unit) for unit in tree.units]
    pairs = zip(tree.units, sizes, strict=True)
    units = tuple(UnitMemory(unit.name, sum(map(_shard_nbytes, unit.groups)), nbytes) for unit, nbytes in pairs)
    return MemoryPlan(units, _peak(tree, sizes, overlaps=True), _peak(tree, sizes, overlaps=False))


def _shard_nbytes(group: ParamGroup) -> int:
    return sum(_torch.local_of(param.sharded).nbytes for param in group.params)


def peak_if_staged(tree: UnitTree, staged: Sequence[bool]) -> int:
    """What ``MemoryPlan.peak`` would be if exactly the ``staged`` units had their shards on the host."""
    pairs = zip(tree.units, staged, strict=True)
    return _peak(tree, [unit_bytes(unit, is_staged=is_staged) for unit, is_staged in pairs], overlaps=True)


def _peak(tree: UnitTree, sizes: Sequence[UnitBytes], *, overlaps: bool) -> int:
    """The most that a step holds. Without ``overlaps``, nothing is prefetched, and reductions land at once."""
    rules = tree.schedule.rules
    if not overlaps:
        rules = [replace(rule, forward_prefetch=(), backward_prefetch=()) for rule in rules]
    schedule = schedules.Schedule(rules)
    order = tree.schedule.tape.expected or range(len(tree.units))
    uses = {unit: Use(unit, hands_on=unit != order[0]) for unit in order}  # the whole backward ends that of the root
    events = [(uses[unit], begins) for unit, begins in nested(order, tree.parents)]
    for _ in range(2):  # the first step records the order
        ledger = Ledger(dict(enumerate(sizes)))
        for moment, use, actions in replay(schedule, events, events[::-1]):
            if moment is Moment.BACKWARD:
                if not overlaps:
                    ledger.land()
                rule = rules[use.unit]
                ledger.run_backward(use.unit, gathers=rule.unshard_in_backward, reshards=rule.reshard_after_backward)
            for action, unit in schedules.in_parts(actions):
                ledger.count(action, unit)
    return ledger.peak


# The sizes of plans in bytes


@dataclass(frozen=True)
class UnitBytes:
    """The memory of one unit, in bytes.

    Attributes:
        unsharded: unsharded parameters.
        arriving: memory that the gather takes besides the unsharded parameters.
        post_forward: shards on the post-forward mesh.
        gradients: gradients that autograd makes in the unit's backward.
        copies: memory that the reduction of these gradients makes: buckets, casts, and room to receive.
        sent: the part of gradients and copies that is held while the reduction is in flight.
        kept: the part of ``unsharded`` that stays allocated when the parameters are resharded.
    """

    unsharded: int = 0
    arriving: int = 0
    post_forward: int = 0
    gradients: int = 0
    copies: int = 0
    sent: int = 0
    kept: int = 0

    def __add__(self, other: UnitBytes) -> UnitBytes:
        return UnitBytes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def gather(self) -> int:
        """What a gather takes: the unsharded parameters, and additional memory."""
        return self.unsharded + self.arriving

    def backward(self, *, reshards: bool) -> int:
        """What backward adds to the unsharded parameters, up to the start of the reduction. With ``reshards``, the
        parameters are freed before the reduction makes its copies."""
        return self.gradients + max(self.copies - (self.unsharded - self.kept if reshards else 0), 0)

    @property
    def alone(self) -> int:
        """What a step with only this unit takes."""
        return max(self.gather, self.unsharded + self.backward(reshards=True))


def trainable_of(group: ParamGroup) -> list[int]:
    """The positions of the parameters of ``group`` that require gradients now."""
    group.take_flags()
    return [i for i, requires_grad in enumerate(group.unsharded.requires_grad) if requires_grad]


def unit_bytes(unit: Unit, *, is_staged: bool | None = None) -> UnitBytes:
    """What ``unit`` takes besides its shards, in bytes, the same on all ranks. Payloads of hooks are counted after the
    first gather. ``is_staged`` says whether to assume that shards are on the host; None means wherever they are now."""
    found = UnitBytes()
    for group in unit.groups:
        plans, comm = group.gradients.plans(trainable_of(group))
        staged = group.home.is_staged if is_staged is None else is_staged
        found += _gather_bytes(group, is_staged=staged) + reduce_bytes(plans, comm.reduce_buffer_nbytes)
    return found


def _gather_bytes(group: ParamGroup, *, is_staged: bool) -> UnitBytes:
    unsharded = group.unsharded
    plan, smaller = unsharded.plan(), unsharded.post_forward_mesh
    if unsharded.is_local(plan, is_staged=is_staged):
        return UnitBytes()
    staged = sum(flat.nbytes for flat in group.shards.flats.values()) if is_staged else 0
    found = gather_bytes(plan, staged_nbytes=staged, num_resting=None if smaller is None else smaller.shard.size)
    stays = found.post_forward if group.keeps_post_forward else 0
    travelling = sum(step.padded_nbytes for step in plan.steps)
    return found + UnitBytes(
        unsharded=unsharded.nbytes - plan.unsharded_nbytes + stays,
        arriving=unsharded.carrier.gather_buffer_nbytes(travelling),
        post_forward=-stays,
        kept=stays + (unsharded.nbytes if group.keeps_storage else 0),
    )


def gather_bytes(plan: plans.GatherPlan, *, staged_nbytes: int = 0, num_resting: int | None = None) -> UnitBytes:
    """What a gather with ``plan`` takes. ``staged_nbytes``: shards that come from the host first. ``num_resting``: the
    number of ranks that hold the parameters between forward and backward, if these are not the ranks that shard."""
    passing = sum(step.padded_nbytes for step in plan.steps if step.origin is plans.Origin.HOOK_CONSUMED)
    cut = [] if num_resting is None else [(plans.cut_after_forward(step, num_resting), step) for step in plan.steps]
    return UnitBytes(
        unsharded=plan.unsharded_nbytes,
        arriving=plan.staging_nbytes + passing + staged_nbytes,
        post_forward=sum(each.layout.chunk_numel * step.dtype.itemsize for each, step in cut),
    )


def reduce_bytes(
    reduces: Sequence[plans.ReducePlan],
    buffer_nbytes: Callable[[int], int] = lambda _: 0,
    *,
    packs_at_once: bool = False,
) -> UnitBytes:
    """What reductions take: buckets, casts, memory of the comm, and the sums until they land as gradients. Gradients
    that are sent without a copy are held while the reduction is in flight.

    Args:
        buffer_nbytes: what the comm allocates for so many bytes.
        packs_at_once: whether one kernel pads and casts what goes into a bucket, as on CUDA.
    """
    gradients = copies = sent_as_they_are = packing = 0
    for plan in reduces:
        param, reduce = plan.dtypes.param, plan.dtypes.reduce
        direct = sum(step.layout.numel for step in plan.steps if step.route is plans.Route.DIRECT)
        bucketed = sum(step.layout.padded_numel for step in plan.steps if step.route is not plans.Route.DIRECT)
        travelling = sum(step.layout.padded_numel for step in plan.steps) * reduce.itemsize
        cast = direct if param is not reduce and plan.casts_first else 0
        gradients += sum(step.layout.numel for step in plan.steps) * param.itemsize
        copies += (bucketed + cast + plan.flat_numel) * reduce.itemsize + buffer_nbytes(travelling)
        sent_as_they_are += (direct - cast) * param.itemsize
        for step in plan.steps:
            if (
                step.route is plans.Route.ROWS and not packs_at_once
            ):  # on the CPU, ``pack_rows`` pads and casts one after the other
                padded = 0 if step.layout.is_even else step.layout.padded_numel * param.itemsize
                row = 0 if param is reduce else step.layout.chunk_numel * reduce.itemsize
                packing = max(packing, padded + row)
    return UnitBytes(gradients=gradients, copies=copies + packing, sent=copies + sent_as_they_are)


# How much each unit holds


class Held(str, Enum):
    """The purpose for which bytes are held."""

    __hash__ = str.__hash__

    SHARDS = "shards of parameters"
    OPTIMIZER_STATES = "optimizer states"
    SHARD_GRADIENTS = "gradients of shards"
    PARAMETERS = "unsharded parameters"
    GRADIENTS = "gradients and their copies"
    REDUCTION = "gradients in flight"
    SAVED = "saved by forward for backward"
    OTHER = "activations, gradients before reduction, and other"  # what an allocator does not tell apart


TEMPORARY = (Held.PARAMETERS, Held.GRADIENTS, Held.REDUCTION)  # what plans know
UnitKey = Any  # the number of a unit, or its name


@dataclass(frozen=True)
class Room:
    """How to make room: land the oldest ``landings`` reductions, then drop the gathers of the units ``dropped``."""

    landings: int = 0
    dropped: tuple[UnitKey, ...] = ()


class Ledger:
    """Counts the bytes that units hold, by purpose and under ``limit``. Questions are asked before an action, and
    events record it. Others may count bytes here, too, which may belong to no unit.

    Attributes:
        sizes: the plans' figures of each unit; the owner of the ledger replaces them when plans are new.
        by_owner, totals: the bytes held now, by unit and purpose, and by purpose alone.
        held: all of them.
        peak: the most that was held, and ``at_peak`` for what.
    """

    def __init__(self, sizes: Mapping[UnitKey, UnitBytes], limit: float = math.inf) -> None:
        self.sizes = dict(sizes)
        self.limit = limit
        self.by_owner: dict[tuple[UnitKey, Held], int] = {}
        self.totals: dict[Held, int] = {}
        self.at_peak: dict[Held, int] = {}
        self.held = self.peak = 0
        self._unsharded: set[UnitKey] = set()  # or being unsharded
        self._arriving: dict[UnitKey, None] = {}  # oldest first
        self._reductions: deque[tuple[UnitKey, int]] = deque()  # with their bytes, oldest first
        for unit, each in self.sizes.items():
            self.set(unit, Held.PARAMETERS, each.kept)

    def of(self, unit: UnitKey, purpose: Held) -> int:
        return self.by_owner.get((unit, purpose), 0)

    def set(self, unit: UnitKey, purpose: Held, nbytes: int) -> None:
        """From now on, ``unit`` holds ``nbytes`` for ``purpose``."""
        self.add(unit, purpose, nbytes - self.of(unit, purpose))

    def add(self, unit: UnitKey, purpose: Held, nbytes: int) -> None:
        """``unit`` holds ``nbytes`` more for ``purpose``; negative ones are freed."""
        self.by_owner[unit, purpose] = self.of(unit, purpose) + nbytes
        self.totals[purpose] = self.totals.get(purpose, 0) + nbytes
        self.held += nbytes
        if self.held > self.peak:
            self.peak, self.at_peak = self.held, dict(self.totals)

    @property
    def num_reductions(self) -> int:
        """How many reductions count as in flight, the same on all ranks. On this rank, some may have landed already."""
        return len(self._reductions)

    # Questions

    def to_unshard(self, unit: UnitKey) -> int:
        """What gathering ``unit`` adds."""
        if unit in self._unsharded:
            return 0
        return self.sizes[unit].gather - min(self.sizes[unit].kept, self.of(unit, Held.PARAMETERS))

    def to_run_backward(self, unit: UnitKey, *, gathers: bool, reshards: bool) -> int:
        """What the backward of ``unit`` adds: its parameters, if backward ``gathers`` them, and its gradients."""
        sizes, now = self.sizes[unit], self.of(unit, Held.PARAMETERS)
        params = sizes.unsharded if gathers or unit in self._unsharded else now
        at_most = max(now + self.to_unshard(unit) * gathers, params + sizes.backward(reshards=reshards))
        return max(at_most - now - self.of(unit, Held.GRADIENTS), 0)

    def fits(self, nbytes: int) -> bool:
        return self.held + nbytes <= self.limit

    def stays(self, unit: UnitKey) -> dict[UnitKey, int]:
        """The bytes by unit that cannot be freed to make room for ``unit``."""
        found = {}
        for other, sizes in self.sizes.items():
            is_dropped = other in self._arriving and other != unit
            params = sizes.kept if is_dropped else self.of(other, Held.PARAMETERS)
            found[other] = params + self.of(other, Held.GRADIENTS)
        return {other: nbytes for other, nbytes in found.items() if nbytes}

    def room_for(self, nbytes: int, unit: UnitKey) -> Room | None:
        """What to free so that ``unit`` can take ``nbytes`` more; None if freeing everything possible is not enough."""
        missing = self.held + nbytes - self.limit
        landings = 0
        while missing > 0 and landings < len(self._reductions):
            missing -= self._reductions[landings][1]
            landings += 1
        dropped = []
        for other in reversed(self._arriving):  # latest first: that unit is expected to be needed last
            if missing > 0 and other != unit:
                missing -= self.of(other, Held.PARAMETERS) - self.sizes[other].kept
                dropped.append(other)
        return None if missing > 0 else Room(landings, tuple(dropped))

    # Events

    def unshard(self, unit: UnitKey) -> None:
        self.add(unit, Held.PARAMETERS, self.to_unshard(unit))
        if unit not in self._unsharded:
            self._arriving[unit] = None
            self._unsharded.add(unit)

    def wait(self, unit: UnitKey) -> None:
        self._arriving.pop(unit, None)
        self._unsharded.add(unit)
        self.set(unit, Held.PARAMETERS, self.sizes[unit].unsharded)

    def reshard(self, unit: UnitKey, *, post_forward: bool = False) -> None:
        """``unit`` is resharded; with ``post_forward``, to its smaller mesh."""
        self._arriving.pop(unit, None)
        self._unsharded.discard(unit)
        self.set(unit, Held.PARAMETERS, self.sizes[unit].kept + self.sizes[unit].post_forward * post_forward)

    def run_backward(self, unit: UnitKey, *, gathers: bool, reshards: bool) -> None:
        if gathers or unit in self._unsharded:
            self.unshard(unit)
            self.wait(unit)
        self.set(unit, Held.GRADIENTS, self.sizes[unit].backward(reshards=reshards))

    def keep(self, unit: UnitKey) -> None:
        """The gradients of ``unit`` stay unreduced, as the user requested, so they are no longer counted."""
        self.set(unit, Held.GRADIENTS, 0)

    def reduce(self, unit: UnitKey, max_in_flight: int) -> None:
        """The reduction of ``unit`` starts. If too many are in flight, the oldest ones land first."""
        while len(self._reductions) >= max_in_flight:
            self.land(1)
        self.set(unit, Held.GRADIENTS, 0)
        self._reductions.append((unit, self.sizes[unit].sent))
        self.add(unit, Held.REDUCTION, self.sizes[unit].sent)

    def land(self, count: int | None = None) -> None:
        """The oldest ``count`` reductions land; None means all."""
        for _ in range(len(self._reductions) if count is None else count):
            unit, sent = self._reductions.popleft()
            self.add(unit, Held.REDUCTION, -sent)

    def count(self, action: schedules.Action, unit: UnitKey, max_in_flight: int = 1) -> None:
        """``action`` is performed on ``unit``."""
        if action in (schedules.Action.UNSHARD, schedules.Action.PREFETCH):
            self.unshard(unit)
        elif action is schedules.Action.WAIT:
            self.wait(unit)
        elif action in (schedules.Action.RESHARD, schedules.Action.RESHARD_POST_FORWARD):
            self.reshard(unit, post_forward=action is schedules.Action.RESHARD_POST_FORWARD)
        elif action in (schedules.Action.REDUCE, schedules.Action.REDUCE_JOINTLY):
            self.reduce(unit, max_in_flight)
        elif action is schedules.Action.KEEP:
            self.keep(unit)
        elif action is schedules.Action.LAND:
            self.land()


# The events of a step


class Moment(Enum):
    """When actions are performed."""

    FORWARD = "a forward begins"
    FORWARD_ENDED = "a forward has ended"
    BACKWARD = "a backward begins"
    BACKWARD_ENDED = "a backward has ended"
    END = "the whole backward has ended"


@dataclass(frozen=True)
class Use:
    """One use of ``unit`` in a forward. ``has_backward``: autograd goes through it. ``hands_on``: its input gets a
    gradient, which tells that its backward has ended."""

    unit: int
    has_backward: bool = True
    hands_on: bool = True


AnyUse = TypeVar("AnyUse", bound=Use)


def replay(
    schedule: schedules.Schedule, forward: Sequence[tuple[AnyUse, bool]], backward: Sequence[tuple[AnyUse, bool]]
) -> Iterator[tuple[Moment, AnyUse, schedules.Actions]]:
    """The actions of ``schedule`` in one forward and its backward, with the moment and the use that they belong to.
    ``forward`` says where uses begin (True) and end; ``backward`` the same, in reverse: a backward begins where a
    forward has ended. The first use of ``forward`` is that of the root."""
    for use, begins in forward:
        if begins:
            yield Moment.FORWARD, use, schedule.pre_forward(use.unit, grad_enabled=True)
        else:
            leads_to = schedules.Outcome.BACKWARD if use.has_backward else schedules.Outcome.NOTHING
            yield Moment.FORWARD_ENDED, use, schedule.post_forward(use.unit, leads_to)
    to_come = Counter(use.unit for use, begins in backward if begins)
    for use, begins in backward:
        if not begins:
            yield Moment.BACKWARD, use, schedule.pre_backward(use.unit)
            continue
        to_come[use.unit] -= 1
        is_last_use = to_come[use.unit] == 0
        ended = schedule.post_backward(use.unit, is_last_use=is_last_use) if use.hands_on else ()
        yield Moment.BACKWARD_ENDED, use, ended
    yield Moment.END, forward[0][0], schedule.end_backward()
