"""How bytes are moved: which calls of which backend perform all-gathers and reductions.

A comm sees flat tensors, never parameters. It also provides the facts that plans need: from which size on a tensor is
sent on its own, and whether the backend averages. All ranks issue all calls in the same order.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from fsdp2.core import _torch
from fsdp2.core.comm.streams import Waitable, streams_for
from fsdp2.core.plan.mesh import Axis, ParallelMesh
from fsdp2.core.plan.plan import Routing

Launch = Callable[[], Sequence[Waitable]]
ReduceLaunch = Callable[[list[torch.Tensor], list[torch.Tensor]], Sequence[Waitable]]  # gets outputs and inputs


class GatherComm(Protocol):
    """All-gathers over one shard axis. ``routing``: what plans need to know about the comm."""

    routing: Routing

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Launch:
        """A function whose calls gather each ``inputs[i]`` ``[n]`` of all ranks into ``outputs[i]`` ``[W * n]``.

        An input may be this rank's slice of its output. The tensors stay bound; their memory may change between calls.
        """

    def gather_buffer_nbytes(self, nbytes: int) -> int:
        """The number of bytes that the comm itself allocates while ``nbytes`` are gathered."""
        return 0


class ReduceComm(Protocol):
    """Reduce-scatters over one shard axis. ``routing``: what plans need to know about the comm. ``reads_gaps``: whether
    ``all_reduce`` needs zeros between the sums in a buffer."""

    routing: Routing
    reads_gaps: bool = False

    def reduce_scatter(self, *, averages: bool = False) -> ReduceLaunch:
        """A function that sums, or averages, each ``inputs[i]`` ``[W * n]`` over the ranks; rank r gets elements
        ``[r * n, (r + 1) * n)`` in ``outputs[i]`` ``[n]``. If ``routing.reduces_uneven``, an input may be shorter; then
        the last ranks get fewer elements. It may empty the list ``inputs`` once nothing reads these tensors anymore.
        """

    def reduce_buffer_nbytes(self, nbytes: int) -> int:
        """The number of bytes that the comm itself allocates while ``nbytes`` of all ranks' parts are reduced."""
        return 0

    def all_reduce(
        self, group: dist.ProcessGroup | None, sums: Sequence[torch.Tensor], op: dist.ReduceOp.RedOpType
    ) -> Sequence[Waitable]:
        """Reduce this rank's ``sums``, one buffer per plan, over the ranks of ``group``, the replicas, in place."""
        return [work for each in sums for work in all_reduce(group, each, op)]


class AxisComm(GatherComm, ReduceComm, Protocol):
    """Gathers and reductions; every backend has both."""


class CollectiveComm(AxisComm):
    """The backend's own collectives, all tensors of a group in one launch: NCCL, and any backend but gloo."""

    # NCCL groups few large tensors well, and many small ones badly (NVIDIA/nccl#725, pytorch/pytorch#153673). The
    # transfers themselves were not measured, since that needs several GPUs. On one H200, launches and copies took 0.8
    # to 1.0 of the time that buckets take (benchmarks/gpu/direct.py).
    routing = Routing(direct_min_nbytes=1024 * 1024, reduces_uneven=False)

    def __init__(self, group: dist.ProcessGroup, *, on_stream: bool) -> None:
        self._group = group
        self._on_stream = on_stream
        self._launch_of = launch_of = partial(_torch.with_works, on_stream=on_stream)
        self._sum = launch_of(_torch.reduce_scatter(group, dist.ReduceOp.SUM, on_stream=on_stream))
        self._average = launch_of(_torch.reduce_scatter(group, dist.ReduceOp.AVG, on_stream=on_stream))

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Launch:
        if not outputs:  # hooks may send nothing, but a coalesced launch takes no empty list
            return lambda: ()
        return self._launch_of(_torch.all_gather(self._group, outputs, inputs, on_stream=self._on_stream))

    def reduce_scatter(self, *, averages: bool = False) -> ReduceLaunch:
        return self._average if averages else self._sum


