"""Run a group's reduce plans: bind their steps to a comm once, then issue, finish, land.

This room sees plans, gradients as tensors, a comm and streams, never parameters or modules. What is in flight is one
``PendingReduce``, finished exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch

from fsdp2 import _torch
from fsdp2.comm.backends import ReduceComm, all_reduce
from fsdp2.comm.services import Services
from fsdp2.comm.streams import Streams, Waitable, wait_for
from fsdp2.group.kept_gradients import KeptGradients, Place
from fsdp2.group.packing import CopiedRows, pack_strided
from fsdp2.plan.layout import contiguous_stride
from fsdp2.plan.mesh import ParallelMesh
from fsdp2.plan.plan import ReducePlan, Route


@dataclass(frozen=True)
class AllReduceHook:
    """``run`` is the user's, called on ``stream``, or on that of reductions."""

    run: Callable[[torch.Tensor], object]
    stream: torch.Stream | None = None


class Reads(IntEnum):
    """Until when a reduction reads the gradients that it was given."""

    WHEN_PACKED = 1  # all of them are copied, or cast
    WHEN_SENT = 2  # some travel from where they are
    WHEN_LANDED = 3  # they are their own sums


class PendingReduce:
    """A reduction in flight. ``finish`` completes it on the CPU; on an accelerator all of it has been enqueued.

    ``keep``: what it reads, until it has. On an accelerator that is when ``read`` has happened; None is the end.
    """

    def __init__(
        self, works: Sequence[Waitable], keep: object, streams: Streams, read: torch.Event | None = None
    ) -> None:
        self._works, self._keep, self._streams, self._read = works, keep, streams, read
        self._then: Callable[[], None] | None = None
        self._done: torch.Event | None = None

    def then(self, land: Callable[[], None]) -> PendingReduce:
        """Run ``land`` when the data has arrived: at once where it is enqueued behind the data, else in ``finish``."""
        if self._works:
            self._then = land
            return self
        with self._streams.on_reduce():
            land()
            self._done = self._streams.record()
        return self

    def joined(self, behind: PendingReduce) -> PendingReduce:
        """This one and ``behind``, launched after it, as one, before either is told what comes then."""
        works, keep = [*self._works, *behind._works], (self._keep, behind._keep)
        return PendingReduce(works, keep, self._streams, behind._read)

    def drop(self) -> None:
        """Wait, but do not land."""
        self._then = None
        self.finish()
        self.wait()

    def finish(self) -> None:
        """What the reduction read may be freed. On the CPU the gradients have landed; on an accelerator they may still
        travel, and compute goes on beside."""
        wait_for(self._works)
        if self._then is not None:
            self._then()
        self._streams.wait_here(self._read or self._done)  # compute waits for reduce stream: it frees what that read
        self._works, self._then, self._keep = (), None, None

    def wait(self) -> None:
        """The gradients of this reduction, and of those before it, are usable by the current stream; it is finished."""
        self._streams.wait_here(self._done)  # compute waits for the reduce stream: the optimizer reads what it wrote


