"""Run a plan: bind its steps to memory once, then issue, wait, release.

This room sees plans, flat tensors, a comm and streams, never parameters or modules. What is in flight is one
``PendingGather`` or ``PendingReduce``, finished exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fsdp2 import _torch
from fsdp2.buffers import Memory, alias, tensor_on
from fsdp2.comm import Comm, all_reduce
from fsdp2.layout import ShardLayout, contiguous_stride
from fsdp2.mesh import ParallelMesh
from fsdp2.plan import GatherPlan, GatherStep, ReducePlan, Route
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
        unpack: Callable[[], None] | None,
        keep: Sequence[torch.Tensor],
        done: torch.Event | None,
        streams: Streams,
    ) -> None:
        self._works, self._unpack, self._keep, self._done, self._streams = works, unpack, keep, done, streams

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._unpack is not None:
            self._unpack()
        self._streams.wait_here(self._done)  # compute waits for the gather stream: the unsharded parameters are read
        self._keep = ()


class Gather:
    """A gather plan bound to a group's flat shards and unsharded storage.

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
        self._comm, self._memory, self._streams = comm, memory, streams
        self.release = lambda: memory.release(storage)
        was_empty = storage.nbytes() == 0
        if was_empty:  # tensors can be placed only inside a storage; nothing is written here
            storage.resize_(plan.unsharded_nbytes)
        self._bind_direct(flats, rank)
        self._buckets = [
            bucket(steps, flats, storage)
            for bucket, route in ((RowsBucket, Route.ROWS), (StridedBucket, Route.STRIDED))
            if (steps := plan.on_route(route))
        ]
        self.unsharded = _unsharded_tensors(plan, storage)
        if was_empty:
            storage.resize_(0)

    def _bind_direct(self, flats: FlatShards, rank: int) -> None:
        self._outputs: list[torch.Tensor] = []
        self._inputs: list[torch.Tensor] = []
        self._cast_targets: list[torch.Tensor] = []
        self._cast_sources: list[torch.Tensor] = []
        for step in self.plan.on_route(Route.DIRECT):
            n = step.layout.chunk_numel
            mine_nbytes = step.offset_nbytes + rank * step.chunk_nbytes
            shard = shard_slice(flats, step, (n,))
            if step.cast:  # straight into this rank's slice of the output: the gather then works in place
                self._cast_sources.append(shard)
                shard = tensor_on(self.storage, mine_nbytes, (n,), (1,), step.dtype)
                self._cast_targets.append(shard)
            self._inputs.append(shard)
            padded = step.layout.padded_numel
            self._outputs.append(tensor_on(self.storage, step.offset_nbytes, (padded,), (1,), step.dtype))

    def issue(self) -> PendingGather:
        """Start gathering; returns before the data has arrived. Allocates the storage on the gather stream."""
        with self._streams.on_gather():
            self._memory.allocate(self.storage, self.plan.unsharded_nbytes)
            if self._cast_targets:
                _torch.foreach_copy(self._cast_targets, self._cast_sources)
            outputs, inputs = self._outputs.copy(), self._inputs.copy()
            staged = []
            for bucket in self._buckets:
                contribution = bucket.contribution()
                staging = contribution.new_empty(contribution.numel() * bucket.num_shards)
                outputs.append(staging)
                inputs.append(contribution)
                staged.append((bucket, staging))
            works = self._streams.issued(self._comm.all_gather(outputs, inputs))

            def unpack() -> None:
                for bucket, staging in staged:
                    bucket.unpack(staging)

            if not works:  # enqueued in order on the gather stream
                unpack()
            done = self._streams.record()
        return PendingGather(works, unpack if works and staged else None, inputs, done, self._streams)


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
        return PendingGather((), None, (), None, self._streams)

    def release(self) -> None:
        """Nothing was allocated."""


def is_local(plan: GatherPlan, mesh: ParallelMesh) -> bool:
    """Whether gathering ``plan`` would move nothing."""
    return mesh.shard.size == 1 and not any(step.cast for step in plan.steps)


