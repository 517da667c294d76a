"""Run a group's reduce plans: bind them to a comm once, then launch and complete.

This file sees plans, gradients as tensors, a comm and streams, never parameters or modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch

from fsdp2 import _torch
from fsdp2.comm.backends import ReduceComm, all_reduce
from fsdp2.comm.memory import Services
from fsdp2.comm.streams import Waitable, wait_for
from fsdp2.group.all_gather import pieces
from fsdp2.plan.layout import Layout, contiguous_stride
from fsdp2.plan.mesh import ParallelMesh
from fsdp2.plan.plan import ReducePlan, Route

_dtype_of = attrgetter("dtype")  # in C, since it runs once per parameter and step
Sums = list[list[torch.Tensor]]  # per plan, the buffers that hold this rank's sums


@dataclass(frozen=True)
class AllReduceHook:
    """``run`` is the user's, called on ``stream``, or on that of reductions."""

    run: Callable[[torch.Tensor], object]
    stream: torch.Stream | None = None


class Launched(NamedTuple):
    """A reduce-scatter on its way.

    ``sums`` receives this rank's part. ``works``: what the CPU has to wait for. ``inputs`` must live until ``read``
    has happened on an accelerator; without an event, until the gradients have landed.
    """

    sums: Sums
    works: Sequence[Waitable]
    inputs: object
    read: torch.Event | None


class Reduce:
    """The reduce plans of a group, one per combination of dtypes. All of them travel in one launch."""

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
        self._parts = [_Part(plan, mesh, is_hooked=hook is not None) for plan in plans]
        self._hook = hook
        self._lands_gradients = any(part.is_local for part in self._parts)

    def launch(self, grads: list[torch.Tensor]) -> Launched:
        """Start reducing ``grads``, one per step of the plans, in their unsharded shapes. Empties the list.

        Each gradient is freed when it has been copied or sent.
        """
        streams, held = self.streams, list[torch.Tensor]()
        if streams.runs_ahead:
            streams.reduce_after_compute()
            held = grads.copy()  # the reduce stream reads them later
        sums: Sums = []
        outputs: list[torch.Tensor] = []
        inputs: list[torch.Tensor] = []
        reads_gradients = False
        with streams.on_reduce():
            for part in self._parts:
                mine = grads[: part.num_steps]
                del grads[: part.num_steps]
                reads_gradients |= part.prepare(mine, sums, outputs, inputs)
            read = streams.record() if held and not reads_gradients else None
            works = self._comm.reduce_scatter(outputs, inputs) if inputs else ()
            if held and reads_gradients and not self._lands_gradients:
                read = streams.record()
        # What was packed belongs to the reduce stream: nobody else need keep it once that stream has been given all.
        return Launched(sums, works, held or inputs, read)

    def add(self, sums: Sums, others: Sums) -> None:
        """Add ``others`` to ``sums`` in place."""
        for mine, other in zip(sums, others, strict=True):
            _torch.foreach_add(mine, other)

    def complete(self, sums: Sums) -> Sums:
        """Sum over the replicate axis as well, divide in place, run the user's hook, cast to the gradients' dtype."""
        if self._mesh.replicate.size > 1:
            works = [work for mine in sums for buffer in mine for work in all_reduce(self._mesh.replicate, buffer)]
            wait_for(works)  # on an accelerator, the reduce stream waits
        averaged: Sums = []
        for plan, mine in zip(self.plans, sums, strict=True):
            if self._hook is not None and plan.factors.behind_hook:
                self._run_hook(self._hook, mine)
            if plan.factors.after != 1.0:
                for buffer in mine:
                    buffer.div_(plan.factors.after)
            if self._hook is not None and not plan.factors.behind_hook:
                self._run_hook(self._hook, mine)
            is_cast = plan.dtypes.reduce is not plan.dtypes.grad
            averaged.append([buffer.to(plan.dtypes.grad) for buffer in mine] if is_cast else mine)
        return averaged

    def shards(self, averaged: Sums) -> list[torch.Tensor]:
        """Per step of the plans, this rank's gradient: a view of the flat buffer."""
        shards: list[torch.Tensor] = []
        for part, mine in zip(self._parts, averaged, strict=True):
            shards += mine if part.is_local else [mine[0].as_strided(*place) for place in part.places]
        return shards

    def _run_hook(self, hook: AllReduceHook, sums: list[torch.Tensor]) -> None:
        with self.streams.on(hook.stream), torch.no_grad():
            for buffer in sums:
                hook.run(buffer)


