"""The door to private torch: one function for each use of a name that torch does not document.

Checked with torch 2.13.0. Each function says what it uses and why no public name would do. Names that only the rooms
above the core need are in similar files there: ``extras/torch_names.py``, ``tensors/torch_names.py`` and
``fsdp1/torch_names.py``. No other file of the package uses a private name.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

T = TypeVar("T")
_Called = TypeVar("_Called", bound=Callable[..., Any])
_P = ParamSpec("_P")

# The compiler


def keep_out_of_graphs(function: Callable[..., Any], *, recursive: bool = False) -> None:
    """Let the compiler run ``function`` unchanged; if ``recursive``, also what it calls. ``torch.compiler.disable``
    would put three Python calls around each call; ``skip_code`` would import the compiler."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    of_calls = skip if recursive else frames._FrameAction.DEFAULT
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, of_calls))


def runs_between_graphs(function: _Called) -> _Called:
    """Let the compiler end its graph where ``function`` is called, and run it and all its callees unchanged."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    keep_out_of_graphs(function, recursive=True)
    return function


# Autograd: gradients, versions and hooks


class GradDtype(NamedTuple):
    """The ``grad_dtype`` that a user has set on a tensor; None allows gradients of any dtype."""

    dtype: torch.dtype | None


def own_grad_dtype(tensor: torch.Tensor) -> GradDtype | None:
    """The ``grad_dtype`` that the user has set on a leaf, if any. Only torch 2.15 can tell whether it was set. In
    earlier versions, a ``grad_dtype`` equal to the tensor's dtype counts as not set."""
    found = tensor.grad_dtype
    is_set = getattr(tensor, "_has_grad_dtype_override", found is not tensor.dtype)
    return GradDtype(found) if is_set else None


def set_grad_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Let ``tensor`` have gradients of ``dtype``, or of any dtype if None, even if it already has a gradient."""
    if tensor.grad_dtype is not dtype:
        grad, tensor.grad = tensor.grad, None
        tensor.grad_dtype = dtype
        if grad is not None:
            tensor.grad = grad if dtype is None else grad.to(dtype)


# A different number for each backward that runs on this thread, nested ones included; -1 outside of a backward.
running_backward: Callable[[], int] = torch._C._current_graph_task_id
NO_BACKWARD = -1


def in_backward() -> bool:
    """Whether the autograd engine is executing a graph on this thread."""
    return running_backward() != NO_BACKWARD


class BackwardToken:
    """The last backward that has begun under a root, in whichever threads it runs.

    The engine holds a callback while it executes a graph, and calls it after the last node. If a node raises, the
    engine does not call the callback, but releases it. Nothing else holds it, so its end shows that the backward is
    over. There is no public hook for the end of a backward, and none at all for one that has raised.

    Attributes:
        task: the engine's number of the backward.
    """

    def __init__(self) -> None:
        self.task = NO_BACKWARD
        self._held_by_engine: Callable[[], object] = lambda: None

    def begin(self, at_end: Callable[[], None]) -> None:
        """The running backward has begun; the engine calls ``at_end`` at its end, unless it raises."""
        callback = _AtEnd(at_end)
        self.task, self._held_by_engine = running_backward(), weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def is_over(self) -> bool:
        """Whether the engine has left the backward."""
        return self._held_by_engine() is None

    def is_over_soon(self) -> bool:
        """The same, for a thread that runs no backward. A device's thread may need the GIL to release the callback."""
        for _ in range(100):
            if self.is_over():
                return True
            time.sleep(0.01)
        return False


class _AtEnd:
    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    @runs_between_graphs  # if a step is compiled together with its backward
    def __call__(self) -> None:
        self._function()


# What surrounds the user's code: see core/runtime/door.py

# Whether a transform of torch.func (grad, vmap, ...) is active on this thread.
in_func_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
in_transform = in_func_transform  # or whether a checker is active: see add_checker
without_autocast: Callable[[], AbstractContextManager[None]] = torch._C._DisableAutocast
_pause_checker: Callable[[], AbstractContextManager[None]] = nullcontext


