"""fsdp2: a composable ``fully_shard`` runtime for PyTorch."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsdp2 import _torch
from fsdp2.api.adapters import ADAPTERS, SPEC_READERS
from fsdp2.api.fully_shard import PlugIns as _OfCalls, fully_shard
from fsdp2.api.module import (
    FSDPModule,
    GradientReductionHandle,
    PlugIns as _OfModules,
    UnshardHandle,
)
from fsdp2.extras import (
    alike as _alike,
    empty_buffers as _empty_buffers,
    handed_out as _handed_out,
    local_parts as _local_parts,
    lost_gradients as _lost_gradients,
    outside_calls as _outside_calls,
    peers as _peers,
    ranks_may_differ as _ranks_may_differ,
    refusals as _refusals,
    shared_memory as _shared_memory,
    state as _state,
    ties as _ties,
    unit_checks as _unit_checks,
)
from fsdp2.group.codec import PlugIns as _OfCodecs
from fsdp2.group.param import PlugIns as _OfParams
from fsdp2.group.shards import PlugIns as _OfSteps
from fsdp2.runtime.hooks import PlugIns as _OfHooks
from fsdp2.runtime.unit_tree import PlugIns
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


def _later(module: str, name: str) -> Any:
    """The function ``name`` of ``module``, which is imported at the first call."""

    # The step of an optimizer may be compiled, and no compiler follows an import.
    @_torch.runs_between_graphs
    def call(*args: Any) -> Any:
        return getattr(import_module(f"fsdp2.{module}"), name)(*args)

    return call


def _once_imported(library: str, function: Callable[..., Any], without: Callable[..., Any]) -> Callable[..., Any]:
    """Calls ``function`` where somebody has imported ``library``, else ``without``."""
    return lambda *args: (function if library in sys.modules else without)(*args)


_types = "tensors.typed_params"  # in front of local parts: the first who knows a parameter answers
SPEC_READERS.append(_once_imported("spmd_types", _later(_types, "written"), lambda *_: None))
_OfCalls.resolve = _once_imported("spmd_types", _later(_types, "resolved"), lambda _, resolve: resolve())
for _extra in (
    *(_unit_checks, _lost_gradients, _alike),  # each tree asks them in this order
    *(
        _empty_buffers,
        _handed_out,
        _local_parts,
        _outside_calls,
        _peers,
        _ranks_may_differ,
        _refusals,
        _shared_memory,
        _state,
        _ties,
    ),
):
    _extra.register()
_OfHooks.check_loaded = _later("tools.loading", "check_loaded")
_OfModules.copied = _later("tools.copying", "copied_module")
_OfModules.communicate_by = _later("tools.custom_comm", "communicate_by")
PlugIns.limits_memory = _later("tools.memory_limit", "MemoryLimit")
_OfParams.why_not = _later("tools.replaced", "why_not")
_OfSteps.on_plain_step = _later("tools.plain_params", "warn_of_plain")
_OfCodecs.cut, _OfCodecs.pin = _later("tensors.cut", "pinned_shard"), _later("tensors.cut", "pinned")
_OfCodecs.codec = _later("tensors.all_gather_hooks", "HookedParams")
ADAPTERS["bitsandbytes.nn.modules.Params4bit"] = _later("tensors.params4bit", "adapt")
del globals()["plan"]  # the folder, which hides the function
