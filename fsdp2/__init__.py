"""fsdp2: a composable ``fully_shard`` runtime for PyTorch."""

from fsdp2 import extensions, trace
from fsdp2.api import CPUOffloadPolicy, ExtensionError, MixedPrecisionPolicy, Observer, OffloadPolicy, ScheduleError
from fsdp2.fully_shard import fully_shard
from fsdp2.module import FSDPModule, UnshardHandle

__all__ = [
    "CPUOffloadPolicy",
    "ExtensionError",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "Observer",
    "OffloadPolicy",
    "ScheduleError",
    "UnshardHandle",
    "extensions",
    "fully_shard",
    "trace",
]
