"""Process groups for one GPU: ranks that are not there, whose data comes late, and ranks that share it, over gloo.

Their contract is NCCL's: without ``asyncOp``, a collective is ordered on the current stream, and there is no work.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.device import GATHER, REDUCE, Device


class Work(dist._Work):
    """A collective on another stream. Keeps its tensors until the current stream has waited for it."""

    def __init__(self, module: Any = None, done: torch.Event | None = None, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._module, self._done, self._tensors = module, done, list(tensors)

    def wait(self, timeout: object = None) -> bool:
        if self._done is not None:
            self._module.current_stream().wait_event(self._done)
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        return self._done is None or self._done.query()


class _Group(dist.ProcessGroup):
    """What both have in common: names, and an all-gather of tensors in terms of one into a flat tensor."""

    NAME = ""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return self.NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def gather(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work | None:
        raise NotImplementedError

    def reduce(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work | None:
        raise NotImplementedError

    def exchange(self, output: Tensor, values: Tensor, opts: Any) -> Work | None:
        raise NotImplementedError

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work | None:
        flat = [each.new_empty(self._size * each.numel()) for each in inputs]
        work = self.gather(flat, [each.reshape(-1) for each in inputs], opts)
        if work is not None:
            work.wait()
        for rows, gathered in zip(outputs, flat, strict=True):
            for row, part in zip(rows, _rows(gathered, self._size), strict=True):
                row.copy_(part.view(row.shape))
        return None if work is None else Work()

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work | None:
        return self.gather(outputs, inputs, opts)

    def _allgather_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> Work | None:
        return self.gather([output], [mine], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work | None:
        return self.reduce(outputs, inputs, opts)

    def _reduce_scatter_base(self, output: Tensor, values: Tensor, opts: Any = None) -> Work | None:
        return self.reduce([output], [values], opts)

    def alltoall_base(
        self, output: Tensor, values: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Work | None:
        """Of equal parts, as gradients in a format of their own travel."""
        assert not output_sizes
        assert not input_sizes
        return self.exchange(output, values, opts)

    # The names of torch 2.13
    all_to_all_single = alltoall_base
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced


def _rows(tensor: Tensor, size: int) -> Tensor:
    """A row for each of ``size`` ranks."""
    return tensor.view(size, tensor.numel() // size)


# Ranks that are not there


class LateGroup(_Group):
    """Rank 0 of ranks that are not there. They hold what this one holds; a sum is the sum of all parts of its input,
    and a mean their mean.

    Outputs are NaN first, and inputs are read at the end of the delay. So whoever reads too early, or frees an input
    too early, gets other values.
    """

    NAME = "late"
    on: Device

    def gather(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work | None:
        def finish(written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
            for output, mine in zip(written, read, strict=True):
                rows = _rows(output, self._size)
                rows[0].copy_(mine.view(-1))  # nothing, where the gather works in place
                rows[1:].copy_(rows[:1].expand(self._size - 1, -1))

        def start(written: Sequence[Tensor]) -> None:
            for output in written:
                spoil(_rows(output, self._size)[1:])  # the first row may be the input

        return self._run(GATHER, outputs, inputs, start, finish, opts)

    def reduce(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work | None:
        def finish(written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
            for output, values in zip(written, read, strict=True):
                rows = _rows(values, self._size)
                output.view(-1).copy_(rows.mean(0) if _averages(opts) else rows.sum(0))

        def start(written: Sequence[Tensor]) -> None:
            for output in written:
                spoil(output)

        return self._run(REDUCE, outputs, inputs, start, finish, opts)

    def exchange(self, output: Tensor, values: Tensor, opts: Any) -> Work | None:
        """Every rank sends here what this one sends to itself. As late as a reduction, which this is a part of."""

        def finish(written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
            rows = _rows(written[0], self._size)
            rows.copy_(_rows(read[0], self._size)[:1].expand(self._size, -1))

        return self._run(REDUCE, [output], [values], lambda written: spoil(written[0]), finish, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Of what ranks agree on, which all of them say alike."""
        return Work()

    def _run(
        self, kind: str, outputs: list[Tensor], inputs: list[Tensor], start: Any, finish: Any, opts: Any
    ) -> Work | None:
        if outputs[0].device.type == "cpu":
            finish(outputs, inputs)
            return Work()
        if not getattr(opts, "asyncOp", True):
            self.on.collective(kind, outputs, inputs, start, finish)
            return None
        module, stream = torch.get_device_module(outputs[0].device), _own_stream(outputs[0].device)
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            self.on.collective(kind, outputs, inputs, start, finish)
        return Work(module, stream.record_event(), [*outputs, *inputs])


