"""What a trace of torch's profiler says about a step on a GPU: what copied, on which stream, and when the CPU waited.

Knows the trace's format and the names of kernels, and nothing of models. A step is what ran inside a
``record_function`` of a given name: the calls of the CPU by their time, and what they launched by correlation, whenever
that ran.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Interval = tuple[float, float]

# Kernels of torch that move or cast values and compute nothing: copy_ and to(), foreach_copy, cat, chunk_cat and
# split_with_sizes_copy.
_COPIES = re.compile(r"copy_kernel|CopyFunctor|CatArrayBatchedCopy|chunk_cat|split_with_sizes_copy")
_COLLECTIVES = re.compile(r"^nccl", re.IGNORECASE)
# Calls for which the CPU waits for the GPU; with memory that is not pinned, cudaMemcpyAsync does so, too.
_WAITS = re.compile(r"Synchronize|^cu(da)?Memcpy(?!.*Async)")
# Calls that reach the driver's allocator, and make it wait: none is left in a step that has run before.
_ALLOCATIONS = re.compile(r"^cuda(Malloc|Free|HostAlloc|FreeHost)|^cuMem(Create|Release|Map|Unmap|SetAccess)")
_HOST_CALLS = ("cuda_runtime", "cuda_driver")
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class DeviceOp:
    """A kernel, copy or fill that ran on ``stream``, in microseconds of the trace's clock."""

    name: str
    category: str
    stream: int
    start: float
    stop: float

    @property
    def duration(self) -> float:
        return self.stop - self.start

    @property
    def is_copy(self) -> bool:
        """Whether it moves or casts values, and does nothing else."""
        return self.category == "gpu_memcpy" or (self.category == "kernel" and bool(_COPIES.search(self.name)))

    @property
    def is_upload(self) -> bool:
        """Whether it is a copy from the host."""
        return self.category == "gpu_memcpy" and "HtoD" in self.name

    @property
    def is_collective(self) -> bool:
        return bool(_COLLECTIVES.match(self.name))


@dataclass(frozen=True)
class Step:
    """What one step did. ``waits``: calls for which the CPU waited. ``allocations``: calls of the driver's allocator.
    Both by name, one entry per call."""

    ops: tuple[DeviceOp, ...]
    waits: tuple[str, ...]
    allocations: tuple[str, ...]

    @property
    def compute_stream(self) -> int | None:
        """The stream that was busy longest with what is no copy and no collective; None without device."""
        busy: dict[int, float] = defaultdict(float)
        for op in self.ops:
            if not op.is_copy and not op.is_collective:
                busy[op.stream] += op.duration
        return max(busy, key=lambda stream: busy[stream]) if busy else None

    @property
    def copies(self) -> tuple[DeviceOp, ...]:
        return tuple(op for op in self.ops if op.is_copy)

    @property
    def copy_ms(self) -> float:
        """Time that copies take, on whatever stream."""
        return sum(op.duration for op in self.copies) / 1e3

    def num_copies(self, *, on_compute: bool, is_upload: bool) -> int:
        compute = self.compute_stream
        return sum((op.stream == compute) is on_compute and op.is_upload is is_upload for op in self.copies)

    @property
    def compute_idle_ms(self) -> float:
        """Time for which the compute stream has nothing to run, between its first and its last kernel."""
        return sum(after[0] - before[1] for before, after in pairwise(self._busy(on_compute=True))) / 1e3

    @property
    def hidden_share(self) -> float:
        """The part of the time of all other streams during which the compute stream runs, too; nan without any."""
        beside = self._busy(on_compute=False)
        total = _length(beside)
        return _length(_common(beside, self._busy(on_compute=True))) / total if total else math.nan

    def kinds_of_copies(self) -> dict[str, tuple[int, float]]:
        """By short name: how many there are, and the milliseconds they take."""
        kinds: dict[str, list[float]] = defaultdict(list)
        for op in self.copies:
            kinds[short_name(op.name)].append(op.duration)
        return {name: (len(each), sum(each) / 1e3) for name, each in sorted(kinds.items())}

    def _busy(self, *, on_compute: bool) -> list[Interval]:
        compute = self.compute_stream
        return _union((op.start, op.stop) for op in self.ops if (op.stream == compute) is on_compute)


