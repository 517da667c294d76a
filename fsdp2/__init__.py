"""fsdp2: a composable ``fully_shard`` runtime for PyTorch."""

from fsdp2 import extensions, trace
from fsdp2.api import (
    AllGather,
    Comm,
    CommunicationError,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    ExtensionError,
    MemoryLimitError,
    MixedPrecisionPolicy,
    Observer,
    OffloadPolicy,
    ParamPlacement,
    ReduceScatter,
    ScheduleError,
    TiedWeights,
)
from fsdp2.clip import clip_grad_norm_
from fsdp2.fully_shard import fully_shard
from fsdp2.hooks import register_fsdp_forward_method
from fsdp2.memory import memory_plan
from fsdp2.module import FSDPModule, GradientReductionHandle, UnshardHandle, share_comm_ctx
from fsdp2.optim import flatten_optimizer
from fsdp2.scopes import no_sync, unsharded

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
    "TiedWeights",
    "UnshardHandle",
    "clip_grad_norm_",
    "extensions",
    "flatten_optimizer",
    "fully_shard",
    "memory_plan",
    "no_sync",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "trace",
    "unsharded",
]
