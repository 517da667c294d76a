"""Run a group's reduce plans: bind them to a comm once, then launch and complete each reduction.

This file sees plans, gradients as tensors, a comm and streams, never parameters or modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp2.core import _torch
from fsdp2.core.comm.backends import ReduceComm
from fsdp2.core.comm.custom import AllReduceHook
from fsdp2.core.comm.streams import Streams, Waitable, is_of_backend, launched
from fsdp2.core.group.all_gather import piece_pairs
from fsdp2.core.plan.layout import Layout, contiguous_stride
from fsdp2.core.plan.mesh import ParallelMesh
from fsdp2.core.plan.plan import ReducePlan, Route
from fsdp2.core.types import CommunicationError

Sums = list[list[torch.Tensor]]  # per plan, the buffers that hold this rank's sums


class Launched(NamedTuple):
    """A reduce-scatter in flight.

    ``sums`` receives this rank's part, and the CPU must wait for ``works``. On an accelerator, ``inputs`` must live
    until the event ``read``; without an event, they must live until the gradients have landed.
    """

    sums: Sums
    works: Sequence[Waitable]
    inputs: object
    read: torch.Event | None


class Reduce:
    """The reduce plans of a group, one per combination of dtypes. One launch runs all of them.

    Attributes:
        lands_gradients: some gradients land as they are, without a copy.
    """

    def __init__(
        self,
        plans: Sequence[ReducePlan],
        mesh: ParallelMesh,
        comm: ReduceComm,
        streams: Streams,
        hook: AllReduceHook | None,
    ) -> None:
        self.plans = tuple(plans)
        self._mesh, self.streams = mesh, streams
        is_hooked, fills_gaps = hook is not None, hook is not None or comm.reads_gaps
        self._parts = [_Part(plan, mesh, is_hooked=is_hooked, fills_gaps=fills_gaps) for plan in plans]
        self._hook = hook
        self._averages = any(plan.factors.averages for plan in plans)  # if one plan averages, all do
        self._reduce_scatter, self._all_reduce = comm.reduce_scatter(averages=self._averages), comm.all_reduce
        self.lands_gradients = any(part.is_local for part in self._parts)

    def launch(self, grads: list[torch.Tensor]) -> Launched:
        """Start reducing ``grads``, one per step of the plans, in unsharded shape. Empties the list.

        Gradients that need a copy or a cast are copied on the current stream and freed immediately.
        """
        streams = self.streams
        packed = [part.pack(grads) for part in self._parts]
        streams.reduce_after_compute()
        outputs: list[torch.Tensor] = []
        sent: list[torch.Tensor] = []
        with streams.on_reduce:
            sums = [part.receive(mine, outputs, sent) for part, mine in zip(self._parts, packed, strict=True)]
            held = packed if streams.runs_ahead else sent  # on the CPU, the comm empties ``sent`` once it has read it
            del packed
            try:
                works = self._reduce_scatter(outputs, sent) if outputs else ()
            except RuntimeError as error:  # like launched(), without another call
                if is_of_backend(error):
                    raise CommunicationError(str(error)) from error
                raise
            # Gradients that land without a copy must live until they have landed.
            read = None if self.lands_gradients else streams.record()
        return Launched(sums, works, held, read)

    def all_reduce(self, sums: Sums) -> Sequence[Waitable]:
        """Start summing over the replicate axis as well, in place. Returns the works to wait for."""
        op = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        return launched(self._all_reduce, self._mesh.replicate.group, list(chain(*sums)), op)

    def complete(self, sums: Sums) -> Sums:
        """Divide in place, run the user's hook, and cast to the gradients' dtype."""
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

    def landed(self, sums: Sums) -> list[torch.Tensor]:
        """``complete``, then ``shards``."""
        return self.shards(self.complete(sums))

    def shards(self, averaged: Sums) -> list[torch.Tensor]:
        """This rank's gradient for each step of the plans, as a view of the flat buffer."""
        shards: list[torch.Tensor] = []
        for part, mine in zip(self._parts, averaged, strict=True):
            shards += mine if part.is_local else [mine[0].as_strided(*place) for place in part.places]
        return shards

    def _run_hook(self, hook: AllReduceHook, sums: list[torch.Tensor]) -> None:
        with self.streams.on(hook.stream), torch.no_grad():
            for buffer in sums:
                hook.run(buffer)


