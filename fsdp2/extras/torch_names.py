"""Private names of torch that only this folder and those above it use; ``_torch.py`` lists the tested versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import _torch


def default_store() -> dist.Store:
    """The store that the ranks of the world share; ``init_process_group`` may have created it."""
    return dist.distributed_c10d._get_default_store()


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
    owner = hook.owner

    def watched(*args: Any, **kwargs: Any) -> Any:
        if is_traced():
            return call(*args, **kwargs)
        output = call(*args, **kwargs)
        if type(output) is not torch.Tensor:
            for tensor in find_tensors(output, []):
                if tensor.requires_grad:
                    hook.add_to(tensor)
        elif output.requires_grad and (_torch.running_backward() == -1 or not is_late()):
            if args and output is args[0]:  # it may be the unit's input, whose own hook must run last
                output = output.view_as(output)
            node = output.grad_fn
            if node is None or output.output_nr:
                hook.add_to(output)
            else:  # the usual case: the same as add_to, but saves one call
                node._register_hook_dict(owner)
        return output

    _torch.keep_out_of_graphs(watched)
    vars(module)[_torch.CALL] = watched


def non_persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers that state dicts leave out."""
    return {name: each for name, each in module._buffers.items() if name in module._non_persistent_buffers_set}


def buffers_dict(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The dict that holds a module's own buffers."""
    return module._buffers
