"""How the bytes travel: which calls of which backend carry an all-gather and a reduction.

A comm sees flat tensors, never parameters. It also gives the facts that plans need: from which size on a tensor travels
on its own, and whether the backend averages. All ranks issue all calls in the same order.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import pickle
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.comm.streams import Waitable, launched, streams_for, wait_for, waiting
from fsdp2.plan.mesh import Axis, ParallelMesh
from fsdp2.plan.plan import Routing

Launch = Callable[[], Sequence[Waitable]]

# What torch's runtime calls for one gather and one reduction of a group: by these names, tools count ours.
_ALL_GATHER, _REDUCE_SCATTER = "_allgather_base_", "_reduce_scatter_base_"


class GatherComm(Protocol):
    """All-gathers over one shard axis. ``routing``: what plans ask of the comm."""

    routing: Routing

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Launch:
        """A function that gathers each ``inputs[i]`` ``[n]`` of all ranks into ``outputs[i]`` ``[W * n]`` at each call.

        An input may be this rank's slice of its output. The tensors stay bound; their memory may change between calls.
        """

    def gather_buffer_nbytes(self, nbytes: int) -> int:
        """Memory that the comm itself allocates while ``nbytes`` are gathered."""
        return 0


class ReduceComm(Protocol):
    """Reduce-scatters over one shard axis. ``routing``: what plans ask of the comm."""

    routing: Routing

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, averages: bool = False
    ) -> Sequence[Waitable]:
        """Sum, or average, ``inputs[i]`` ``[W * n]`` over the ranks; rank r gets elements ``[r * n, (r + 1) * n)`` in
        ``outputs[i]`` ``[n]``. If ``routing.reduces_uneven``, an input may be shorter; then the last ranks get fewer
        elements. May empty the list ``inputs`` once nothing reads the tensors any more.
        """

    def reduce_buffer_nbytes(self, nbytes: int) -> int:
        """Memory that the comm itself allocates while ``nbytes`` of all ranks' parts are reduced."""
        return 0


class AxisComm(GatherComm, ReduceComm, Protocol):
    """Gathers and reductions; every backend has both."""


class CollectiveComm(AxisComm):
    """The backend's own collectives, all tensors of a group in one launch: NCCL, and any backend not named below."""

    # NCCL groups few large tensors well, and many small ones badly (NVIDIA/nccl#725, pytorch/pytorch#153673). Not
    # measured so far, which takes several GPUs; of one, benchmarks/gpu_direct.py measures launches and copies.
    routing = Routing(direct_min_nbytes=1024 * 1024, reduces_uneven=False, buckets_casts=True)

    def __init__(self, group: dist.ProcessGroup, *, on_stream: bool) -> None:
        self._group = group
        self._on_stream = on_stream
        self._sum = _torch.reduce_scatter(group, dist.ReduceOp.SUM, on_stream=on_stream)
        self._average = _torch.reduce_scatter(group, dist.ReduceOp.AVG, on_stream=on_stream)

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Launch:
        if not outputs:  # hooks may send nothing; a coalesced launch takes no empty list
            return lambda: ()
        launch = _torch.all_gather(self._group, outputs, inputs, on_stream=self._on_stream)
        return lambda: self._issued(_torch.counted_as(_ALL_GATHER, launch) if _torch.num_modes() else launch())

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, averages: bool = False
    ) -> Sequence[Waitable]:
        launch = self._average if averages else self._sum
        if _torch.num_modes():
            return self._issued(_torch.counted_as(_REDUCE_SCATTER, partial(launch, outputs, inputs)))
        return self._issued(launch(outputs, inputs))

    def _issued(self, work: dist.Work | None) -> Sequence[Waitable]:
        """On a stream, NCCL returns no work. If another backend returns one, the stream waits for it, not the CPU."""
        if work is None or not self._on_stream:
            return () if work is None else (work,)
        work.wait()
        return ()