class RowsBucket:
    """Shards that are intervals of their tensors, gathered as bytes in one message and copied out in one launch."""

    def __init__(self, steps: Sequence[GatherStep], flats: FlatShards, storage: torch.UntypedStorage) -> None:
        self.num_shards = steps[0].layout.num_shards
        self._runs = _runs(steps, flats)
        self._sizes = [step.chunk_nbytes for step in steps]
        self._targets = [
            tensor_on(
                storage,
                step.offset_nbytes,
                (self.num_shards, step.chunk_nbytes),
                (step.chunk_nbytes, 1),
                torch.uint8,
            )
            for step in steps
        ]

    def contribution(self) -> torch.Tensor:
        """This rank's bytes ``[n]``: the shards as they lie in the flat buffers, cast where needed."""
        return _contribution(self._runs)

    def unpack(self, staging: torch.Tensor) -> None:
        """Copy ``staging`` ``[W * n]`` out into the unsharded storage."""
        rows = staging.view(self.num_shards, -1)
        torch.split_with_sizes_copy(rows, self._sizes, dim=1, out=self._targets)


class StridedBucket:
    """Shards along another dimension than the first: each is scattered over the memory of its tensor."""

    def __init__(self, steps: Sequence[GatherStep], flats: FlatShards, storage: torch.UntypedStorage) -> None:
        self.num_shards = steps[0].layout.num_shards
        self._runs = _runs(steps, flats)
        self._nbytes = sum(step.chunk_nbytes for step in steps)
        self._copies: list[tuple[torch.Tensor, int, int]] = []  # target, offset and size in the staging buffer
        offset = 0
        for step in steps:
            for rank, target in enumerate(_pieces(_tensor_of(step, storage), step.layout)):
                start = rank * self._nbytes + offset
                self._copies.append((target, start, target.numel() * target.itemsize))
            offset += step.chunk_nbytes

    def contribution(self) -> torch.Tensor:
        """This rank's bytes ``[n]``."""
        return _contribution(self._runs)

    def unpack(self, staging: torch.Tensor) -> None:
        """Copy ``staging`` ``[W * n]`` out, shard by shard."""
        for target, start, nbytes in self._copies:
            if nbytes > 0:
                # A copy, since bytes at an odd offset cannot be viewed as a wider dtype.
                piece = staging.narrow(0, start, nbytes).clone().view(target.dtype)
                target.copy_(piece.view(target.shape))


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

    def __init__(self, plan: ReducePlan, mesh: ParallelMesh, comm: Comm, streams: Streams) -> None:
        self.plan = plan
        self._mesh, self._comm, self._streams = mesh, comm, streams
        self._rows = [(i, s) for i, s in enumerate(plan.steps) if s.route is Route.ROWS]
        self._strided = [(i, s) for i, s in enumerate(plan.steps) if s.route is Route.STRIDED]
        self._direct = [i for i, s in enumerate(plan.steps) if s.route is Route.DIRECT]
        self._rows_numel = sum(step.layout.chunk_numel for _, step in self._rows)
        shapes = [(step.layout.shard_shape(mesh.shard.rank), step.offset) for step in plan.steps]
        self._shard_places = [(offset, shape, contiguous_stride(shape)) for shape, offset in shapes]

    def issue(self, grads: list[torch.Tensor]) -> tuple[list[torch.Tensor], PendingReduce]:
        """Start reducing ``grads``, one per step of the plan, in their unsharded shapes.

        Returns the buffers that receive this rank's sums (one flat buffer ``[flat_numel]`` of reduce dtype), and what
        is pending.
        """
        ready = self._streams.record()
        with self._streams.on_reduce():
            self._streams.wait_here(ready)  # reduce stream waits for compute: it has written the gradients
            flat = torch.empty(self.plan.flat_numel, dtype=self.plan.dtypes.reduce, device=self._mesh.device)
            outputs = list(flat.split_with_sizes(self.plan.split_sizes))[::2]
            inputs = self._inputs(grads)
            if self.plan.factors.before != 1.0:
                torch._foreach_div_(inputs, self.plan.factors.before)
            works = self._streams.issued(self._comm.reduce_scatter(outputs, inputs))
        return [flat], PendingReduce(works, (grads, inputs), self._streams)

    def all_reduce(self, sums: list[torch.Tensor]) -> None:
        """Sum over the replicate axis as well."""
        if self._mesh.replicate.size > 1:
            for tensor in sums:
                for work in self._streams.issued(all_reduce(self._mesh.replicate, tensor)):
                    work.wait()

    def average(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """Divide the complete sums in place and cast them to the dtype of the sharded gradients."""
        if self.plan.factors.after != 1.0:
            torch._foreach_div_(sums, self.plan.factors.after)
        return [tensor.to(self.plan.dtypes.orig) for tensor in sums]

    def shards(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """Per step of the plan, this rank's gradient, on the memory of its buffer."""
        (flat,) = sums
        return [alias(flat, offset, shape, stride) for offset, shape, stride in self._shard_places]

    def _inputs(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        num_shards, dtype = self._mesh.shard.size, self.plan.dtypes.reduce
        inputs = []
        if self._rows:
            staging = grads[0].new_empty((num_shards, self._rows_numel), dtype=dtype)
            _torch.pack_rows([grads[i] for i, _ in self._rows], staging)
            inputs.append(staging.view(-1))
        if self._strided:
            inputs.append(_pack_strided([(grads[i], step.layout) for i, step in self._strided], dtype))
        return inputs + [grads[i].reshape(-1) for i in self._direct]


class LocalReduce(Reduce):
    """One rank and no cast: the gradients are their own reduction. No buffer, no copy."""

    def issue(self, grads: list[torch.Tensor]) -> tuple[list[torch.Tensor], PendingReduce]:
        return list(grads), PendingReduce((), None, self._streams)

    def shards(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        return sums


def bound_reduce(plan: ReducePlan, mesh: ParallelMesh, comm: Comm, streams: Streams) -> Reduce:
    """``plan`` bound to ``comm``, or to nothing where nothing has to move."""
    is_local = mesh.data_parallel_size == 1 and plan.dtypes.param is plan.dtypes.reduce and plan.factors.before == 1.0
    return (LocalReduce if is_local else Reduce)(plan, mesh, comm, streams)


def _unsharded_tensors(plan: GatherPlan, storage: torch.UntypedStorage) -> list[torch.Tensor]:
    tensors = {step.index: _tensor_of(step, storage) for step in plan.steps}
    return [tensors[index] for index in range(len(plan.steps))]


def _tensor_of(step: GatherStep, storage: torch.UntypedStorage) -> torch.Tensor:
    shape = step.layout.shape
    return tensor_on(storage, step.offset_nbytes, shape, contiguous_stride(shape), step.dtype)


def _pieces(full: torch.Tensor, layout: ShardLayout) -> list[torch.Tensor]:
    intervals = [layout.interval(rank) for rank in range(layout.num_shards)]
    return [full.narrow(layout.dim, start, stop - start) for start, stop in intervals]


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


def _runs(steps: Sequence[GatherStep], flats: FlatShards) -> list[tuple[torch.Tensor, torch.dtype]]:
    """Neighbouring shards of the same dtypes as one slice each, with the dtype they travel in."""
    runs: list[tuple[torch.Tensor, torch.dtype]] = []
    start = 0
    for i, step in enumerate(steps):
        following = steps[i + 1] if i + 1 < len(steps) else None
        if following is not None and (following.source, following.dtype) == (step.source, step.dtype):
            continue
        first = steps[start]
        numel = sum(s.layout.chunk_numel for s in steps[start : i + 1])
        runs.append((flats[first.source].narrow(0, first.shard_offset, numel), step.dtype))
        start = i + 1
    return runs


def _contribution(runs: Sequence[tuple[torch.Tensor, torch.dtype]]) -> torch.Tensor:
    parts = [run.to(dtype).view(torch.uint8) for run, dtype in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
