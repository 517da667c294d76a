"""Streams that only keep clocks, and the accesses to memory that nothing orders.

A stream is a name and a clock: for every stream, how many of its operations are done before this one goes on. Events
copy clocks, waits join them. Two accesses to the same bytes, one of which writes, must be ordered by them; that is all
an accelerator promises, however fast its kernels happen to be.

Memory goes back to the stream that it was allocated on, when its last owner is gone, as far as the CPU has come. What
is allocated on that stream next may lie there, as with CUDA's caching allocator: so allocating must come behind
everything that other streams do with what was freed. Memory of the host is the CPU's: what it does there is done at
once, so it must have waited for streams that do something with it.
"""

from __future__ import annotations

import bisect
import itertools
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Clock = dict[str, int]

COMPUTE = "compute"
HOST = "host"


def _join(clock: Clock, other: Clock) -> None:
    for name, count in other.items():
        clock[name] = max(clock.get(name, 0), count)


class SimulatedEvent:
    """What was done when it was recorded."""

    def __init__(self, device: SimulatedDevice, clock: Clock) -> None:
        self.clock = clock.copy()
        self._device = device

    def synchronize(self) -> None:
        """The CPU waits."""
        _join(self._device.host.clock, self.clock)


class SimulatedStream:
    """As far as fsdp2 uses streams. What the CPU has waited for comes before all that it enqueues afterwards."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.name = name
        self.clock: Clock = {}
        self._device = device

    def record_event(self) -> SimulatedEvent:
        return SimulatedEvent(self._device, self.clock)

    def wait_event(self, event: SimulatedEvent) -> None:
        _join(self.clock, event.clock)

    def wait_stream(self, other: SimulatedStream) -> None:
        _join(self.clock, other.clock)

    def tick(self) -> int:
        """One more operation is enqueued; returns its number."""
        _join(self.clock, self._device.host.clock)
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]


class SimulatedDevice:
    """What ``torch.cuda`` is for CUDA, as far as streams go: each thread has its own current stream."""

    def __init__(self) -> None:
        self.host = SimulatedStream(self, HOST)
        self._compute = SimulatedStream(self, COMPUTE)
        self._here = threading.local()
        self._names = itertools.chain(["gather", "reduce"], map("stream {}".format, itertools.count(1)))

    def Stream(self, device: object = None, priority: int = 0) -> SimulatedStream:  # noqa: N802  # torch's name
        return SimulatedStream(self, next(self._names))

    def current_stream(self) -> SimulatedStream:
        return getattr(self._here, "stream", self._compute)

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        before, self._here.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._here.stream = before


@dataclass(frozen=True)
class Access:
    """Bytes ``[start, stop)`` that operation ``number`` of ``stream`` reads or writes. ``what``: for people."""

    start: int
    stop: int
    writes: bool
    stream: str
    number: int
    what: str

    def is_before(self, clock: Clock) -> bool:
        return self.number <= clock.get(self.stream, 0)

    def __str__(self) -> str:
        return f"{self.what} on {self.stream} {'writes' if self.writes else 'reads'}"


@dataclass
class _Block:
    """Memory of one owner. ``accesses``: those that no later one stands for."""

    start: int
    stop: int
    stream: SimulatedStream
    owner: StorageWeakRef
    accesses: list[Access] = field(default_factory=list)


class Races:
    """Accesses to memory, block by block.

    Attributes:
        found: what nothing orders, each once.
        num_accesses: how many accesses were looked at.
    """

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.found: dict[str, None] = {}
        self.num_accesses = 0
        self._blocks: list[_Block] = []  # by their start
        self._freed: dict[SimulatedStream, list[_Block]] = defaultdict(list)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether the CPU can read ``tensor``."""
        block = self._block_at(tensor.data_ptr())
        return block is not None and block.stream is self.device.host

    def access(self, tensor: torch.Tensor, stream: SimulatedStream, number: int, what: str, *, writes: bool) -> None:
        """Operation ``number`` of ``stream`` reads or writes ``tensor``."""
        start = tensor.data_ptr()
        if start == 0 or tensor.numel() == 0:
            return
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        access = Access(start, start + (reach + 1) * tensor.itemsize, writes, stream.name, number, what)
        block = self._block_at(start) or self._add(tensor.untyped_storage(), self.device.current_stream())
        self.num_accesses += 1
        kept = []
        for earlier in block.accesses:
            is_ordered = earlier.is_before(stream.clock)
            overlaps = earlier.start < access.stop and access.start < earlier.stop
            if overlaps and not is_ordered and (writes or earlier.writes):
                self._report(f"{access} what {earlier}; nothing orders them")
            covers = access.start <= earlier.start and earlier.stop <= access.stop
            if not (is_ordered and covers and (writes or not earlier.writes)):
                kept.append(earlier)
        block.accesses = [*kept, access]

    def allocate(self, storage: torch.UntypedStorage, stream: SimulatedStream, what: str) -> None:
        """``storage`` got memory on ``stream``: whatever was freed there may have been its own."""
        if storage.nbytes() == 0 or self._block_at(storage.data_ptr()) is not None:
            return
        number = stream.tick()
        # The host's allocator sees to it itself that copies are done.
        for block in self._freed.pop(stream, ()) if stream is not self.device.host else ():
            for earlier in block.accesses:
                if not earlier.is_before(stream.clock):
                    self._report(f"{what} allocates on {stream.name} where {earlier}; nothing orders them")
        block = self._add(storage, stream)
        block.accesses.append(Access(block.start, block.stop, True, stream.name, number, f"allocation by {what}"))

    def free(self, storage: torch.UntypedStorage) -> None:
        """The memory of ``storage`` goes, and the storage stays."""
        block = self._block_at(storage.data_ptr())
        if block is not None:
            self._blocks.remove(block)
            self._freed[block.stream].append(block)

    def sweep(self) -> None:
        """Memory whose owner is gone is free."""
        kept = []
        for block in self._blocks:
            (self._freed[block.stream] if block.owner.expired() else kept).append(block)
        self._blocks = kept

    def _add(self, storage: torch.UntypedStorage, stream: SimulatedStream) -> _Block:
        start = storage.data_ptr()
        block = _Block(start, start + storage.nbytes(), stream, StorageWeakRef(storage))
        bisect.insort(self._blocks, block, key=lambda each: each.start)
        return block

    def _block_at(self, address: int) -> _Block | None:
        index = bisect.bisect_right(self._blocks, address, key=lambda each: each.start) - 1
        block = self._blocks[index] if index >= 0 else None
        return block if block is not None and address < block.stop else None

    def _report(self, text: str) -> None:
        self.found.setdefault(text)


def caller() -> str:
    """The nearest function of fsdp2 on the stack, if any: where an operation comes from."""
    frame = sys._getframe(1)
    while frame is not None:
        room = frame.f_globals.get("__name__", "")
        if room.startswith("fsdp2.") and not room.startswith("fsdp2.core._torch"):
            return f" ({room.removeprefix('fsdp2.')}.{frame.f_code.co_name})"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
