"""fsdp2: a composable ``fully_shard`` runtime for PyTorch."""

from fsdp2 import extensions
from fsdp2.api.contexts import no_sync, unsharded
from fsdp2.api.fully_shard import fully_shard
from fsdp2.api.module import FSDPModule, GradientReductionHandle, UnshardHandle, share_comm_ctx
from fsdp2.runtime.hooks import register_fsdp_forward_method
from fsdp2.tools import inner_gradients as _inner_gradients, memory_limit as _memory_limit, trace
from fsdp2.tools.clip import clip_grad_norm_
from fsdp2.tools.flat_optimizer import flatten_optimizer
from fsdp2.tools.install import install, installed, uninstall
from fsdp2.tools.memory_plan import memory_plan
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

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "CommunicationError",
    "DataParallelMeshDims",
    "ExtensionError",
    "FSDPModule",
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
    "clip_grad_norm_",
    "extensions",
    "flatten_optimizer",
    "fully_shard",
    "install",
    "installed",
    "load_safetensors",
    "memory_plan",
    "no_sync",
    "register_fsdp_forward_method",
    "save_safetensors",
    "share_comm_ctx",
    "stream_full_params",
    "trace",
    "uninstall",
    "unsharded",
]

_inner_gradients.register()
_memory_limit.register()
