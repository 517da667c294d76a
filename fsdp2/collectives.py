"""Run a plan: bind its steps to memory once, then issue, wait, release.

This room sees plans, flat tensors, a comm and streams, never parameters or modules. What is in flight is one
``PendingGather`` or ``PendingReduce``, finished exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fsdp2 import _torch
from fsdp2.buffers import Memory, tensor_on
from fsdp2.comm import Comm, all_reduce
from fsdp2.layout import ShardLayout, contiguous_stride
from fsdp2.mesh import ParallelMesh
from fsdp2.plan import GatherBucket, GatherPlan, GatherStep, ReducePlan, Route
from fsdp2.services import Services
from fsdp2.streams import Streams, Waitable

FlatShards = dict[torch.dtype, torch.Tensor]


def flat_shards(plan: GatherPlan, device: torch.device) -> FlatShards:
    """Zeroed flat shard buffers ``[numel]`` for ``plan``, one per dtype; padding stays zero for good."""
    return {dtype: torch.zeros(numel, dtype=dtype, device=device) for dtype, numel in plan.shard_numels}


def shard_slice(flats: FlatShards, step: GatherStep, shape: tuple[int, ...]) -> torch.Tensor:
    """The part of a flat shard buffer that holds a shard of ``shape``, without its padding."""
    return flats[step.source].as_strided(shape, contiguous_stride(shape), step.shard_offset)


class PendingGather:
    """An all-gather in flight; ``wait`` makes the unsharded tensors usable by the current stream."""

    def __init__(
        self,
        works: Sequence[Waitable],
        arrive: Callable[[], None] | None,
        done: torch.Event | None,
        streams: Streams,
    ) -> None:
        self._works, self._arrive, self._done, self._streams = works, arrive, done, streams

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._arrive is not None:
            self._arrive()
        self._streams.wait_here(self._done)  # compute waits for the gather stream: the unsharded parameters are read


class Gather:
    """A gather plan bound to a group's flat shards and unsharded storage.

    Every tensor that a step touches is made here, once, on storages whose memory comes and goes.

    Attributes:
        unsharded: per parameter of the group, the tensor ``[*shape]`` that compute reads, on ``storage``.
    """

    def __init__(
        self,
        plan: GatherPlan,
        flats: FlatShards,
        storage: torch.UntypedStorage,
        rank: int,
        comm: Comm,
        memory: Memory,
        streams: Streams,
    ) -> None:
        self.plan = plan
        self.storage = storage
        self._staging = torch.UntypedStorage(0, device=storage.device)
        self._memory, self._streams = memory, streams
        self._casts = Copies()
        self._unpacks: list[Copies | SplitCopy] = []
        self._has_direct = bool(plan.on_route(Route.DIRECT))
        with _placed(storage, plan.unsharded_nbytes), _placed(self._staging, plan.staging_nbytes):
            wires = [self._direct(step, flats, rank) for step in plan.on_route(Route.DIRECT)]
            wires += [self._bucket(bucket, flats, rank) for bucket in plan.buckets]
            self._launch = comm.all_gather([output for output, _ in wires], [mine for _, mine in wires])
            self.unsharded = _unsharded_tensors(plan, storage)

    def issue(self) -> PendingGather:
        """Start gathering; returns before the data has arrived. Allocates the storage on the gather stream: now if
        tensors travel right into it, else when the buckets have arrived."""
        with self._streams.on_gather():
            if self._has_direct:
                self._memory.allocate(self.storage, self.plan.unsharded_nbytes)
            self._staging.resize_(self.plan.staging_nbytes)
            self._casts.run()
            works = self._streams.issued(self._launch())
            if not works:  # the rest is enqueued in order on the gather stream
                self._arrive()
            done = self._streams.record()
        return PendingGather(works, self._arrive if works else None, done, self._streams)

    def release(self) -> None:
        """Free the unsharded tensors when the compute enqueued so far has read them."""
        self._memory.release(self.storage)

    def _arrive(self) -> None:
        if not self._has_direct:
            self._memory.allocate(self.storage, self.plan.unsharded_nbytes)
        for unpack in self._unpacks:
            unpack.run()
        self._staging.resize_(0)

    def _direct(self, step: GatherStep, flats: FlatShards, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and input of a tensor that travels on its own."""
        n = step.layout.chunk_numel
        output = tensor_on(self.storage, step.offset_nbytes, (n * step.layout.num_shards,), (1,), step.dtype)
        shard = shard_slice(flats, step, (n,))
        if not step.cast:
            return output, shard
        mine = output.narrow(0, rank * n, n)  # the gather then works in place
        self._casts.add(mine, shard)
        return output, mine

    def _bucket(self, bucket: GatherBucket, flats: FlatShards, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and input of a bucket; binds the copies into it and out of it."""
        rows_shape = (bucket.num_shards, bucket.row_numel)
        rows = tensor_on(self._staging, bucket.offset_nbytes, rows_shape, (bucket.row_numel, 1), bucket.dtype)
        self._unpacks.append(_unpack(bucket, rows, self.storage))
        runs = _runs(bucket.steps, flats)
        if len(runs) == 1 and not bucket.steps[0].cast:
            return rows.view(-1), runs[0]
        offset = 0
        for run in runs:
            self._casts.add(rows[rank].narrow(0, offset, run.numel()), run)
            offset += run.numel()
        return rows.view(-1), rows[rank]


class Copies:
    """Copies bound once and run every step, casting where dtypes differ, in one launch."""

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """``source`` of the same shape is to be copied into ``target``."""
        if target.numel() > 0:
            self._targets.append(target)
            self._sources.append(source)

    def run(self) -> None:
        if self._targets:
            _torch.foreach_copy(self._targets, self._sources)


class SplitCopy:
    """Rows cut at the same columns, one launch on CUDA, where many copies of strided tensors are as many launches."""

    def __init__(self, rows: torch.Tensor, sizes: list[int], targets: list[torch.Tensor]) -> None:
        self._rows, self._sizes, self._targets = rows, sizes, targets

    def run(self) -> None:
        torch.split_with_sizes_copy(self._rows, self._sizes, dim=1, out=self._targets)


class LocalGather:
    """World size 1 without a cast: the unsharded parameters are the shards. No memory, no copy."""

    def __init__(self, plan: GatherPlan, flats: FlatShards, streams: Streams) -> None:
        self.plan = plan
        self._streams = streams
        self.storage = torch.UntypedStorage(0)
        self.unsharded: list[torch.Tensor] = [torch.empty(0)] * len(plan.steps)
        for step in plan.steps:
            shape = step.layout.shape
            offset_nbytes = step.shard_offset * step.dtype.itemsize
            flat = flats[step.source].untyped_storage()
            self.unsharded[step.index] = tensor_on(flat, offset_nbytes, shape, contiguous_stride(shape), step.dtype)

    def issue(self) -> PendingGather:
        return PendingGather((), None, None, self._streams)

    def release(self) -> None:
        """Nothing was allocated."""


def is_local(plan: GatherPlan, mesh: ParallelMesh) -> bool:
    """Whether gathering ``plan`` would move nothing."""
    return mesh.shard.size == 1 and not any(step.cast for step in plan.steps)


class PendingReduce:
    """A reduction in flight. ``finish`` completes it on the CPU; on an accelerator all of it has been enqueued."""

    def __init__(self, works: Sequence[Waitable], keep: object, streams: Streams) -> None:
        self._works, self._keep, self._streams = works, keep, streams
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

    def finish(self) -> None:
        """The gradients are usable by the current stream; what the reduction read may be freed."""
        for work in self._works:
            work.wait()
        if self._then is not None:
            self._then()
        self._streams.wait_here(self._done)  # compute waits for the reduce stream: it frees the gradients it reads
        self._works, self._then, self._keep = (), None, None


class Reduce:
    """A reduce plan bound to a comm and streams; memory is allocated per step, and becomes the gradients'."""

    def __init__(self, plan: ReducePlan, mesh: ParallelMesh, comm: Comm, services: Services) -> None:
        self.plan = plan
        self._mesh, self._comm = mesh, comm
        self._streams, self._memory = services.streams, services.memory
        self._rows = [(i, s) for i, s in enumerate(plan.steps) if s.route is Route.ROWS]
        self._strided = [(i, s) for i, s in enumerate(plan.steps) if s.route is Route.STRIDED]
        self._direct = [i for i, s in enumerate(plan.steps) if s.route is Route.DIRECT]
        self._packed = [i for i, step in self._rows if step.layout.numel > 0]
        is_even = all(step.layout.is_even for _, step in self._rows)
        self._pack_rows = _torch.pack_rows if is_even or mesh.device.type != "cpu" else _pack_uneven_rows
        self._rows_numel = sum(step.layout.chunk_numel for _, step in self._rows)
        shapes = [(step.layout.shard_shape(mesh.shard.rank), step.offset) for step in plan.steps]
        self._shard_places = [(shape, contiguous_stride(shape), offset) for shape, offset in shapes]

    def issue(self, grads: list[torch.Tensor]) -> tuple[list[torch.Tensor], PendingReduce]:
        """Start reducing ``grads``, one per step of the plan, in their unsharded shapes.

        Takes the gradients out of the list, so that each is freed when it has been copied or sent. Returns the buffers
        that receive this rank's sums (one flat buffer ``[flat_numel]`` of reduce dtype), and what is pending.
        """
        ready = self._streams.record()
        keep = [] if self._mesh.device.type == "cpu" else grads.copy()  # the reduce stream reads them later
        with self._streams.on_reduce():
            self._streams.wait_here(ready)  # reduce stream waits for compute: it has written the gradients
            flat = torch.empty(self.plan.flat_numel, dtype=self.plan.dtypes.reduce, device=self._mesh.device)
            calls = self.plan.calls
            outputs = [flat] if len(calls) == 1 else [flat.narrow(0, offset, numel) for offset, numel in calls]
            inputs = self._inputs(grads)
            if self.plan.factors.before != 1.0:
                _torch.foreach_div(inputs, self.plan.factors.before)
            works = self._streams.issued(self._comm.reduce_scatter(outputs, inputs))
        return [flat], PendingReduce(works, (keep, inputs), self._streams)

    def all_reduce(self, sums: list[torch.Tensor]) -> None:
        """Sum over the replicate axis as well."""
        if self._mesh.replicate.size > 1:
            for tensor in sums:
                for work in self._streams.issued(all_reduce(self._mesh.replicate, tensor)):
                    work.wait()

    def average(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """Divide the complete sums in place and cast them to the dtype of the sharded gradients."""
        if self.plan.factors.after != 1.0:
            _torch.foreach_div(sums, self.plan.factors.after)
        dtype = self.plan.dtypes.orig
        return [tensor if tensor.dtype is dtype else tensor.to(dtype) for tensor in sums]

    def shards(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """Per step of the plan, this rank's gradient as a view of its buffer."""
        (flat,) = sums
        return [flat.as_strided(shape, stride, offset) for shape, stride, offset in self._shard_places]

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
        grads.clear()
        while direct:
            inputs.append(direct.pop(0).reshape(-1).to(dtype))
        return inputs


class LocalReduce(Reduce):
    """One rank and no cast: the gradients are their own reduction. No buffer, no copy."""

    def issue(self, grads: list[torch.Tensor]) -> tuple[list[torch.Tensor], PendingReduce]:
        ready = self._streams.record()
        with self._streams.on_reduce():
            self._streams.wait_here(ready)  # reduce stream waits for compute: it has written the gradients
        return list(grads), PendingReduce((), list(grads), self._streams)

    def shards(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        return sums


def bound_reduce(plan: ReducePlan, mesh: ParallelMesh, comm: Comm, services: Services) -> Reduce:
    """``plan`` bound to ``comm``, or to nothing where nothing has to move."""
    is_local = mesh.data_parallel_size == 1 and plan.dtypes.param is plan.dtypes.reduce and plan.factors.before == 1.0
    return (LocalReduce if is_local else Reduce)(plan, mesh, comm, services)


def _unsharded_tensors(plan: GatherPlan, storage: torch.UntypedStorage) -> list[torch.Tensor]:
    tensors = {step.index: _tensor_of(step, storage) for step in plan.steps}
    return [tensors[index] for index in range(len(plan.steps))]


def _tensor_of(step: GatherStep, storage: torch.UntypedStorage) -> torch.Tensor:
    shape = step.layout.shape
    return tensor_on(storage, step.offset_nbytes, shape, contiguous_stride(shape), step.dtype)


def _pieces(full: torch.Tensor, layout: ShardLayout) -> list[torch.Tensor]:
    intervals = [layout.interval(rank) for rank in range(layout.num_shards)]
    return [full.narrow(layout.dim, start, stop - start) for start, stop in intervals]


def _pack_uneven_rows(grads: list[torch.Tensor], out: torch.Tensor) -> None:
    """``_torch.pack_rows`` without its padded copies."""
    out.zero_()
    offset = 0
    for grad in grads:
        n = -(-grad.size(0) // out.size(0)) * math.prod(grad.shape[1:])
        values = grad.reshape(-1)
        num_full = values.numel() // max(n, 1)
        rows = out.narrow(1, offset, n)
        rows[:num_full].copy_(values[: num_full * n].view(num_full, n))
        if num_full * n < values.numel():
            rest = values[num_full * n :]
            rows[num_full, : rest.numel()].copy_(rest)
        offset += n


def _pack_strided(grads: Sequence[tuple[torch.Tensor, ShardLayout]], dtype: torch.dtype) -> torch.Tensor:
    """Rank-major ``[W * n]``: each rank's piece of every gradient, padded to the chunk."""
    num_shards = grads[0][1].num_shards
    packed = grads[0][0].new_zeros((num_shards, sum(layout.chunk_numel for _, layout in grads)), dtype=dtype)
    offset = 0
    for grad, layout in grads:
        for row, piece in zip(packed, _pieces(grad, layout), strict=True):
            row.narrow(0, offset, piece.numel()).view(piece.shape).copy_(piece)
        offset += layout.chunk_numel
    return packed.view(-1)


def _unpack(bucket: GatherBucket, rows: torch.Tensor, storage: torch.UntypedStorage) -> Copies | SplitCopy:
    """The copies from ``rows`` ``[W, row_numel]`` to where the bucket's tensors lie in ``storage``."""
    steps = [step for step in bucket.steps if step.layout.numel > 0]
    sizes = [step.layout.chunk_numel for step in steps]
    columns = rows.split_with_sizes(sizes, dim=1)
    if rows.device.type != "cpu" and all(step.route is Route.ROWS for step in steps):
        return SplitCopy(rows, sizes, [_rows_of(step, storage) for step in steps])
    copies = Copies()
    for step, column in zip(steps, columns, strict=True):
        if step.route is Route.ROWS:
            copies.add(_rows_of(step, storage), column)
            continue
        for row, target in zip(column, _pieces(_tensor_of(step, storage), step.layout), strict=True):
            copies.add(target, row.narrow(0, 0, target.numel()).view(target.shape))
    return copies


def _rows_of(step: GatherStep, storage: torch.UntypedStorage) -> torch.Tensor:
    """``step``'s region of ``storage`` as ``[W, n]``, its padding included."""
    n = step.layout.chunk_numel
    return tensor_on(storage, step.offset_nbytes, (step.layout.num_shards, n), (n, 1), step.dtype)


def _runs(steps: Sequence[GatherStep], flats: FlatShards) -> list[torch.Tensor]:
    """The shards of ``steps``, neighbours in one flat buffer as one slice."""
    runs: list[torch.Tensor] = []
    for source in dict.fromkeys(step.source for step in steps):
        same = [step for step in steps if step.source is source]
        runs.append(flats[source].narrow(0, same[0].shard_offset, sum(step.layout.chunk_numel for step in same)))
    return runs


@contextmanager
def _placed(storage: torch.UntypedStorage, nbytes: int) -> Iterator[None]:
    """Tensors can be made only inside a storage's memory: give an empty one memory meanwhile. Nothing is written."""
    was_empty = storage.nbytes() == 0
    if was_empty:
        storage.resize_(nbytes)
    yield
    if was_empty:
        storage.resize_(0)