class OneByOneComm(CollectiveComm):
    """gloo on an accelerator, one call per tensor. gloo's calls for many tensors take one dtype, on the CPU, only."""

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Launch:
        gather, pairs = super().all_gather, zip(outputs, inputs, strict=True)
        launches = [gather([output], [mine]) for output, mine in pairs]
        return lambda: [work for launch in launches for work in launch()]

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, averages: bool = False
    ) -> Sequence[Waitable]:
        reduce, pairs = super().reduce_scatter, zip(outputs, inputs, strict=True)
        return [work for output, mine in pairs for work in reduce([output], [mine], averages=averages)]


# Every comm has its own channels: even if the ranks' programs diverge, no message of one parameter group is taken for a
# message of another. Every rank makes its comms on a process group in the same order; else see match_channels.
_FIRST_CHANNEL = 7101  # tags of messages: away from 0, which user code on the same group is likely to use
_next_channel: dict[tuple[object, ...], int] = {}  # by name and ranks of the process group


def _new_channels(group: dist.ProcessGroup) -> tuple[int, int]:
    """One for gathers, one for reductions."""
    first = _next_channel.get(_identity(group), _FIRST_CHANNEL)
    _next_channel[_identity(group)] = first + 2
    return first, first + 1


def match_channels(axis: Axis) -> None:
    """Make comms that are created on ``axis`` from now on match, although the ranks created different ones before."""
    if axis.group is not None:
        mine = _next_channel.get(_identity(axis.group), _FIRST_CHANNEL)
        _next_channel[_identity(axis.group)] = max(exchange(axis, mine))


def check_connections(group: dist.ProcessGroup) -> None:
    """Find out, on the CPU, whether a rank of ``group`` is lost: gloo says that a connection is closed when it is to
    send a message. Nobody receives this one.

    Raises:
        CommunicationError: a connection is closed.
    """
    if _torch.backend_name(group, torch.device("cpu")) == "gloo":
        for target in range(group.size()):
            if target != group.rank():
                launched(group.send, [_NOTHING], target, _CHECKS)


_CHECKS = _FIRST_CHANNEL - 1
_NOTHING = torch.zeros(1, dtype=torch.uint8, device="cpu")


def _identity(group: dist.ProcessGroup) -> tuple[object, ...]:
    return (group.group_name, *dist.get_process_group_ranks(group))


class PeerComm(AxisComm):
    """gloo: every rank sends its part directly to every other rank, from and to the tensors that compute uses.

    gloo's own all-gather and reduce-scatter stage their data. Measured with 2 ranks and 48 MiB in four tensors: 15 ms
    for either direction here, 24 ms for its all-gather, 35 ms for its reduce-scatter.
    Rank r adds the parts in the order r - 1, r - 2, ..., r + 1, r: a result does not depend on where an element lies.

    Sends come first: a ``send`` whose receive is already known writes all its data on the calling thread, while gloo's
    own thread spins. With receives first, a step took 3 to 13% longer (2 ranks, widths 256 to 1024;
    benchmarks/gloo_step.py).
    """

    # For smaller shards, a message costs more than the bucket's copy: with shards of 128 KiB a step took 87 ms direct
    # and 70 ms in buckets. With shards of 2 MiB both take the same time, and direct saves the bucket's memory
    # (benchmarks/gloo_step.py --direct-min-nbytes).
    routing = Routing(direct_min_nbytes=512 * 1024)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank, self._size = group, group.rank(), group.size()
        self._gather_tag, self._reduce_tag = _new_channels(group)
        # Staggered, so that no rank is the first target of all others.
        self._targets = [(self._rank + step) % self._size for step in range(1, self._size)]
        self._sources = [(self._rank - step) % self._size for step in range(1, self._size)]

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Launch:
        sends: list[tuple[torch.Tensor, int]] = []
        receives: list[tuple[torch.Tensor, int]] = []
        own: list[torch.Tensor] = []
        for output, mine in zip(outputs, inputs, strict=True):
            slices = output.split(mine.numel())
            sends += [(mine, target) for target in self._targets]
            receives += [(slices[source], source) for source in self._sources]
            own.append(slices[self._rank])
        copy_own = _copies(own, inputs)

        def launch() -> Sequence[Waitable]:
            messages = _Messages()
            for part, target in sends:
                messages.start(self._group.send, part, target, self._gather_tag)
            for part, source in receives:
                messages.start(self._group.recv, part, source, self._gather_tag)
            copy_own()
            return (messages,)

        return lambda: _torch.counted_as(_ALL_GATHER, launch) if _torch.num_modes() else launch()

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, averages: bool = False
    ) -> Sequence[Waitable]:
        assert not averages  # see can_average
        pairs = zip(outputs, inputs, strict=True)
        return _torch.counted_as(
            _REDUCE_SCATTER, lambda: [self._reduce_one(output, values) for output, values in pairs]
        )

    def reduce_buffer_nbytes(self, nbytes: int) -> int:
        return nbytes // self._size * max(self._size - 2, 0)  # the first part arrives in the output

    def _reduce_one(self, output: torch.Tensor, values: torch.Tensor) -> Waitable:
        parts = _parts(values, output.numel(), self._size)
        mine = parts[self._rank]
        if mine.numel() < output.numel():
            output[mine.numel() :].zero_()
            output = output[: mine.numel()]
        received = [output, *(torch.empty_like(output) for _ in self._sources[1:])]
        messages = _Messages()
        for target in self._targets:
            if parts[target].numel() > 0:
                messages.start(self._group.send, parts[target], target, self._reduce_tag)
        if mine.numel() > 0:
            for buffer, source in zip(received, self._sources, strict=True):
                messages.start(self._group.recv, buffer, source, self._reduce_tag)
        return _PeerSum(messages, received, mine)


