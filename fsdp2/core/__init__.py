"""The runtime. What is imported here is its face: the rooms above use only these names."""

from fsdp2.core.api.fully_shard import fully_shard
from fsdp2.core.api.module import FSDPModule, GradientReductionHandle, UnshardHandle, share_comm_ctx
from fsdp2.core.comm.custom import AllGather, Comm, ReduceScatter
from fsdp2.core.types import (
    CommunicationError,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    ExtensionError,
    MemoryLimitError,
    MixedPrecisionPolicy,
    Observer,
    OffloadPolicy,
    ParamPlacement,
    ScheduleError,
)

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "CommunicationError",
    "DataParallelMeshDims",
    "ExtensionError",
    "FSDPModule",
    "GradientReductionHandle",
    "MemoryLimitError",
    "MixedPrecisionPolicy",
    "Observer",
    "OffloadPolicy",
    "ParamPlacement",
    "ReduceScatter",
    "ScheduleError",
    "UnshardHandle",
    "fully_shard",
    "share_comm_ctx",
]
