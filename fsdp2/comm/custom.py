"""Communication by the interfaces ``AllGather`` and ``ReduceScatter``, the user's own or those shipped here.

Parameter groups use it like any other comm. It puts the tensors of a launch side by side in one buffer, which the
interface allocates. When the message has arrived, it copies the data to the outputs. So plans and memory are the same
for every interface, at the price of these copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from fsdp2 import _torch
from fsdp2.comm.backends import GatherComm, Launch, ReduceComm
from fsdp2.comm.streams import Waitable, streams_for
from fsdp2.plan.mesh import Axis, ParallelMesh
from fsdp2.plan.plan import Routing
from fsdp2.types import AllGather, Comm, ReduceScatter


class _Message:
    """A message in flight, and what to do when it has arrived. The first ``wait`` does it; later ones do nothing."""

    def __init__(self, work: dist.Work | None, buffers: list[torch.Tensor], arrive: Callable[[], None]) -> None:
        self._work, self._buffers = work, buffers
        self._arrive: Callable[[], None] | None = arrive
        self._places = [_place(buffer) for buffer in buffers]
        _in_flight.update(dict.fromkeys(self._places, self))

    def wait(self) -> None:
        if self._arrive is None:
            return
        if self._work is not None:
            self._work.wait()
        self._arrive()
        self._work = self._arrive = None
        self._buffers.clear()
        for place in self._places:
            _in_flight.pop(place, None)


# Messages by the address of their memory. An ``allocate`` may return the same memory every time; on the CPU nothing
# else orders the messages in that memory.
_in_flight: dict[int, _Message] = {}


def _is_async(device: torch.device) -> bool:
    """Whether messages travel beside the thread that issues them. On an accelerator, the current stream orders them."""
    return not streams_for(device).runs_ahead


def _still_to_wait_for(messages: Sequence[_Message], device: torch.device) -> Sequence[Waitable]:
    """What the CPU has to wait for. On an accelerator, the current stream waits."""
    if _is_async(device):
        return messages
    for message in messages:
        message.wait()
    return ()


def _place(buffer: torch.Tensor) -> int:
    return buffer.untyped_storage().data_ptr()


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
        with torch.inference_mode(False), torch.no_grad():  # the buffer may be used in the next pass, too
            buffer = _allocated(self._comm, self._axis.size * sum(sizes), dtype, self._device)
            rows = buffer.view(self._axis.size, -1)
            mine = rows[self._axis.rank]
            torch.cat(parts, out=mine)
            is_async = _is_async(self._device)
            work = self._comm(output_tensor=buffer, input_tensor=mine, group=self._axis.group, async_op=is_async)
        message = _Message(work, [buffer], partial(torch.split_with_sizes_copy, rows, sizes, dim=1, out=targets))
        return _still_to_wait_for([message], self._device)


class CustomReduce:
    """A ``ReduceScatter`` as the comm of ``axis``."""

    routing = Routing(direct_min_nbytes=0)  # a bucket would be one more copy: all gradients go through one buffer

    def __init__(self, comm: ReduceScatter, axis: Axis, device: torch.device) -> None:
        self._comm, self._axis, self._device = comm, axis, device

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, averages: bool = False
    ) -> Sequence[Waitable]:
        assert not averages  # the interface is asked for sums
        pairs = list(zip(outputs, inputs, strict=True))
        inputs.clear()
        messages = []
        for dtype in dict.fromkeys(output.dtype for output in outputs):
            alike = [(output, values) for output, values in pairs if output.dtype is dtype]
            pairs = [(output, values) for output, values in pairs if output.dtype is not dtype]
            messages.append(self._reduce([output for output, _ in alike], [values for _, values in alike], dtype))
        return _still_to_wait_for(messages, self._device)

    def reduce_buffer_nbytes(self, nbytes: int) -> int:
        return nbytes + nbytes // self._axis.size

    def _reduce(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], dtype: torch.dtype) -> _Message:
        assert self._axis.group is not None
        size, sizes = self._axis.size, [output.numel() for output in outputs]
        with torch.inference_mode(False), torch.no_grad():
            sent = _allocated(self._comm, size * sum(sizes), dtype, self._device)
            received = _allocated(self._comm, sum(sizes), dtype, self._device)
            rows = [_rows(values, size, numel) for values, numel in zip(inputs, sizes, strict=True)]
            torch.cat(rows, dim=1, out=sent.view(size, -1))
            is_async = _is_async(self._device)
            op = dist.ReduceOp.SUM
            work = self._comm(
                output_tensor=received, input_tensor=sent, group=self._axis.group, op=op, async_op=is_async
            )
        arrive = partial(torch.split_with_sizes_copy, received, sizes, out=outputs)
        return _Message(work, [sent, received], arrive)


def _rows(values: torch.Tensor, count: int, numel: int) -> torch.Tensor:
    """``values``, whose last parts may be short, as ``[count, numel]``."""
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
    if (earlier := _in_flight.get(_place(buffer))) is not None:
        earlier.wait()  # copies its data out before the next message is written
    return buffer.view(-1)


def gather_comm(default: GatherComm, mesh: ParallelMesh, all_gather: AllGather | None) -> GatherComm:
    """The comm for gathers on ``mesh``: ``default``, unless there is an ``all_gather``, and something to move."""
    if all_gather is None or mesh.shard.size == 1:
        return default
    # Plans stay as compiled for the default comm: they define where the shards lie in their buffers.
    return CustomGather(all_gather, mesh.shard, mesh.device, default.routing)


def reduce_comm(
    default: ReduceComm, axis: Axis, device: torch.device, reduce_scatter: ReduceScatter | None
) -> ReduceComm:
    """The same for reductions."""
    if reduce_scatter is None or axis.size == 1:
        return default
    return CustomReduce(reduce_scatter, axis, device)


# The shipped interfaces: the backend's own collectives, in the memory that the backend moves fastest


class CommMemory(Protocol):
    """Where the buffers of messages come from."""

    def allocate(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...

    def prepare(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        """``tensor`` is about to travel over ``group``."""


class BackendMemory:
    """Memory from the backend's own allocator, if it has one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return _torch.allocate_by_backend(self._group, size, dtype, device)

    def prepare(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        """The backend knows its memory."""


class SymmetricMemory:
    """Memory at addresses that all ranks know. Not tried so far: it takes several GPUs."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        _torch.use_symmetric_memory(group, backend)

    def allocate(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return _torch.allocate_symmetric(size, dtype, device)

    def prepare(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        _torch.exchange_addresses(tensor, group)


class _InMemory(Comm):
    """Its buffers come from the chosen ``memory``."""

    def __init__(self, memory: CommMemory) -> None:
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
        return _torch.all_gather(group, [output_tensor], [input_tensor], on_stream=not async_op)()


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
        return _torch.reduce_scatter(group, op, on_stream=not async_op)([output_tensor], [input_tensor])
