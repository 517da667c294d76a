"""Records what a rank does while steps run, and when; ``timeline`` reads these marks afterwards.

Marks tell when a unit computed; only torch.profiler tells when nothing ran in between because the host was late.

On the CPU, the clock is the host's. On an accelerator, each mark is an event on the stream that does the work: nothing
waits for the device inside a step, and times are read at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType

from fsdp2.core import Observer, Unit, comms
from fsdp2.report.held import HeldBytes
from fsdp2.report.memory import Bytes
from fsdp2.report.operators import Operation
from fsdp2.report.timeline import BLOCKED, COPIES, HOST_STEP, OPTIMIZER, OPTIMIZER_END, TO_DEVICE, TO_HOST, Edge, Mark

Stamp = float | torch.Event | None
_Mark = tuple[Edge, str, str, Stamp, Stamp, str, int]  # as ``Mark``, with stamps

# Work on the gather stream of an accelerator; other work is done on the compute stream, or on none.
_ON_GATHER_STREAM = ("unshard", "prefetch")
_ON_REDUCE_STREAM = ("reduce_launch", "reduce_land")
_ON_NO_STREAM = ("unshard", "prefetch", "stay", "keep", *COPIES)

_COPIES = {comms.Activity.COPY_TO_DEVICE: TO_DEVICE, comms.Activity.COPY_TO_HOST: TO_HOST}


class Step(NamedTuple):
    """The marks of one step, from ``start`` to ``stop`` in seconds of the host's clock."""

    marks: list[Mark]
    start: float
    stop: float


class HostClock:
    """The clock of the CPU: work is done when the call returns.

    Attributes:
        times_waits: whether a wait for collectives takes time of this thread.
    """

    times_waits = True

    def now(self) -> Stamp:
        return time.perf_counter()

    def of_work(self, work: str, unit: str) -> tuple[Stamp, Stamp]:
        """A stamp of this moment for the start or end of ``work`` on ``unit``, and one on another stream. A copy is on
        the current stream."""
        return time.perf_counter(), None

    def settle(self) -> None:
        """Wait until all stamps can be read."""

    def seconds(self, stamp: Stamp) -> float | None:
        """The time when ``stamp`` was made."""
        assert not isinstance(stamp, torch.Event)
        return stamp


class DeviceClock(HostClock):
    """The clock of an accelerator: stamps are events on its streams. Those of ``units`` that do not use the device's
    usual streams are asked for theirs."""

    times_waits = False

    def __init__(self, device: torch.device, units: Sequence[Unit]) -> None:
        self._device = device
        self._usual = comms.streams_for(device)
        self._streams = {unit.name: group.unsharded.streams for unit in units for group in unit.groups}
        self._zero = self._event()
        self._zero.synchronize()
        self._zero_s = time.perf_counter()

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def now(self) -> Stamp:
        return self._event()

    def of_work(self, work: str, unit: str) -> tuple[Stamp, Stamp]:
        streams: comms.Streams = self._streams.get(unit, self._usual)
        side = None
        if work in COPIES:
            side = self._event()
        elif work in _ON_GATHER_STREAM:
            with streams.on_gather:
                side = self._event()
        elif work in _ON_REDUCE_STREAM:
            with streams.on_reduce:
                side = self._event()
        return None if work in _ON_NO_STREAM else self._event(), side

    def settle(self) -> None:
        torch.accelerator.synchronize(self._device)

    def seconds(self, stamp: Stamp) -> float | None:
        if stamp is None or isinstance(stamp, float):
            return stamp
        return self._zero_s + self._zero.elapsed_time(stamp) / 1e3


