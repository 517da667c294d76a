"""Simulates steps of one rank: the events of a model go to the real ``Schedule``, and its actions are enqueued as
``fsdp2.core.runtime.executor`` and ``fsdp2.core.group.group`` would do it. Nothing here decides an order.

The CPU of an ``Accelerator`` runs ahead of it: its ledger counts memory in the order of the program, which is the order
in which the caching allocator sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp2.core import GroupState, schedules
from fsdp2.memory.plan import Held, Ledger, Moment, UnitBytes, Use, replay
from fsdp2.planner.groups import GroupCost
from fsdp2.planner.machine import Contention, Transfer
from fsdp2.planner.queues import Op, Queues, Stream, run

_STEP = "step"  # the owner of bytes that belong to no unit


@dataclass(frozen=True)
class CallCost(Use):
    """Seconds of compute of one call of ``unit``. Nothing slows down the ``fixed`` part: tensor parallelism on its own
    link."""

    forward: float = 0.0
    backward: float = 0.0
    saved_nbytes: int = 0
    working_nbytes: int = 0
    left_nbytes: int = 0
    forward_fixed: float = 0.0
    backward_fixed: float = 0.0


class Accelerator:
    """See the module docstring. Unit 0 is the root, whose forward surrounds ``calls`` of the others.

    Attributes:
        groups: the cost of each unit's parameters; None if it has none.
        memory: bytes held in addition to shards and their optimizer state.
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
        micro_batches: int = 1,
    ) -> None:
        self.groups = groups
        self.schedule = schedules.Schedule(rules)
        self.shares_communicator = shares_communicator
        self.queues = Queues()
        self.memory = Ledger({i: UnitBytes() if group is None else group.nbytes for i, group in enumerate(groups)})
        self.performed: list[tuple[schedules.Action, int]] = []
        self._forward, self._backward = _events(calls)
        self._left_nbytes = sum(call.left_nbytes for call in calls)
        self._optimizer = optimizer
        self._micro_batches = micro_batches
        self._states = [GroupState.SHARDED] * len(groups)
        self._have_grads: set[int] = set()  # units whose gradients autograd has left
        self._gathers: dict[int, Op] = {}
        self._reductions: list[tuple[GroupCost, Op]] = []  # in flight: each ends with the operation
        self._communicator: Op | None = None
        self._is_first = True
        self._perform = {
            schedules.Action.UNSHARD: self._unshard,
            schedules.Action.PREFETCH: self._unshard,
            schedules.Action.WAIT: self._wait,
            schedules.Action.STAY: lambda _: False,
            schedules.Action.RESHARD: self._reshard,
            schedules.Action.RESHARD_POST_FORWARD: self._rest,
            schedules.Action.REDUCE: self._reduce,
            schedules.Action.LAND: self._land,
        }

    def step(self) -> None:
        """Enqueue forward and backward of each micro-batch, then the optimizer."""
        self.queues.wait(Stream.GATHER, self.queues.last(Stream.COMPUTE))  # it reads what the optimizer wrote
        for number in range(self._micro_batches):
            self._is_first = number == 0
            self._run_micro_batch()
        self.queues.enqueue(Stream.COMPUTE, "optimizer", work=self._optimizer)
        self.memory.set(_STEP, Held.SHARD_GRADIENTS, 0)

    def _run_micro_batch(self) -> None:
        memory = self.memory
        for moment, call, actions in replay(self.schedule, self._forward, self._backward):
            if moment is Moment.BACKWARD_ENDED:
                self._compute_backward(call)
                memory.add(_STEP, Held.SAVED, call.working_nbytes)
                memory.add(_STEP, Held.SAVED, -call.working_nbytes - call.saved_nbytes)
            if moment in (Moment.BACKWARD_ENDED, Moment.END):
                self._leave_grads(call.unit)
            self._do(actions)
            if moment is Moment.FORWARD:
                label = f"forward {call.unit}"
                self.queues.enqueue(Stream.COMPUTE, label, fixed=call.forward_fixed, work=call.forward)
                memory.add(_STEP, Held.SAVED, call.saved_nbytes + call.left_nbytes)
        memory.add(_STEP, Held.SAVED, -self._left_nbytes)

    def _do(self, actions: schedules.Actions) -> None:
        for action, unit in schedules.in_parts(actions):
            if self._perform[action](unit):
                self.performed.append((action, unit))
                self.memory.count(action, unit)

    # Compute

    def _compute_backward(self, call: CallCost) -> None:
        label = f"backward {call.unit}"
        self.queues.enqueue(Stream.COMPUTE, label, fixed=call.backward_fixed, work=call.backward)

    def _leave_grads(self, unit: int) -> None:
        """Autograd leaves gradients, or adds to those of another call."""
        group = self.groups[unit]
        if group is not None and group.reduce:
            self._have_grads.add(unit)
            self.memory.run_backward(unit, gathers=False, reshards=self.schedule.rules[unit].reshard_after_backward)

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
        if before is GroupState.SHARDED_POST_FORWARD and group.regather is not None:
            self._gathers[unit] = self._launch(Stream.GATHER, f"regather {unit}", group.regather, own_communicator=True)
        else:
            self._gathers[unit] = self._launch(Stream.GATHER, f"gather {unit}", group.gather)
        return True

    def _wait(self, unit: int) -> bool:
        group, _ = self._transition(unit, schedules.GroupEvent.WAIT)
        if group is None:
            return False
        self.queues.wait(Stream.COMPUTE, self._gathers[unit])
        self._arrive(unit, group)
        return True

    def _arrive(self, unit: int, group: GroupCost) -> None:
        """Called when the gather stream has copied everything to its place."""

    def _reshard(self, unit: int) -> bool:
        group, _ = self._transition(unit, schedules.GroupEvent.RESHARD)
        if group is not None:
            self._release()
        return group is not None

    def _rest(self, unit: int) -> bool:
        group, _ = self._transition(unit, schedules.GroupEvent.RESHARD_POST_FORWARD)
        if group is None:
            return False
        self.queues.wait(Stream.GATHER, self.queues.enqueue(Stream.COMPUTE, f"cut {unit}", fixed=group.rest))
        return True

    def _release(self) -> None:
        """The gather stream waits for compute before it fills the memory again: invariant I3 of
        docs/architecture.md."""
        self.queues.wait(Stream.GATHER, self.queues.last(Stream.COMPUTE))

    def _reduce(self, unit: int) -> bool:
        group = self.groups[unit]
        if group is None or unit not in self._have_grads:
            return False
        self._have_grads.remove(unit)
        self._land(unit)  # at most one reduction is in flight
        self.queues.wait(Stream.REDUCE, self.queues.last(Stream.COMPUTE))
        for index, transfer in enumerate(group.reduce):
            label = f"{'all-reduce' if index else 'reduce'} {unit}"
            done = self._launch(Stream.REDUCE, label, transfer, own_communicator=index > 0)
        self._reductions.append((group, done))
        return True

    def _land(self, unit: int) -> bool:
        pending, self._reductions = self._reductions, []
        for group, done in pending:
            self.queues.wait(Stream.COMPUTE, done)
            self._finish(group)
        return bool(pending)

    def _finish(self, group: GroupCost) -> None:
        """Called when compute has waited for a reduction."""
        self.memory.land(1)
        if self._is_first:  # later ones are added to them
            self.memory.add(_STEP, Held.SHARD_GRADIENTS, group.reduced_nbytes)

    def _launch(self, stream: Stream, label: str, transfer: Transfer, *, own_communicator: bool = False) -> Op:
        """Enqueue a launch. Backends run the collectives of one communicator in launch order."""
        if self.shares_communicator and not own_communicator:
            self.queues.wait(stream, self._communicator)
        fixed = transfer.before + transfer.latency + transfer.behind
        op = self.queues.enqueue(stream, label, fixed=fixed, work=transfer.seconds, resource=transfer.resource)
        if not own_communicator:
            self._communicator = op
        return op


Events = list[tuple[CallCost, bool]]


def _events(calls: Sequence[CallCost]) -> tuple[Events, Events]:
    """Where calls begin (True) and end, in a forward and in the backward through them. The output of the last call is
    that of the root, so the backward of the root begins after that call's. The first call needs no gradient of its
    input."""
    root = CallCost(0)
    calls = [*(replace(call, hands_on=False) for call in calls[:1]), *calls[1:]]
    forward = [(root, True), *((call, begins) for call in calls for begins in (True, False)), (root, False)]
    backward = [(call, begins) for call in reversed(calls) if call.has_backward for begins in (False, True)]
    return forward, [*backward[:1], *([(root, False)] if backward else []), *backward[1:]]


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
