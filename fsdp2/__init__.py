"""fsdp2: a composable ``fully_shard`` runtime for PyTorch."""

from fsdp2 import trace
from fsdp2.api import CPUOffloadPolicy, MixedPrecisionPolicy, Observer, OffloadPolicy, ScheduleError
from fsdp2.fully_shard import fully_shard
from fsdp2.module import FSDPModule, UnshardHandle

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "Observer",
    "OffloadPolicy",
    "ScheduleError",
    "UnshardHandle",
    "fully_shard",
    "trace",
]
