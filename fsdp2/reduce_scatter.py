"""Run a group's reduce plans: bind their steps to a comm once, then issue, finish, land.

This room sees plans, gradients as tensors, a comm and streams, never parameters or modules. What is in flight is one
``PendingReduce``, finished exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from fsdp2 import _torch
from fsdp2.all_gather import pieces
from fsdp2.comm import ReduceComm, all_reduce
from fsdp2.kept_gradients import KeptGradients, Place
from fsdp2.layout import Layout, ShardLayout, contiguous_stride
from fsdp2.mesh import ParallelMesh
from fsdp2.plan import ReducePlan, Route
from fsdp2.services import Services
from fsdp2.streams import Streams, Waitable


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

    def drop(self) -> None:
        """Wait, but do not land."""
        self._then = None
        self.finish()
        self.wait()

    def finish(self) -> None:
        """What the reduction read may be freed. On the CPU the gradients have landed; on an accelerator they may still
        travel, and compute goes on beside."""
        for work in self._works:
            work.wait()
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
        reads: until when the reduction reads the gradients that were prepared last.
    """

    def __init__(self, plan: ReducePlan, mesh: ParallelMesh, services: Services, hook: AllReduceHook | None) -> None:
        self.plan = plan
        self.kept: KeptGradients | None = None
        self._hook = hook
        self._mesh, self._streams, self._memory = mesh, services.streams, services.memory
        self._rows = [(i, s) for i, s in enumerate(plan.steps) if s.route is Route.ROWS]
        self._strided = [(i, s) for i, s in enumerate(plan.steps) if s.route is Route.STRIDED]
        self._direct = [i for i, s in enumerate(plan.steps) if s.route is Route.DIRECT]
        self._packed = [i for i, step in self._rows if step.layout.numel > 0]
        layouts = [plan.steps[i].layout for i in self._packed]
        # On the CPU, pack_rows would pad and cast in memory of its own.
        is_copied_once = mesh.device.type != "cpu" or (
            plan.dtypes.param is plan.dtypes.reduce and all(layout.is_even for layout in layouts)
        )
        self._pack_rows = _torch.pack_rows if is_copied_once else _CopiedRows(layouts)
        self._rows_numel = sum(step.layout.chunk_numel for _, step in self._rows)
        shapes = [(step.layout.shard_shape(mesh.shard.rank), step.offset) for step in plan.steps]
        self._places: list[Place] = [(shape, contiguous_stride(shape), offset) for shape, offset in shapes]
        self.reads = Reads.WHEN_PACKED

    def prepare(self, grads: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Take ``grads``, one per step, out of the list, so that each is freed when it has been copied or sent.

        Returns the buffers that receive this rank's sums (one flat buffer ``[flat_numel]`` of reduce dtype), and
        outputs and inputs for the comm.
        """
        flat = self._new_buffer()
        calls = self.plan.calls
        outputs = [flat] if len(calls) == 1 else [flat.narrow(0, offset, numel) for offset, numel in calls]
        inputs = self._inputs(grads)
        if self.plan.factors.before != 1.0:
            _torch.foreach_div(inputs, self.plan.factors.before)
        return [flat], outputs, inputs

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

    def _inputs(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        num_shards, dtype = self._mesh.shard.size, self.plan.dtypes.reduce
        inputs = []
        if self._rows:
            staging = self._memory.scratch((num_shards, self._rows_numel), dtype)
            if self._packed:
                self._pack_rows([grads[i] for i in self._packed], staging)
            inputs.append(staging.view(-1))
        if self._strided:
            inputs.append(_pack_strided([(grads[i], step.layout) for i, step in self._strided], dtype))
        direct = [grads[i] for i in self._direct]
        self.reads = Reads.WHEN_SENT if any(grad.dtype is dtype for grad in direct) else Reads.WHEN_PACKED
        grads.clear()
        while direct:
            inputs.append(direct.pop(0).reshape(-1).to(dtype))
        return inputs


class _LocalPart(_Part):
    """One rank and no cast: the gradients are their own reduction. No buffer, no copy."""

    def keep_gradients(
        self, as_gradient: Callable[[int, torch.Tensor], torch.Tensor], are_set: Callable[[], bool]
    ) -> None:
        """They are autograd's."""

    def prepare(self, grads: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        self.reads = Reads.WHEN_LANDED
        return grads, [], []

    def shards(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        return sums


def _bound(plan: ReducePlan, mesh: ParallelMesh, services: Services, hook: AllReduceHook | None) -> _Part:
    """A ``hook`` gets all sums of a plan in one buffer."""
    is_uncast = plan.dtypes.param is plan.dtypes.reduce and plan.factors.before == 1.0
    is_local = mesh.data_parallel_size == 1 and is_uncast and hook is None
    return (_LocalPart if is_local else _Part)(plan, mesh, services, hook)


Sums = list[list[torch.Tensor]]  # per plan, the buffers that hold its sums


class Reduce:
    """The plans of a group, one per combination of dtypes, bound to a comm and streams. All travel in one launch."""

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

    def issue(self, grads: list[torch.Tensor]) -> tuple[Sums, PendingReduce]:
        """Start reducing ``grads``, one per step of the plans, in their unsharded shapes.

        Takes the gradients out of the list. Returns what receives this rank's sums, and what is pending.
        """
        self.streams.reduce_after_compute()
        grads_to_keep = grads.copy() if self.streams.runs_ahead else []  # the reduce stream reads them later
        sums: Sums = []
        outputs: list[torch.Tensor] = []
        inputs: list[torch.Tensor] = []
        with self.streams.on_reduce():
            for part in self.parts:
                mine = grads[: len(part.plan.steps)]
                del grads[: len(mine)]
                buffers, to, values = part.prepare(mine)
                sums.append(buffers)
                outputs += to
                inputs += values
            reads = max([part.reads for part in self.parts])
            read = self.streams.record() if reads is Reads.WHEN_PACKED else None
            works = self.streams.issued(self._comm.reduce_scatter(outputs, inputs)) if inputs else ()
            if reads is Reads.WHEN_SENT:
                read = self.streams.record()
        # What was packed belongs to the reduce stream: where that has been given all of it, nobody else need keep it.
        return sums, PendingReduce(works, grads_to_keep or inputs, self.streams, read)

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


class _CopiedRows:
    """``_torch.pack_rows`` without copies that are padded or cast first. Of ``[rows, n]``, what a gradient fills whole
    is copied at once, and its last, partial row after that."""

    def __init__(self, layouts: Sequence[ShardLayout]) -> None:
        self._sizes = [layout.chunk_numel for layout in layouts]
        self._whole = [(layout.numel // layout.chunk_numel, layout.chunk_numel) for layout in layouts]
        self._heights = sorted({rows for rows, _ in self._whole})
        rests = [layout.numel % layout.chunk_numel for layout in layouts]
        starts = [sum(self._sizes[:i]) for i in range(len(layouts))]
        self._partial = [(i, starts[i], rest) for i, rest in enumerate(rests) if rest > 0]
        # With as many ranks as rows, or more, most gradients have the shape already.
        self._reshaped = [
            i for i, layout in enumerate(layouts) if rests[i] == 0 and tuple(layout.shape) != self._whole[i]
        ]
        self._is_padded = not all(layout.is_even for layout in layouts)

    def __call__(self, grads: list[torch.Tensor], out: torch.Tensor) -> None:
        if self._is_padded:
            out.zero_()
        columns = {rows: out.narrow(0, 0, rows).split_with_sizes(self._sizes, dim=1) for rows in self._heights}
        targets = [columns[rows][i] for i, (rows, _) in enumerate(self._whole)]
        sources = grads.copy()
        for i in self._reshaped:
            sources[i] = grads[i].reshape(self._whole[i])
        for i, start, numel in self._partial:
            values, (rows, n) = grads[i].reshape(-1), self._whole[i]
            sources[i] = values[: rows * n].view(rows, n)
            sources.append(values[rows * n :])
            targets.append(out[rows, start : start + numel])
        _torch.foreach_copy(targets, sources)


def _pack_strided(grads: Sequence[tuple[torch.Tensor, Layout]], dtype: torch.dtype) -> torch.Tensor:
    """Rank-major ``[W * n]``: each rank's piece of every gradient, padded to the chunk."""
    num_shards = grads[0][1].num_shards
    packed = grads[0][0].new_zeros((num_shards, sum(layout.chunk_numel for _, layout in grads)), dtype=dtype)
    offset = 0
    for grad, layout in grads:
        for row, piece in zip(packed, pieces(grad, layout), strict=True):
            row.narrow(0, offset, piece.numel()).view(piece.shape).copy_(piece)
        offset += layout.chunk_numel
    return packed.view(-1)