def add_checker(is_checking: Callable[[], bool], pause: Callable[[], AbstractContextManager[None]]) -> None:
    """Treat a checker, which follows each operation of the user, like a transform, and pause it in the same places."""
    global in_transform, _pause_checker
    in_transform, _pause_checker = lambda: in_func_transform() or is_checking(), pause
    SURROUNDINGS.append(is_checking)


@contextmanager
def without_transforms() -> Iterator[None]:
    """In the block, no transform of ``torch.func`` is active, so tensors that are made or written there are not part of
    the transformed computation."""
    with temporarily_clear_interpreter_stack(), _pause_checker():
        yield


# Modes of selective checkpointing, which return saved results instead of computing, and one that copies before writes.
_REPLACING = (
    torch.utils.checkpoint._CachingTorchDispatchMode,
    torch.utils.checkpoint._CachedTorchDispatchMode,
    torch.autograd.graph._CloneArgBeforeMutateMode,
)
_REPLACES = ("replaces_results", "allow_non_fake_inputs")  # users' modes, and the mode of fake tensors with real shards


class ModeStack(NamedTuple):
    """This thread's modes of one kind, the innermost last. ``is_left`` tells which of them the runtime leaves."""

    size: Callable[[], int]
    at: Callable[[int], Any]
    pop: Callable[[], object]
    push: Callable[[Any], None]
    is_left: Callable[[Any], bool]

    def has_any(self) -> bool:
        """Whether ``left`` would leave any."""
        return any(map(self.is_left, map(self.at, range(self.size()))))

    @contextmanager
    def left(self) -> Iterator[None]:
        """In the block, only the other modes are active: those that watch, and most of torch's own."""
        modes = list(map(self.at, range(self.size())))
        staying = [mode for mode in modes if not self.is_left(mode)]
        self._swap(modes, staying)
        try:
            yield
        finally:
            self._swap(staying, modes)

    def _swap(self, before: list[Any], after: list[Any]) -> None:
        for _ in before:
            self.pop()
        for mode in after:
            self.push(mode)


# Dispatch modes see every operation below autograd; function modes see each call of torch's Python functions.
# DebugMode, which watches, is both. A default device stays, since it also applies to users' all-gather hooks.
DISPATCH_MODES = ModeStack(
    torch._C._len_torch_dispatch_stack,
    torch._C._get_dispatch_stack_at,
    partial(torch._C._pop_torch_dispatch_stack, None),
    torch._C._push_on_torch_dispatch_stack,
    lambda mode: isinstance(mode, _REPLACING) or any(getattr(mode, name, False) for name in _REPLACES),
)
FUNCTION_MODES = ModeStack(
    torch._C._len_torch_function_stack,
    torch._C._get_function_stack_at,
    torch._C._pop_torch_function_stack,
    torch._C._push_on_torch_function_stack,
    lambda mode: not isinstance(mode, (TorchDispatchMode, DeviceContext)),
)
SURROUNDINGS = [DISPATCH_MODES.size, FUNCTION_MODES.size, in_func_transform, torch.is_inference_mode_enabled]


class GradientHook:
    """Calls ``function`` in backward with the gradients of many tensors, before the nodes that computed these tensors.

    ``Tensor.register_hook`` makes a dict and a handle for each tensor, which takes 20 thousand instructions more. Nodes
    of a graph accept the dict of any tensor, so the dict of ``owner`` serves all of them.
    """

    def __init__(self, function: Callable[[torch.Tensor], None]) -> None:
        self._function = function
        with torch.inference_mode(False), torch.enable_grad():
            self.owner = torch.zeros((), device="cpu", requires_grad=True)
        self.owner.register_hook(function)

    def add_to(self, tensor: torch.Tensor) -> None:
        """Call the function with the gradient of ``tensor``, which requires one."""
        node = tensor.grad_fn
        if node is None:  # a leaf, such as a parameter that a unit returns, keeps its hooks
            if self._function not in (tensor._backward_hooks or {}).values():
                tensor.register_hook(self._function)
        elif tensor.output_nr:  # the dict works only for a node's first output
            tensor.register_hook(self._function)
        else:
            node._register_hook_dict(self.owner)


