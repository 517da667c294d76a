"""The door to private torch: every use of a name that torch does not document, behind one function each.

Checked on torch 2.13.0. Each function says what it uses and why no public name would do. No other file of the package
touches a private name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _symmetric_memory
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def dtensor_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """The spec that ``dtensor`` needs. ``DTensor.from_local`` builds one per call and runs autograd."""
    return DTensorSpec(mesh, tuple(placements), TensorMeta(shape, stride, dtype))


def dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """``local`` as a DTensor, no check, no autograd: 1 us where ``DTensor.from_local`` takes 50.

    ``DTensor.__new__`` does all the work; ``__init__``, which is skipped, only tells exporters about it. It copies the
    local tensor's storage offset, and ``copy.deepcopy`` then refuses the DTensor: a stand-in without an offset avoids
    that.
    """
    plain = type(local) is torch.Tensor  # subclasses have no offset, and may lack new_empty
    made = DTensor.__new__(DTensor, local.new_empty(0) if plain else local, spec, requires_grad=False)
    made._local_tensor = local
    return made


def dtensor_like(param: torch.Tensor, local: torch.Tensor) -> DTensor:
    """``local`` as a DTensor that is sharded like ``param``, of the same dtype and on the same device."""
    like = cast(DTensor, param)
    made = DTensor.__new__(DTensor, like._local_tensor, like._spec, requires_grad=False)  # its local has no offset
    made._local_tensor = local
    return made


def dtensor_placed_like(param: torch.Tensor, local: torch.Tensor) -> DTensor:
    """The same, but of the dtype of ``local``."""
    like = cast(DTensor, param)
    return dtensor(local, dtensor_spec(like.device_mesh, like.placements, like.shape, like.stride(), local.dtype))


_get_local = attrgetter("_local_tensor")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local tensor itself; ``to_local()`` returns a new, differentiable view."""
    return tensor._local_tensor  # type: ignore[attr-defined]


def have_locals(tensors: Sequence[torch.Tensor], locals_: Sequence[torch.Tensor]) -> bool:
    """Whether these are the local tensors of ``tensors``, the very objects; once per gather, so without Python."""
    return all(map(is_, map(_get_local, tensors), locals_))


def locals_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The local tensors of many DTensors."""
    return list(map(_get_local, tensors))


def locals_placed_like(
    params: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """The local tensors of ``tensors``; None for those that are no DTensor, or not placed like their parameter. Made
    for many: where the runtime has made the DTensor, its spec is the parameter's, and one test tells."""
    return [
        tensor._local_tensor
        if isinstance(tensor, DTensor) and (tensor._spec is param._spec or _is_placed_like(param, tensor))
        else None
        for param, tensor in zip(cast(Sequence[DTensor], params), tensors, strict=True)
    ]


def specs_of(tensors: Sequence[torch.Tensor]) -> list[object]:
    """The spec of each DTensor, None of others. It says how the tensor is placed, and is never changed."""
    return [getattr(tensor, "_spec", None) for tensor in tensors]


def _is_placed_like(param: DTensor, tensor: DTensor) -> bool:
    local = tensor._local_tensor
    is_plain = type(local) is torch.Tensor and local.shape == param._local_tensor.shape
    return is_plain and tensor.placements == param.placements and tensor.device_mesh == param.device_mesh


def set_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Point a DTensor at other local memory; the object stays, so optimizers and ties keep their references."""
    cast(DTensor, tensor)._local_tensor = local


def arrived_local(tensor: DTensor) -> torch.Tensor:
    """A DTensor's local tensor, after the collective that makes it: DTensor leaves some pending."""
    local = tensor._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def strided_shard(dim: int, split_factor: int) -> Placement:
    """A part of each of ``split_factor`` pieces along ``dim`` that axes further right have made."""
    return cast(Placement, _StridedShard(dim, split_factor=split_factor))


def shards_dim(placement: Placement, dim: int) -> bool:
    """Whether ``placement`` cuts tensor dimension ``dim``; strided shards are no ``Shard`` for ``is_shard()``."""
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def concatenated_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """The axes of ``meshes``, parts of one mesh, behind each other. Public API only takes axes in their order."""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)


