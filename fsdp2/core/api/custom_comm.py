"""Communication by the interfaces ``AllGather`` and ``ReduceScatter``, the user's own or those shipped here.

The setters of ``FSDPModule`` load this file. Parameter groups use the comms made here like any other comm. They pack
the tensors of a launch into one buffer, which the interface allocates, and copy the data to the outputs. So plans and
memory are the same for every interface, at the cost of these copies. As in torch, a launch ends when its message has
arrived.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from fsdp2.core import _torch
from fsdp2.core.api.arguments import expect
from fsdp2.core.api.module import FSDPModule, cut_groups, units_of
from fsdp2.core.comm.backends import GatherComm, Launch, ReduceComm, ReduceLaunch
from fsdp2.core.comm.streams import Waitable, waiting
from fsdp2.core.group.gradients import GroupOptions
from fsdp2.core.plan.mesh import Axis
from fsdp2.core.plan.plan import Routing
from fsdp2.core.runtime.unit import Unit


class Comm(ABC):
    """Communication that the user implements. Subclass :class:`AllGather` or :class:`ReduceScatter`."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a contiguous, uninitialised tensor for one message, allocated on the stream of the message. Calls may
        return the same memory: the runtime copies the old message out before it writes the next one."""


class AllGather(Comm):
    """An all-gather for :meth:`FSDPModule.set_custom_all_gather`. Source: the interface of PyTorch's FSDP2."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` ``[n]`` of all ranks of ``group`` into ``output_tensor`` ``[W * n]``, in rank order.

        ``output_tensor`` was returned by ``allocate``; ``input_tensor`` is this rank's slice of ``output_tensor``. One
        call gathers a whole unit; mixed dtypes are sent as bytes (``uint8``). ``async_op`` is not passed: the call must
        enqueue on the current stream or, on the CPU, return when the data has arrived. If it returns a ``Work``, the
        runtime waits for it.
        """


class ReduceScatter(Comm):
    """A reduce-scatter for :meth:`FSDPModule.set_custom_reduce_scatter`. Source: the interface of PyTorch's FSDP2."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` ``[W * n]`` over the ranks of ``group`` by ``op``, which is ``SUM``. Rank r receives
        elements ``[r * n, (r + 1) * n)`` in ``output_tensor`` ``[n]``.

        ``allocate`` returned both tensors; they have the reduce dtype. As in an all-gather, ``async_op`` is not passed.
        """


# As comms of the runtime


def _run(call: Callable[[], dist.Work | None]) -> None:
    """Send a message, which has arrived before whatever follows on this stream or, on the CPU, in this thread."""
    with waiting():
        work = call()
        if work is not None:  # although async_op was not passed
            work.wait()


class CustomGather:
    """An ``AllGather`` as the comm of ``axis``."""

    def __init__(self, comm: AllGather, axis: Axis, device: torch.device, routing: Routing) -> None:
        self._comm, self._axis, self._device, self.routing = comm, axis, device, routing

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Launch:
        if not outputs:
            return lambda: ()
        dtypes = {output.dtype for output in outputs}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        parts = [mine.view(dtype) for mine in inputs]
        sizes = [part.numel() for part in parts]
        targets = [output.view(dtype).view(self._axis.size, -1) for output in outputs]
        return partial(self._launch, parts, sizes, targets, dtype)

    def gather_buffer_nbytes(self, nbytes: int) -> int:
        return nbytes

    def _launch(
        self, parts: list[torch.Tensor], sizes: list[int], targets: list[torch.Tensor], dtype: torch.dtype
    ) -> Sequence[Waitable]:
        assert self._axis.group is not None
        with torch.inference_mode(False), torch.no_grad():  # the next pass may reuse the buffer
            buffer = _allocated(self._comm, self._axis.size * sum(sizes), dtype, self._device)
            rows = buffer.view(self._axis.size, -1)
            mine = rows[self._axis.rank]
            torch.cat(parts, out=mine)
            _run(partial(self._comm, output_tensor=buffer, input_tensor=mine, group=self._axis.group))
            torch.split_with_sizes_copy(rows, sizes, dim=1, out=targets)
        return ()


class CustomReduce:
    """A ``ReduceScatter`` as the comm of ``axis``."""

    routing = Routing(direct_min_nbytes=0)  # a bucket would add a copy: all gradients pass through one buffer already

    def __init__(self, comm: ReduceScatter, axis: Axis, device: torch.device) -> None:
        self._comm, self._axis, self._device = comm, axis, device

    def reduce_scatter(self, *, averages: bool = False) -> ReduceLaunch:
        assert not averages  # the interface only computes sums
        return self._launch

    def reduce_buffer_nbytes(self, nbytes: int) -> int:
        return nbytes + nbytes // self._axis.size

    def _launch(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Sequence[Waitable]:
        pairs = list(zip(outputs, inputs, strict=True))
        inputs.clear()
        for dtype in dict.fromkeys(output.dtype for output in outputs):
            alike = [(output, values) for output, values in pairs if output.dtype is dtype]
            pairs = [(output, values) for output, values in pairs if output.dtype is not dtype]
            self._reduce([output for output, _ in alike], [values for _, values in alike], dtype)
        return ()

    def _reduce(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], dtype: torch.dtype) -> None:
        assert self._axis.group is not None
        size, sizes = self._axis.size, [output.numel() for output in outputs]
        with torch.inference_mode(False), torch.no_grad():
            sent = _allocated(self._comm, size * sum(sizes), dtype, self._device)
            received = _allocated(self._comm, sum(sizes), dtype, self._device)
            rows = [_rows(values, size, numel) for values, numel in zip(inputs, sizes, strict=True)]
            torch.cat(rows, dim=1, out=sent.view(size, -1))
            op = dist.ReduceOp.SUM
            _run(partial(self._comm, output_tensor=received, input_tensor=sent, group=self._axis.group, op=op))
            torch.split_with_sizes_copy(received, sizes, out=outputs)


def _rows(values: torch.Tensor, count: int, numel: int) -> torch.Tensor:
    """``values``, whose last rows may be short, as ``[count, numel]``."""
    missing = count * numel - values.numel()
    return (pad(values, (0, missing)) if missing else values).view(count, numel)


def _allocated(comm: Comm, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    buffer = comm.allocate((numel,), dtype=dtype, device=device)
    found = (buffer.numel(), buffer.dtype, buffer.device.type, buffer.is_contiguous())
    if found != (numel, dtype, device.type, True):
        raise ValueError(
            f"{type(comm).__name__}.allocate(({numel},), dtype={dtype}, device='{device}') returned a tensor of shape "
            f"{tuple(buffer.shape)}, {buffer.dtype}, on {buffer.device}, with strides {buffer.stride()}. Return a "
            "contiguous tensor of the requested size, dtype and device, for example a slice of a larger buffer."
        )
    return buffer.view(-1)


@dataclass(frozen=True)
class GathersBy:
    """Makes the comms of ``interface``."""

    interface: AllGather

    def __call__(self, default: GatherComm, axis: Axis, device: torch.device) -> GatherComm:
        # Plans stay as compiled for the default comm, since they define where the shards lie in their buffers.
        return CustomGather(self.interface, axis, device, default.routing)


@dataclass(frozen=True)
class ReducesBy:
    """Makes the comms of ``interface``."""

    interface: ReduceScatter

    def __call__(self, default: ReduceComm, axis: Axis, device: torch.device) -> ReduceComm:
        return CustomReduce(self.interface, axis, device)


# The shipped interfaces: the backend's own collectives, in the memory that is fastest for the backend


class BackendMemory:
    """Memory from the backend's own allocator, if it has one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        backend = _torch.backend_of(self._group, device)
        if not backend.supports_tensor_alloc(device):
            return torch.empty(size, dtype=dtype, device=device)
        return cast(torch.Tensor, backend.allocate_tensor(math.prod(size), dtype=dtype, device=device))

    def prepare(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Nothing to do: the backend already knows its own memory."""


class SymmetricMemory:
    """Memory at addresses that all ranks know. Untested so far, since it needs several GPUs."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        _torch.symmetric_memory.set_backend(cast(Any, backend))
        dist.barrier(group=group)  # creates the communicator that the memory needs

    def allocate(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        pool = _torch.symmetric_memory.get_mem_pool(device)  # avoids most exchanges of addresses
        with torch.cuda.use_mem_pool(pool):
            return torch.empty(size, dtype=dtype, device=device)

    def prepare(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        _torch.symmetric_memory.rendezvous(tensor, group.group_name)


class _InMemory(Comm):
    """A comm whose buffers come from the chosen ``memory``."""

    def __init__(self, memory: BackendMemory | SymmetricMemory) -> None:
        self.memory = memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.memory.allocate(size, dtype, device)


class BackendAllGather(_InMemory, AllGather):
    """The backend's all-gather in chosen ``memory``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.memory.prepare(output_tensor, group)  # the input is a part of it
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class BackendReduceScatter(_InMemory, ReduceScatter):
    """The backend's reduce-scatter in chosen ``memory``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.memory.prepare(input_tensor, group)
        self.memory.prepare(output_tensor, group)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def in_memory(memory: BackendMemory | SymmetricMemory) -> dict[str, Any]:
    """The options of a group that communicates in ``memory``."""
    return {"gathers_by": GathersBy(BackendAllGather(memory)), "reduces_by": ReducesBy(BackendReduceScatter(memory))}


def has_memory(options: GroupOptions, kind: type) -> bool:
    """Whether a group with ``options`` gathers in memory of ``kind``."""
    return isinstance(options.gathers_by, GathersBy) and _is_in(options.gathers_by.interface, kind)


def _is_in(comm: Comm, kind: type) -> bool:
    return isinstance(getattr(comm, "memory", None), kind)


# The implementation of the setters


def communicate_by(caller: str, unit: Unit, value: Any) -> None:
    """Make ``unit`` communicate through ``value``, which was passed to the setter ``caller`` of its module.

    Raises:
        TypeError, ValueError: as documented for the setter.
    """
    _SETTERS[caller](caller, unit, value)


def _gather_by(caller: str, unit: Unit, comm: Any) -> None:
    _check_comm(caller, unit, comm, "AllGather")
    _configure(unit, gathers_by=GathersBy(comm))


def _reduce_by(caller: str, unit: Unit, comm: Any) -> None:
    _check_comm(caller, unit, comm, "ReduceScatter")
    _configure(unit, reduces_by=ReducesBy(comm))


def _use_backend_memory(caller: str, unit: Unit, enable: Any) -> None:
    _check_no_other_comm(caller, unit, BackendMemory)
    for group in unit.groups:
        shard = group.mesh.shard.group
        none = {"gathers_by": None, "reduces_by": None}
        group.configure(**(none if not enable or shard is None else in_memory(BackendMemory(shard))))


def _use_symmetric_memory(caller: str, unit: Unit, backend: Any) -> None:
    _check_no_other_comm(caller, unit, SymmetricMemory)
    expect(backend == "NCCL", f"{caller}: backend", backend, "'NCCL'", "No other is supported.", by_value=True)
    device = unit.mesh.device
    if device.type != "cuda":
        raise ValueError(
            f"{caller}: the mesh of unit '{unit.name}' is on {device.type}, expected cuda. Only CUDA has symmetric "
            f"memory here. Do not call {caller} on other devices."
        )
    for group in unit.groups:
        shard = group.mesh.shard.group
        if shard is not None:
            options = in_memory(SymmetricMemory(shard, backend))
            if not group.options.divides_behind_hook:
                options["reduces_by"] = None
            group.configure(**options)


_SETTERS: dict[str, Callable[[str, Unit, Any], None]] = {
    "set_custom_all_gather": _gather_by,
    "set_custom_reduce_scatter": _reduce_by,
    "set_allocate_memory_from_process_group_for_comm": _use_backend_memory,
    "set_symm_mem_for_comm": _use_symmetric_memory,
}


def _configure(unit: Unit, **changes: object) -> None:
    for group in unit.groups:
        group.configure(**changes)


def _check_comm(caller: str, unit: Unit, comm: object, expected: str) -> None:
    """Accept any object with the two methods: a comm may be a subclass of torch's interface."""
    cut_groups(unit, caller)
    is_comm = not isinstance(comm, type) and callable(comm) and callable(getattr(comm, "allocate", None))
    expect(is_comm, f"{caller}: comm", comm, f"an fsdp2.core.{expected}, with allocate() and __call__()")


def _check_no_other_comm(caller: str, unit: Unit, kind: type) -> None:
    """Refuse a unit with a comm that ``caller`` did not set; comms that it sets have memory of ``kind``."""
    made = [by for group in unit.groups for by in (group.options.gathers_by, group.options.reduces_by)]
    for comm in (by.interface for by in made if isinstance(by, (GathersBy, ReducesBy))):
        if not _is_in(comm, kind):
            raise ValueError(
                f"{caller}: unit '{unit.name}' already communicates by a {type(comm).__name__}, which allocates its "
                "own memory. For each unit, call only one of: set_custom_all_gather and set_custom_reduce_scatter; "
                "set_allocate_memory_from_process_group_for_comm; set_symm_mem_for_comm."
            )


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots share communication streams. Roots on one device always do so: this call only checks.

    Raises:
        ValueError: an item of ``modules`` is not sharded, or ``modules`` are on several devices.
    """
    devices = dict.fromkeys(str(unit.mesh.device) for unit in units_of(modules, "share_comm_ctx"))
    if len(devices) > 1:
        raise ValueError(f"share_comm_ctx: expected modules on one device, got modules on {' and '.join(devices)}.")
