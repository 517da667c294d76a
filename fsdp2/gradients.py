"""The gradients of one group, from where autograd left them to the sharded parameters.

They pass through up to four states: none; unreduced (a backward without communication left them on the unsharded
parameters); partial (reduced over the shard axis, not over the replicate axis); reduced (in ``.grad`` of the shards).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import compress
from operator import attrgetter, is_not
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.api import AllGather, ExtensionError, ReduceScatter
from fsdp2.budget import UnitBytes
from fsdp2.buffers import alias
from fsdp2.comm import ReduceComm
from fsdp2.footprint import reduce_bytes
from fsdp2.mesh import Axis, ParallelMesh
from fsdp2.offload import Home, HostCopies
from fsdp2.param import ShardedParam
from fsdp2.plan import compile_reduces
from fsdp2.reduce_scatter import AllReduceHook, PendingReduce, Reduce, Sums
from fsdp2.services import Services

# In C, since they run once per parameter and step.
_is_there = partial(is_not, None)
_accumulated_of, _dtype_of = attrgetter("accumulated"), attrgetter("dtype")
_PLAIN = {torch.Tensor}


class GradientState(Enum):
    """Where a group's gradients are, the furthest behind of them."""

    NONE = "NONE"
    UNREDUCED = "UNREDUCED"
    PARTIAL = "PARTIAL"
    REDUCED = "REDUCED"


@dataclass(frozen=True)
class GroupOptions:
    """What the setters of ``FSDPModule`` configure for one group: its gradients, and what carries its bytes."""

    requires_all_reduce: bool = True
    gradient_divide_factor: float | None = None
    divides_behind_hook: bool = False
    all_reduce_hook: AllReduceHook | None = None
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    reduce_axis: Axis | None = None

    @property
    def bound(self) -> tuple[object, ...]:
        """What is part of a bound reduction."""
        return (self.gradient_divide_factor, self.divides_behind_hook, self.all_reduce_hook)


class _Part(NamedTuple):
    """What one step of a reduction reduces: the gradient of ``param``, or the inner tensor ``name`` of it."""

    param: ShardedParam
    name: str


class _BoundReduce(NamedTuple):
    """Bound plans, and per step what they reduce. ``is_wrapped``: some unsharded parameter is a tensor subclass, and so
    may be its gradient. ``plain``: the unsharded parameters, if autograd leaves them gradients that travel as they are.
    ``as_gradient``: from a sharded parameter and a shard to what becomes its ``.grad``."""

    reduce: Reduce
    parts: list[_Part]
    is_wrapped: bool
    plain: list[nn.Parameter]
    as_gradient: Callable[[torch.Tensor, torch.Tensor], DTensor]


class _Sums(NamedTuple):
    """Sums over the shard axis, and which steps of the plan had a gradient."""

    bound: _BoundReduce
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


