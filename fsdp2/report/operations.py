"""The times when operations ran, from torch.profiler. Events on streams, or the host's clock, tell when a unit
computed, but not when nothing ran in between because the host was late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import DeviceType

_ZERO = "fsdp2.report"  # a range whose start is known on both clocks


class Operations:
    """Profiles the block of ``profiled``. With ``on_device``, kernels of the accelerator count, except those of NCCL;
    otherwise, operations of the thread that starts it."""

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

    def busy(self) -> list[tuple[float, float]]:
        """The intervals in which operations ran, in seconds of the host's clock, in order and without overlaps."""
        events: Any = self._profiler.events()
        zero = next(event for event in events if event.name == _ZERO)
        ranges = [event.time_range for event in events if self._counts(event, zero)]
        found: list[tuple[float, float]] = []
        for start, stop in sorted((each.start, each.end) for each in ranges):
            if found and start <= found[-1][1]:
                found[-1] = found[-1][0], max(found[-1][1], stop)
            else:
                found.append((start, stop))
        offset_s = self._zero_s - zero.time_range.start / 1e6
        return [(offset_s + start / 1e6, offset_s + stop / 1e6) for start, stop in found]

    def _counts(self, event: Any, zero: Any) -> bool:
        if event.is_user_annotation:
            return False
        if self._on_device:
            return event.device_type != DeviceType.CPU and "nccl" not in event.name.lower()
        is_operation = "::" in event.name and "autograd::" not in event.name
        return is_operation and event.device_type == DeviceType.CPU and event.thread == zero.thread
