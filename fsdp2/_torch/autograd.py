"""Backwards, hooks in them, and what tensors carry for them: gradients, versions, a dtype of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch


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


# A number of its own for each backward that runs on this thread, nested ones included; -1 outside of any. An alias and
# no function, because a call more per event shows.
running_backward: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether the autograd engine is executing a graph on this thread."""
    return running_backward() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward has executed its last node; autograd has no public hook for that."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class GradientHook:
    """``function``, to be called in backward with the gradients of many tensors, ahead of what computed these.

    Attributes:
        owner: the tensor whose hooks serve all.

    ``Tensor.register_hook`` makes a dict and a handle for each tensor, 20 thousand instructions more. Nodes of a graph
    take the dict of any tensor, so that of one serves all.
    """

    def __init__(self, function: Callable[[torch.Tensor], None]) -> None:
        self._function = function
        with torch.inference_mode(False), torch.enable_grad():
            self.owner = torch.zeros((), device="cpu", requires_grad=True)
        self.owner.register_hook(function)

    def add_to(self, tensor: torch.Tensor) -> None:
        """Call the function with the gradient of ``tensor``, which requires one."""
        node = tensor.grad_fn
        if node is None or tensor.output_nr:  # the dict counts for a node's first output
            tensor.register_hook(self._function)
        else:
            node._register_hook_dict(self.owner)


# To look up an attribute of a subclass, torch asks the class for ``__torch_function__`` first, which takes four fifths
# of the time. DTensor has none to call. The functions below switch that off, for the time of a ``with`` block.
plain_access = torch._C.DisableTorchFunctionSubclass
_get_grad = attrgetter("grad")
_get_hooks, _get_version = attrgetter("_post_accumulate_grad_hooks"), attrgetter("_version")


def grads_of(params: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """``grad`` of each."""
    with plain_access():
        return list(map(_get_grad, params))


def take_grads(params: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """``grad`` of each, which has none afterwards."""
    with plain_access():
        grads = list(map(_get_grad, params))
        for param in params:
            param.grad = None
    return grads


def set_grads(params: Sequence[torch.Tensor], grads: Iterable[torch.Tensor | None]) -> None:
    """Set ``grad`` of each."""
    with plain_access():
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each was written in place."""
    with plain_access():
        return list(map(_get_version, tensors))


# Makes autograd take tensors for unmodified since they had these versions. The context manager that torch has for this,
# private as well, takes as long as the writes that it hides.
set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)


def have_post_accumulate_grad_hooks(params: Sequence[torch.Tensor]) -> bool:
    """Whether the user registered a hook on any of the sharded ``params``."""
    with plain_access():
        return any(map(_get_hooks, params))


def post_accumulate_grad_hooks(param: torch.Tensor) -> Sequence[Callable[[torch.Tensor], None]]:
    """Hooks that the user registered on a sharded parameter; autograd never accumulates into it, so we call them."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None)
    return tuple(hooks.values()) if hooks else ()
