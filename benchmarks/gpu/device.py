"""What ``acceptance.py`` asks of a device: its process group, and collectives that come late.

``Cuda`` delays by ``torch.cuda._sleep``. ``Simulated`` is the accelerator of ``tests/accelerator``: it holds late
operations back until nothing else can run. So the script itself is tested where no GPU is.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
DEVICES = ("cuda", "sim", "cpu")
GATHER, REDUCE = "all-gather", "reduce-scatter"

Start = Callable[[Sequence[Tensor]], None]
Finish = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


class Device(Protocol):
    """An accelerator.

    Attributes:
        type: torch's name of it.
        backend: of its real process group.
        dim: width of models that are quick here, and of which some tensors travel direct and some in buckets.
        late: the kinds of collectives that come late.
        is_serial: the host waits for each collective. So no order is left open.
    """

    type: str
    backend: str
    dim: int
    late: frozenset[str]
    is_serial: bool

    def set_late(self, kinds: Collection[str]) -> None:
        """Collectives of ``kinds``, and no others, come late from here on."""

    def keep_busy(self) -> None:
        """The current stream has something to do, for longer than the host takes for a few calls."""

    def collective(
        self, kind: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], start: Start, finish: Finish
    ) -> None:
        """On the current stream: ``start(outputs)``, a delay if ``kind`` is late, ``finish(outputs, inputs)``."""

    def captured(self, step: Callable[[], object]) -> Callable[[], object]:
        """Capture ``step`` on the current stream. Returns what replays it. What a capture may not contain raises."""

    def finish(self) -> None:
        """The host waits for all that was enqueued."""


class Cuda(Device):
    type, backend, dim = "cuda", "cpu:gloo,cuda:nccl", 512
    CYCLES = 10_000_000  # about 6 ms

    def __init__(self) -> None:
        torch.cuda.set_device(0)
        self.late, self.is_serial = frozenset(), False

    def set_late(self, kinds: Collection[str]) -> None:
        self.late = frozenset(kinds)

    def keep_busy(self) -> None:
        torch.cuda._sleep(20 * self.CYCLES)

    def collective(
        self, kind: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], start: Start, finish: Finish
    ) -> None:
        start(outputs)
        if kind in self.late:
            torch.cuda._sleep(self.CYCLES)
        finish(outputs, inputs)
        if self.is_serial:
            torch.cuda.synchronize()

    def captured(self, step: Callable[[], object]) -> Callable[[], object]:
        graph, raised = torch.cuda.CUDAGraph(), []
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                try:
                    step()
                except Exception as error:
                    raised.append(error)
                    raise
        except Exception as error:  # at the end of a capture that has failed, CUDA raises something less telling
            first = raised[0] if raised else error
            raise RuntimeError(f"the capture failed: {type(first).__name__}: {first}") from first
        return graph.replay

    def finish(self) -> None:
        torch.cuda.synchronize()


class Simulated(Device):
    type, backend, dim = "sim", "simnccl", 128

    def __init__(self) -> None:
        sys.path.insert(0, str(ROOT))
        from tests.accelerator import device, group

        self._schedule, self._watched, self._extension = device.schedule, device.captured, device.load()
        group.register()
        self.is_serial = False
        self.set_late(())

    def set_late(self, kinds: Collection[str]) -> None:
        self.late = frozenset(kinds)
        self._schedule(0, late=sorted(kinds))

    def keep_busy(self) -> None:
        """It is never in a hurry: nothing runs until the host waits."""

    def collective(
        self, kind: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], start: Start, finish: Finish
    ) -> None:
        written, read = ([self._extension.host_view(each) for each in group] for group in (outputs, inputs))
        message = _Message(functools.partial(start, written), functools.partial(finish, written, read))
        stream = torch.accelerator.current_stream().stream_id
        self._extension.send(stream, kind, message)
        if self.is_serial:
            self.finish()

    def captured(self, step: Callable[[], object]) -> Callable[[], object]:
        """There are no graphs here: whatever CUDA would refuse raises, and a replay calls ``step``. CUDA does not run
        what it captures, but this device has run it, so the first replay does nothing."""
        with self._watched() as broken:
            step()
        if broken:
            raise RuntimeError(f"the capture failed: {'; '.join(dict.fromkeys(broken))}")
        replays: Iterator[Callable[[], object]] = itertools.chain([lambda: None], itertools.repeat(step))
        return lambda: next(replays)()

    def finish(self) -> None:
        self._extension.drain()


class _Message:
    """What the simulated device's worker runs."""

    def __init__(self, start: Callable[[], None], finish: Callable[[], None]) -> None:
        self.start, self.finish = start, finish

    def arrived(self, seconds: float) -> bool:
        return True


class Host(Device):
    """The CPU, to try what needs no streams."""

    type, backend, dim = "cpu", "gloo", 128
    late: frozenset[str] = frozenset()
    is_serial = False

    def finish(self) -> None:
        """Nothing is enqueued."""


@functools.cache
def device(name: str) -> Any:
    """The device of that name, in this process."""
    return {"cuda": Cuda, "sim": Simulated, "cpu": Host}[name]()
