"""How long to wait before something counts as hung."""

from __future__ import annotations

import gc
import os
import time
import weakref
from typing import Any

from tests.memory_errors import allocator

# Ranks that hang are reported with their stacks before pytest's own timeout, 300 s, ends the process.
MOST_S = 240.0


def patient(timeout_s: float) -> float:
    """``timeout_s`` of an idle machine, in seconds of this one now: as many times longer as programs that want to run
    outnumber cores, on the average of the last minute. Beyond ``MOST_S`` only if ``timeout_s`` is."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return max(timeout_s, min(timeout_s * load, MOST_S)) * allocator.patience()


def assert_freed(*gone: weakref.ref[Any]) -> None:
    """Collect garbage until all of ``gone`` are dead. Autograd's thread of a device may hold the graph of a backward
    for a moment after ``backward`` has returned, and by its hooks the model."""
    end = time.monotonic() + patient(10)
    while any(reference() is not None for reference in gone):
        assert time.monotonic() < end, f"still alive: {[type(reference()).__name__ for reference in gone]}"
        gc.collect()
