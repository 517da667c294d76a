"""How long to wait before something counts as hung."""

from __future__ import annotations

import os

from tests.memory_errors import allocator

# Ranks that hang are reported with their stacks before pytest's own timeout, 300 s, ends the process.
MOST_S = 240.0


def patient(timeout_s: float) -> float:
    """``timeout_s`` of an idle machine, in seconds of this one now: as many times longer as programs that want to run
    outnumber cores, on the average of the last minute. Beyond ``MOST_S`` only if ``timeout_s`` is."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return max(timeout_s, min(timeout_s * load, MOST_S)) * allocator.patience()