class _Part:
    """One plan of a reduction: what it sends, and the flat buffer that receives the sums.

    Attributes:
        is_local: there is one rank, no cast and no hook, so the gradients are the sums, without a buffer or a copy.
        places: for this rank's part of each gradient: shape, stride and offset in the flat buffer.
    """

    def __init__(self, plan: ReducePlan, mesh: ParallelMesh, *, is_hooked: bool, fills_gaps: bool) -> None:
        self.plan, self.num_steps = plan, len(plan.steps)
        is_uncast = plan.dtypes.param is plan.dtypes.reduce and plan.factors.before == 1.0
        self.is_local = mesh.data_parallel_size == 1 and is_uncast and not is_hooked
        self._mesh = mesh
        # A hook gets all sums in one buffer, including the gaps between them, so the gaps must be zero.
        self._new_buffer = torch.zeros if fills_gaps else torch.empty
        on_route = {route: [(i, s) for i, s in enumerate(plan.steps) if s.route is route] for route in Route}
        self._rows_numel = sum(step.layout.chunk_numel for _, step in on_route[Route.ROWS])
        self._has_rows = bool(on_route[Route.ROWS])
        self._packed = [i for i, step in on_route[Route.ROWS] if step.layout.numel > 0]
        self._strided = [(i, step.layout) for i, step in on_route[Route.STRIDED]]
        self._direct = [i for i, _ in on_route[Route.DIRECT]]
        shapes = [(step.layout.shard_shape(mesh.shard.rank), step.offset) for step in plan.steps]
        self.places = [(shape, contiguous_stride(shape), offset) for shape, offset in shapes]

    def pack(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Remove this plan's gradients from the front of ``grads``. Returns what each call of the comm sends: the
        gradients themselves, or copies made on the current stream."""
        mine = grads[: self.num_steps]
        del grads[: self.num_steps]
        if self.is_local:
            return mine
        plan, dtype, device = self.plan, self.plan.dtypes.reduce, self._mesh.device
        packed = []
        if self._has_rows:
            rows = torch.empty((self._mesh.shard.size, self._rows_numel), dtype=dtype, device=device)
            if self._packed:
                _torch.pack_rows(list(map(mine.__getitem__, self._packed)), 0, rows.size(0), out=rows)
            packed.append(rows.view(-1))
        if self._strided:
            packed.append(pack_strided([(mine[i], layout) for i, layout in self._strided], dtype))
        direct = [mine[i].reshape(-1) for i in self._direct]
        if plan.casts_first and direct and direct[0].dtype is not dtype:
            casts = [torch.empty_like(grad, dtype=dtype) for grad in direct]
            _torch.foreach_copy(casts, direct)  # on an H200, takes two thirds of the time of one launch per tensor
            direct = casts
        packed += direct
        if plan.factors.before != 1.0:
            _torch.foreach_div(packed, plan.factors.before)
        return packed

    def receive(
        self, packed: list[torch.Tensor], outputs: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the buffers for this rank's sums: one flat buffer ``[flat_numel]``, or ``packed`` if local. Append to
        ``outputs`` and ``inputs`` what each call of the comm fills and sends."""
        if self.is_local:
            return packed
        plan = self.plan
        flat = self._new_buffer(plan.flat_numel, dtype=plan.dtypes.reduce, device=self._mesh.device)
        outputs += [flat] if len(plan.calls) == 1 else [flat.narrow(0, start, numel) for start, numel in plan.calls]
        inputs += packed
        return [flat]


def pack_strided(grads: Sequence[tuple[torch.Tensor, Layout]], dtype: torch.dtype) -> torch.Tensor:
    """Pack ``grads`` rank-major as ``[W * n]``: each rank's piece of every gradient, padded to the chunk."""
    sizes = [layout.chunk_numel for _, layout in grads]
    packed = grads[0][0].new_empty((grads[0][1].num_shards, sum(sizes)), dtype=dtype)
    if not all(layout.is_even for _, layout in grads):
        packed.zero_()
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for (grad, layout), column in zip(grads, packed.split_with_sizes(sizes, dim=1), strict=True):
        parts, row_parts = piece_pairs(grad, column, layout)
        targets += row_parts
        sources += parts
    if targets:
        _torch.foreach_copy(targets, sources)
    return packed.view(-1)
