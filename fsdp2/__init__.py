"""fsdp2: a composable ``fully_shard`` runtime for PyTorch."""

from typing import TYPE_CHECKING, Any

from fsdp2 import extensions
from fsdp2.api.contexts import no_sync, unsharded
from fsdp2.api.fully_shard import fully_shard
from fsdp2.api.module import FSDPModule, GradientReductionHandle, UnshardHandle, share_comm_ctx
from fsdp2.runtime.hooks import register_fsdp_forward_method
from fsdp2.tools import memory_limit as _memory_limit, progress as _progress, trace
from fsdp2.tools.auto_shard import AutoShard, auto_shard
from fsdp2.tools.clip import clip_grad_norm_
from fsdp2.tools.flat_optimizer import flatten_optimizer
from fsdp2.tools.install import install, installed, uninstall
from fsdp2.tools.memory_plan import memory_plan
from fsdp2.tools.planner.plan import Workload, plan
from fsdp2.tools.report import report
from fsdp2.tools.reshard import reshard_to
from fsdp2.tools.save_weights import save_safetensors
from fsdp2.tools.weights import LoadedKeys, load_safetensors, stream_full_params
from fsdp2.types import (
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

if TYPE_CHECKING:
    from fsdp2.fsdp1.extensions import FSDPExtensions, set_fsdp_extensions
    from fsdp2.fsdp1.wrapper import FullyShardedDataParallel

__all__ = [
    "AllGather",
    "AutoShard",
    "CPUOffloadPolicy",
    "Comm",
    "CommunicationError",
    "DataParallelMeshDims",
    "ExtensionError",
    "FSDPExtensions",
    "FSDPModule",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "LoadedKeys",
    "MemoryLimitError",
    "MixedPrecisionPolicy",
    "Observer",
    "OffloadPolicy",
    "ParamPlacement",
    "ReduceScatter",
    "ScheduleError",
    "TiedWeights",
    "UnshardHandle",
    "Workload",
    "auto_shard",
    "clip_grad_norm_",
    "extensions",
    "flatten_optimizer",
    "fully_shard",
    "install",
    "installed",
    "load_safetensors",
    "memory_plan",
    "no_sync",
    "plan",
    "register_fsdp_forward_method",
    "report",
    "reshard_to",
    "save_safetensors",
    "set_fsdp_extensions",
    "share_comm_ctx",
    "stream_full_params",
    "trace",
    "uninstall",
    "unsharded",
]

_memory_limit.register()
_progress.register()

_OF_FSDP1 = ("FSDPExtensions", "FullyShardedDataParallel", "set_fsdp_extensions")


def __getattr__(name: str) -> Any:
    """Import FSDP1's front at its first use: it imports torch's FSDP1, which takes longer than all of fsdp2."""
    if name not in _OF_FSDP1:
        raise AttributeError(f"module 'fsdp2' has no attribute {name!r}")
    from fsdp2 import fsdp1

    return getattr(fsdp1, name)