def before_in_place(view: torch.Tensor, num_writes: int, function: Callable[[torch.Tensor], None]) -> None:
    """``view`` was written in place ``num_writes`` times, which changed its graph, so its hooks are lost. Call
    ``function`` in backward with the gradient of its base tensor, as that was before these writes."""
    base = view._base
    node = None if base is None else base.grad_fn
    for _ in range(num_writes):  # a write without gradients leaves no node
        if node is not None and node.name().endswith("CopySlices"):  # its namespace comes first
            node = node.next_functions[0][0]
    if node is not None:
        node.register_prehook(lambda gradients: function(gradients[0]))


# At each attribute access on a DTensor, torch first looks up ``__torch_function__``, which is 80% of the time.
plain_access = torch._C.DisableTorchFunctionSubclass
_get_grad = attrgetter("grad")
_get_hooks, _get_version = attrgetter("_post_accumulate_grad_hooks"), attrgetter("_version")


# The storage of a tensor, and the key that it keeps as long as it lives, although its memory is freed and allocated.
storage_of, key_of_storage = torch.Tensor.untyped_storage, attrgetter("_cdata")


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each tensor was written in place."""
    with plain_access():
        return list(map(_get_version, tensors))


# Makes autograd treat tensors as unmodified since they had these versions.
set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)


def post_accumulate_grad_hooks(param: torch.Tensor) -> Sequence[Callable[[torch.Tensor], None]]:
    """Hooks that the user registered on a sharded parameter; autograd never accumulates into it, so we call them."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None)
    return tuple(hooks.values()) if hooks else ()


# Process groups and their memory


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that serves ``device`` in ``group``. Groups written in Python are their own backend."""
    try:
        return backend_of(group, device).name()
    except RuntimeError:
        return group.name()


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend that serves ``device`` in ``group``, which knows its own memory allocator."""
    return group._get_backend(device)