class OneByOneComm(CollectiveComm):
    """gloo with one call per tensor: its calls for many tensors work only on the CPU, with tensors of one dtype."""

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Launch:
        gather, pairs = super().all_gather, zip(outputs, inputs, strict=True)
        launches = [gather([output], [mine]) for output, mine in pairs]
        return lambda: [work for launch in launches for work in launch()]

    def reduce_scatter(self, *, averages: bool = False) -> ReduceLaunch:
        reduce = super().reduce_scatter(averages=averages)

        def reduce_each(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Sequence[Waitable]:
            pairs = zip(outputs, inputs, strict=True)
            return [work for output, mine in pairs for work in reduce([output], [mine])]

        return reduce_each


class LocalComm(AxisComm):
    """A shard axis of one rank: gathers and reductions are local copies."""

    routing = Routing(direct_min_nbytes=0, reduces_casts=True)

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Launch:
        return copies(outputs, inputs)

    def reduce_scatter(self, *, averages: bool = False) -> ReduceLaunch:
        return _copy_all


def _copy_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Sequence[Waitable]:
    _torch.foreach_copy(outputs, inputs)
    return ()


def copies(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Launch:
    """A function that copies each of ``sources`` to its target, unless both share memory. It returns no works."""
    pairs = zip(targets, sources, strict=True)
    copies = [(target, source) for target, source in pairs if target.data_ptr() != source.data_ptr()]

    def launch() -> Sequence[Waitable]:
        for target, source in copies:
            target.copy_(source)
        return ()

    return launch


_registered: dict[tuple[str, str], Callable[[dist.ProcessGroup], AxisComm]] = {}


def register_comm(backend: str, device_type: str, make: Callable[[dist.ProcessGroup], AxisComm]) -> None:
    """Let ``make`` make the comms of process groups whose ``backend`` serves devices of ``device_type``."""
    _registered[backend, device_type] = make


def comm_for(axis: Axis, device: torch.device, *, is_async: bool = False) -> AxisComm:
    """The comm for ``axis``, chosen by the backend that serves ``device``. ``is_async``: even on an accelerator, the
    collectives run concurrently with the stream that issues them."""
    if axis.group is None or axis.size == 1:
        return LocalComm()
    backend = _torch.backend_name(axis.group, device)
    registered = _registered.get((backend, device.type))
    if registered is not None:
        return registered(axis.group)
    kind = OneByOneComm if backend == "gloo" else CollectiveComm
    return kind(axis.group, on_stream=streams_for(device).runs_ahead and not is_async)


def can_average(mesh: ParallelMesh) -> bool:
    """Whether reductions on ``mesh`` can take the mean themselves: NCCL and similar backends can, gloo cannot."""
    is_able = mesh.device.type not in ("cpu", "mtia")
    return is_able and all(_torch.backend_name(group, mesh.device) != "gloo" for group in mesh.process_groups)


# Tensors that gloo's threads may still hold. Such a thread drops a collective after it has reported completion, and
# needs the GIL to drop the tensor. If Python were finalizing by then, the thread would end there and abort the process:
# "terminate called without an active exception".
_lent: set[weakref.ref[torch.Tensor]] = set()
_MAX_WAIT_S = 5.0  # a limit for the end of a program whose collectives have failed


def all_reduce(
    group: dist.ProcessGroup | None, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Sequence[Waitable]:
    """Reduce ``tensor`` over the ranks of ``group`` in place."""
    lent = tensor.detach()  # only the backend holds it, so it dies with the last of the backend's references
    if tensor.device.type == "cpu":
        _lent.add(weakref.ref(lent, _lent.discard))
    work = dist.all_reduce(lent, op, group=group, async_op=True)
    return () if work is None else (work,)


@atexit.register
def _wait_for_lent() -> None:
    """Let gloo's threads drop their tensors while they can still take the GIL."""
    until = time.monotonic() + _MAX_WAIT_S
    while _lent and time.monotonic() < until:
        time.sleep(0.001)
