"""fsdp2: a composable ``fully_shard`` runtime for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsdp2.api.fully_shard import fully_shard
from fsdp2.api.module import FSDPModule, GradientReductionHandle, UnshardHandle
from fsdp2.extras import wiring
from fsdp2.types import (
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

if TYPE_CHECKING:
    from fsdp2 import extensions
    from fsdp2.extras.inner_losses import allow_inner_losses
    from fsdp2.fsdp1.extensions import FSDPExtensions, set_fsdp_extensions
    from fsdp2.fsdp1.wrapper import FullyShardedDataParallel
    from fsdp2.tools import trace
    from fsdp2.tools.auto_shard import AutoShard, auto_shard
    from fsdp2.tools.checkpointable import from_checkpointable, to_checkpointable
    from fsdp2.tools.clip import clip_grad_norm_
    from fsdp2.tools.custom_comm import AllGather, Comm, ReduceScatter, share_comm_ctx
    from fsdp2.tools.flat_optimizer import flatten_optimizer
    from fsdp2.tools.forward_methods import register_fsdp_forward_method
    from fsdp2.tools.host_adamw import HostAdamW
    from fsdp2.tools.install import install, installed, uninstall
    from fsdp2.tools.lending import unsharded
    from fsdp2.tools.load_weights import LoadedKeys, load_safetensors
    from fsdp2.tools.memory_plan import memory_plan
    from fsdp2.tools.merge_lora import MergedLora, merge_lora
    from fsdp2.tools.muon import Muon, muon_groups
    from fsdp2.tools.no_sync import no_sync
    from fsdp2.tools.offload_budget import OffloadChoice, offload_by_budget
    from fsdp2.tools.planner.plan import Workload, plan
    from fsdp2.tools.report import compare_reports, report
    from fsdp2.tools.reshard import reshard_to
    from fsdp2.tools.save_weights import save_safetensors
    from fsdp2.tools.stream_weights import FullParamStream, stream_full_params
    from fsdp2.tools.whole_matrices import MatrixRule, WholeMatrices, whole_matrices

__all__ = [
    "AllGather",
    "AutoShard",
    "CPUOffloadPolicy",
    "Comm",
    "CommunicationError",
    "DataParallelMeshDims",
    "ExpertMeshes",
    "ExtensionError",
    "FSDPExtensions",
    "FSDPModule",
    "FullParamStream",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "HostAdamW",
    "LoadedKeys",
    "MatrixRule",
    "MemoryLimitError",
    "MergedLora",
    "MixedPrecisionPolicy",
    "Muon",
    "Observer",
    "OffloadChoice",
    "OffloadPolicy",
    "ParamPlacement",
    "ReduceScatter",
    "ScheduleError",
    "UnshardHandle",
    "WholeMatrices",
    "Workload",
    "allow_inner_losses",
    "auto_shard",
    "clip_grad_norm_",
    "compare_reports",
    "expert_meshes",
    "extensions",
    "flatten_optimizer",
    "from_checkpointable",
    "fully_shard",
    "install",
    "installed",
    "load_safetensors",
    "memory_plan",
    "merge_lora",
    "muon_groups",
    "no_sync",
    "offload_by_budget",
    "plan",
    "register_fsdp_forward_method",
    "report",
    "reshard_to",
    "save_safetensors",
    "set_fsdp_extensions",
    "share_comm_ctx",
    "stream_full_params",
    "to_checkpointable",
    "trace",
    "uninstall",
    "unsharded",
    "whole_matrices",
]

__version__ = "0.1.0"

# By module, what is imported at its first use: training needs none of it.
_LAZY = {
    "extras.inner_losses": ("allow_inner_losses",),
    "fsdp1": ("FSDPExtensions", "FullyShardedDataParallel", "set_fsdp_extensions"),
    "tools.auto_shard": ("AutoShard", "auto_shard"),
    "tools.checkpointable": ("from_checkpointable", "to_checkpointable"),
    "tools.clip": ("clip_grad_norm_",),
    "tools.custom_comm": ("AllGather", "Comm", "ReduceScatter", "share_comm_ctx"),
    "tools.expert_parallel": ("ExpertMeshes", "expert_meshes"),
    "tools.flat_optimizer": ("flatten_optimizer",),
    "tools.forward_methods": ("register_fsdp_forward_method",),
    "tools.host_adamw": ("HostAdamW",),
    "tools.install": ("install", "installed", "uninstall"),
    "tools.lending": ("unsharded",),
    "tools.load_weights": ("LoadedKeys", "load_safetensors"),
    "tools.memory_plan": ("memory_plan",),
    "tools.merge_lora": ("MergedLora", "merge_lora"),
    "tools.muon": ("Muon", "muon_groups"),
    "tools.no_sync": ("no_sync",),
    "tools.offload_budget": ("OffloadChoice", "offload_by_budget"),
    "tools.planner.plan": ("Workload", "plan"),
    "tools.report": ("compare_reports", "report"),
    "tools.reshard": ("reshard_to",),
    "tools.save_weights": ("save_safetensors",),
    "tools.stream_weights": ("FullParamStream", "stream_full_params"),
    "tools.whole_matrices": ("MatrixRule", "WholeMatrices", "whole_matrices"),
}
_LAZY_MODULES = {"extensions": "extensions", "trace": "tools.trace"}
_MODULE_OF = {name: module for module, names in _LAZY.items() for name in names} | _LAZY_MODULES


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fsdp2' has no attribute {name!r}")
    module = import_module(f"fsdp2.{_MODULE_OF[name]}")
    found = globals()[name] = module if name in _LAZY_MODULES else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


wiring.wire()
del globals()["plan"]  # the folder, which hides the function