@functools.cache
def _own_stream(of: torch.device) -> Any:
    return torch.get_device_module(of).Stream()


def spoil(tensor: Tensor) -> None:
    """Set all bits, which is NaN in every floating-point dtype."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(255 if tensor.dtype is torch.uint8 else -1)


@contextmanager
def late_group(size: int, on: Device) -> Iterator[None]:
    """Be rank 0 of ``size`` ranks that are not there."""
    if not hasattr(dist.Backend, LateGroup.NAME.upper()):
        dist.Backend.register_backend(
            LateGroup.NAME, lambda store, rank, size, timeout: LateGroup(rank, size), devices=["cpu", on.type]
        )
    LateGroup.on = on
    dist.init_process_group(LateGroup.NAME, rank=0, world_size=size, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# Ranks that share a GPU


class StagedGroup(_Group):
    """Ranks of which several share a GPU, which NCCL refuses: what travels is copied to the host, and goes by gloo.

    The host waits for the inputs. Outputs are NaN, then a copy that the stream makes. Sums run in rank order.
    """

    NAME = "staged"

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("staged", store), rank, size, timeout)

    def gather(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work | None:
        for output, mine in zip(outputs, inputs, strict=True):
            self._return(output, torch.stack(self._of_all_ranks(mine)))
        return _work(opts)

    def reduce(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work | None:
        for output, values in zip(outputs, inputs, strict=True):
            parts = [_rows(part, self._size)[self._rank] for part in self._of_all_ranks(values)]
            summed = functools.reduce(torch.add, parts)
            self._return(output, summed / self._size if _averages(opts) else summed)
        return _work(opts)

    def exchange(self, output: Tensor, values: Tensor, opts: Any) -> Work | None:
        parts = [_rows(part, self._size)[self._rank] for part in self._of_all_ranks(values)]
        self._return(output, torch.cat(parts))
        return _work(opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work | None:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        known = {dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum}
        combine: Callable[..., Tensor] = next((function for each, function in known.items() if op == each), torch.add)
        for tensor in tensors:
            combined = functools.reduce(combine, self._of_all_ranks(tensor))
            self._return(tensor, combined / self._size if _averages(opts) else combined)
        return _work(opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work | None:
        for tensor in tensors:
            self._return(tensor, self._of_all_ranks(tensor)[opts.rootRank])
        return _work(opts)

    def barrier(self, opts: Any = None) -> Work:
        torch.accelerator.synchronize()
        self._gloo.barrier().wait()
        return Work()

    def _of_all_ranks(self, mine: Tensor) -> list[Tensor]:
        """The flat ``mine`` of every rank, on the host."""
        sent = mine.detach().cpu().reshape(-1)
        received = [torch.empty_like(sent) for _ in range(self._size)]
        as_bytes = [each.view(torch.uint8) for each in received]
        self._gloo.allgather([as_bytes], [sent.view(torch.uint8)]).wait()
        return received

    def _return(self, output: Tensor, values: Tensor) -> None:
        values = values.view(output.shape)
        if output.device.type == "cpu":
            output.copy_(values)
            return
        spoil(output)
        output.copy_(values.pin_memory(), non_blocking=True)


def _averages(opts: Any) -> bool:
    return opts is not None and opts.reduceOp == dist.ReduceOp.AVG


def _work(opts: Any) -> Work | None:
    return Work() if getattr(opts, "asyncOp", True) else None


@contextmanager
def staged_group(rank: int, size: int, store: Path, on: Device) -> Iterator[None]:
    """Be a rank of ``size`` that meet at the file ``store``."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.Backend.register_backend(StagedGroup.NAME, StagedGroup, devices=["cpu", on.type])
    dist.init_process_group(StagedGroup.NAME, rank=rank, world_size=size, store=dist.FileStore(str(store), size))
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def real_group(on: Device) -> Iterator[None]:
    """The device's own process group, with one rank."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(on.backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