_in_flight: set[_Messages] = set()


class _Messages:
    """Messages that gloo sends and receives. They stay in ``_in_flight`` until somebody has waited for them, also if
    their owner goes away (I17): a message that finds no memory to arrive in blocks its connection for all later ones.
    """

    def __init__(self) -> None:
        self._works: deque[dist.Work] = deque()
        self._error: RuntimeError | None = None
        _in_flight.add(self)

    def start(self, call: Callable[..., dist.Work], tensor: torch.Tensor, rank: int, tag: int) -> None:
        """Send ``tensor``, or receive it. If that fails, ``wait`` raises: others are in flight already."""
        if self._error is None:
            try:
                self._works.append(call([tensor], rank, tag))
            except RuntimeError as error:
                self._error = error

    def wait(self) -> None:
        """Wait for those that nobody has waited for: after an interrupt, the next call waits for the others."""
        if self._error is not None:
            raise self._error
        while self._works:
            self._works.popleft().wait()
        _in_flight.discard(self)


class _PeerSum:
    """Messages in flight, and the sum to compute when the messages have arrived."""

    def __init__(self, messages: _Messages, received: list[torch.Tensor], mine: torch.Tensor) -> None:
        self._messages, self._received, self._mine = messages, received, mine

    def wait(self) -> None:
        self._messages.wait()
        output, *others = self._received
        for other in [*others, self._mine]:
            output.add_(other)


def _parts(values: torch.Tensor, size: int, count: int) -> list[torch.Tensor]:
    """``values`` cut into ``count`` consecutive parts of ``size``; the last ones may be short or empty."""
    total = values.numel()
    bounds = [min(i * size, total) for i in range(count + 1)]
    return [values.narrow(0, start, stop - start) for start, stop in itertools.pairwise(bounds)]


class LocalComm(AxisComm):
    """A shard axis of one rank: gathers and reductions are local copies."""

    routing = Routing(direct_min_nbytes=0)

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Launch:
        return _copies(outputs, inputs)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, averages: bool = False
    ) -> Sequence[Waitable]:
        _torch.foreach_copy(outputs, inputs)
        return ()