class _Part:
    """One plan of a reduction: what it sends, and the flat buffer that receives.

    Attributes:
        is_local: one rank, no cast and no hook: the gradients are their own reduction, without buffer or copy.
        places: shape, stride and offset in the flat buffer of this rank's part of each gradient.
    """

    def __init__(self, plan: ReducePlan, mesh: ParallelMesh, *, is_hooked: bool) -> None:
        self.plan, self.num_steps = plan, len(plan.steps)
        is_uncast = plan.dtypes.param is plan.dtypes.reduce and plan.factors.before == 1.0
        self.is_local = mesh.data_parallel_size == 1 and is_uncast and not is_hooked
        self._mesh = mesh
        # A hook gets all sums in one buffer, and sees the gaps between its parts.
        self._new_buffer = torch.zeros if is_hooked else torch.empty
        on_route = {route: [(i, s) for i, s in enumerate(plan.steps) if s.route is route] for route in Route}
        self._rows_numel = sum(step.layout.chunk_numel for _, step in on_route[Route.ROWS])
        self._has_rows = bool(on_route[Route.ROWS])
        self._packed = [i for i, step in on_route[Route.ROWS] if step.layout.numel > 0]
        self._strided = [(i, step.layout) for i, step in on_route[Route.STRIDED]]
        self._direct = [i for i, _ in on_route[Route.DIRECT]]
        shapes = [(step.layout.shard_shape(mesh.shard.rank), step.offset) for step in plan.steps]
        self.places = [(shape, contiguous_stride(shape), offset) for shape, offset in shapes]

    def prepare(
        self, grads: list[torch.Tensor], sums: Sums, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> bool:
        """Append the flat buffer ``[flat_numel]`` to ``sums``, and what each call of the comm fills and sends to
        ``outputs`` and ``inputs``. Returns whether some gradients are sent from where they are."""
        if self.is_local:
            sums.append(grads)
            return True
        plan, dtype = self.plan, self.plan.dtypes.reduce
        flat = self._new_buffer(plan.flat_numel, dtype=dtype, device=self._mesh.device)
        sums.append([flat])
        outputs += [flat] if len(plan.calls) == 1 else [flat.narrow(0, start, numel) for start, numel in plan.calls]
        mine = []
        if self._has_rows:
            rows = torch.empty((self._mesh.shard.size, self._rows_numel), dtype=dtype, device=flat.device)
            if self._packed:
                _torch.pack_rows(list(map(grads.__getitem__, self._packed)), 0, rows.size(0), out=rows)
            mine.append(rows.view(-1))
        if self._strided:
            mine.append(pack_strided([(grads[i], layout) for i, layout in self._strided], dtype))
        direct = list(map(grads.__getitem__, self._direct))
        grads.clear()
        reads_gradients = dtype in map(_dtype_of, direct)
        while direct:  # a gradient that is cast is freed before the next one is cast
            mine.append(direct.pop(0).reshape(-1).to(dtype))
        if plan.factors.before != 1.0:
            _torch.foreach_div(mine, plan.factors.before)
        inputs += mine
        return reads_gradients


def pack_strided(grads: Sequence[tuple[torch.Tensor, Layout]], dtype: torch.dtype) -> torch.Tensor:
    """Rank-major ``[W * n]``: each rank's piece of every gradient, padded to the chunk."""
    num_shards = grads[0][1].num_shards
    packed = grads[0][0].new_zeros((num_shards, sum(layout.chunk_numel for _, layout in grads)), dtype=dtype)
    offset = 0
    for grad, layout in grads:
        for row, piece in zip(packed, pieces(grad, layout), strict=True):
            row.narrow(0, offset, piece.numel()).view(piece.shape).copy_(piece)
        offset += layout.chunk_numel
    return packed.view(-1)
