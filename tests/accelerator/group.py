"""A process group with NCCL's contract on the simulated accelerator: backend ``"simnccl"``.

- Without ``asyncOp`` a collective is ordered on the current stream, and there is no work. With it, the collective runs
  on a stream of the group, behind what the current one was given; the work's ``wait`` makes the current stream wait.
- A launch reads its inputs when its stream comes to it, and what it writes is NaN until it has arrived.
- Only async works keep tensors alive. Else whoever frees them must have waited.
- It refuses what NCCL refuses.

The bytes of a launch travel between the processes by gloo, one message for each pair of ranks, and every rank adds up
in the order of ranks. Tensors of the CPU are given to gloo, as by the backend "cpu:gloo,cuda:nccl".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from tests.accelerator.device import DEVICE, load

BACKEND = "simnccl"

# Of the messages of launches, far from the tags of messages on the CPU, which go by the same connections.
_FIRST_TAG = 1 << 24

launches: list[str] = []  # "all-reduce starts", "all-reduce ends" and so on, in the order of the device

_COLLECTIVES = [
    *("all_gather_single_coalesced", "all_gather_single", "reduce_scatter_single_coalesced", "reduce_scatter_single"),
    *("allreduce", "allgather", "all_to_all_single", "broadcast", "scatter", "gather", "send", "recv", "barrier"),
]

Op = dist.ReduceOp
_COMBINE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,
    Op.PREMUL_SUM: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
}


def register() -> None:
    """Make ``"simnccl"`` known to ``torch.distributed``."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        for name in _COLLECTIVES:  # the compiler does not see NCCL's, which are C++
            setattr(SimNCCL, name, torch.compiler.disable(getattr(SimNCCL, name)))
        dist.Backend.register_backend(BACKEND, SimNCCL, devices=[DEVICE, "cpu"])


def refuse(text: str) -> NoReturn:
    raise ValueError(f"{BACKEND}: {text}")


@functools.cache
def _waiters() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(8, thread_name_prefix=BACKEND)


class Message:
    """One launch, as the device's worker runs it: ``start``, then ``finish`` when the other ranks' parts are here.

    Args:
        name: kind of collective; also the kind of operation that a schedule may delay.
        parts: what each rank gets of this rank's inputs, read at start; None for those that get nothing.
        finish: given one buffer per rank that sends something to this one, in rank order, writes ``outputs``.
        sizes: bytes that each rank sends to this one.
    """

    def __init__(
        self,
        group: SimNCCL,
        name: str,
        outputs: Sequence[Tensor],
        parts: Callable[[], list[list[Tensor] | None]],
        sizes: list[int],
        finish: Callable[[list[Tensor]], None],
    ) -> None:
        self.name = name
        self._group, self._outputs, self._parts = group, outputs, parts
        self._sizes, self._finish = sizes, finish
        self._tag = group.next_tag()
        self._received: list[Tensor] = []
        self._arrived: list[Future[object]] = []

    def start(self) -> None:
        launches.append(f"{self.name} starts")
        group, rank, works = self._group, self._group.rank(), []
        self._sent = [None if parts is None else _as_bytes(parts) for parts in self._parts()]
        for output in self._outputs:
            output.reshape(-1).view(torch.uint8).fill_(0xFF)  # in flight
        self._received = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in self._sizes]
        for peer, part in enumerate(self._sent):
            if peer != rank and part is not None and part.numel():
                works.append(group.gloo.send([part], peer, self._tag))
        for peer, buffer in enumerate(self._received):
            if peer == rank:
                mine = self._sent[rank]
                if mine is not None and buffer.numel():
                    buffer.copy_(mine)
            elif buffer.numel():
                works.append(group.gloo.recv([buffer], peer, self._tag))
        self._arrived = [_waiters().submit(work.wait) for work in works]

    def arrived(self, seconds: float) -> bool:
        return not wait(self._arrived, seconds).not_done

    def finish(self) -> None:
        launches.append(f"{self.name} ends")
        for each in self._arrived:
            each.result()  # raises if a rank has gone
        self._finish(self._received)


def _as_bytes(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors]).clone()


class Work(dist._Work):
    """A collective on the group's own stream. Keeps its tensors until the current stream has waited."""

    def __init__(self, done: torch.Event | None, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._done, self._tensors = done, list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._done is not None:
            torch.accelerator.current_stream().wait_event(self._done)
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        return self._done is None or self._done.query()

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(self._tensors))
        return future


