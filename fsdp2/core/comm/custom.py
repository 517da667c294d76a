"""A user's own communication, by the interfaces ``AllGather`` and ``ReduceScatter``.

Parameter groups use the comms made here like any other comm. They pack the tensors of a launch into one buffer, which
the interface allocates, and copy the data to the outputs. So plans and memory are the same for every interface, at the
cost of these copies. As in torch, a launch ends when its message has arrived.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from fsdp2.core.comm.backends import GatherComm, Launch, ReduceComm, ReduceLaunch
from fsdp2.core.comm.streams import Waitable, waiting
from fsdp2.core.plan.mesh import Axis
from fsdp2.core.plan.plan import Routing


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


class CustomReduce(ReduceComm):
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
        return default if axis.size == 1 else CustomGather(self.interface, axis, device, default.routing)


@dataclass(frozen=True)
class ReducesBy:
    """Makes the comms of ``interface``."""

    interface: ReduceScatter

    def __call__(self, default: ReduceComm, axis: Axis, device: torch.device) -> ReduceComm:
        return default if axis.size == 1 else CustomReduce(self.interface, axis, device)


# Makes the comm that reduces over an axis, given the default one.
ReduceMaker = Callable[[ReduceComm, Axis, torch.device], ReduceComm]


@dataclass(frozen=True)
class AllReduceHook:
    """The user's hook ``run``, called on ``stream``, or on the reduce stream if ``stream`` is None."""

    run: Callable[[torch.Tensor], object]
    stream: torch.Stream | None = None


def carrier(default: Any, by: Callable[[Any, Axis, torch.device], Any] | None, axis: Axis, device: torch.device) -> Any:
    """The comm of ``axis``: the one that ``by`` makes, or ``default``."""
    return default if by is None else by(default, axis, device)