class Recorder(Observer):
    """The marks of up to ``max_steps`` steps. A step ends where the next forward begins after a backward that reduced
    gradients, so it holds all micro-batches of an accumulation, and the optimizer. ``held`` reports the bytes of
    tensors. What happens to a unit that ``held`` does not know by its name is left out: it has another root, or is new.

    Attributes:
        on_done: called when nothing more will be recorded, so that the recorder needs no further calls.
    """

    def __init__(self, clock: HostClock, max_steps: int, held: HeldBytes) -> None:
        self._clock, self._max_steps, self._held = clock, max_steps, held
        self.on_done: Callable[[], None] = lambda: None
        self._marks: list[_Mark] = []
        self._before: list[_Mark] = []  # what is held when the first step begins, if it is known only later
        self._bounds: list[tuple[int, Stamp]] = []  # where a step begins among the marks, and when
        self._last: tuple[Stamp, Stamp] = (None, None)
        self._unit = ""  # of the work that started last
        self._has_reduced = self._has_ended = False  # the step's gradients; its backward
        self._is_done = False

    @property
    def _is_in_step(self) -> bool:
        return bool(self._bounds) and not self._is_done

    def on_event(self, event: str, unit: str) -> None:
        if not self._records(unit):
            return
        now = self._clock.now()
        begins = not self._bounds or (event == "pre_forward" and self._has_reduced and self._has_ended)
        if begins and not self._begin_step(now):
            return
        self._has_ended = self._has_ended or event == "end_backward"
        self._hold(self._held.at(event, unit), now)  # before the event, since plans know what it adds
        self._add(Edge.EVENT, event, unit, now)

    def _begin_step(self, now: Stamp) -> bool:
        """End the running step, and begin the next one if it is to be recorded."""
        self._bounds.append((len(self._marks), now))
        self._has_reduced = self._has_ended = False
        if len(self._bounds) > self._max_steps:
            self._is_done = True
            self.on_done()
            return False
        self._hold(self._held.at_start(), now)
        return True

    def _records(self, unit: str) -> bool:
        return not self._is_done and unit in self._held.units

    def on_module(self, unit: str, module: str, event: str) -> None:
        """``module`` of ``unit`` starts its ``forward`` or ``backward``, or ends it."""
        if self._is_in_step:
            self._add(Edge.EVENT, event, unit, self._clock.now(), module=module)

    def on_optimizer(self, optimizer: torch.optim.Optimizer, starts: bool) -> None:
        """A step of ``optimizer`` starts or stops."""
        if not self._is_in_step:
            return
        now = self._clock.now()
        self._add(Edge.EVENT, OPTIMIZER if starts else OPTIMIZER_END, "", now)
        if starts:
            (_, first), *_ = self._bounds
            self._before += _marks_of(self._held.steps(optimizer), first)
        else:
            self._hold(self._held.stepped(optimizer), now)

    def on_start(self, work: str, unit: str) -> None:
        if self._records(unit):
            self._unit = unit
            self._on_work(Edge.START, work, unit)

    def on_stop(self, work: str, unit: str) -> None:
        if not self._records(unit):
            return
        self._on_work(Edge.STOP, work, unit)
        if work == "reduce_land" and self._is_in_step:
            self._hold(self._held.landed(unit), self._last[0])

    def on_action(self, action: str, unit: str, nbytes: int) -> None:
        if self._records(unit) and self._is_in_step and self._last != (None, None):
            self._has_reduced = self._has_reduced or action == "reduce"
            self._add(Edge.ACTION, action, unit, *self._last)
            self._hold(self._held.at(action, unit), self._last[0] or self._last[1])

    def on_activity(self, activity: comms.Activity, starts: bool) -> None:
        """A wait for collectives, or a copy in the work that started last, starts or stops."""
        edge = Edge.START if starts else Edge.STOP
        if activity is not comms.Activity.WAIT:
            self._on_work(edge, _COPIES[activity], self._unit)
        elif self._clock.times_waits:
            self._on_work(edge, BLOCKED, "")

    def on_host_step(self, unit: str, start: float, stop: float) -> None:
        """The host's thread has stepped ``unit``. It calls this while the training thread adds marks, so a single
        operation adds both marks, and nothing comes between them."""
        if self._is_in_step:
            edges = ((Edge.START, start), (Edge.STOP, stop))
            self._marks += [(edge, HOST_STEP, unit, None, stamp, "", 0) for edge, stamp in edges]

    def _on_work(self, edge: Edge, work: str, unit: str) -> None:
        if self._is_in_step:
            self._last = self._clock.of_work(work, unit)
            if self._last != (None, None):
                self._add(edge, work, unit, *self._last)

    def _add(self, edge: Edge, name: str, unit: str, time: Stamp, side: Stamp = None, module: str = "") -> None:
        self._marks.append((edge, name, unit, time, side, module, 0))

    def _hold(self, nbytes: Bytes, now: Stamp) -> None:
        self._marks += _marks_of(nbytes, now)

    def end(self) -> None:
        """The block is over, and so is the running step."""
        if self._is_in_step:
            self._bounds.append((len(self._marks), self._clock.now()))
        self._is_done = True

    def steps(self) -> list[Step]:
        """All steps; call it after ``end``. The CPU waits for the device."""
        self._clock.settle()
        seconds = self._clock.seconds
        marks = [
            Mark(edge, name, unit, seconds(a), seconds(b), module, n)
            for edge, name, unit, a, b, module, n in [*self._before, *self._marks]
        ]
        shift = len(self._before)
        bounds = [(index and index + shift, seconds(stamp) or 0.0) for index, stamp in self._bounds]
        return [Step(marks[first:last], start, stop) for (first, start), (last, stop) in pairwise(bounds)]


def _marks_of(held: Bytes, now: Stamp) -> list[_Mark]:
    return [(Edge.HELD, what, unit, now, None, "", nbytes) for (unit, what), nbytes in held.items()]


# Of torch.profiler


_ZERO = "fsdp2.report"  # a range whose start is known on both clocks
_MAX_NAME = 120  # characters; kernels made from templates have thousands


class Operations:
    """Profiles the block of ``profiled``. With ``on_device``, kernels of the accelerator count, except those of NCCL;
    otherwise, operations of the thread that starts it, each without those that it calls."""

    def __init__(self, *, on_device: bool) -> None:
        self._on_device = on_device
        self._profiler = torch.profiler.profile(acc_events=True)
        self._zero_s = 0.0

    @contextmanager
    def profiled(self) -> Iterator[None]:
        with self._profiler:
            with torch.profiler.record_function(_ZERO):
                self._zero_s = time.perf_counter()
            yield

    def found(self) -> list[Operation]:
        """All operations, in seconds of the host's clock, in order."""
        events: Any = self._profiler.events()
        zero = next(event for event in events if event.name == _ZERO)
        offset_s = self._zero_s - zero.time_range.start / 1e6
        found = []
        for event in events:
            if self._counts(event, zero):
                start, stop = (offset_s + each / 1e6 for each in (event.time_range.start, event.time_range.end))
                own = stop - start if self._on_device else event.self_cpu_time_total / 1e6
                found.append(Operation(start, stop, own, event.name[:_MAX_NAME]))
        return sorted(found)

    def _counts(self, event: Any, zero: Any) -> bool:
        if event.is_user_annotation:
            return False
        if self._on_device:
            return event.device_type != DeviceType.CPU and "nccl" not in event.name.lower()
        is_operation = "::" in event.name and "autograd::" not in event.name
        return is_operation and event.device_type == DeviceType.CPU and event.thread == zero.thread
