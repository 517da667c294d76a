"""How long to wait before something counts as hung."""

from __future__ import annotations

import os

from tests.memory_errors import allocator


def patience() -> float:
    """How many times longer than alone on this machine something may take now: as often as programs that want to run
    outnumber cores, on the average of the last minute."""
    cores = os.cpu_count() or 1
    return max(1.0, os.getloadavg()[0] / cores) * allocator.patience()
