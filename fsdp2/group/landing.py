"""What becomes of reduced gradients: ``.grad`` of the sharded parameters, and the hooks that users have on them.

A reduction sees tensors; here is which parameter each of its steps belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.comm.memory import alias
from fsdp2.comm.offload import HostCopies
from fsdp2.group.param import ShardedParam
from fsdp2.group.reduce_scatter import Reduce, Sums


class Part(NamedTuple):
    """What one step of a reduction reduces: the gradient of ``param``, or the inner tensor ``name`` of it."""

    param: ShardedParam
    name: str


class BoundReduce(NamedTuple):
    """Bound plans, and per step what they reduce. ``is_wrapped``: some unsharded parameter is a tensor subclass, and so
    may be its gradient. ``plain``: the unsharded parameters, if autograd leaves them gradients that travel as they are.
    ``early``: whose gradients may be reduced ahead of those of ``late``, in the order of the steps.
    ``everybody``: a byte per parameter of the group, 1 if it is reduced. ``as_gradient``: from a sharded parameter and
    a shard to what becomes its ``.grad``."""

    reduce: Reduce
    parts: list[Part]
    is_wrapped: bool
    plain: list[nn.Parameter]
    early: tuple[ShardedParam, ...]
    late: tuple[ShardedParam, ...]
    everybody: bytes
    as_gradient: Callable[[torch.Tensor, torch.Tensor], DTensor]


class Reduced(NamedTuple):
    """Sums over the shard axis, and which steps of the plan had a gradient."""

    bound: BoundReduce
    sums: Sums
    present: list[bool]


class Landing(NamedTuple):
    """Averaged gradients on their way to the host."""

    copies: list[HostCopies]
    hand_over: Callable[[], object]

    def finish(self) -> None:
        """Have the CPU wait for the values, and set or add to ``.grad``."""
        for copies in self.copies:
            copies.wait()
        self.hand_over()


def hand_over(averaged: Reduced) -> bool:
    """Set or add to ``.grad``, and run the user's hooks on the parameters. Returns whether there were any."""
    bound, present = averaged.bound, averaged.present
    shards = bound.reduce.shards(averaged.sums)
    kept = bound.reduce.kept_gradients(averaged.sums)
    if bound.is_wrapped:
        params, shards = _wrapped(list(compress(zip(bound.parts, shards, strict=True), present)))
    else:
        params = [param.sharded for param, _ in bound.parts]
        if False in present:
            params, shards = list(compress(params, present)), list(compress(shards, present))
            kept = list(compress(kept, present))
    _deposit(params, shards, kept, bound.as_gradient)
    has_hooks = _torch.have_post_accumulate_grad_hooks(params)
    if has_hooks:
        _run_hooks(params)
    return has_hooks


def gradient_of(
    params: list[ShardedParam],
    as_gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    i: int,
    shard: torch.Tensor,
) -> torch.Tensor:
    return as_gradient(params[i].sharded, shard)


def have_gradients(params: list[ShardedParam]) -> bool:
    return any(param.sharded.grad is not None for param in params)


def is_alike(earlier: BoundReduce, bound: BoundReduce) -> bool:
    """Whether sums of both may be added: nothing was frozen, unfrozen, cast or configured in between."""
    if earlier is bound:
        return True
    layouts = [[(plan.steps, plan.dtypes, plan.factors.before) for plan in b.reduce.plans] for b in (earlier, bound)]
    return earlier.parts == bound.parts and layouts[0] == layouts[1]


def _deposit(
    params: list[nn.Parameter],
    shards: list[torch.Tensor],
    kept: list[torch.Tensor],
    as_gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Set or add to ``.grad`` of the sharded parameters. ``kept``: the gradients on ``shards``, if they were kept."""
    before = _torch.grads_of(params)
    if before.count(None) == len(before):
        _torch.set_grads(params, kept or map(as_gradient, params, shards))
        return
    targets, values = [], []
    for i, (param, earlier, shard) in enumerate(zip(params, before, shards, strict=True)):
        if earlier is None:
            param.grad = kept[i] if kept else as_gradient(param, shard)
        else:
            targets.append(_torch.local_of(earlier))
            values.append(shard)
    _torch.foreach_add(targets, values)


def _run_hooks(params: list[nn.Parameter]) -> None:
    """Run the user's hooks on the sharded parameters as autograd would."""
    for param in params:
        for hook in _torch.post_accumulate_grad_hooks(param):
            hook(param)


def _wrapped(landed: list[tuple[Part, torch.Tensor]]) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    """Parameters and their gradients' shards: inner tensors that belong together as one of the parameter's class."""
    by_param: dict[ShardedParam, dict[str, torch.Tensor]] = {}
    for part, shard in landed:
        own = alias(
            shard, int(shard.storage_offset()), shard.shape, shard.stride()
        )  # subclasses compare storage offsets
        by_param.setdefault(part.param, {})[part.name] = own if part.name else shard
    shards = [
        parts[""] if "" in parts else _torch.rewrapped(_torch.local_of(param.sharded), parts)
        for param, parts in by_param.items()
    ]
    return [param.sharded for param in by_param], shards