def all_gather(
    group: dist.ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, on_stream: bool
) -> Callable[[], dist.Work | None]:
    """A function that gathers each input into its output in one launch. ``on_stream``: it runs on the caller's stream,
    and NCCL returns no work. The public ``all_gather_into_tensor`` takes one tensor and costs 5 us more per call."""
    options = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = not on_stream
    if len(outputs) == 1:
        return partial(_method(group, "all_gather_single", "_allgather_base"), outputs[0], inputs[0], options)
    coalesced = _method(group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    return partial(coalesced, outputs, inputs, options)


def reduce_scatter(
    group: dist.ProcessGroup, op: Any, *, on_stream: bool
) -> Callable[[list[torch.Tensor], list[torch.Tensor]], dist.Work | None]:
    """A function that reduce-scatters each input into its output in one launch; ``on_stream`` as for ``all_gather``."""
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = not on_stream
    single = _method(group, "reduce_scatter_single", "_reduce_scatter_base")
    coalesced = _method(group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")

    def launch(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> dist.Work | None:
        if len(outputs) == 1:
            return single(outputs[0], inputs[0], options)
        return coalesced(outputs, inputs, options)

    return launch


def with_works(launch: Callable[..., dist.Work | None], *, on_stream: bool) -> Callable[..., Sequence[dist.Work]]:
    """``launch``, changed to return the works that the CPU has to wait for. On a stream, NCCL returns no work. If
    another backend returns one, the stream waits for it, not the CPU."""

    def issue(*tensors: list[torch.Tensor]) -> Sequence[dist.Work]:
        work = launch(*tensors)
        if work is None or not on_stream:
            return () if work is None else (work,)
        work.wait()
        return ()

    return issue


def _method(group: dist.ProcessGroup, name: str, older_name: str) -> Callable[..., dist.Work | None]:
    """The method under either name: torch 2.13 renamed these, and groups written in Python have only one of them."""
    return cast(Callable[..., dist.Work | None], getattr(group, name, None) or getattr(group, older_name))


# DTensors and meshes


def dtensor_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """The spec that ``dtensor`` needs."""
    return DTensorSpec(mesh, tuple(placements), TensorMeta(shape, stride, dtype))


# Makes a DTensor from a local tensor and a spec without checks or autograd: 1 us, vs. 50 for ``DTensor.from_local``.
dtensor: Callable[[torch.Tensor, DTensorSpec], DTensor] = partial(DTensor.__new__, DTensor, requires_grad=False)


def parameter_outside_its_mesh(data: DTensor, requires_grad: bool) -> nn.Parameter:
    """``data`` itself as a parameter. ``nn.Parameter`` would detach it, and outside the mesh, any operation on a
    DTensor returns one that is empty and on the CPU."""
    made: Any = data.requires_grad_(requires_grad)
    made._is_param = True
    return cast(nn.Parameter, made)


# A DTensor's local tensor itself; ``to_local()`` returns a new, differentiable view.
local_of: Callable[[torch.Tensor], torch.Tensor] = attrgetter("_local_tensor")


def dtensors_like(params: Sequence[Any], locals_: Sequence[torch.Tensor]) -> list[DTensor]:
    """``locals_`` as DTensors that are sharded like ``params``. Each keeps its own dtype."""
    made = []
    for param, local in zip(params, locals_, strict=True):
        spec = param._spec
        if spec.tensor_meta.dtype is not local.dtype:
            spec = DTensorSpec(spec.mesh, spec.placements, spec.tensor_meta._replace(dtype=local.dtype))
        made.append(dtensor(local, spec))
    return made


def set_grads(params: Sequence[torch.Tensor], locals_: Sequence[torch.Tensor]) -> None:
    """Set ``grad`` of each parameter to its tensor in ``locals_``, as a DTensor."""
    grads = dtensors_like(params, locals_)
    with plain_access():
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad


def set_first_grads(
    params: Sequence[torch.Tensor], locals_: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor | None], bool]:
    """Like ``set_grads``, but sets nothing if a parameter already has a gradient. Returns the earlier ``grad`` of each,
    and whether the user registered a hook on any of the sharded ``params``."""
    with plain_access():
        before, has_hooks = list(map(_get_grad, params)), any(map(_get_hooks, params))
    if before.count(None) == len(before):
        set_grads(params, locals_)
    return before, has_hooks


def set_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Point a DTensor at other local memory. The object stays, so optimizers and ties keep their references."""
    cast(DTensor, tensor)._local_tensor = local


def arrived_local(tensor: DTensor) -> torch.Tensor:
    """A DTensor's local tensor, after waiting for the collective that makes it: DTensor leaves some pending."""
    local = tensor._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def strided_shard(dim: int, split_factor: int) -> Placement:
    """The placement that shards each of the ``split_factor`` pieces along ``dim`` that axes further right make."""
    return cast(Placement, _StridedShard(dim, split_factor=split_factor))


def shards_dim(placement: Placement, dim: int) -> bool:
    """Whether ``placement`` cuts tensor dimension ``dim``. ``is_shard()`` does not recognize strided shards."""
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def concatenated_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """The axes of ``meshes``, which are parts of one mesh, in this order. The public API keeps the mesh's own order."""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)


# Tools that watch

# Whether a profiler records. This call takes 0.03 us; opening a range takes 3 us even if nothing records.
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


def in_range(what: str, unit: str, act: Callable[[], T]) -> T:
    """Call ``act`` in a profiler range ``FSDP::what (unit)``, named as torch names its ranges."""
    with torch.profiler.record_function(f"FSDP::{what}" if unit == "(root)" else f"FSDP::{what} ({unit})"):
        return act()


# One launch for many tensors: copies that cast if dtypes differ, additions, and divisions by one number.
foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
foreach_add: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_add_
foreach_div: Callable[[list[torch.Tensor], float], None] = torch._foreach_div_

# Cuts each tensor along a dimension into rows, padded with zeros, and puts the rows of all tensors side by side into
# ``out``, casting if dtypes differ: (tensors, dim, number of rows, out=).
pack_rows: Callable[..., torch.Tensor] = torch._chunk_cat


# Modules and optimizers


# If this attribute of a module is set, the module's calls run it; ``Module.compile`` sets it. Copies and pickles of a
# module leave it out. A forward hook instead would add 11 thousand instructions to a call.
CALL = "_compiled_call_impl"
_CALL_IMPL = nn.Module._call_impl.__code__


def is_called_inside_itself(module: nn.Module) -> bool:
    """Whether the call of ``module`` whose hook runs this is inside another call of it on this thread. Only the stack
    shows that, since torch calls no hook when a KeyboardInterrupt ends a forward."""
    num_calls, frame = 0, sys._getframe().f_back
    while frame is not None and num_calls < 2:
        num_calls += frame.f_code is _CALL_IMPL and frame.f_locals.get("self") is module
        frame = frame.f_back
    return num_calls == 2


def composable_apis(module: nn.Module) -> Collection[str]:
    """The names of the composable APIs that were applied to ``module``, such as ``fully_shard`` and ``replicate``. Each
    of these APIs looks for the others in torch's registry, which is private."""
    return module.__dict__.get(REGISTRY_KEY, ())


def mark_as_managed(module: nn.Module) -> None:
    """Mark a ``module`` whose parameters are sharded, as torch's ``fully_shard`` does. The compiler then leaves the
    module's parameters alone; otherwise, it lists all of them, as static, for each module that it meets. Hugging Face's
    ``generate`` also keeps ranks in step if a model has this mark."""
    module._is_fsdp_managed_module = True  # type: ignore[assignment]
    module._fsdp_use_orig_params = True  # type: ignore[assignment]


def register_composable_api(module: nn.Module, name: str) -> None:
    """Record in torch's registry that the composable API ``name`` was applied to ``module``."""
    module.__dict__.setdefault(REGISTRY_KEY, {})[name] = RegistryItem()


def sets_attributes_plainly(module: nn.Module) -> bool:
    """Whether parameters may be bound through ``_parameters``. ``nn.LSTM``, for example, must see the assignment."""
    return type(module).__setattr__ is nn.Module.__setattr__


def parameters_dict(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict that holds a module's own parameters."""
    return module._parameters


# Wrapper subclasses

# Wrapper subclasses define ``__tensor_flatten__``; torch's test for that is private. Its type guard confuses mypy.
_is_wrapper: Callable[[object], bool] = is_traceable_wrapper_subclass


def inner_names(tensor: torch.Tensor) -> tuple[str, ...]:
    """The attributes that hold the inner tensors of a wrapper subclass; none for other tensors."""
    names = cast(Any, tensor).__tensor_flatten__()[0] if _is_wrapper(tensor) else ()
    return tuple(name for name in names if isinstance(getattr(tensor, name), torch.Tensor))  # DTensor lists its mesh


def leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a wrapper subclass consists of, at any depth, or ``tensor`` itself."""
    names = inner_names(tensor)
    return [leaf for name in names for leaf in leaves(getattr(tensor, name))] if names else [tensor]


def versioned(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors whose versions autograd compares: ``tensor``, and its inner tensors, which compiled blocks save."""
    return [tensor, *(leaf for leaf in leaves(tensor) if leaf is not tensor)]


def rewrapped(like: torch.Tensor, inner: dict[str, torch.Tensor]) -> torch.Tensor:
    """A tensor of ``like``'s class, shape and context that consists of ``inner``."""
    _, context = cast(Any, like).__tensor_flatten__()
    return cast(torch.Tensor, type(like).__tensor_unflatten__(inner, context, like.shape, like.stride()))  # type: ignore[attr-defined]
