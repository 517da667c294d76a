"""Private names of torch that only the rooms above the core use; ``core/_torch.py`` lists the tested versions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _symmetric_memory
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils import _python_dispatch

from fsdp2.core import CommunicationError, _torch


def default_store() -> dist.Store:
    """The store that the ranks of the world share; ``init_process_group`` may have created it.

    Raises:
        CommunicationError: the process group was destroyed.
    """
    check_not_destroyed()
    return dist.distributed_c10d._get_default_store()


def check_not_destroyed(caller: str = "") -> None:
    """Raise CommunicationError if the process group of the world was destroyed."""
    if not dist.is_initialized():
        raise CommunicationError(
            f"{caller}the process group was destroyed, so this rank cannot reach the others. Call "
            "torch.distributed.destroy_process_group() after the last step, and not before its backward has ended."
        )


def is_hosted_here(store: dist.Store) -> bool:
    """Whether ``store``, the store of the world, ends with this process."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore) and dist.get_rank() == 0 and not dist.is_torchelastic_launched()


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long an operation of ``group`` may take on ``device``; None if the backend has no limit."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # the backend is written in Python, such as torch's for threads
        return None


@contextmanager
def groups_made_from_nothing() -> Iterator[None]:
    """Give new groups their own communicators. If ``init_process_group`` was given a ``device_id``, torch would split
    them off the world's communicator, and that requires all ranks of the world."""
    world = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None  # type: ignore[union-attr]
    try:
        yield
    finally:
        world.bound_device_id = device  # type: ignore[union-attr]


def num_groups() -> int:
    """The counter torch uses to name this rank's next process group, if only some ranks create it. Each group that this
    rank creates increments it. torch 2.13 and earlier versions used another number in the name."""
    world, names_read = dist.distributed_c10d._world, dist.distributed_c10d._hash_ranks_to_str.__code__.co_names
    return world.group_count if "group_count" in names_read else len(world.pg_names)


_MIXED = "mixed torch.Tensor and DTensor"  # part of torch's error if an operation gets a tensor and a DTensor


def guarded_call(module: nn.Module, on_shards: Callable[[RuntimeError], None]) -> Callable[..., Any]:
    """A wrapper for calls of ``module``. If a call raises because it got shards, the wrapper calls ``on_shards``, which
    may raise a better error."""
    call = module._call_impl

    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            if type(error) is RuntimeError and _MIXED in str(error):
                on_shards(error)
            raise

    _torch.keep_out_of_graphs(guarded)
    return guarded


def watch_calls(
    module: nn.Module,
    hook: _torch.GradientHook,
    find_tensors: Callable[[Any, list[torch.Tensor]], list[torch.Tensor]],
    is_late: Callable[[], bool],
) -> None:
    """Permanently add ``hook`` to what each call of ``module`` returns. ``find_tensors`` lists the tensors in that.
    ``is_late`` tells whether the hook would have no effect in a call inside a backward, which recomputes.

    The compiler looks at ``CALL`` in modules with hooks, such as those of tensor parallelism, and then traces
    ``watched``.
    """
    is_traced = torch.compiler.is_dynamo_compiling
    call: Callable[..., Any] = module._compiled_call_impl or module._call_impl

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        if is_traced():
            return output
        if type(output) is not torch.Tensor:
            for tensor in find_tensors(output, []):
                if tensor.requires_grad:
                    hook.add_to(tensor)
        elif output.requires_grad and (_torch.running_backward() == -1 or not is_late()):
            if args and output is args[0]:  # it may be the unit's input, whose own hook must run last
                output = output.view_as(output)
            hook.add_to(output)
        return output

    _torch.keep_out_of_graphs(watched)
    vars(module)[_torch.CALL] = watched


def non_persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers that state dicts leave out."""
    return {name: each for name, each in module._buffers.items() if name in module._non_persistent_buffers_set}


def buffers_dict(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The dict that holds a module's own buffers."""
    return module._buffers