def flattened_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of ``mesh`` as one axis, with a process group of its own, made once per name."""
    return mesh._flatten(name)


class GradDtype(NamedTuple):
    """What a user set as ``grad_dtype`` of a tensor; None allows gradients of any dtype."""

    dtype: torch.dtype | None


def own_grad_dtype(tensor: torch.Tensor) -> GradDtype | None:
    """What the user set as ``grad_dtype`` of a leaf, if anything.

    Only torch 2.15 says whether it was set, privately. Before, a ``grad_dtype`` equal to the tensor's dtype counts as
    not set. Where torch has no such attribute, nothing is set.
    """
    if not hasattr(torch.Tensor, "grad_dtype"):
        return None
    found = tensor.grad_dtype
    is_set = getattr(tensor, "_has_grad_dtype_override", found is not tensor.dtype)
    return GradDtype(found) if is_set else None


def set_grad_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Let ``tensor`` have gradients of ``dtype``, or of any with None. A gradient that it has keeps its values. Without
    effect where torch has no ``grad_dtype``: gradients have the dtype of their tensor then."""
    if hasattr(torch.Tensor, "grad_dtype") and tensor.grad_dtype is not dtype:
        grad, tensor.grad = tensor.grad, None
        tensor.grad_dtype = dtype
        if grad is not None:
            tensor.grad = grad if dtype is None else grad.to(dtype)


def in_backward() -> bool:
    """Whether the autograd engine is executing a graph on this thread."""
    return torch._C._current_graph_task_id() != -1


def running_backward() -> int:
    """A number of its own for each backward, nested ones included; -1 outside of any."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward has executed its last node; autograd has no public hook for that."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class GradientHook:
    """``function``, to be called in backward with the gradients of many tensors, ahead of what computed these.

    ``Tensor.register_hook`` makes a dict and a handle for each tensor, 20 thousand instructions more. Nodes of a graph
    take the dict of any tensor, so that of one serves all.
    """

    def __init__(self, function: Callable[[torch.Tensor], None]) -> None:
        self._function = function
        with torch.inference_mode(False), torch.enable_grad():
            self._owner = torch.zeros((), device="cpu", requires_grad=True)
        self._owner.register_hook(function)

    def add_to(self, tensor: torch.Tensor) -> None:
        """Call the function with the gradient of ``tensor``, which requires one."""
        node = tensor.grad_fn
        if node is None or tensor.output_nr:  # the dict counts for a node's first output
            tensor.register_hook(self._function)
        else:
            node._register_hook_dict(self._owner)


# To look up an attribute of a subclass, torch asks the class for ``__torch_function__`` first, which takes four fifths
# of the time. DTensor has none to call. The functions below switch that off, for the time of a ``with`` block.
plain_access = torch._C.DisableTorchFunctionSubclass
_get_requires_grad, _get_grad = attrgetter("requires_grad"), attrgetter("grad")
_get_hooks, _get_version = attrgetter("_post_accumulate_grad_hooks"), attrgetter("_version")


def requires_grad_of(params: Sequence[torch.Tensor]) -> list[bool]:
    """``requires_grad`` of each."""
    with plain_access():
        return list(map(_get_requires_grad, params))


def grads_of(params: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """``grad`` of each."""
    with plain_access():
        return list(map(_get_grad, params))


def set_grads(params: Sequence[torch.Tensor], grads: Iterable[torch.Tensor | None]) -> None:
    """Set ``grad`` of each."""
    with plain_access():
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad


def share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one is a view of the other, or both of a third; 1 us less than by the addresses of their storages."""
    return bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each was written in place."""
    with plain_access():
        return list(map(_get_version, tensors))


def remove_hooks(module: torch.nn.Module, functions: Sequence[Callable[..., Any]]) -> None:
    """Take ``functions`` off ``module``, where copying it has brought them. The copy has no handles, and nothing public
    lists hooks."""
    of_forward, of_state = ("forward_pre_hooks", "forward_hooks"), ("state_dict_pre_hooks", "load_state_dict_pre_hooks")
    for name in (*of_forward, *of_state, "load_state_dict_post_hooks"):
        hooks = getattr(module, f"_{name}")
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) in functions]:
            del hooks[key]


def watch_calls(module: nn.Module, see: Callable[[Any], Any], on_first: Callable[[], None] | None = None) -> None:
    """Have each call of ``module`` return what ``see`` makes of what it returned, for good. ``on_first`` is called at
    the end of the first.

    With a forward hook, public as that is, torch calls modules on a way that takes 11 thousand instructions more; this
    takes one. It is the attribute that ``Module.compile`` sets, with the same meaning. Copies and pickles of the module
    leave it behind, and the compiler does not look at it where it traces through the module.
    """
    call: Callable[..., Any] = module._compiled_call_impl or module._call_impl
    watched = module.__dict__["_compiled_call_impl"] = lambda *args, **kwargs: see(call(*args, **kwargs))

    def first(*args: Any, **kwargs: Any) -> Any:
        output = watched(*args, **kwargs)
        if module.__dict__["_compiled_call_impl"] is first:  # Module.compile may have taken its place
            module.__dict__["_compiled_call_impl"] = watched
        on_first()  # type: ignore[misc]
        return output

    if on_first is not None:
        module.__dict__["_compiled_call_impl"] = first


def at_start_of_compilation(function: Callable[[], None]) -> None:
    """Call ``function``, which lives as long as its module, before ``torch.compile`` traces anything. No public module
    tells of that."""
    from torch._dynamo import callback_handler  # takes a second, and is loaded anyway where something is compiled

    if all(getattr(known, "tells", None) is not function for known in callback_handler.start_callbacks):

        def tell(_: object) -> None:
            function()

        tell.tells = function  # type: ignore[attr-defined]
        callback_handler.register_start_callback(tell)


def have_post_accumulate_grad_hooks(params: Sequence[torch.Tensor]) -> bool:
    """Whether the user registered a hook on any of the sharded ``params``."""
    with plain_access():
        return any(map(_get_hooks, params))


def post_accumulate_grad_hooks(param: torch.Tensor) -> Sequence[Callable[[torch.Tensor], None]]:
    """Hooks that the user registered on a sharded parameter; autograd never accumulates into it, so we call them."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None)
    return tuple(hooks.values()) if hooks else ()