class _Backend:
    """What is asked of a group's part for one kind of device. As NCCL's, it gives memory."""

    @staticmethod
    def name() -> str:
        return BACKEND

    @staticmethod
    def supports_tensor_alloc(device: torch.device) -> bool:
        return True

    @staticmethod
    def allocate_tensor(size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class SimNCCL(dist.ProcessGroup):
    """See the module's text."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._size, self._rank = size, rank
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._on_host = dist.ProcessGroup(store, rank, size)
        self._on_host._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._on_host._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.gloo)
        self._stream: torch.Stream | None = None
        self._last_tag = _FIRST_TAG

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(DEVICE), torch.device("cpu")]

    def _get_backend(self, device: Any) -> Any:
        return self.gloo if torch.device(device).type == "cpu" else _Backend

    def next_tag(self) -> int:
        """All ranks launch in one order, so the number of a launch tells it from others."""
        self._last_tag += 1
        return self._last_tag

    # What fully_shard and DTensor use

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        if (on_cpu := self._on_cpu("allgather_into_tensor_coalesced", outputs, inputs, opts)) is not None:
            return on_cpu
        self._check(outputs, inputs, factor=self._size)
        outs, ins = _views(outputs), _views(inputs)
        nbytes = sum(each.nbytes for each in ins)

        def finish(received: list[Tensor]) -> None:
            for source, buffer in enumerate(received):
                _scatter_bytes(buffer, [out.view(self._size, -1)[source] for out in outs])

        parts: Callable[[], Any] = lambda: [ins] * self._size  # noqa: E731
        return self._launch(
            Message(self, "all-gather", outs, parts, [nbytes] * self._size, finish), opts, outputs, inputs
        )

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [mine], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        op, factor = _op_of(opts)
        if (on_cpu := self._on_cpu("reduce_scatter_tensor_coalesced", outputs, inputs, opts)) is not None:
            return on_cpu
        self._check(inputs, outputs, factor=self._size)
        self._check_op(op, inputs)
        outs, ins = _views(outputs), _views(inputs)
        nbytes = sum(each.nbytes for each in outs)

        def parts() -> Any:
            return [[each.view(self._size, -1)[target] for each in ins] for target in range(self._size)]

        def finish(received: list[Tensor]) -> None:
            _reduce(received, outs, op, factor)

        return self._launch(
            Message(self, "reduce-scatter", outs, parts, [nbytes] * self._size, finish), opts, outputs, inputs
        )

    def reduce_scatter_single(self, output: Tensor, values: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [values], opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        op, factor = _op_of(opts)
        if (on_cpu := self._on_cpu("allreduce", tensors, opts)) is not None:
            return on_cpu
        self._check(tensors, tensors, factor=1)
        self._check_op(op, tensors)
        views = _views(tensors)

        def finish(received: list[Tensor]) -> None:
            _reduce(received, views, op, factor)

        nbytes = [sum(each.nbytes for each in views)] * self._size
        return self._launch(
            Message(self, "all-reduce", views, lambda: [views] * self._size, nbytes, finish), opts, tensors, tensors
        )

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        if (on_cpu := self._on_cpu("allgather", outputs, inputs, opts)) is not None:
            return on_cpu
        for row, mine in zip(outputs, inputs, strict=True):
            for each in row:
                self._check([each], [mine], factor=1)
        outs, ins = [_views(row) for row in outputs], _views(inputs)

        def finish(received: list[Tensor]) -> None:
            for source, buffer in enumerate(received):
                _scatter_bytes(buffer, [row[source] for row in outs])

        nbytes = [sum(each.nbytes for each in ins)] * self._size
        flat = [each for row in outs for each in row]
        message = Message(self, "all-gather", flat, lambda: [ins] * self._size, nbytes, finish)
        return self._launch(message, opts, [each for row in outputs for each in row], inputs)

    def all_to_all_single(
        self, output: Tensor, values: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        if values.device.type == "cpu":  # the oracle's
            load().drain()
            return self._on_host.alltoall_base(output, values, output_sizes, input_sizes, *([opts] if opts else []))
        out, given = _views([output, values])
        targets = out.split(output_sizes or out.size(0) // self._size)  # no sizes: equal parts

        def finish(received: list[Tensor]) -> None:
            for buffer, target in zip(received, targets, strict=True):
                _scatter_bytes(buffer, [target])

        parts: Callable[[], Any] = lambda: [[part] for part in given.split(input_sizes or given.size(0) // self._size)]  # noqa: E731
        nbytes = [target.nbytes for target in targets]
        return self._launch(Message(self, "all-to-all", [out], parts, nbytes, finish), opts, [output], [values])

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        if (on_cpu := self._on_cpu("broadcast", tensors, opts)) is not None:
            return on_cpu
        self._check(tensors, tensors, factor=1)
        views, root = _views(tensors), opts.rootRank
        nbytes = sum(each.nbytes for each in views)

        def finish(received: list[Tensor]) -> None:
            _scatter_bytes(received[root], views)

        sizes = [nbytes if source == root else 0 for source in range(self._size)]
        parts: Callable[[], Any] = lambda: [views if self._rank == root else None] * self._size  # noqa: E731
        return self._launch(Message(self, "broadcast", views, parts, sizes, finish), opts, tensors, tensors)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        if (on_cpu := self._on_cpu("scatter", outputs, inputs, opts)) is not None:
            return on_cpu
        outs, ins, root = _views(outputs), [_views(row) for row in inputs], opts.rootRank

        def parts() -> Any:
            return [[row[target] for row in ins] if ins else None for target in range(self._size)]

        def finish(received: list[Tensor]) -> None:
            _scatter_bytes(received[root], outs)

        nbytes = sum(each.nbytes for each in outs)
        sizes = [nbytes if source == root else 0 for source in range(self._size)]
        given = [each for row in inputs for each in row]
        return self._launch(Message(self, "scatter", outs, parts, sizes, finish), opts, outputs, given)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Of objects only, which lie on the CPU."""
        if inputs[0].device.type != "cpu":
            refuse("gathers on the device to one rank")
        load().drain()
        return self._on_host.gather(outputs, inputs, opts)

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        """On the CPU only, as what fsdp2 does there."""
        return self.gloo.send(tensors, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        return self.gloo.recv(tensors, rank, tag)

    def barrier(self, opts: Any = None) -> Any:
        """NCCL's makes the host wait."""
        self.allreduce([torch.zeros(1, device=DEVICE)], _on_stream())
        torch.accelerator.current_stream().synchronize()
        return Work(None, [])

    def _start_coalescing(self, device: torch.device) -> None:
        """What follows could be one launch; here it is as many as it has calls."""

    def _end_coalescing(self, device: torch.device) -> Work:
        return Work(None if self._stream is None else self._stream.record_event(), [])

    # The names before torch 2.13
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    allreduce_coalesced, alltoall_base = allreduce, all_to_all_single

    def _launch(self, message: Message, opts: Any, written: Sequence[Tensor], read: Sequence[Tensor]) -> Work | None:
        current = torch.accelerator.current_stream()
        if not getattr(opts, "asyncOp", True):
            load().send(current.stream_id, message.name, message)
            return None
        if self._stream is None:
            self._stream = torch.Stream(device=DEVICE)
        self._stream.wait_stream(current)
        load().send(self._stream.stream_id, message.name, message)
        return Work(self._stream.record_event(), [*written, *read])

    def _on_cpu(self, name: str, *args: Any) -> Any:
        """What gloo returns, if the tensors are the CPU's."""
        if not args[0]:
            refuse("an empty list of tensors")
        first = args[0][0]
        first = first[0] if isinstance(first, list) else first
        if first.device.type != "cpu":
            return None
        load().drain()  # another rank may be waiting for what this one has only enqueued
        return getattr(self._on_host, name)(*(arg for arg in args if arg is not None))

    def _check(self, larger: Sequence[Tensor], smaller: Sequence[Tensor], *, factor: int) -> None:
        for whole, part in zip(larger, smaller, strict=True):
            if whole.device.type != DEVICE or part.device.type != DEVICE:
                refuse(f"tensors on {whole.device} and {part.device}")
            if whole.dtype is not part.dtype:
                refuse(f"tensors of {whole.dtype} and {part.dtype}")
            if not (whole.is_contiguous() and part.is_contiguous()):
                refuse("tensors must be contiguous")
            if whole.numel() != factor * part.numel():
                refuse(f"{whole.numel()} elements where {factor} ranks have {part.numel()} each")

    def _check_op(self, op: Any, tensors: Sequence[Tensor]) -> None:
        if op not in _COMBINE:
            refuse(f"cannot reduce with {op}")
        for tensor in tensors:
            if tensor.is_complex() and op not in (Op.SUM, Op.AVG):
                refuse(f"cannot reduce {tensor.dtype} with {op}")
            if op == Op.PREMUL_SUM and not tensor.is_floating_point():
                refuse(f"PREMUL_SUM takes floating point, not {tensor.dtype}")
            if op == Op.AVG and tensor.dtype is torch.bool:
                refuse("cannot average bool")


def _on_stream() -> Any:
    options = dist.AllreduceOptions()
    options.asyncOp = False
    return options


def _views(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The memory of ``tensors``, for the worker to read and write. Their owners may free it at any time."""
    return [load().host_view(tensor) for tensor in tensors]


def _scatter_bytes(buffer: Tensor, targets: Sequence[Tensor]) -> None:
    """Fill ``targets`` from ``buffer``, one behind the other."""
    offset = 0
    for target in targets:
        target.reshape(-1).view(torch.uint8).copy_(buffer.narrow(0, offset, target.nbytes))
        offset += target.nbytes


def _op_of(opts: Any) -> tuple[Any, float]:
    """The operation, and the factor of PREMUL_SUM."""
    op = getattr(opts, "reduceOp", Op.SUM)
    if isinstance(op, Op):
        kind, factor = op.__getstate__()  # type: ignore[attr-defined]  # pickled, it tells
        return kind, 1.0 if factor is None else float(factor)
    return op, 1.0


def _reduce(received: list[Tensor], outputs: Sequence[Tensor], op: Any, factor: float) -> None:
    """The parts of all ranks, combined in rank order."""
    offset = 0
    for output in outputs:
        parts = [each.narrow(0, offset, output.nbytes).clone().view(output.dtype) for each in received]
        offset += output.nbytes
        if op == Op.PREMUL_SUM:
            parts = [part * factor for part in parts]
        result = functools.reduce(_COMBINE[op], parts)
        if op == Op.AVG:
            result = result / len(parts) if result.is_floating_point() else result // len(parts)
        output.reshape(-1).copy_(result)
