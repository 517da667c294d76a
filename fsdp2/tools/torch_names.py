"""Private names of torch that only the tools use; ``_torch.py`` says which versions were tried."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed import _symmetric_memory
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils import _python_dispatch

from fsdp2 import _torch

_get_grad = attrgetter("grad")

# Memory at addresses that all ranks know.
symmetric_memory = _symmetric_memory


def is_sharded_tensor(value: object) -> bool:
    """Whether ``value`` is a ShardedTensor."""
    names = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return names is not None and isinstance(value, names.ShardedTensor)


def grads_of(params: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The ``grad`` of each parameter."""
    with _torch.plain_access():
        return list(map(_get_grad, params))


def locals_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The local tensors of many DTensors."""
    return list(map(_torch.local_of, tensors))


def locals_placed_like(
    params: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """The local tensors of ``tensors``; None for those that are not DTensors or not placed like their parameter. If the
    runtime has made the DTensor, its spec is the parameter's."""
    return [
        tensor._local_tensor
        if isinstance(tensor, DTensor) and (tensor._spec is param._spec or _is_placed_like(param, tensor))
        else None
        for param, tensor in zip(cast(Sequence[DTensor], params), tensors, strict=True)
    ]


def _is_placed_like(param: DTensor, tensor: DTensor) -> bool:
    local = tensor._local_tensor
    is_plain = type(local) is torch.Tensor and local.shape == param._local_tensor.shape
    return is_plain and tensor.placements == param.placements and tensor.device_mesh == param.device_mesh


def specs_of(tensors: Sequence[torch.Tensor]) -> list[object]:
    """The spec of each DTensor, which says how the tensor is placed and is never changed; None for other tensors."""
    return [getattr(tensor, "_spec", None) for tensor in tensors]


def set_placement(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Set the mesh and placements of a DTensor in place. ``set_local`` then gives it its local tensor."""
    like = cast(DTensor, tensor)
    like._spec = _torch.dtensor_spec(mesh, placements, like.shape, like.stride(), like.dtype)


def as_of_dim_0(placement: Placement) -> Placement:
    """The equivalent of ``placement``, which shards some dimension, for dimension 0 of another tensor."""
    return _torch.strided_shard(0, split_factor_of(placement)) if isinstance(placement, _StridedShard) else Shard(0)


def sharded_dim(placement: Placement) -> int | None:
    """The tensor dimension that ``placement`` shards; None if it does not shard."""
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def split_factor_of(placement: Placement) -> int:
    """How many shards there were along its dimension before ``placement`` cut it."""
    return cast(int, placement.split_factor) if isinstance(placement, _StridedShard) else 1


# One launch for many tensors: products with a 0-dim tensor, and norms of an order, computed in a dtype.
foreach_mul: Callable[[list[torch.Tensor], torch.Tensor], None] = torch._foreach_mul_
foreach_norm: Callable[[list[torch.Tensor], float, torch.dtype], Sequence[torch.Tensor]] = torch._foreach_norm


_Step = TypeVar("_Step", bound=Callable[..., Any])


def hooked_step(step: _Step) -> _Step:
    """``step`` with the optimizer's hooks and the profiler's label around it, as torch wraps it in each class."""
    hooked = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True  # type: ignore[attr-defined]  # otherwise torch would wrap it again
    return cast(_Step, hooked)


def unhooked_step(cls: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """The step of an optimizer's class without its hooks."""
    step: Any = cls.step
    return cast(Callable[[torch.optim.Optimizer], Any], step.__wrapped__ if getattr(step, "hooked", False) else step)


# Where torch has the names of its ``fully_shard``. First, modules that only re-export names:
FULLY_SHARD_HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
# Modules that define names and also use them, so that torch's own must stay in their globals:
FULLY_SHARD_SOURCES = (
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed.fsdp._fully_shard._fsdp_api",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.fsdp._flat_param",
    "torch.distributed.fsdp.sharded_grad_scaler",
)
# Modules that build on torch's own classes.
FULLY_SHARD_INTERNALS = ("torch.distributed.fsdp.", "torch.distributed._composable.replicate_with_fsdp")
# (module, name) of the function that checks a module before torch shards or replicates it.
FULLY_SHARD_CHECKS = (
    ("torch.distributed.fsdp._fully_shard._fully_shard", "_validate_module"),
    ("torch.distributed._composable.replicate_with_fsdp", "_validate_module_common"),
)
# (module, name) of the functions by which torch's checkpoints, and clients, ask for the state of a
# FullyShardedDataParallel: torch's class is its own state.
FSDP1_STATES = (
    ("torch.distributed.fsdp._common_utils", "_get_module_fsdp_state_if_fully_sharded_module"),
    ("torch.distributed.fsdp._common_utils", "_get_module_fsdp_state"),
    ("torch.distributed._composable_state", "_get_module_state"),
)
# The same for the function by which clients make a FullyShardedDataParallel a root.
FSDP1_LAZY_INIT = ("torch.distributed.fsdp._runtime_utils", "_lazy_init")
# The same for the function by which torch's checkpoints list the parameters of a model.
LISTED_STATE = ("torch.distributed.checkpoint.state_dict", "_iterate_valid_model_state")
# The method by which torch's pipelining, since 2.15, and clients ask a sharded module for its state.
STATE_OF_MODULE = "_get_fsdp_state"


def forget_composable_api(module: nn.Module, function: Callable[..., Any]) -> None:
    """Remove what torch's ``contract`` recorded on ``module`` for a call of ``function`` that was refused."""
    applied = getattr(function, "__wrapped__", function)
    module.__dict__.get(REGISTRY_KEY, {}).pop(applied.__name__, None)
    module.__dict__.get(STATE_KEY, {}).pop(applied, None)


# Fake tensors: torch documents them for compilers, without a public name.
DispatchMode = _python_dispatch.TorchDispatchMode  # sees every operation below autograd


def fake_tensors() -> Any:
    """A context in which new tensors have a shape, a dtype and a device, but no memory. The meta device does not work
    here, since attention chooses its kernel by the device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def storage_key(tensor: torch.Tensor) -> int:
    """A number that is the same for all tensors in one storage as long as it lives, even if its memory is freed and
    reallocated, which changes the public ``data_ptr``."""
    return tensor.untyped_storage()._cdata


def remove_hooks(module: nn.Module, owner: object) -> None:
    """Remove the hooks that are methods of ``owner`` from ``module``. A copied module has no handles for them."""
    of_forward, of_state = ("forward_pre_hooks", "forward_hooks"), ("state_dict_pre_hooks", "load_state_dict_pre_hooks")
    for name in (*of_forward, *of_state, "load_state_dict_post_hooks"):
        hooks = getattr(module, f"_{name}")
        for key, hook in list(hooks.items()):
            if getattr(getattr(hook, "hook", hook), "__self__", None) is owner:
                del hooks[key]


def replicates_plain_tensors() -> bool:
    """Whether ``torch.distributed.tensor.experimental.implicit_replication`` is active: operations that mix plain
    tensors with DTensors then treat the plain ones as equal on all ranks."""
    return DTensor._op_dispatcher._allow_implicit_replication


def changes_what_it_loads(module: nn.Module, is_known: Callable[[object], bool]) -> bool:
    """Whether the module's class, or a hook that is not ``is_known``, may change a state dict before it is loaded."""
    hooks = (getattr(each, "hook", each) for each in module._load_state_dict_pre_hooks.values())
    return type(module)._load_from_state_dict is not nn.Module._load_from_state_dict or not all(map(is_known, hooks))