class GroupGradients:
    """Takes gradients off the unsharded parameters, and lands what the reduction makes of them."""

    def __init__(self, params: Sequence[ShardedParam], mesh: ParallelMesh, comm: ReduceComm, home: Home) -> None:
        self._params = params
        self._home = home
        self._mesh = mesh
        self._comm = comm
        self._bound: dict[tuple[int, ...], _BoundReduce] = {}  # by the indices of trainable parameters
        self._options = GroupOptions()  # of what is bound
        self._partial: _Sums | None = None
        self._landings: list[Landing] = []
        self.has_run_hooks = False  # the user's, on what landed last

    @property
    def state(self) -> GradientState:
        if any(p.accumulated is not None or _unsharded_grad(p) is not None for p in self._params):
            return GradientState.UNREDUCED
        if self._partial is not None:
            return GradientState.PARTIAL
        has_grad = any(param.sharded.grad is not None for param in self._params)
        return GradientState.REDUCED if has_grad else GradientState.NONE

    def unbind(self) -> None:
        """Forget compiled plans: dtypes, layouts or streams have changed."""
        self._bound.clear()

    def carry_by(self, comm: ReduceComm) -> None:
        """From the next reduction on, ``comm`` carries it."""
        self._comm = comm
        self._bound.clear()

    def take_landings(self) -> list[Landing]:
        """What was reduced and copied to the host since the last call, for the caller to finish or to drop."""
        landings, self._landings = self._landings, []
        return landings

    def discard_unreduced(self) -> None:
        """Drop what is not in the shards' ``.grad`` yet."""
        self._partial = None
        for param in self._params:
            param.accumulated = None
            if param.unsharded is not None:
                param.unsharded.grad = None

    def keep_unreduced(self) -> None:
        """Keep this backward's gradients on this rank, in reduce dtype."""
        for param in self._params:
            if param.compute_dtypes.param is param.compute_dtypes.reduce:
                continue  # autograd itself accumulates, in that dtype
            grad = _take_unsharded_grad(param)
            if grad is not None:
                _accumulate(param, grad.to(param.compute_dtypes.reduce))

    def reduce(
        self, trainable: tuple[int, ...], options: GroupOptions, services: Services, *, with_unused: bool
    ) -> PendingReduce | None:
        """Start reducing the gradients of the parameters ``trainable`` (indices); None if there are none.
        ``with_unused``: a parameter without a gradient has one of zeros."""
        if not trainable:
            return None
        if options is not self._options:
            if options.bound != self._options.bound:
                self._bound.clear()
            self._options = options
        bound = self._bound.get(trainable) or self._bind(trainable, services)
        self._bound[trainable] = bound
        grads = self._take_all(bound)
        present = list(map(_is_there, grads))
        if with_unused:
            present = [True] * len(present)
        elif True not in present:
            return self.reduce_partial(options, services)
        earlier, self._partial = self._partial, None
        if earlier is not None and not _is_alike(earlier.bound, bound):
            self._carry_on(earlier, services).finish()
            earlier = None
        self._complete(bound, grads)
        sums, pending = bound.reduce.issue(grads)
        return pending.then(partial(self._receive, _Sums(bound, sums, present), earlier, options.requires_all_reduce))

    def reduce_partial(self, options: GroupOptions, services: Services) -> PendingReduce | None:
        """Carry sums over the shard axis, if there are any, on over the replicate axis, unless they have to wait."""
        if self._partial is None or not options.requires_all_reduce:
            return None
        earlier, self._partial = self._partial, None
        return self._carry_on(earlier, services)

    def _carry_on(self, earlier: _Sums, services: Services) -> PendingReduce:
        """Start landing sums over the shard axis that no reduction adds to."""
        services.streams.reduce_after_compute()
        return PendingReduce((), None, services.streams).then(partial(self._land, earlier))

    def footprint(self, trainable: Sequence[int]) -> UnitBytes:
        """What reducing the gradients of the parameters ``trainable`` (indices) takes, in bytes."""
        params = [self._params[index] for index in trainable]
        inputs = [param.reduce_input for param in params for _ in param.gradient_parts()]
        plans = compile_reduces(inputs, self._comm, self._mesh.data_parallel_size)
        return reduce_bytes(plans, self._comm, keeps_gradients=self._mesh.device.type != "cpu")

    def _bind(self, trainable: tuple[int, ...], services: Services) -> _BoundReduce:
        params = [self._params[index] for index in trainable]
        parts = [_Part(param, name) for param in params for name in param.gradient_parts()]
        inputs = [part.param.reduce_input for part in parts]
        options = self._options
        plans = compile_reduces(
            inputs,
            self._comm,
            self._mesh.data_parallel_size,
            options.gradient_divide_factor,
            behind_hook=options.divides_behind_hook,
        )
        is_wrapped = any(param.is_wrapped for param in params)
        ordered = [parts[step.index] for plan in plans for step in plan.steps]
        is_usual = all(plan.dtypes.grad is plan.dtypes.orig for plan in plans)
        as_gradient = _torch.dtensor_like if is_usual else _torch.dtensor_placed_like
        reduce = Reduce(plans, self._mesh, self._comm, services, options.all_reduce_hook)
        is_plain = not is_wrapped and all(param.spec.unsharded is None for param in params)
        plain = [param.unsharded for param, _ in ordered if is_plain and param.unsharded is not None]
        bound = _BoundReduce(reduce, ordered, is_wrapped, plain, as_gradient)
        if not is_wrapped and not self._home.is_staged and options.all_reduce_hook is None:
            self._keep_gradients(bound)
        return bound

    def _keep_gradients(self, bound: _BoundReduce) -> None:
        """Have the DTensors that ``bound`` lands kept from step to step."""
        start = 0
        for part in bound.reduce.parts:
            params = [param for param, _ in bound.parts[start : start + len(part.plan.steps)]]
            part.keep_gradients(partial(_gradient_of, params, bound.as_gradient), partial(_have_gradients, params))
            start += len(params)

    def free_unused(self) -> None:
        """Free the memory of gradients that the user has let go of."""
        for bound in self._bound.values():
            bound.reduce.free_unused()

    def _take_all(self, bound: _BoundReduce) -> list[Any]:
        """The gradient that each step of ``bound`` reduces, off the unsharded parameters, or None."""
        if bound.is_wrapped:
            return self._take_parts(bound)
        if not bound.plain or any(map(_is_there, map(_accumulated_of, self._params))):
            return [self._take(param) for param, _ in bound.parts]
        grads = [param.grad for param in bound.plain]
        for param in bound.plain:
            param.grad = None
        return grads

    def _take_parts(self, bound: _BoundReduce) -> list[torch.Tensor | None]:
        taken = {param: self._take(param) for param in dict.fromkeys(param for param, _ in bound.parts)}
        return [_inner_gradient(part, taken[part.param]) for part in bound.parts]

    def _take(self, param: ShardedParam) -> torch.Tensor | None:
        grad = _take_unsharded_grad(param)
        if param.accumulated is None:
            return grad
        if grad is not None:
            _accumulate(param, grad)
        grad, param.accumulated = param.accumulated, None
        return grad

    def _complete(self, bound: _BoundReduce, grads: list[torch.Tensor | None]) -> None:
        """Make ``grads`` one gradient per step, of one dtype per plan. The layout of a reduction is the same on all
        ranks, whatever autograd did on this one: a parameter without a gradient contributes zeros."""
        if len(bound.reduce.plans) == 1 and set(map(type, grads)) == _PLAIN and len(set(map(_dtype_of, grads))) == 1:
            return
        start = 0
        for plan in bound.reduce.plans:
            stop = start + len(plan.steps)
            dtypes = {grad.dtype for grad in grads[start:stop] if grad is not None}
            dtype = dtypes.pop() if len(dtypes) == 1 else plan.dtypes.reduce  # some accumulated in that dtype
            for i, grad in enumerate(grads[start:stop], start):
                if grad is None:
                    grads[i] = torch.zeros(bound.parts[i].param.layout.shape, dtype=dtype, device=self._mesh.device)
                elif type(grad) is not torch.Tensor:
                    _refuse_gradient(bound.parts[i].param, grad)
                elif grad.dtype is not dtype:
                    grads[i] = grad.to(dtype)
            start = stop

    def _receive(self, received: _Sums, earlier: _Sums | None, all_reduce: bool) -> None:
        """The sums over the shard axis are complete: keep them, or carry them on."""
        if earlier is not None:
            received.bound.reduce.add(received.sums, earlier.sums)
            present = [now or before for now, before in zip(received.present, earlier.present, strict=True)]
            received = received._replace(present=present)
        if self._mesh.replicate.group is not None and not all_reduce:
            self._partial = received
        else:
            self._land(received)

    def _land(self, received: _Sums) -> None:
        """Sum over the replicate axis, average, and hand over to the sharded parameters. If those live on the host,
        the CPU does so when it has waited for the copies."""
        reduce = received.bound.reduce
        reduce.all_reduce(received.sums)
        averaged = received._replace(sums=reduce.average(received.sums))
        if not self._home.is_staged:
            self.has_run_hooks = _hand_over(averaged)
            return
        copies = [HostCopies(buffers, self._home, reduce.streams) for buffers in averaged.sums]
        on_host = averaged._replace(sums=[copy.tensors for copy in copies])  # nothing keeps the memory on the device
        self._landings.append(Landing(copies, partial(_hand_over, on_host)))