def is_sharded_tensor(value: object) -> bool:
    """Whether ``value`` is a ShardedTensor."""
    names = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return names is not None and isinstance(value, names.ShardedTensor)


def grads_of(params: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The ``grad`` of each parameter."""
    with _torch.plain_access():
        return list(map(attrgetter("grad"), params))


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


def forget_composable_api(module: nn.Module, function: Callable[..., Any]) -> None:
    """Remove what torch's ``contract`` recorded on ``module`` for a call of ``function`` that was refused."""
    applied = getattr(function, "__wrapped__", function)
    module.__dict__.get(REGISTRY_KEY, {}).pop(applied.__name__, None)
    module.__dict__.get(STATE_KEY, {}).pop(applied, None)


# Fake tensors: torch documents them for compilers, without a public name.
DispatchMode = _python_dispatch.TorchDispatchMode  # sees every operation below autograd


def decompositions() -> dict[Any, Callable[..., Any]]:
    """How ``torch.compile`` takes a masked softmax apart, so that backward may keep scores and compute it again."""
    aten = torch.ops.aten
    taken_apart = [aten._softmax, aten._softmax_backward_data, aten.masked_fill, aten.detach]
    return cast("dict[Any, Callable[..., Any]]", torch._decomp.get_decompositions(taken_apart))


def fake_tensors() -> Any:
    """A context in which new tensors have a shape, a dtype and a device, but no memory. The meta device does not work
    here, since attention chooses its kernel by the device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def storage_key(tensor: torch.Tensor) -> int:
    """A number that is the same for all tensors in one storage as long as it lives, even if its memory is freed and
    reallocated, which changes the public ``data_ptr``."""
    return tensor.untyped_storage()._cdata


def num_holders(tensor: torch.Tensor) -> int:
    """How many tensors have the storage of ``tensor``. Other holders of the storage count, too."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # this Python object is one


def has_saved_tensors_hooks() -> bool:
    """Whether hooks would get what autograd saves now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def remove_hooks(module: nn.Module, owner: object) -> None:
    """Remove the hooks that are methods or partial functions of ``owner``. A copied module has no handles for them."""
    of_forward, of_saving = ("forward_pre_hooks", "forward_hooks"), ("state_dict_pre_hooks", "state_dict_hooks")
    for name in (*of_forward, *of_saving, "load_state_dict_pre_hooks", "load_state_dict_post_hooks"):
        hooks = getattr(module, f"_{name}")
        for key, hook in list(hooks.items()):
            is_method = getattr(getattr(hook, "hook", hook), "__self__", None) is owner
            if is_method or owner in getattr(hook, "args", ()):
                del hooks[key]


def replicates_plain_tensors() -> bool:
    """Whether ``torch.distributed.tensor.experimental.implicit_replication`` is active: operations that mix plain
    tensors with DTensors then treat the plain ones as equal on all ranks."""
    return DTensor._op_dispatcher._allow_implicit_replication


def changes_what_it_loads(module: nn.Module, is_known: Callable[[object], bool]) -> bool:
    """Whether the module's class, or a hook that is not ``is_known``, may change a state dict before it is loaded."""
    hooks = (getattr(each, "hook", each) for each in module._load_state_dict_pre_hooks.values())
    return type(module)._load_from_state_dict is not nn.Module._load_from_state_dict or not all(map(is_known, hooks))


def way_of_hooks(param: torch.Tensor) -> str | None:
    """The method that registered hooks for the gradient of ``param``; None if there are no such hooks."""
    if param._backward_hooks:
        return "register_hook"
    return "register_post_accumulate_grad_hook" if _torch.post_accumulate_grad_hooks(param) else None


def flattened_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of ``mesh`` as one axis with its own process group, which is created once per name."""
    return mesh._flatten(name)


def is_flattened(param: torch.Tensor) -> bool:
    """Whether torch's own ``FullyShardedDataParallel`` manages ``param``, which it then marks."""
    return getattr(param, "_fsdp_flattened", False)


# Memory at addresses that all ranks know.
symmetric_memory = _symmetric_memory
