"""Private names of torch that the views imitate. They are looked up only on demand, since importing them takes long."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping, Sequence
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard."
STATE_MODULE = f"{_FULLY_SHARD}_fsdp_state"  # where torch's hooks on modules are defined
_COMMON, _PARAM, _GROUP = (f"{_FULLY_SHARD}{name}" for name in ("_fsdp_common", "_fsdp_param", "_fsdp_param_group"))

_ENUMS = {
    "TrainingState": _COMMON,
    "ShardedState": _PARAM,
    "HandleTrainingState": "torch.distributed.fsdp._common_utils",
    "HandleShardingStrategy": "torch.distributed.fsdp._flat_param",
}

# Classes of torch's runtimes that clients patch, and the equivalent in ours.
PATCHED = (
    (_PARAM, "FSDPParam", "For other formats of parameters, use tensor subclasses with all-gather hooks"),
    (_GROUP, "FSDPParamGroup", "To change communication, use the setters of FSDPModule, such as set_all_reduce_hook"),
    (STATE_MODULE, "FSDPState", "To see or change passes, use hooks of modules"),
    ("torch.distributed.fsdp._flat_param", "FlatParamHandle", "To see or change passes, use hooks of modules"),
)

# torch's registry, which maps a module to a weak reference to its state.
states_by_module: MutableMapping[nn.Module, Any] = _composable_state._module_state_mapping


def state_class() -> type | None:
    """torch's class of a module's state; None if it has not been imported."""
    module = sys.modules.get(STATE_MODULE)
    return None if module is None else vars(module)["FSDPState"]


def class_of_torch(module: str, name: str) -> type | None:
    """The class ``name`` in ``module``; None if this version of torch has no such class."""
    try:
        import_module(module)
    except ImportError:
        return None
    return vars(sys.modules[module]).get(name)


def member(enum: str, name: str) -> Any:
    """A member of one of torch's enums: of passes, of forms in which parameters may be bound, or of strategies."""
    return getattr(import_module(_ENUMS[enum]), enum)[name]


def places_of(slots: Sequence[tuple[nn.Module, str]]) -> Any:
    """Where a parameter is bound, as torch describes it."""
    (module, name), *others = slots
    return import_module(_PARAM).ParamModuleInfo(module, name, [m for m, _ in others], [n for _, n in others])


def mesh_info(mesh: DeviceMesh, shard: int | None, replicate: int | None, **options: Any) -> Any:
    """torch's description of a mesh; ``shard`` and ``replicate`` are axis numbers. Creates no process group."""
    names = {(True, True): "HSDPMeshInfo", (True, False): "FSDPMeshInfo", (False, True): "DDPMeshInfo"}
    made = getattr(import_module(_COMMON), names[shard is not None, replicate is not None])
    return made(mesh, shard_mesh_dim=shard, replicate_mesh_dim=replicate, **options)


def size_of(info: Any) -> int:
    """The number of ranks over which a ``mesh_info`` shards."""
    return int(info.shard_mesh_size)


def set_reduce_group(info: Any, group: dist.ProcessGroup | None) -> Any:
    """``info``, changed to say that gradients are reduced in ``group``."""
    if hasattr(info, "reduce_scatter_process_group"):
        info.reduce_scatter_process_group = group
    return info
