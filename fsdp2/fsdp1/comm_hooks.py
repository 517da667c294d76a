"""``register_comm_hook``: replaces the gradient reduction by a hook, either one of torch's or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp2.core import comms
from fsdp2.fsdp1.search import Wrapper, wrappers_in
from fsdp2.fsdp1.torch_names import HYBRID, default_hooks

Hook = Callable[..., Any]


def _compressing(dtype: torch.dtype) -> Hook:
    """Does the same as torch's hooks that compress to ``dtype``, which call ``record_stream`` and so do not run on the
    CPU."""

    def hook(state: Any, gradients: torch.Tensor, shard: torch.Tensor | None = None) -> None:
        tensors = [gradients] if shard is None else [gradients, shard]
        for tensor in tensors:
            tensor.data = tensor.data.to(dtype)
        (default_hooks.allreduce_hook if shard is None else default_hooks.reduce_scatter_hook)(state, *tensors)
        tensors[-1].data = tensors[-1].data.to(state.parameter_type)

    return hook


class HookedReduceScatter(comms.ReduceScatter):
    """Runs ``hook(state, gradients, shard)`` as the reduce-scatter."""

    def __init__(self, state: object, hook: Hook) -> None:
        self._state, self._hook = state, hook

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        _run(self._hook, self._state, input_tensor, output_tensor)
        return None


def _run(hook: Hook, state: object, *tensors: torch.Tensor) -> None:
    """Run ``hook``, which writes its result into the last one of ``tensors``, and cast that back to its dtype:
    compressing hooks leave it in the dtype that their state names."""
    result, dtype = tensors[-1], tensors[-1].dtype
    hook(state, *tensors)
    if result.dtype is not dtype:
        result.data = result.data.to(dtype)


def _compressed_dtype(hook: Hook) -> torch.dtype | None:
    """The dtype that ``hook`` communicates in, if it is one of torch's compressing hooks; else None."""
    known = ((default_hooks.fp16_compress_hook, torch.float16), (default_hooks.bf16_compress_hook, torch.bfloat16))
    return next((dtype for each, dtype in known if hook is each), None)


def register(wrapper: Wrapper, state: object, hook: Hook) -> None:
    """See :meth:`FullyShardedDataParallel.register_comm_hook`."""
    if not callable(hook):
        raise ValueError(f"register_comm_hook: the hook must be callable, found {hook!r} ({type(hook).__name__}).")
    if not wrapper.check_is_root():
        raise RuntimeError(
            "register_comm_hook: this FullyShardedDataParallel is inside another one. Call register_comm_hook on the "
            "outermost one; the hook is then used for all inner ones."
        )
    wrappers: list[Wrapper] = wrappers_in(wrapper)
    for each in wrappers:
        inner = type(each._fsdp_wrapped_module).__name__
        if each.sharding_strategy in HYBRID:
            raise RuntimeError(
                f"register_comm_hook: the wrapper of a {inner} has {each.sharding_strategy}, which reduces in two "
                "steps. Hooks work with FULL_SHARD, SHARD_GRAD_OP and NO_SHARD."
            )
        if each._has_comm_hook:
            raise RuntimeError(
                f"register_comm_hook: the wrapper of a {inner} has a hook already. Register one hook, once, that does "
                "all that is needed."
            )
    dtype = _compressed_dtype(hook)
    if dtype is not None and wrapper.compute_device.type == "cpu":
        hook = _compressing(dtype)
    for each in wrappers:
        each._has_comm_hook = True
        for group in each._unit.groups:
            if group.mesh.shard.size > 1:
                by = comms.ReducesBy(HookedReduceScatter(state, hook))
                group.configure(reduces_by=by, gradient_divide_factor=1.0)
            else:
                run = comms.AllReduceHook(partial(_run, hook, state))
                group.configure(all_reduce_hook=run, hook_reduces=True, gradient_divide_factor=1.0)
