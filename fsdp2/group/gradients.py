"""The gradients of one group, from where autograd left them to the sharded parameters.

They pass through up to four states: none; unreduced (a backward without communication left them on the unsharded
parameters); partial (reduced over the shard axis, not over the replicate axis); reduced (in ``.grad`` of the shards).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import compress
from operator import attrgetter, is_not, or_
from typing import Any, NamedTuple, NoReturn

import torch

from fsdp2 import _torch
from fsdp2.comm.backends import ReduceComm
from fsdp2.comm.offload import Home, HostCopies
from fsdp2.comm.services import Services
from fsdp2.group.landing import BoundReduce, Landing, Part, Reduced, gradient_of, hand_over, have_gradients, is_alike
from fsdp2.group.param import ShardedParam
from fsdp2.group.reduce_scatter import AllReduceHook, Begun, PendingReduce, Reduce
from fsdp2.plan.mesh import Axis, ParallelMesh
from fsdp2.plan.plan import compile_reduces
from fsdp2.tools.budget import UnitBytes
from fsdp2.tools.footprint import reduce_bytes
from fsdp2.types import AllGather, ExtensionError, ReduceScatter

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


class Unused(Enum):
    """What a reduction makes of parameters without a gradient on this rank."""

    LEAVE = "leave"  # if that is all of them, nothing is reduced
    JOIN = "join"  # they contribute zeros to what other ranks may have
    ZERO = "zero"  # their gradient is one of zeros


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


class _Begun(NamedTuple):
    """A reduction whose early gradients have left."""

    bound: BoundReduce
    begun: Begun


class GroupGradients:
    """Takes gradients off the unsharded parameters, and lands what the reduction makes of them.

    Attributes:
        splits: whether half of a large group may be reduced ahead of the rest.
        on_bound: called when plans have been compiled.
        presence: a byte per parameter, 1 if it had a gradient on this rank in a reduction since the last ``settle``.
        has_latecomers: whether gradients came after the last reduction's early ones had left, because the same
            parameters were used again: they need a reduction of their own.
    """

    def __init__(self, params: Sequence[ShardedParam], mesh: ParallelMesh, comm: ReduceComm, home: Home) -> None:
        self._params = params
        self._home = home
        self._mesh = mesh
        self._comm = comm
        self._bound: dict[tuple[int, ...], BoundReduce] = {}  # by the indices of trainable parameters
        self._options = GroupOptions()  # of what is bound
        self._partial: Reduced | None = None
        self._begun: _Begun | None = None
        self.has_latecomers = False
        self.splits = False
        self.on_bound: Callable[[], None] = lambda: None
        self._landings: list[Landing] = []
        self.has_run_hooks = False  # the user's, on what landed last
        self._withheld: list[Reduced] = []  # landed, in part for parameters without a gradient on this rank
        self.presence = self._nobody = bytes(len(params))

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

    def split(self, splits: bool) -> None:
        """Whether half of a large group may be reduced ahead of the rest."""
        if splits is not self.splits:
            self.splits = splits
            self._bound.clear()

    def early(self, trainable: tuple[int, ...]) -> tuple[ShardedParam, ...]:
        """Those of the parameters ``trainable`` (indices) whose gradients are reduced ahead of the rest, as far as that
        is known: from their first reduction on."""
        bound = self._bound.get(trainable)
        return () if bound is None else bound.early

    def take_landings(self) -> list[Landing]:
        """What was reduced and copied to the host since the last call, for the caller to finish or to drop."""
        landings, self._landings = self._landings, []
        return landings

    def discard_unreduced(self) -> None:
        """Drop what is not in the shards' ``.grad`` yet."""
        self._partial = self._begun = None
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
        self, trainable: tuple[int, ...], options: GroupOptions, services: Services, unused: Unused
    ) -> PendingReduce | None:
        """Start reducing the gradients of the parameters ``trainable`` (indices); None if nothing has to be."""
        if not trainable:
            return None
        begun: Begun | None = None
        if self._begun is None:
            if options is not self._options:
                self._follow(options)
            bound = self._bound.get(trainable) or self._bind(trainable, services)
            grads = self._take_all(bound)
        else:
            (bound, begun), self._begun = self._begun, None
            grads = [self._take(param) for param in bound.late]
        present = list(map(_is_there, grads))
        if unused is Unused.ZERO:
            present = [True] * len(present)
        elif unused is Unused.LEAVE and begun is None and True not in present:
            return self.reduce_partial(options, services)
        earlier, self._partial = self._partial, None
        if earlier is not None and not is_alike(earlier.bound, bound):
            self._carry_on(earlier, services).finish()
            earlier = None
        self._complete(bound, grads, without_early=begun is not None)
        sums, pending = bound.reduce.issue(grads, begun)
        if begun is not None:
            present = bound.reduce.with_early(present, early=True)
            self.has_latecomers = any(_unsharded_grad(param) is not None for param in bound.early)
        return pending.then(partial(self._receive, Reduced(bound, sums, present), earlier, options.requires_all_reduce))

    def begin(self, trainable: tuple[int, ...], options: GroupOptions) -> PendingReduce | None:
        """Start reducing the early gradients, which are all there; ``reduce`` goes on with the rest. None if nothing is
        early, or something has changed since it was."""
        bound = self._bound.get(trainable)
        if bound is None or not bound.early or self._begun is not None or options.bound != self._options.bound:
            return None
        if not all(map(_is_there, map(_unsharded_grad, bound.early))):
            return None  # a hook of the user's has taken one away
        grads: list[Any] = [self._take(param) for param in bound.early]
        for param, grad in zip(bound.early, grads, strict=True):
            if type(grad) is not torch.Tensor:
                _refuse_gradient(param, grad)
        begun, pending = bound.reduce.begin(grads)
        self._begun = _Begun(bound, begun)
        return pending.then(_nothing)

    def _follow(self, options: GroupOptions) -> None:
        if options.bound != self._options.bound:
            self._bound.clear()
        self._options = options

    def reduce_partial(self, options: GroupOptions, services: Services) -> PendingReduce | None:
        """Carry sums over the shard axis, if there are any, on over the replicate axis, unless they have to wait."""
        if self._partial is None or not options.requires_all_reduce:
            return None
        earlier, self._partial = self._partial, None
        return self._carry_on(earlier, services)

    def _carry_on(self, earlier: Reduced, services: Services) -> PendingReduce:
        """Start landing sums over the shard axis that no reduction adds to."""
        services.streams.reduce_after_compute()
        return PendingReduce((), None, services.streams).then(partial(self._land, earlier))

    def footprint(self, trainable: Sequence[int]) -> UnitBytes:
        """What reducing the gradients of the parameters ``trainable`` (indices) takes, in bytes."""
        params = [self._params[index] for index in trainable]
        inputs = [param.reduce_input for param in params for _ in param.gradient_parts()]
        splits = self.splits and self._comm.splits
        plans = compile_reduces(inputs, self._comm, self._mesh.data_parallel_size, splits=splits)
        return reduce_bytes(plans, self._comm, keeps_gradients=self._mesh.device.type != "cpu")

    def _bind(self, trainable: tuple[int, ...], services: Services) -> BoundReduce:
        params = [self._params[index] for index in trainable]
        parts = [Part(param, name) for param in params for name in param.gradient_parts()]
        inputs = [part.param.reduce_input for part in parts]
        options = self._options
        plans = compile_reduces(
            inputs,
            self._comm,
            self._mesh.data_parallel_size,
            options.gradient_divide_factor,
            behind_hook=options.divides_behind_hook,
            splits=self.splits and self._comm.splits and not any(param.is_wrapped for param in params),
        )
        is_wrapped = any(param.is_wrapped for param in params)
        ordered = [parts[step.index] for plan in plans for step in plan.steps]
        is_usual = all(plan.dtypes.grad is plan.dtypes.orig for plan in plans)
        as_gradient = _torch.dtensor_like if is_usual else _torch.dtensor_placed_like
        reduce = Reduce(plans, self._mesh, self._comm, services, options.all_reduce_hook)
        is_plain = not is_wrapped and all(param.spec.unsharded is None for param in params)
        plain = [param.unsharded for param, _ in ordered if is_plain and param.unsharded is not None]
        is_early = reduce.with_early([False] * (len(ordered) - reduce.num_early), early=True)
        early = tuple(param for (param, _), ahead in zip(ordered, is_early, strict=True) if ahead)
        late = tuple(param for (param, _), ahead in zip(ordered, is_early, strict=True) if not ahead)
        bound = BoundReduce(reduce, ordered, is_wrapped, plain, early, late, self._flags(params), as_gradient)
        if not is_wrapped and not self._home.is_staged and options.all_reduce_hook is None:
            self._keep_gradients(bound)
        self._bound[trainable] = bound
        self.on_bound()
        return bound

    def _keep_gradients(self, bound: BoundReduce) -> None:
        """Have the DTensors that ``bound`` lands kept from step to step."""
        start = 0
        for part in bound.reduce.parts:
            params = [param for param, _ in bound.parts[start : start + len(part.plan.steps)]]
            part.keep_gradients(partial(gradient_of, params, bound.as_gradient), partial(have_gradients, params))
            start += len(params)

    def free_unused(self) -> None:
        """Free the memory of gradients that the user has let go of."""
        for bound in self._bound.values():
            bound.reduce.free_unused()

    def _take_all(self, bound: BoundReduce) -> list[Any]:
        """The gradient that each step of ``bound`` reduces, off the unsharded parameters, or None."""
        if bound.is_wrapped:
            return self._take_parts(bound)
        if not bound.plain or any(map(_is_there, map(_accumulated_of, self._params))):
            return [self._take(param) for param, _ in bound.parts]
        grads = _torch.grads_of(bound.plain)
        _torch.set_grads(bound.plain, [None] * len(grads))
        return grads

    def _take_parts(self, bound: BoundReduce) -> list[torch.Tensor | None]:
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

    def _complete(self, bound: BoundReduce, grads: list[torch.Tensor | None], *, without_early: bool) -> None:
        """Make ``grads`` one gradient per step, of one dtype per plan. The layout of a reduction is the same on all
        ranks, whatever autograd did on this one: a parameter without a gradient contributes zeros."""
        if len(bound.reduce.plans) == 1 and set(map(type, grads)) == _PLAIN and len(set(map(_dtype_of, grads))) == 1:
            return
        params = bound.late if without_early else [param for param, _ in bound.parts]
        start = 0
        for part in bound.reduce.parts:
            plan = part.plan
            stop = start + (part.num_late if without_early else len(plan.steps))
            dtypes = {grad.dtype for grad in grads[start:stop] if grad is not None}
            dtype = dtypes.pop() if len(dtypes) == 1 else plan.dtypes.reduce  # some accumulated in that dtype
            for i, grad in enumerate(grads[start:stop], start):
                if grad is None:
                    grads[i] = torch.zeros(params[i].layout.shape, dtype=dtype, device=self._mesh.device)
                elif type(grad) is not torch.Tensor:
                    _refuse_gradient(params[i], grad)
                elif grad.dtype is not dtype:
                    grads[i] = grad.to(dtype)
            start = stop

    def _receive(self, received: Reduced, earlier: Reduced | None, all_reduce: bool) -> None:
        """The sums over the shard axis are complete: keep them, or carry them on."""
        if earlier is not None:
            received.bound.reduce.add(received.sums, earlier.sums)
            present = [now or before for now, before in zip(received.present, earlier.present, strict=True)]
            received = received._replace(present=present)
        if self._mesh.replicate.group is not None and not all_reduce:
            self._partial = received
        else:
            self._land(received)

    def _land(self, received: Reduced) -> None:
        """Sum over the replicate axis, average, and hand over to the sharded parameters. If those live on the host,
        the CPU does so when it has waited for the copies."""
        reduce = received.bound.reduce
        reduce.all_reduce(received.sums)
        averaged = received._replace(sums=reduce.average(received.sums))
        if not self._home.is_staged:
            self._hand_over(averaged)
            return
        copies = [HostCopies(buffers, self._home, reduce.streams) for buffers in averaged.sums]
        on_host = averaged._replace(sums=[copy.tensors for copy in copies])  # nothing keeps the memory on the device
        self._landings.append(Landing(copies, partial(self._hand_over, on_host)))

    def _hand_over(self, averaged: Reduced) -> None:
        """Hand over what had a gradient on this rank; of the rest, other ranks may have had one."""
        self.has_run_hooks = hand_over(averaged)
        here = averaged.bound.everybody
        if False in averaged.present:
            self._withheld.append(averaged)
            here = self._flags(part.param for part in compress(averaged.bound.parts, averaged.present))
        self.presence = here if self.presence is self._nobody else bytes(map(or_, self.presence, here))

    def _flags(self, params: Iterable[ShardedParam]) -> bytes:
        present = set(params)
        return bytes(param in present for param in self._params)

    @property
    def withholds(self) -> bool:
        """Whether it depends on other ranks which gradients are handed over."""
        return bool(self._withheld)

    def settle(self, presence: bytes) -> None:
        """The step is over. ``presence``, as the attribute, of all ranks: hand over what was withheld of the parameters
        in it, and drop the rest."""
        withheld, self._withheld = self._withheld, []
        self.presence = self._nobody
        if withheld and presence:
            anywhere = set(compress(self._params, presence))
            for averaged in withheld:
                parts = zip(averaged.bound.parts, averaged.present, strict=True)
                late = [not had and part.param in anywhere for part, had in parts]
                if True in late:
                    hand_over(averaged._replace(present=late))


def _nothing() -> None:
    """What comes when early gradients have arrived: the rest lands with them."""


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


def _inner_gradient(part: Part, grad: torch.Tensor | None) -> torch.Tensor | None:
    """What ``part`` is of ``grad``. A plain gradient counts for each inner tensor."""
    return grad if grad is None or part.name not in _torch.inner_names(grad) else getattr(grad, part.name)


def _refuse_gradient(param: ShardedParam, grad: torch.Tensor) -> NoReturn:
    raise ExtensionError(
        f"parameter '{param.full_name}': its gradient is a {type(grad).__name__}, expected a plain tensor. A gradient "
        "may be of a subclass only if the unsharded parameter is a wrapper of the same class, whose inner tensors all "
        "have its shape and dtype. Let the subclass compute plain gradients, or take its activations apart."
    )