def _copies(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Launch:
    """A function that copies each of ``sources`` to its target, unless both share memory. Nothing to wait for."""
    pairs = zip(targets, sources, strict=True)
    copies = [(target, source) for target, source in pairs if target.data_ptr() != source.data_ptr()]

    def launch() -> Sequence[Waitable]:
        for target, source in copies:
            target.copy_(source)
        return ()

    return launch


def comm_for(axis: Axis, device: torch.device, *, is_async: bool = False) -> AxisComm:
    """The comm for ``axis``, chosen by the backend that serves ``device``. ``is_async``: the collectives run beside the
    stream that issues them, on an accelerator, too."""
    if axis.group is None or axis.size == 1:
        return LocalComm()
    is_gloo = _torch.backend_name(axis.group, device) == "gloo"
    if is_gloo and device.type == "cpu":
        return PeerComm(axis.group)
    kind = OneByOneComm if is_gloo else CollectiveComm
    return kind(axis.group, on_stream=streams_for(device).runs_ahead and not is_async)


def can_average(mesh: ParallelMesh) -> bool:
    """Whether reductions on ``mesh`` can take the mean themselves: NCCL and backends like it do, gloo does not."""
    groups = [axis.group for axis in (mesh.shard, mesh.replicate) if axis.group is not None and axis.size > 1]
    is_able = mesh.device.type not in ("cpu", "mtia")
    return is_able and all(_torch.backend_name(group, mesh.device) != "gloo" for group in groups)


def exchange(axis: Axis, value: object) -> list[Any]:
    """The ``value`` of every rank on ``axis``, in rank order. Slow, and the CPU waits: only for one-time agreements."""
    if axis.group is None or axis.size == 1:
        return [value]
    if _torch.backend_name(axis.group, torch.device("cpu")) == "gloo":
        return launched(_torch.counted_as, None, partial(_exchange_by_sums, axis, value))
    values: list[Any] = [None] * axis.size
    gather = partial(dist.all_gather_object, values, value, group=axis.group)
    with waiting():
        launched(_torch.counted_as, None, gather)
    return values


def _exchange_by_sums(axis: Axis, value: object) -> list[Any]:
    """As ``dist.all_gather_object``, with tensors that are known here: see ``_lent``."""
    assert axis.group is not None
    mine, rank = pickle.dumps(value), axis.group.rank()
    sizes = torch.zeros(axis.size, dtype=torch.int64, device="cpu")  # whatever the user's default device is
    sizes[rank] = len(mine)
    parts = [torch.zeros(size, dtype=torch.uint8, device="cpu") for size in _summed(axis, sizes).tolist()]
    parts[rank].copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    whole = _summed(axis, torch.cat(parts))
    return [pickle.loads(ctypes.string_at(part.data_ptr(), part.numel())) for part in whole.split(sizes.tolist())]


def _summed(axis: Axis, tensor: torch.Tensor) -> torch.Tensor:
    wait_for(all_reduce(axis, tensor))
    return tensor


# Tensors that gloo's threads may still hold. Such a thread drops a collective after it has told us that it is done, and
# needs Python's lock to drop the tensor. If Python were ending, the thread would end there, and with it the process:
# "terminate called without an active exception".
_lent: set[weakref.ref[torch.Tensor]] = set()
_MAX_WAIT_S = 5.0  # at the end of a program whose collectives have failed


def all_reduce(axis: Axis, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Sequence[Waitable]:
    """Reduce ``tensor`` over ``axis`` in place."""
    return all_reduce_in(axis.group, tensor, op)


def all_reduce_in(
    group: dist.ProcessGroup | None, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType
) -> Sequence[Waitable]:
    """Reduce ``tensor`` over the ranks of ``group`` in place."""
    lent = tensor.detach()  # the backend alone holds it, so it goes away with the last of the backend's references
    if tensor.device.type == "cpu":
        _lent.add(weakref.ref(lent, _lent.discard))
    work = dist.all_reduce(lent, op, group=group, async_op=True)
    return () if work is None else (work,)


@atexit.register
def _wait_for_lent() -> None:
    """Let gloo's threads drop what they hold, while they can still take Python's lock."""
    until = time.monotonic() + _MAX_WAIT_S
    while _lent and time.monotonic() < until:
        time.sleep(0.001)
