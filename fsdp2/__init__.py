"""fsdp2: a composable ``fully_shard`` runtime for PyTorch.

At the top are the names that ``torch.distributed.fsdp`` has, and those of ours that a training loop calls. Everything
else is in the room that it belongs to, such as ``fsdp2.optim.Muon``. A room is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fsdp2.core import (
    CommunicationError,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    ExtensionError,
    FSDPModule,
    GradientReductionHandle,
    MemoryLimitError,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ParamPlacement,
    ScheduleError,
    UnshardHandle,
    fully_shard,
    share_comm_ctx,
)
from fsdp2.extras import wiring

if TYPE_CHECKING:
    from fsdp2 import (
        checkpoint as checkpoint,
        fsdp1 as fsdp1,
        memory as memory,
        optim as optim,
        planner as planner,
        report as report,
        tensors as tensors,
        testing as testing,
    )
    from fsdp2.checkpoint.replicas import broadcast_from, check_replicas
    from fsdp2.checkpoint.whole_init import whole_init
    from fsdp2.extras.expert_parallel import ExpertMeshes, expert_meshes
    from fsdp2.extras.forward_methods import register_fsdp_forward_method
    from fsdp2.extras.inner_losses import allow_inner_losses
    from fsdp2.extras.joined import joined
    from fsdp2.extras.lending import no_sync, unsharded
    from fsdp2.extras.other_weights import weights_of
    from fsdp2.fsdp1 import FullyShardedDataParallel
    from fsdp2.installation import install, uninstall
    from fsdp2.optim import clip_grad_norm_
    from fsdp2.planner import auto_shard

__all__ = [
    "CPUOffloadPolicy",
    "CommunicationError",
    "DataParallelMeshDims",
    "ExpertMeshes",
    "ExtensionError",
    "FSDPModule",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "MemoryLimitError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParamPlacement",
    "ScheduleError",
    "UnshardHandle",
    "allow_inner_losses",
    "auto_shard",
    "broadcast_from",
    "check_replicas",
    "clip_grad_norm_",
    "expert_meshes",
    "fully_shard",
    "install",
    "joined",
    "no_sync",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "uninstall",
    "unsharded",
    "weights_of",
    "whole_init",
]

__version__ = "0.1.0.dev0"

_ROOMS = ("checkpoint", "fsdp1", "memory", "optim", "planner", "report", "tensors", "testing")
# By module, the names that are imported at their first use: training needs none of them.
_LAZY = {
    "checkpoint.replicas": ("broadcast_from", "check_replicas"),
    "checkpoint.whole_init": ("whole_init",),
    "extras.expert_parallel": ("ExpertMeshes", "expert_meshes"),
    "extras.forward_methods": ("register_fsdp_forward_method",),
    "extras.inner_losses": ("allow_inner_losses",),
    "extras.joined": ("joined",),
    "extras.lending": ("no_sync", "unsharded"),
    "extras.other_weights": ("weights_of",),
    "fsdp1": ("FullyShardedDataParallel",),
    "installation": ("install", "uninstall"),
    "optim.clip": ("clip_grad_norm_",),
    "planner": ("auto_shard",),
}
_MODULE_OF = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"fsdp2.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fsdp2' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"fsdp2.{_MODULE_OF[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, *_ROOMS})


wiring.wire()
