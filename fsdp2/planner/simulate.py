"""Simulates steps of one rank: the events of a model go to the real ``Schedule``, and its actions are enqueued as
``fsdp2.core.runtime.executor`` and ``fsdp2.core.group.group`` would do it. Nothing here decides an order.

The CPU of an ``Accelerator`` runs ahead of it: memory is counted in the order of the program, which is the order in
which the caching allocator sees it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from fsdp2.core import GroupState, schedules
from fsdp2.planner.groups import Flight, GroupCost
from fsdp2.planner.machine import Contention
from fsdp2.planner.queues import Op, Queues, Stream, run


class Held(Enum):
    """The purpose for which memory is held."""

    __hash__ = object.__hash__

    GROUPS = "groups"
    GRADIENTS = "gradients in flight"
    REDUCED = "gradients"
    ACTIVATIONS = "activations"


class Memory:
    """Bytes that a rank holds in addition to its shards and their optimizer state, now and at the peak."""

    def __init__(self) -> None:
        self.now = dict.fromkeys(Held, 0.0)
        self.peak = dict(self.now)

    def add(self, held: Held, nbytes: float) -> None:
        """Add ``nbytes``; negative ones are freed."""
        self.now[held] += nbytes
        if sum(self.now.values()) > sum(self.peak.values()):
            self.peak = dict(self.now)

    def touch(self, held: Held, nbytes: float) -> None:
        """Hold ``nbytes`` for a moment."""
        self.add(held, nbytes)
        self.add(held, -nbytes)


@dataclass(frozen=True)
class CallCost:
    """Seconds of compute of one call of ``unit``. Nothing slows down the ``fixed`` part: tensor parallelism on its own
    link. ``has_backward``: autograd goes through it. ``hands_on``: its input gets a gradient, which tells that its
    backward is over; that of the first call never needs one."""

    unit: int
    forward: float
    backward: float
    saved_nbytes: float = 0.0
    working_nbytes: float = 0.0
    left_nbytes: float = 0.0
    forward_fixed: float = 0.0
    backward_fixed: float = 0.0
    has_backward: bool = True
    hands_on: bool = True


@dataclass
class Reduction:
    """A reduction in flight. It ends with ``done``, and holds ``nbytes`` of gradients until it is finished."""

    unit: int
    done: Op
    nbytes: float


class Accelerator:
    """See the module docstring. Unit 0 is the root, whose forward surrounds ``calls`` of the others.

    Attributes:
        groups: the cost of each unit's parameters; None if it has none.
        performed: the actions that the schedule asked for and that changed something, in order.
        shares_communicator: whether a reduce-scatter and an all-gather wait for each other.
    """

    def __init__(
        self,
        groups: Sequence[GroupCost | None],
        calls: Sequence[CallCost],
        rules: Sequence[schedules.UnitRules],
        *,
        shares_communicator: bool = True,
        optimizer: float = 0.0,
    ) -> None:
        self.groups, self.calls = groups, calls
        self.schedule = schedules.Schedule(rules)
        self.shares_communicator = shares_communicator
        self.queues, self.memory = Queues(), Memory()
        self.performed: list[tuple[schedules.Action, int]] = []
        self._optimizer = optimizer
        self._states = [GroupState.SHARDED] * len(groups)
        self._have_grads: set[int] = set()  # units whose gradients autograd has left
        self._gathers: dict[int, Op] = {}
        self._resting: dict[int, float] = {}
        self._released: list[tuple[Op | None, float]] = []
        self._reductions: list[Reduction] = []
        self._communicator: Op | None = None
        self._perform = {
            schedules.Action.UNSHARD: self._unshard,
            schedules.Action.PREFETCH: self._unshard,
            schedules.Action.WAIT: self._wait,
            schedules.Action.RESHARD: self._reshard,
            schedules.Action.RESHARD_POST_FORWARD: self._rest,
            schedules.Action.REDUCE: self._reduce,
            schedules.Action.LAND: self._land,
        }

    def step(self) -> None:
        """Enqueue forward, backward and optimizer."""
        schedule, memory = self.schedule, self.memory
        self.queues.wait(Stream.GATHER, self.queues.last(Stream.COMPUTE))  # it reads what the optimizer wrote
        self.do(schedule.pre_forward(0, grad_enabled=True))
        for call in self.calls:
            self.do(schedule.pre_forward(call.unit, grad_enabled=True))
            self.queues.enqueue(Stream.COMPUTE, f"forward {call.unit}", fixed=call.forward_fixed, work=call.forward)
            memory.add(Held.ACTIVATIONS, call.saved_nbytes + call.left_nbytes)
            self.do(
                schedule.post_forward(
                    call.unit, schedules.Outcome.BACKWARD if call.has_backward else schedules.Outcome.NOTHING
                )
            )
        self.do(schedule.post_forward(0))
        self._flush()
        left = [number for number, call in enumerate(self.calls) if call.has_backward]
        uses = Counter(self.calls[number].unit for number in left)
        for number in reversed(left):
            call = self.calls[number]
            self.do(schedule.pre_backward(call.unit))
            if number == left[-1]:  # whose output is that of the root
                self.do(schedule.pre_backward(0))
            self._compute_backward(call)
            memory.touch(Held.ACTIVATIONS, call.working_nbytes)
            memory.add(Held.ACTIVATIONS, -call.saved_nbytes)
            self._leave_grads(call.unit)
            uses[call.unit] -= 1
            if call.hands_on and number:
                self.do(schedule.post_backward(call.unit, is_last_use=uses[call.unit] == 0))
        self._leave_grads(0)
        self.do(schedule.end_backward())
        self._flush()
        self.queues.enqueue(Stream.COMPUTE, "optimizer", work=self._optimizer)
        memory.add(Held.REDUCED, -memory.now[Held.REDUCED])
        memory.add(Held.ACTIVATIONS, -sum(call.left_nbytes for call in self.calls))

    def do(self, actions: schedules.Actions) -> None:
        for action, unit in schedules.in_parts(actions):
            if self._perform[action](unit):
                self.performed.append((action, unit))

    # Compute

    def _compute_backward(self, call: CallCost) -> None:
        label = f"backward {call.unit}"
        self.queues.enqueue(Stream.COMPUTE, label, fixed=call.backward_fixed, work=call.backward)

    def _leave_grads(self, unit: int) -> None:
        """Autograd leaves gradients, or adds to those of another call."""
        group = self.groups[unit]
        if group is not None and group.reduce and unit not in self._have_grads:
            self._have_grads.add(unit)
            self.memory.add(Held.GRADIENTS, group.grad_nbytes)

    # Actions

    def _transition(self, unit: int, event: schedules.GroupEvent) -> tuple[GroupCost | None, GroupState]:
        """Return the group of ``unit``, if ``event`` changes its state, and the previous state."""
        group, before = self.groups[unit], self._states[unit]
        if group is None:
            return None, before
        self._states[unit] = schedules.TRANSITIONS[before, event]
        return (group if self._states[unit] is not before else None), before

    def _unshard(self, unit: int) -> bool:
        group, before = self._transition(unit, schedules.GroupEvent.UNSHARD)
        if group is None:
            return False
        self._flush()
        self.memory.add(Held.GROUPS, group.unsharded_nbytes)
        if before is GroupState.SHARDED_POST_FORWARD and group.regather is not None:
            self.memory.touch(Held.GROUPS, group.regather_staging_nbytes)
            self._gathers[unit] = self._launch(Stream.GATHER, f"regather {unit}", group.regather, own_communicator=True)
        else:
            self.memory.touch(Held.GROUPS, group.staging_nbytes)
            self._gathers[unit] = self._launch(Stream.GATHER, f"gather {unit}", group.gather)
        return True

    def _wait(self, unit: int) -> bool:
        group, _ = self._transition(unit, schedules.GroupEvent.WAIT)
        if group is None:
            return False
        self.queues.wait(Stream.COMPUTE, self._gathers[unit])
        self._leave_rest(unit)
        self._arrive(unit, group)
        return True

    def _arrive(self, unit: int, group: GroupCost) -> None:
        """Called when the gather stream has copied everything to its place."""

    def _reshard(self, unit: int) -> bool:
        group, before = self._transition(unit, schedules.GroupEvent.RESHARD)
        if group is None:
            return False
        if before is not GroupState.SHARDED_POST_FORWARD:
            self._release(group.unsharded_nbytes)
        self._leave_rest(unit)
        return True

    def _rest(self, unit: int) -> bool:
        group, _ = self._transition(unit, schedules.GroupEvent.RESHARD_POST_FORWARD)
        if group is None:
            return False
        self._resting[unit] = group.resting_nbytes
        self.memory.add(Held.GROUPS, group.resting_nbytes)
        self.queues.wait(Stream.GATHER, self.queues.enqueue(Stream.COMPUTE, f"cut {unit}", fixed=group.rest))
        self._release(group.unsharded_nbytes)
        return True

    def _leave_rest(self, unit: int) -> None:
        self.memory.add(Held.GROUPS, -self._resting.pop(unit, 0.0))

    def _reduce(self, unit: int) -> bool:
        group = self.groups[unit]
        if group is None or unit not in self._have_grads:
            return False
        self._have_grads.remove(unit)
        self._land(unit)  # at most one reduction is in flight
        self.queues.wait(Stream.REDUCE, self.queues.last(Stream.COMPUTE))
        self.memory.add(Held.REDUCED, group.reduced_nbytes)
        self.memory.add(Held.GRADIENTS, group.cast_nbytes)
        for index, flight in enumerate(group.reduce):
            label = f"{'all-reduce' if index else 'reduce'} {unit}"
            done = self._launch(Stream.REDUCE, label, flight, own_communicator=index > 0)
        self._reductions.append(Reduction(unit, done, group.grad_nbytes + group.cast_nbytes))
        return True

    def _land(self, _: int) -> bool:
        pending, self._reductions = self._reductions, []
        for reduction in pending:
            self._finish(reduction)
        return bool(pending)

    def _finish(self, reduction: Reduction) -> None:
        self.queues.wait(Stream.COMPUTE, reduction.done)
        self.memory.add(Held.GRADIENTS, -reduction.nbytes)

    def _launch(self, stream: Stream, label: str, flight: Flight, *, own_communicator: bool = False) -> Op:
        """Enqueue a launch. Backends run the collectives of one communicator in launch order."""
        if self.shares_communicator and not own_communicator:
            self.queues.wait(stream, self._communicator)
        transfer = flight.transfer
        fixed = flight.before + transfer.latency + flight.behind
        op = self.queues.enqueue(stream, label, fixed=fixed, work=transfer.seconds, resource=transfer.resource)
        if not own_communicator:
            self._communicator = op
        return op

    # Memory of groups: invariant I3 of docs/architecture.md

    def _release(self, nbytes: float) -> None:
        self._released.append((self.queues.last(Stream.COMPUTE), nbytes))

    def _flush(self) -> None:
        for event, nbytes in self._released:
            self.queues.wait(Stream.GATHER, event)
            self.memory.add(Held.GROUPS, -nbytes)
        self._released.clear()


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. ``compute`` is its time if nothing else ran, ``exposed`` the rest."""

    step: float
    compute: float

    @property
    def exposed(self) -> float:
        return self.step - self.compute


def steady_step(device: Accelerator, contention: Contention) -> StepTime:
    """The second step of ``device``: the first one records the order that the schedule prefetches along."""
    device.step()
    first = len(device.queues.ops)
    device.step()
    run(device.queues.ops, contention)
    ops = device.queues.ops[first:]
    started, ended = max(op.end for op in device.queues.ops[:first]), max(op.end for op in ops)
    compute = sum(op.fixed + op.work for op in ops if op.label.split()[0] in ("forward", "backward", "optimizer"))
    return StepTime(ended - started, compute)