@dataclass(frozen=True)
class Planned:
    """The copies of a step that a runtime makes by design, beyond those of the unsharded model.

    Attributes:
        kernels: how many copy or cast on the compute stream.
        uploads: copies from the host on the compute stream, from pinned memory.
        is_beside: whether other streams may copy and cast, too.
    """

    kernels: int = 0
    uploads: int = 0
    is_beside: bool = True


def problems(step: Step, unsharded: Step, planned: Planned) -> list[str]:
    """What a sharded model's step does that it should not, beside that of the unsharded model: an empty list if all
    further copies were planned, all collectives are off the compute stream, and the CPU waits no more often."""
    found = []

    def compare(what: str, expected: int, *, on_compute: bool, is_upload: bool) -> None:
        counts = [each.num_copies(on_compute=on_compute, is_upload=is_upload) for each in (step, unsharded)]
        more = counts[0] - counts[1]
        if more > expected:
            where = "the compute stream" if on_compute else "other streams"
            found.append(f"{more} more {what} on {where} than without sharding, {expected} planned")

    compare("copies and casts", planned.kernels, on_compute=True, is_upload=False)
    compare("uploads", planned.uploads, on_compute=True, is_upload=True)
    if not planned.is_beside:
        compare("copies and casts", 0, on_compute=False, is_upload=False)
        compare("uploads", 0, on_compute=False, is_upload=True)
    collectives = sum(op.is_collective and op.stream == step.compute_stream for op in step.ops)
    if collectives:
        found.append(f"{collectives} collectives on the compute stream")
    waits, allocations = Counter(step.waits) - Counter(unsharded.waits), Counter(step.allocations)
    found += [f"the CPU waits: {name} x{count}" for name, count in sorted(waits.items())]
    found += [f"the driver allocates: {name} x{count}" for name, count in sorted(allocations.items())]
    return found


def read(path: Path, name: str) -> list[Step]:
    """The steps that the trace at ``path`` has under ``name``, in the order in which they ran.

    Raises:
        ValueError: there is none.
    """
    return steps_of(json.loads(path.read_text())["traceEvents"], name)


def steps_of(events: Sequence[Event], name: str) -> list[Step]:
    """The same of a trace's events."""
    windows = sorted(_interval(event) for event in events if _is_named_step(event, name))
    if not windows:
        raise ValueError(f"the trace has no step {name!r}: wrap each in torch.profiler.record_function({name!r}).")
    calls = [event for event in events if _category(event) in _HOST_CALLS]
    work = [event for event in events if _category(event) in _DEVICE_WORK]
    return [_step([call for call in calls if start <= call["ts"] < stop], work) for start, stop in windows]


def _step(calls: Sequence[Event], work: Sequence[Event]) -> Step:
    """What ``calls`` of the CPU did, and launched of ``work``."""
    launched = {call["args"]["correlation"] for call in calls if "correlation" in call.get("args", {})}
    mine = [event for event in work if event["args"].get("correlation") in launched]
    ops = [DeviceOp(event["name"], event["cat"], event["args"]["stream"], *_interval(event)) for event in mine]
    names = [call["name"] for call in calls]
    waits = [name for name in names if _WAITS.search(name)]
    waits += [op.name for op in ops if op.category == "gpu_memcpy" and "Pageable" in op.name]
    allocations = tuple(name for name in names if _ALLOCATIONS.search(name))
    return Step(tuple(sorted(ops, key=lambda op: op.start)), tuple(waits), allocations)


def short_name(kernel: str) -> str:
    """What tells one copying kernel of torch from another: ``at::native::`` and template arguments left out."""
    if kernel.startswith("Mem"):
        return kernel
    found = re.search(
        r"(\w*(?:copy_kernel|CopyFunctor|CatArrayBatchedCopy|chunk_cat|split_with_sizes_copy)\w*)", kernel
    )
    return found[0] if found else kernel.partition("<")[0]


def _category(event: Event) -> str:
    return str(event.get("cat", "")) if event.get("ph") == "X" else ""


def _is_named_step(event: Event, name: str) -> bool:
    return _category(event) == "user_annotation" and event["name"] == name


def _interval(event: Event) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that do not touch, in order."""
    union: list[Interval] = []
    for start, stop in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], stop))
        else:
            union.append((start, stop))
    return union


def _common(ours: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Where both unions have intervals."""
    pairs = [(max(a[0], b[0]), min(a[1], b[1])) for a in ours for b in others]
    return [(start, stop) for start, stop in pairs if start < stop]


def _length(intervals: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)