def _hand_over(averaged: _Sums) -> bool:
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


def _gradient_of(
    params: list[ShardedParam],
    as_gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    i: int,
    shard: torch.Tensor,
) -> torch.Tensor:
    return as_gradient(params[i].sharded, shard)


def _have_gradients(params: list[ShardedParam]) -> bool:
    return any(param.sharded.grad is not None for param in params)


def _is_alike(earlier: _BoundReduce, bound: _BoundReduce) -> bool:
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
    if not any(map(_is_there, before)):
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


def _unsharded_grad(param: ShardedParam) -> torch.Tensor | None:
    return None if param.unsharded is None else param.unsharded.grad


def _take_unsharded_grad(param: ShardedParam) -> torch.Tensor | None:
    grad = _unsharded_grad(param)
    if grad is not None:
        assert param.unsharded is not None
        param.unsharded.grad = None
        if param.spec.unsharded is not None:
            grad = param.spec.local_gradient(grad)
    return grad


def _accumulate(param: ShardedParam, grad: torch.Tensor) -> None:
    if param.accumulated is None:
        param.accumulated = grad
    else:
        param.accumulated += grad


def _inner_gradient(part: _Part, grad: torch.Tensor | None) -> torch.Tensor | None:
    """What ``part`` is of ``grad``. A plain gradient counts for each inner tensor."""
    return grad if grad is None or part.name not in _torch.inner_names(grad) else getattr(grad, part.name)


def _refuse_gradient(param: ShardedParam, grad: torch.Tensor) -> NoReturn:
    raise ExtensionError(
        f"parameter '{param.full_name}': its gradient is a {type(grad).__name__}, expected a plain tensor. A gradient "
        "may be of a subclass only if the unsharded parameter is a wrapper of the same class, whose inner tensors all "
        "have its shape and dtype. Let the subclass compute plain gradients, or take its activations apart."
    )


def _wrapped(landed: list[tuple[_Part, torch.Tensor]]) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
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
