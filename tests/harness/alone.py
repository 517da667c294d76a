"""One rank of several that are not there: what a rank can see by itself needs no others.

Collectives do nothing, so values that other ranks would send are whatever memory holds. Traces, states and refusals do
not depend on values. The rank is this process: no pool, and a debugger stops in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.null_group import null_process_group
from tests.harness.worker import RankContext


def on_one_rank(body: Callable[..., Any], world_size: int = 2, **kwargs: Any) -> Any:
    """What ``body(ctx, **kwargs)`` returns as rank 0 of ``world_size``."""
    __tracebackhide__ = True
    with null_process_group(world_size):
        torch.manual_seed(0)
        return body(RankContext(0, world_size), **kwargs)