_Step = TypeVar("_Step", bound=Callable[..., Any])


def hooked_step(step: _Step) -> _Step:
    """``step`` of an optimizer's class, with the hooks of the optimizer and the profiler's label around it. torch does
    that to the class of each optimizer that is constructed."""
    hooked = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True  # type: ignore[attr-defined]  # or torch hooks it once more
    return cast(_Step, hooked)


def unhooked_step(cls: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """The step of an optimizer's class without its hooks."""
    step: Any = cls.step
    return cast(Callable[[torch.optim.Optimizer], Any], step.__wrapped__ if getattr(step, "hooked", False) else step)


# One launch for many tensors: copies that cast where dtypes differ, additions, divisions by one number. Names of their
# own and no functions, because a call more per launch shows.
foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
foreach_add: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_add_
foreach_div: Callable[[list[torch.Tensor], float], None] = torch._foreach_div_


def foreach_norm(tensors: list[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The norm of each tensor, computed in ``dtype``, in one launch."""
    return list(torch._foreach_norm(tensors, order, dtype))


def foreach_mul(targets: list[torch.Tensor], factor: torch.Tensor) -> None:
    """One launch for many in-place multiplications by a 0-dim tensor, whose value the CPU need not know."""
    torch._foreach_mul_(targets, factor)


def pack_rows(tensors: list[torch.Tensor], out: torch.Tensor) -> None:
    """Cut each tensor along its first dimension into ``out.size(0)`` rows, padded with zeros, and lay the rows of all
    tensors side by side in ``out``, casting where dtypes differ. One launch on CUDA; on CPU, tensors that need padding
    or a cast are copied twice."""
    torch._chunk_cat(tensors, 0, out.size(0), out=out)


# Only CPython's own counts say at once that nobody has references; not those of its free-threaded build.
COUNTS_REFERENCES = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()
_use_count = cast(Callable[[torch.Tensor], int], torch.Tensor._use_count)  # type: ignore[attr-defined]


def _python_counts_all() -> bool:
    """Whether Python's count of a tensor's references shows that C++ has some; it does from torch 2.12 on."""
    grad, param = torch.zeros(1), torch.zeros(1)
    before = sys.getrefcount(grad)
    param.grad = grad
    return sys.getrefcount(grad) > before


_PYTHON_COUNTS_ALL = _python_counts_all()


def reference_counts(tensors: Sequence[torch.Tensor], storage: torch.UntypedStorage) -> list[int]:
    """How many references exist to each of ``tensors``, from Python and from C++, and to their ``storage``. What they
    are without others' has to be found out by a call while there are none."""
    counts = [torch._C._storage_Use_Count(storage._cdata), *map(sys.getrefcount, tensors)]
    return counts if _PYTHON_COUNTS_ALL else counts + list(map(_use_count, tensors))


def can_swap_storages() -> bool:
    """Whether :func:`swap_storages` exists in this torch."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def swap_storages(a: torch.UntypedStorage, b: torch.UntypedStorage) -> None:
    """Exchange the memory of two storages; every tensor keeps its storage. Public API can only free and allocate."""
    a._swap_data_ptr_(b)  # type: ignore[attr-defined]


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that serves ``device`` in ``group``; the public name covers all devices in one string. Groups written
    in Python, such as torch's threaded one for tests, are their own backend."""
    try:
        return group._get_backend(device).name()
    except RuntimeError:
        return group.name()


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long an operation of ``group`` may take on ``device``, if its backend has a limit. Users set it when they
    make the group; no public name tells what they set."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # it is written in Python, such as torch's for threads
        return None


def all_gather(
    group: dist.ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, on_stream: bool
) -> Callable[[], dist.Work]:
    """What gathers each input into its output in one launch; ``on_stream`` uses the current stream of the call.

    The public ``all_gather_into_tensor`` takes one tensor and costs 5 us more of Python per call.
    """
    options = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = not on_stream
    if len(outputs) == 1:
        return partial(_method(group, "all_gather_single", "_allgather_base"), outputs[0], inputs[0], options)
    coalesced = _method(group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    return partial(coalesced, outputs, inputs, options)


def reduce_scatter(
    group: dist.ProcessGroup, op: Any, *, on_stream: bool
) -> Callable[[list[torch.Tensor], list[torch.Tensor]], dist.Work]:
    """What reduce-scatters each input into its output in one launch, (outputs, inputs); ``on_stream`` uses the current
    stream of the call. The public ``reduce_scatter_tensor`` is in Python, as is making the options."""
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = not on_stream
    single = _method(group, "reduce_scatter_single", "_reduce_scatter_base")
    coalesced = _method(group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")

    def launch(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> dist.Work:
        if len(outputs) == 1:
            return single(outputs[0], inputs[0], options)
        return coalesced(outputs, inputs, options)

    return launch


def allocate_by_backend(
    group: dist.ProcessGroup, size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Memory that the backend of ``group`` transfers without copies of its own, such as NCCL's registered memory; else
    ordinary memory. The backend behind a group has no public name."""
    backend = group._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        return torch.empty(size, dtype=dtype, device=device)
    return backend.allocate_tensor(math.prod(size), dtype=dtype, device=device)


def use_symmetric_memory(group: dist.ProcessGroup, backend: str) -> None:
    """Allocate symmetric memory by ``backend`` from now on. Its exchange of addresses needs a communicator, which the
    barrier makes. The whole module is private."""
    _symmetric_memory.set_backend(cast(Any, backend))
    dist.barrier(group=group)


def allocate_symmetric(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Symmetric memory out of a pool, which spares most of its allocations and exchanges of addresses."""
    with torch.cuda.use_mem_pool(_symmetric_memory.get_mem_pool(device)):
        return torch.empty(size, dtype=dtype, device=device)


def exchange_addresses(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Tell the ranks of ``group`` where their symmetric ``tensor`` lies; cheap for memory that is known already."""
    _symmetric_memory.rendezvous(tensor, group.group_name)


def _method(group: dist.ProcessGroup, name: str, older_name: str) -> Callable[..., dist.Work]:
    """torch 2.13 renamed these methods; groups written in Python have one of the names only."""
    return cast(Callable[..., dist.Work], getattr(group, name, None) or getattr(group, older_name))


# Subclasses tell by ``__tensor_flatten__``; torch's test for that is private. Its type guard confuses mypy.
_is_wrapper: Callable[[object], bool] = is_traceable_wrapper_subclass


def inner_names(tensor: torch.Tensor) -> tuple[str, ...]:
    """The attributes that hold the tensors a wrapper subclass is made of; none for other tensors."""
    names = cast(Any, tensor).__tensor_flatten__()[0] if _is_wrapper(tensor) else ()
    return tuple(name for name in names if isinstance(getattr(tensor, name), torch.Tensor))  # DTensor lists its mesh


def leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a wrapper subclass is made of, however nested, or ``tensor`` itself."""
    names = inner_names(tensor)
    return [leaf for name in names for leaf in leaves(getattr(tensor, name))] if names else [tensor]


def versioned(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What carries a version that autograd compares: the tensor, and under a compiled block what it is made of."""
    return [tensor, *(leaf for leaf in leaves(tensor) if leaf is not tensor)]


def rewrapped(like: torch.Tensor, inner: dict[str, torch.Tensor]) -> torch.Tensor:
    """A tensor of ``like``'s class, shape and context that is made of ``inner``."""
    _, context = cast(Any, like).__tensor_flatten__()
    return cast(torch.Tensor, type(like).__tensor_unflatten__(inner, context, like.shape, like.stride()))  # type: ignore[attr-defined]


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Make autograd take ``tensors`` for unmodified since they had ``versions``. The context manager that torch has for
    this, private as well, takes as long as the writes that it hides."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def sets_attributes_plainly(module: nn.Module) -> bool:
    """Whether parameters of ``module`` may be bound through ``_parameters``, skipping ``nn.Module.__setattr__``.

    Modules that override it (``nn.LSTM`` keeps a list of its weights) must see the assignment.
    """
    return type(module).__setattr__ is nn.Module.__setattr__


def parameters_dict(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict that holds a module's own parameters."""
    return module._parameters


def buffers_dict(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The dict that holds a module's own buffers."""
    return module._buffers
