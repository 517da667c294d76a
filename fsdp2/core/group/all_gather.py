"""Run a gather plan: bind its steps to memory once, then issue, wait and release in each pass.

Autograd saves the unsharded parameters, and views of them, for backward. So a group's unsharded tensors always keep the
same storage; only the storage's memory is freed and allocated again (I1). Memory belongs to the stream on which it was
allocated, and returns to that stream when the last reader on another stream is done (I3).

This file sees plans, flat tensors, a comm and streams, never parameters or modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby

import torch

from fsdp2.core import _torch, seams
from fsdp2.core.comm.backends import GatherComm
from fsdp2.core.comm.memory import tensor_on
from fsdp2.core.comm.offload import FlatStage
from fsdp2.core.comm.streams import Streams, Waitable, is_of_backend, wait_for
from fsdp2.core.plan.layout import Layout, contiguous_stride
from fsdp2.core.plan.plan import GatherBucket, GatherPlan, GatherStep, Origin, Route
from fsdp2.core.types import CommunicationError

FlatShards = dict[torch.dtype, torch.Tensor]


def flat_shards(plan: GatherPlan, device: torch.device, *, pin_memory: bool = False) -> FlatShards:
    """Zeroed flat shard buffers ``[numel]`` for ``plan``, one per dtype. The padding always stays zero."""
    return {
        dtype: torch.zeros(numel, dtype=dtype, device=device, pin_memory=pin_memory)
        for dtype, numel in plan.shard_numels
    }


def shard_slice(flats: FlatShards, step: GatherStep, shape: tuple[int, ...]) -> torch.Tensor:
    """The part of a flat shard buffer that holds a shard of ``shape``, without its padding."""
    return flats[step.source].as_strided(shape, contiguous_stride(shape), step.shard_offset)


class GatheredMemory:
    """The storages that one group gathers into, empty at first. All plain parameters share one storage. Each tensor
    for hooks has a separate storage, because hooks expect the tensor at the start of it.

    Attributes:
        is_lost: a collective has failed, or its launch was interrupted. Its other messages may still be sent or
            received at any time, so no memory of gathers into these storages is freed any more (I17).
    """

    def __init__(self, plan: GatherPlan, device: torch.device) -> None:
        self.is_lost = False
        self.shared = torch.UntypedStorage(0, device=device)
        self._own = {
            step.index: torch.UntypedStorage(0, device=device) for step in plan.steps if step.origin is not Origin.SHARD
        }

    def of(self, step: GatherStep) -> torch.UntypedStorage:
        """The storage that ``step`` gathers into."""
        return self._own.get(step.index, self.shared)

    def tensor(self, step: GatherStep, shape: tuple[int, ...]) -> torch.Tensor:
        """What ``step`` gathers, as a contiguous tensor of ``shape``."""
        return tensor_on(self.of(step), step.offset_nbytes, shape, contiguous_stride(shape), step.dtype)


class Gather:
    """A gather plan bound to a group's flat shards and to the memory that it gathers into.

    Every tensor that a step uses is created once, here; its storage's memory is allocated and freed many times. Only
    one gather is in flight at a time: ``issue``, then ``wait`` or ``drop``. If ``calls_pre_hooks`` is False,
    ``hooks.payloads`` is not called: the payloads of an earlier gather are gathered again. ``stage`` copies ``flats``
    to the device that gathers, if ``flats`` are on another.

    Attributes:
        outputs: the gathered tensor ``[*shape]`` of each step, by the step's ``index``.
    """

    def __init__(
        self,
        plan: GatherPlan,
        flats: FlatShards,
        gathered: GatheredMemory,
        rank: int,
        comm: GatherComm,
        streams: Streams,
        hooks: seams.Codec | None,
        *,
        stage: FlatStage | None = None,
        calls_pre_hooks: bool = True,
    ) -> None:
        self.plan, self.gathered, self.stage = plan, gathered, stage
        self._streams, self._hooks = streams, hooks
        self._rank, self._calls_pre_hooks = rank, calls_pre_hooks
        self._flats = flats if stage is None else stage.flats
        self._staging = torch.UntypedStorage(0, device=gathered.shared.device)
        self._plan_memory()
        self._cast_targets: list[torch.Tensor] = []  # parts of what this rank sends; its shards are copied there
        self._cast_sources: list[torch.Tensor] = []
        self._unpacks: list[Callable[[], object]] = []  # copy from the buckets to where compute reads
        self._hooked: dict[int, torch.Tensor] = {}  # other parts, by step index; hooks' payloads are copied there
        with self._placed():
            wires = [self._direct(step) for step in plan.on_route(Route.DIRECT)]
            wires += [self._bucket(bucket) for bucket in plan.buckets]
            self._wires = [(output, mine) for output, mine in wires if output.numel()]
            self.outputs = {step.index: gathered.tensor(step, step.layout.shape) for step in plan.steps}
        self._payload_targets = [target for _, target in sorted(self._hooked.items()) if target.numel()]
        self.set_comm(comm)
        self._has_arrived = True  # ``_arrive`` has run: its work is done, or enqueued
        self._works: Sequence[Waitable] = ()
        self._done: torch.Event | None = None

    def _plan_memory(self) -> None:
        """List the memory that the gather needs. Staging memory, and tensors that hooks consume, are freed on arrival;
        the rest is freed by ``release``."""
        plan, gathered = self.plan, self.gathered
        sizes = {gathered.of(step): step.padded_nbytes for step in plan.steps}
        sizes[gathered.shared] = plan.shared_nbytes
        consumed = {gathered.of(step) for step in plan.steps if step.origin is Origin.HOOK_CONSUMED}
        staging = [(self._staging, plan.staging_nbytes), *([] if self.stage is None else self.stage.storages)]
        self._memory = [(storage, nbytes) for storage, nbytes in [*sizes.items(), *staging] if nbytes]
        self._passing = [storage for storage, _ in self._memory if storage in consumed or storage not in sizes]
        self._lasting = [each for each in self._memory if each[0] in sizes and each[0] not in consumed]

    def set_comm(self, comm: GatherComm) -> None:
        """From the next launch on, gather with ``comm``. Called on the gather stream."""
        with self._placed():
            self._launch = comm.all_gather([output for output, _ in self._wires], [mine for _, mine in self._wires])

    def issue(self) -> None:
        """Start gathering into memory allocated on the gather stream; returns before the data has arrived. If this
        fails, all memory is freed, unless messages may still be in flight."""
        with self._streams.on_gather:
            payloads = None
            if self._hooks is not None and self._calls_pre_hooks:
                with _torch.without_autocast():
                    payloads = self._hooks.payloads()
            try:
                allocate(self._memory)
                if self.stage is not None:
                    self.stage.fetch()
                if self._cast_targets:
                    _torch.foreach_copy(self._cast_targets, self._cast_sources)
                if payloads:
                    _torch.foreach_copy(self._payload_targets, payloads)
            except BaseException:
                self._forget_memory()
                raise
            try:
                works = self._launch()
            except (KeyboardInterrupt, CommunicationError):  # some messages are in flight, and some are not
                self.gathered.is_lost = True
                raise
            except RuntimeError as error:
                if not is_of_backend(error):
                    raise
                self.gathered.is_lost = True
                raise CommunicationError(str(error)) from error
            if not works:  # the gather stream orders the arrival after the collective
                try:
                    self._arrive()
                except BaseException:
                    self._forget_memory()
                    raise
            self._done = None if works else self._streams.record()
        self._works, self._has_arrived = works, not works

    def _forget_memory(self) -> None:
        """Free the memory now. Nothing uses it: the gather is not in flight, or is ordered on the gather stream."""
        self._empty([storage for storage, _ in self._memory])

    def _empty(self, storages: Sequence[torch.UntypedStorage]) -> None:
        if not self.gathered.is_lost:
            for storage in storages:
                storage.resize_(0)

    def wait(self) -> None:
        """After this call, the current stream may use the gathered tensors.

        Raises:
            CommunicationError: the all-gather failed. Call ``drop`` next.
        """
        if not self._has_arrived:
            wait_for(self._works, self._lose)
            self._arrive()
            self._has_arrived = True
        if self._done is not None:
            self._streams.wait_here(self._done)  # compute waits for the gather stream, which fills what compute reads

    def drop(self) -> None:
        """Abandon the gather in flight: wait until no rank reads or writes its memory any more."""
        if not self._has_arrived:
            wait_for(self._works, self._lose)
            self._works = ()
            self._empty(self._passing)
        self._streams.wait_here(self._done)  # compute waits for the gather stream, which fills what compute frees

    def release(self, *, keeps_memory: bool = False) -> None:
        """Free the unsharded tensors once the compute enqueued so far has read them. With ``keeps_memory``, free
        nothing; the next gather waits for that compute before it writes the memory."""
        self._streams.gather_after_compute()  # gather stream waits for compute, which reads the stream's memory (I3)
        if not keeps_memory and not self.gathered.is_lost:
            for storage, _ in self._lasting if self._hooks is None else self._lasting + self._hooks.storages:
                storage.resize_(0)

    def _lose(self) -> None:
        """Note that a collective has failed. No later call waits for it again."""
        self.gathered.is_lost, self._works = True, ()

    def _arrive(self) -> None:
        """The data has arrived: copy it to where compute reads it."""
        self._works = ()
        for unpack in self._unpacks:
            unpack()
        if self._hooks is not None:
            with _torch.without_autocast():  # the surrounding autocast region may belong to another unit
                self._hooks.arrive()
        if self._passing:
            self._empty(self._passing)

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """Give empty storages memory within this block, as tensors can only be made on memory. Nothing is written."""
        empty = [(storage, nbytes) for storage, nbytes in self._memory if storage.nbytes() == 0]
        for storage, nbytes in empty:
            storage.resize_(nbytes)
        try:
            yield
        finally:
            for storage, _ in empty:
                storage.resize_(0)

    def _direct(self, step: GatherStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and input of a tensor that is gathered on its own."""
        n = step.layout.chunk_numel
        output = self.gathered.tensor(step, (n * step.layout.num_shards,))
        if not step.is_copied_in:
            return output, shard_slice(self._flats, step, (n,))
        mine = output.narrow(0, self._rank * n, n)  # the gather then works in place
        self._copy_in(step, mine)
        return output, mine

    def _bucket(self, bucket: GatherBucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and input of a bucket. Also binds the copies into the bucket and out of it."""
        rows_shape = (bucket.num_shards, bucket.row_numel)
        rows = tensor_on(self._staging, bucket.offset_nbytes, rows_shape, (bucket.row_numel, 1), bucket.dtype)
        self._unpacks += _unpacks(bucket, rows, self.gathered)
        shards = [step for step in bucket.steps if step.origin is Origin.SHARD]
        runs = _runs(shards, self._flats)
        if len(runs) == 1 and not any(step.is_copied_in for step in bucket.steps):
            return rows.view(-1), runs[0]
        mine, offset = rows[self._rank], 0
        for run in runs:
            self._cast_in(mine.narrow(0, offset, run.numel()), run)
            offset += run.numel()
        for step in bucket.steps[len(shards) :]:
            self._copy_in(step, mine.narrow(0, offset, step.layout.chunk_numel))
            offset += step.layout.chunk_numel
        return rows.view(-1), mine

    def _copy_in(self, step: GatherStep, mine: torch.Tensor) -> None:
        """``mine`` ``[chunk_numel]`` receives this rank's part of ``step`` before each launch."""
        if step.origin is Origin.SHARD:
            self._cast_in(mine, shard_slice(self._flats, step, (step.layout.chunk_numel,)))
            return
        shape = step.layout.shard_shape(self._rank)
        self._hooked[step.index] = mine.narrow(0, 0, math.prod(shape)).view(shape)

    def _cast_in(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.numel() > 0:
            self._cast_targets.append(target)
            self._cast_sources.append(source)


def allocate(storages: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
    """Allocate each of ``storages``, given with their sizes in bytes, on the current stream, unless it has memory."""
    for storage, nbytes in storages:
        if storage.nbytes() != nbytes:  # else the memory was kept
            storage.resize_(nbytes)


class LocalGather:
    """At world size 1, without casts or hooks, the unsharded parameters are the shards: no memory, no copies."""

    stage = None

    def __init__(self, plan: GatherPlan, flats: FlatShards) -> None:
        self.plan = plan
        self.outputs = {step.index: self._output(step, flats[step.source]) for step in plan.steps}

    def _output(self, step: GatherStep, flat: torch.Tensor) -> torch.Tensor:
        shape, offset_nbytes = step.layout.shape, step.shard_offset * step.dtype.itemsize
        return tensor_on(flat.untyped_storage(), offset_nbytes, shape, contiguous_stride(shape), step.dtype)

    def issue(self) -> None:
        """Nothing moves."""

    wait = drop = issue

    def release(self, *, keeps_memory: bool = False) -> None:
        """Nothing was allocated."""


def piece_pairs(
    full: torch.Tensor, rows: torch.Tensor, layout: Layout
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Pairs of views of ``full`` ``[*layout.shape]`` and of ``rows`` ``[W, chunk_numel]`` for the same elements. Each
    rank's piece is at the start of its row. Neighbouring ranks whose pieces have the same shape share one view.
    """
    of_full, of_rows = [], []
    sizes = [stop - start for start, stop in map(layout.interval, range(layout.num_shards))]
    for size, same in groupby(range(layout.num_shards), key=sizes.__getitem__):
        ranks = list(same)
        if size == 0:
            continue
        start, dim = layout.interval(ranks[0])[0], layout.dim
        part = full.narrow(dim, start, size * len(ranks)).unflatten(dim, (len(ranks), size)).movedim(dim, 0)
        of_full.append(part)
        row_part = rows.narrow(0, ranks[0], len(ranks)).narrow(1, 0, math.prod(part.shape[1:]))
        of_rows.append(row_part.view(part.shape))
    return of_full, of_rows


def _unpacks(bucket: GatherBucket, rows: torch.Tensor, gathered: GatheredMemory) -> list[Callable[[], object]]:
    """Functions that copy ``rows`` ``[W, row_numel]`` to the bucket's tensors in their storages, in one launch."""
    steps = [step for step in bucket.steps if step.layout.numel > 0]
    sizes = [step.layout.chunk_numel for step in steps]

    if rows.device.type != "cpu" and steps and all(step.route is Route.ROWS for step in steps):
        # On CUDA, a foreach copy of strided tensors takes one launch per tensor. This call also copies their padding.
        outputs = [gathered.tensor(step, (step.layout.num_shards, step.layout.chunk_numel)) for step in steps]
        return [partial(torch.split_with_sizes_copy, rows, sizes, dim=1, out=outputs)]
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for step, column in zip(steps, rows.split_with_sizes(sizes, dim=1), strict=True):
        parts, row_parts = piece_pairs(gathered.tensor(step, step.layout.shape or (1,)), column, step.layout)
        targets += parts
        sources += row_parts
    return [partial(_torch.foreach_copy, targets, sources)] if targets else []


def _runs(steps: Sequence[GatherStep], flats: FlatShards) -> list[torch.Tensor]:
    """The shards of ``steps`` as slices of the flat buffers, one slice per buffer."""
    runs: list[torch.Tensor] = []
    for source in dict.fromkeys(step.source for step in steps):
        same = [step for step in steps if step.source is source]
        runs.append(flats[source].narrow(0, same[0].shard_offset, sum(step.layout.chunk_numel for step in same)))
    return runs