class _Part:
    """One plan of a reduction: what it sends and receives. Memory is allocated per step, and becomes the gradients'.

    Attributes:
        kept: where gradients land, if that is kept from step to step.
        num_late: how many steps do not travel early.
        reads: until when the reduction reads the gradients that were prepared last.
    """

    def __init__(self, plan: ReducePlan, mesh: ParallelMesh, services: Services, hook: AllReduceHook | None) -> None:
        self.plan, self.num_late = plan, len(plan.steps) - plan.num_early
        self.kept: KeptGradients | None = None
        self._hook = hook
        self._mesh, self._streams, self._memory = mesh, services.streams, services.memory
        self._rows = [(i, s) for i, s in enumerate(plan.steps) if s.route is Route.ROWS]
        self._strided = [(i, s) for i, s in enumerate(plan.steps) if s.route is Route.STRIDED]
        self._direct = [i for i, s in enumerate(plan.steps[: self.num_late]) if s.route is Route.DIRECT]
        self._packed = [i for i, step in self._rows if step.layout.numel > 0]
        layouts = [plan.steps[i].layout for i in self._packed]
        # On the CPU, pack_rows would pad and cast in memory of its own.
        is_copied_once = mesh.device.type != "cpu" or (
            plan.dtypes.param is plan.dtypes.reduce and all(layout.is_even for layout in layouts)
        )
        self._pack_rows = _torch.pack_rows if is_copied_once else CopiedRows(layouts)
        self._rows_numel = sum(step.layout.chunk_numel for _, step in self._rows)
        shapes = [(step.layout.shard_shape(mesh.shard.rank), step.offset) for step in plan.steps]
        self._places: list[Place] = [(shape, contiguous_stride(shape), offset) for shape, offset in shapes]
        self.reads = Reads.WHEN_PACKED

    def receive(self, grads: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The buffers that receive this rank's sums (one flat buffer ``[flat_numel]`` of reduce dtype), and what each
        call of the comm fills of them."""
        flat = self._new_buffer()
        calls = self.plan.calls
        return [flat], [flat] if len(calls) == 1 else [flat.narrow(0, offset, numel) for offset, numel in calls]

    def inputs(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the comm sends of ``grads``, one per step but the early ones. Takes them out of the list, so that each
        is freed when it has been copied or sent."""
        num_shards, dtype = self._mesh.shard.size, self.plan.dtypes.reduce
        inputs = []
        if self._rows:
            staging = self._memory.scratch((num_shards, self._rows_numel), dtype)
            if self._packed:
                self._pack_rows([grads[i] for i in self._packed], staging)
            inputs.append(staging.view(-1))
        if self._strided:
            inputs.append(pack_strided([(grads[i], step.layout) for i, step in self._strided], dtype))
        direct = [grads[i] for i in self._direct]
        grads.clear()
        return self._with_direct(inputs, direct)

    def early_inputs(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """The same of ``grads``, one per early step."""
        direct = grads.copy()
        grads.clear()
        return self._with_direct([], direct)

    def _with_direct(self, inputs: list[torch.Tensor], direct: list[torch.Tensor]) -> list[torch.Tensor]:
        """``inputs``, and behind them ``direct``, emptied, in reduce dtype; divided."""
        dtype = self.plan.dtypes.reduce
        self.reads = Reads.WHEN_SENT if any(grad.dtype is dtype for grad in direct) else Reads.WHEN_PACKED
        while direct:
            inputs.append(direct.pop(0).reshape(-1).to(dtype))
        if self.plan.factors.before != 1.0 and inputs:
            _torch.foreach_div(inputs, self.plan.factors.before)
        return inputs

    def average(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """Divide the complete sums in place, run the user's hook on them, and cast them to the dtype of the sharded
        gradients."""
        factors = self.plan.factors
        if self._hook is not None and factors.behind_hook:
            self._run_hook(self._hook, sums)
        if factors.after != 1.0:
            for buffer in sums:
                buffer.div_(factors.after)
        if self._hook is not None and not factors.behind_hook:
            self._run_hook(self._hook, sums)
        return sums if self.plan.dtypes.reduce is self.plan.dtypes.grad else self._cast(sums)

    def shards(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """Per step of the plan, this rank's gradient as a view of its buffer."""
        (flat,) = sums
        if self.kept is not None and flat is self.kept.flat:
            return self.kept.locals
        return [flat.as_strided(shape, stride, offset) for shape, stride, offset in self._places]

    def keep_gradients(
        self, as_gradient: Callable[[int, torch.Tensor], torch.Tensor], are_set: Callable[[], bool]
    ) -> None:
        """Have gradients land in memory that is kept, with what ``as_gradient`` makes of shard i. ``are_set``: whether
        some gradient is there already."""
        numel, dtype = self.plan.flat_numel, self.plan.dtypes.grad
        self.kept = KeptGradients(numel, dtype, self._places, as_gradient, are_set, self._mesh.device)

    def _new_buffer(self) -> torch.Tensor:
        """What receives this rank's sums."""
        dtypes, numel = self.plan.dtypes, self.plan.flat_numel
        if self.kept is not None and dtypes.reduce is dtypes.grad:
            return self.kept.buffer()
        # Between its parts the buffer has gaps, which a hook sees.
        new = torch.empty if self._hook is None else torch.zeros
        return new(numel, dtype=dtypes.reduce, device=self._mesh.device)

    def _cast(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.kept is None:
            return [tensor.to(self.plan.dtypes.grad) for tensor in sums]
        (flat,) = sums
        return [self.kept.buffer().copy_(flat)]

    def _run_hook(self, hook: AllReduceHook, sums: list[torch.Tensor]) -> None:
        with self._streams.on(hook.stream), torch.no_grad():
            for tensor in sums:
                hook.run(tensor)


class _LocalPart(_Part):
    """One rank and no cast: the gradients are their own reduction. No buffer, no copy."""

    def keep_gradients(
        self, as_gradient: Callable[[int, torch.Tensor], torch.Tensor], are_set: Callable[[], bool]
    ) -> None:
        """They are autograd's."""

    def receive(self, grads: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        self.reads = Reads.WHEN_LANDED
        return grads, []

    def inputs(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        return []

    def shards(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        return sums


def _bound(plan: ReducePlan, mesh: ParallelMesh, services: Services, hook: AllReduceHook | None) -> _Part:
    """A ``hook`` gets all sums of a plan in one buffer."""
    is_uncast = plan.dtypes.param is plan.dtypes.reduce and plan.factors.before == 1.0
    is_local = mesh.data_parallel_size == 1 and is_uncast and hook is None
    return (_LocalPart if is_local else _Part)(plan, mesh, services, hook)


Sums = list[list[torch.Tensor]]  # per plan, the buffers that hold its sums


class Begun(NamedTuple):
    """A reduction whose early half is on its way. ``rest``: per plan, what the calls to come fill."""

    sums: Sums
    rest: list[list[torch.Tensor]]


class Reduce:
    """The plans of a group, one per combination of dtypes, bound to a comm and streams. All travel in one launch, or in
    two: what is early, and the rest.

    Attributes:
        num_early: how many steps are early.
    """

    def __init__(
        self,
        plans: Sequence[ReducePlan],
        mesh: ParallelMesh,
        comm: ReduceComm,
        services: Services,
        hook: AllReduceHook | None,
    ) -> None:
        self.plans = tuple(plans)
        self._mesh, self._comm, self.streams = mesh, comm, services.streams
        self.parts = [_bound(plan, mesh, services, hook) for plan in plans]
        self.num_early = sum(plan.num_early for plan in plans)

    def begin(self, grads: list[torch.Tensor]) -> tuple[Begun, PendingReduce]:
        """Start reducing ``grads``, one per early step. Otherwise as ``issue``."""
        self.streams.reduce_after_compute()
        keep = grads.copy() if self.streams.runs_ahead else []
        begun, outputs, inputs = Begun([], []), list[torch.Tensor](), list[torch.Tensor]()
        with self.streams.on_reduce():
            for part in self.parts:
                buffers, calls = part.receive([])
                inputs += part.early_inputs(_taken(grads, part.plan.num_early))
                num_late = len(calls) - part.plan.num_early
                outputs += calls[num_late:]
                begun.sums.append(buffers)
                begun.rest.append(calls[:num_late])
            return begun, self._launched(outputs, inputs, keep)

    def issue(self, grads: list[torch.Tensor], begun: Begun | None = None) -> tuple[Sums, PendingReduce]:
        """Start reducing ``grads``, one per step of the plans, in their unsharded shapes; without the early ones if
        those have ``begun``.

        Takes the gradients out of the list. Returns what receives this rank's sums, and what is pending.
        """
        ahead: PendingReduce | None = None
        if begun is None and self.num_early:
            grads, early = self._without_early(grads)
            begun, ahead = self.begin(early)
        self.streams.reduce_after_compute()
        keep = grads.copy() if self.streams.runs_ahead else []  # the reduce stream reads them later
        sums: Sums = []
        outputs: list[torch.Tensor] = []
        inputs: list[torch.Tensor] = []
        with self.streams.on_reduce():
            for part in self.parts:
                mine = grads[: part.num_late]
                del grads[: len(mine)]
                if begun is None:
                    buffers, calls = part.receive(mine)
                else:
                    buffers, calls = begun.sums[len(sums)], begun.rest[len(sums)]
                sums.append(buffers)
                outputs += calls
                inputs += part.inputs(mine)
            pending = self._launched(outputs, inputs, keep)
        return sums, pending if ahead is None else ahead.joined(pending)

    def _launched(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], grads: list[torch.Tensor]
    ) -> PendingReduce:
        """``grads``: to keep while they are read."""
        reads = max([part.reads for part in self.parts])
        read = self.streams.record() if reads is Reads.WHEN_PACKED else None
        works = self.streams.issued(self._comm.reduce_scatter(outputs, inputs)) if inputs else ()
        if reads is Reads.WHEN_SENT:
            read = self.streams.record()
        # What was packed belongs to the reduce stream: where that has been given all of it, nobody else need keep it.
        return PendingReduce(works, grads or inputs, self.streams, read)

    def _without_early(self, grads: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        late, early = list[torch.Tensor](), list[torch.Tensor]()
        for part in self.parts:
            late += _taken(grads, part.num_late)
            early += _taken(grads, part.plan.num_early)
        return late, early

    def with_early(self, late: Sequence[bool], *, early: bool) -> list[bool]:
        """A flag per step of the plans: those of ``late``, and ``early`` for the early ones."""
        rest = iter(late)
        flags: list[bool] = []
        for part in self.parts:
            flags += [next(rest) for _ in range(part.num_late)] + [early] * part.plan.num_early
        return flags

    def kept_gradients(self, sums: Sums) -> list[torch.Tensor]:
        """Per step of the plans, the gradient on this rank's shard of ``sums``; empty if they are not kept."""
        kept = [part.kept for part in self.parts]
        if any(each is None or each.flat is not mine[0] for each, mine in zip(kept, sums, strict=True)):
            return []
        return kept[0].grads if len(kept) == 1 else [grad for each in kept for grad in each.grads]  # type: ignore[union-attr]

    def free_unused(self) -> None:
        """Free the memory of kept gradients that nobody has references to."""
        for part in self.parts:
            if part.kept is not None:
                part.kept.free()

    def add(self, sums: Sums, others: Sums) -> None:
        """Add ``others`` to ``sums`` in place."""
        for mine, other in zip(sums, others, strict=True):
            _torch.foreach_add(mine, other)

    def all_reduce(self, sums: Sums) -> None:
        """Sum over the replicate axis as well."""
        if self._mesh.replicate.size > 1:
            works = [work for mine in sums for buffer in mine for work in all_reduce(self._mesh.replicate, buffer)]
            for work in self.streams.issued(works):
                work.wait()

    def average(self, sums: Sums) -> Sums:
        """Average the complete sums, in place where they are not cast."""
        return [part.average(mine) for part, mine in zip(self.parts, sums, strict=True)]

    def shards(self, averaged: Sums) -> list[torch.Tensor]:
        """Per step of the plans, this rank's gradient as a view of its buffer."""
        return [shard for part, mine in zip(self.parts, averaged, strict=True) for shard in part.shards(mine)]


def _taken(tensors: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    """The first ``count``, taken out of the list."""
    taken = tensors[:count]
    del tensors[:count]
    return taken
