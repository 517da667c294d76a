"""The gradients of one group, on their way from the unsharded parameters to ``.grad`` of the sharded ones.

The group owns them the whole time, whichever root it works under. Along the way, they are

1. unreduced: on the unsharded parameters, or in ``accumulated`` if a backward without communication left them there;
2. in flight: in one reduction, from its launch until it has landed;
3. partial: summed over the shard axis but not over the replicate axis, if the user has disabled the all-reduce;
4. being copied to the host, if the shards live there.

``drop_in_flight`` drops 2 and 4. ``drop`` is called after it, and drops 1 and 3. Where ranks may differ, ``on_missing``
keeps the sums of parameters that had no gradient on this rank until the end of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.core import _torch, seams
from fsdp2.core.comm.backends import ReduceComm, can_average, comm_for
from fsdp2.core.comm.custom import AllReduceHook, GathersBy, ReduceMaker, carrier
from fsdp2.core.comm.memory import alias
from fsdp2.core.comm.offload import Home, HostCopies
from fsdp2.core.comm.streams import Streams, Waitable, wait_for
from fsdp2.core.group.param import ShardedParam
from fsdp2.core.group.reduce_scatter import Launched, Reduce
from fsdp2.core.group.unsharded import UnshardedParams
from fsdp2.core.plan.mesh import Axis, ParallelMesh
from fsdp2.core.plan.plan import PlanInput, ReducePlan, compile_reduces

# These are in C, because they run once per parameter and step.
_is_present = partial(is_not, None)
_accumulated_of, _dtype_of, _grad_of = attrgetter("accumulated"), attrgetter("dtype"), attrgetter("grad")
_sharded_of = attrgetter("sharded")
_PLAIN = {torch.Tensor}
MAX_USED = 2**16  # maximal bytes of ``take_used``: users may run backwards without ever ending the step


@dataclass(frozen=True)
class GroupOptions:
    """What the user configures for one group: its gradients and its communication. ``fills_gradients``: parameters
    without a gradient on any rank get zeros. ``fills_beside_others``: they get zeros if another parameter of the group
    has a gradient, as in a flat parameter. ``hook_reduces``: the hook gets the sums over the shard axis and replaces
    the all-reduce. ``apart_over``: a process group whose ranks hold different parameters under the same names."""

    requires_all_reduce: bool = True
    gradient_divide_factor: float | None = None
    divides_behind_hook: bool = False
    all_reduce_hook: AllReduceHook | None = None
    gathers_by: GathersBy | None = None
    reduces_by: ReduceMaker | None = None
    reduce_axis: Axis | None = None
    fills_gradients: bool = False
    fills_beside_others: bool = False
    hook_reduces: bool = False
    apart_over: dist.ProcessGroup | None = None


Stage = Callable[["Reduction"], Sequence[Waitable]]


@dataclass(frozen=True, eq=False)
class BoundReduce:
    """Plans bound to a comm, and what each step of the plans reduces.

    Attributes:
        params: the parameter of each step. One whose gradient is a wrapper has one step for each inner tensor.
        is_wrapped: some unsharded parameter is a tensor subclass, so its gradient may be one.
        plain: the unsharded parameters if their gradients can be reduced exactly as autograd leaves them; else empty.
        used: one byte per parameter of the group: 1 if the parameter is reduced.
        landing: the stages that land sums over the shard axis.
    """

    reduce: Reduce
    params: list[ShardedParam]
    is_wrapped: bool
    plain: list[nn.Parameter]
    used: bytes
    landing: tuple[Stage, ...]

    def is_like(self, other: BoundReduce) -> bool:
        """Whether the sums of both may be added: nothing was frozen, unfrozen, cast or configured in between."""
        if self is other:
            return True
        plans = [
            [(plan.steps, plan.dtypes, plan.factors.before, plan.factors.averages) for plan in each.reduce.plans]
            for each in (self, other)
        ]
        return self.params == other.params and plans[0] == plans[1]


class Landed(NamedTuple):
    """Reduced gradients of this rank's shards: ``shards[i]`` belongs to ``params[i]``."""

    params: Sequence[ShardedParam]
    shards: Sequence[torch.Tensor]

    def where(self, chosen: Sequence[bool]) -> Landed:
        """The gradients at the positions where ``chosen`` is True."""
        return Landed(list(compress(self.params, chosen)), list(compress(self.shards, chosen)))

    def land(self) -> None:
        """Set ``.grad`` of the sharded parameters, or add to it. Then run the user's hooks on these parameters, as
        autograd would."""
        params: list[nn.Parameter] = list(map(_sharded_of, self.params))
        shards = list(self.shards)
        before, has_hooks = _torch.set_first_grads(params, shards)
        if before.count(None) < len(before):
            _add_gradients(params, shards, before)
        if has_hooks:
            for param in params:
                for hook in _torch.post_accumulate_grad_hooks(param):
                    hook(param)


class Reduction:
    """One reduction of a group, from its launch until its gradients are in place.

    The ``stages`` follow the launch. Each stage runs when the collectives before it have completed. On the CPU, the
    stages run in ``finish`` and ``land``. On an accelerator, they are enqueued on the reduce stream: immediately, up to
    a collective that runs outside of that stream (an all-reduce over replicas), and the rest in ``land``.

    Attributes:
        stages: the stages that have not run yet.
        sums: this rank's sums, first over the shard axis, then over all ranks, then averaged.
        present: for each step of the plans, whether this rank had a gradient.
        copies: copies of offloaded gradients, in flight to the host.
        added_to: gradients of earlier backwards that landed without a copy. Users' hooks may drop them early.
        ends_step: whether no later backward of the step adds to these gradients.
    """

    def __init__(
        self,
        bound: BoundReduce,
        launched: Launched,
        present: list[bool],
        stages: Sequence[Stage],
        *,
        ends_step: bool,
    ) -> None:
        self.bound, self.present, self.ends_step = bound, present, ends_step
        self.sums, self._works, self._inputs, self._read = launched
        self.added_to: object = None
        self.copies: list[HostCopies] = []
        self._streams: Streams = bound.reduce.streams
        self.stages = deque(stages)
        if not self._works:  # there is nothing to wait for before the first stages
            with self._streams.on_reduce:
                self._advance()

    def finish(self) -> None:
        """Free the inputs of the reduce-scatter once it has read them. Called once."""
        if self._works and not self._streams.runs_ahead:
            self._advance()
        if self.bound.reduce.lands_gradients:  # the reduce stream reads them until they have landed
            self._streams.compute_after_reduce()
        elif self._read is not None:
            self._streams.wait_here(self._read)  # compute waits for the reduce stream: compute frees what it read
        self._inputs = self.added_to = None

    def land(self) -> None:
        """Run the remaining stages. Called after ``finish``."""
        with self._streams.on_reduce:
            while self.stages:
                self._advance()

    def drop(self) -> None:
        """Wait for what is in flight without landing it."""
        self.stages.clear()
        with self._streams.on_reduce:
            self._advance()
        self.finish()

    def _advance(self) -> None:
        """Wait for what is in flight, then run stages up to the next collective."""
        works, self._works = self._works, ()  # if one of them fails, no later call waits for them again
        wait_for(works)  # on an accelerator, the reduce stream waits
        while self.stages and not self._works:
            self._works = self.stages.popleft()(self)


class GroupGradients:
    """Takes gradients off the unsharded parameters, and lands the reduced gradients on the sharded ones.

    Attributes:
        params: the parameters of the group.
        options: what the user has configured.
        in_flight: the reduction that has been launched and has not landed.
        on_missing: called with the sums of parameters that had no gradient on this rank, and where ``take_used`` will
            have this reduction's flags. Without ``on_missing``, these sums are dropped.
        are_kept: backwards have kept gradients since the last reduction. The same on all ranks.
        on_landed: called on the stream that landed gradients, with their parameters, and whether no later backward of
            the step adds to them. It may take the gradients from ``.grad``.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        unsharded: UnshardedParams,
        mesh: ParallelMesh,
        comm: ReduceComm,
        home: Home,
    ) -> None:
        self.params, self._unsharded, self._mesh, self._home = params, unsharded, mesh, home
        self._comm = self._default_comm = comm
        self.options = GroupOptions()
        self.on_missing: Callable[[Landed, int], object] | None = None
        self.on_landed: Callable[[list[nn.Parameter], bool], object] | None = None
        self._bound: dict[tuple[int, ...], BoundReduce] = {}  # by the indices of trainable parameters
        self.in_flight: Reduction | None = None
        self._partial: Reduction | None = None  # summed over the shard axis only
        self._to_host: list[Reduction] = []  # averaged; copies to the host are in flight
        self._keeps = False  # whether the last backward left its gradients on this rank
        self.are_kept = False
        self._frozen_since: set[int] = set()  # frozen since then; the next reduction includes them
        self._used = b""

    @property
    def are_unreduced(self) -> bool:
        """Whether backwards without communication have left gradients on this rank."""
        return any(p.accumulated is not None or p.unsharded_grad is not None for p in self.params)

    def has_late(self) -> bool:
        """Whether gradients came after the unit's backward, as when autocast caches casts of earlier forwards."""
        return any(map(_is_present, map(_grad_of, self._unsharded.parameters)))

    @property
    def are_partial(self) -> bool:
        """Whether there are gradients that were reduced over the shard axis but not over the replicate axis."""
        return self._partial is not None

    @property
    def are_hooked(self) -> bool:
        """Whether users have hooks that run when gradients land."""
        return any(_torch.post_accumulate_grad_hooks(param.sharded) for param in self.params)

    def unbind(self) -> None:
        """Forget compiled plans: dtypes, layouts or streams have changed."""
        self._bound.clear()

    def configure(self, options: GroupOptions) -> None:
        """Use ``options`` from the next reduction on."""
        before, self.options = self.options, options
        if replace(before, requires_all_reduce=options.requires_all_reduce) != options:  # else the plans stay valid
            self.unbind()
        if options.reduces_by is not before.reduces_by or options.reduce_axis is not before.reduce_axis:
            axis, device = options.reduce_axis or self._mesh.shard, self._mesh.device
            default = self._default_comm if axis is self._mesh.shard else comm_for(axis, device)
            self._comm = carrier(default, options.reduces_by, axis, device)

    def drop_in_flight(self) -> None:
        """Wait for collectives in flight, and land nothing more. Copies to the host are dropped without waiting.

        Raises:
            CommunicationError: a collective has failed. Nothing is in flight afterwards.
        """
        self._to_host.clear()
        reduction, self.in_flight = self.in_flight, None
        if reduction is not None:
            reduction.drop()

    def drop(self) -> None:
        """Drop unreduced and partial gradients. Requires that nothing is in flight: see ``drop_in_flight``."""
        self._partial = None
        for param in self.params:
            param.accumulated = None
            if param.unsharded is not None:
                param.unsharded.grad = None
        self.are_kept = False
        self._frozen_since.clear()

    @property
    def trainable(self) -> tuple[int, ...]:
        """The positions of the parameters that the next reduction covers."""
        return tuple(sorted(self._frozen_since.union(self._unsharded.trainable)))

    def owe(self, frozen: Iterable[int]) -> None:
        """Note that the parameters at the positions ``frozen`` are no longer trainable. If backwards have left
        gradients on this rank, the next reduction still covers these parameters."""
        if self.are_kept or self.are_unreduced:
            self._frozen_since.update(frozen)

    def begin_backward(self, *, keeps: bool) -> None:
        """A backward has reached the unsharded parameters. ``keeps``: its gradients stay on this rank."""
        if keeps or self._keeps:
            self._keeps = keeps
            for param in self.params:
                param.choose_grad_dtype(is_kept=keeps)

    def keep_unreduced(self) -> None:
        """Keep this backward's gradients on this rank, in reduce dtype."""
        self.are_kept = True
        for param in self.params:
            if param.compute_dtypes.param is not param.compute_dtypes.reduce:  # else autograd itself accumulates in it
                param.keep_grad()

    def reduce(self, *, jointly: bool, ends_step: bool) -> bool:
        """Start reducing the gradients that this and earlier backwards left. Returns False if there are none.
        ``jointly``: reduce zeros in that case, since other ranks may have some. ``ends_step``: no later backward of the
        step adds to them. Requires that nothing is in flight."""
        trainable = self.trainable if self._frozen_since else self._unsharded.trainable
        if not trainable:
            return False
        bound = self._bound.get(trainable) or self._bind(trainable)
        grads = self._take_all(bound)
        self.are_kept = False
        self._frozen_since.clear()
        present = list(map(_is_present, grads))
        if self.options.fills_gradients or (self.options.fills_beside_others and True in present):
            present = [True] * len(present)
        elif not jointly and True not in present:
            return False
        earlier, self._partial = self._partial, None
        if earlier is not None and not earlier.bound.is_like(bound):
            self._start_landing(earlier, ends_step=False).land()
            earlier = None
        whole = self._completed(bound, grads)
        launched = bound.reduce.launch(whole)
        stages: list[Stage] = [] if earlier is None else [partial(_add_earlier, earlier)]
        keeps_partial = self._mesh.replicate.group is not None and not self.options.requires_all_reduce
        stages += [self._keep_partial] if keeps_partial else bound.landing
        self.in_flight = Reduction(bound, launched, present, stages, ends_step=ends_step)
        return True

    @property
    def awaits_all_reduce(self) -> bool:
        """Whether there are partial gradients that the user allows to be summed over the replicate axis."""
        return self._partial is not None and self.options.requires_all_reduce

    def reduce_partial(self, *, ends_step: bool) -> bool:
        """Start summing partial gradients over the replicate axis, too. ``ends_step`` as for ``reduce``."""
        earlier, self._partial = self._partial, None
        assert earlier is not None
        self.in_flight = self._start_landing(earlier, ends_step=ends_step)
        return True

    def finish(self) -> None:
        """Free the inputs of the reduction in flight once they have been read. If no stage remains, it has landed."""
        reduction = self.in_flight
        assert reduction is not None
        reduction.finish()
        if not reduction.stages:
            self.in_flight = None

    def land(self) -> None:
        """Land the finished reduction, unless it has landed already."""
        reduction, self.in_flight = self.in_flight, None
        if reduction is not None:
            reduction.land()

    def finish_copies(self) -> None:
        """Make the CPU wait for copies of gradients to the host, and land these gradients."""
        reductions, self._to_host = self._to_host, []
        for reduction in reductions:
            for copies in reduction.copies:
                copies.wait()
            if reduction.sums:  # else they have landed already
                self._land_shards(reduction, reduction.bound.reduce.shards(reduction.sums))

    def take_used(self) -> bytes:
        """One byte per parameter for each reduction that has landed since the last call: 1 if the parameter had a
        gradient on this rank. All ranks have landed the same reductions."""
        used, self._used = self._used, b""
        return used

    def plans(self, trainable: Sequence[int]) -> tuple[tuple[ReducePlan, ...], ReduceComm]:
        """The plans that reduce the parameters ``trainable`` (indices), and the comm."""
        options = self.options
        plans = compile_reduces(
            [PlanInput(param.name, param.layout, param.compute_dtypes) for param in self._reduced(trainable)],
            self._comm.routing,
            self._mesh.data_parallel_size,
            options.gradient_divide_factor,
            behind_hook=options.divides_behind_hook,
            averages=self._averages,
        )
        return plans, self._comm

    @property
    def _averages(self) -> bool:
        """Whether the collectives may take the mean. A user's own collective or axis must return sums."""
        options = self.options
        is_own = options.reduces_by is not None or options.reduce_axis is not None
        return not (is_own or options.divides_behind_hook) and can_average(self._mesh)

    def _reduced(self, trainable: Sequence[int]) -> list[ShardedParam]:
        """The parameters ``trainable`` in this order, each repeated once per step that the plans have for it."""
        return [self.params[i] for i in trainable for _ in self.params[i].inner_gradients() or ("",)]

    # At first use

    def _bind(self, trainable: tuple[int, ...]) -> BoundReduce:
        params, (plans, comm) = self._reduced(trainable), self.plans(trainable)
        ordered = [params[step.index] for plan in plans for step in plan.steps]
        is_wrapped = any(param.is_wrapped for param in params)
        is_plain = not is_wrapped and all(param.spec.unsharded is None for param in params)
        sums_replicas = self._mesh.replicate.size > 1 and not self.options.hook_reduces
        bound = BoundReduce(
            reduce=Reduce(plans, self._mesh, comm, self._unsharded.streams, self.options.all_reduce_hook),
            params=ordered,
            is_wrapped=is_wrapped,
            plain=[param.unsharded for param in ordered if is_plain and param.unsharded is not None],
            used=self._flags(params),
            landing=(_all_reduce, self._land) if sums_replicas else (self._land,),
        )
        self._bound[trainable] = bound
        return bound

    def _flags(self, params: Iterable[ShardedParam]) -> bytes:
        used = set(params)
        return bytes(param in used for param in self.params)

    # From autograd to the reduction

    def _take_all(self, bound: BoundReduce) -> list[torch.Tensor | None]:
        """Take gradients off the unsharded parameters. Returns one for each step of ``bound``, or None if missing."""
        if bound.plain and not any(map(_is_present, map(_accumulated_of, self.params))):
            grads = list(map(_grad_of, bound.plain))
            for param in bound.plain:
                param.grad = None
            return grads
        taken = {param: _per_step(param, param.take_grad()) for param in dict.fromkeys(bound.params)}
        return [next(taken[param]) for param in bound.params]

    def _completed(self, bound: BoundReduce, grads: list[torch.Tensor | None]) -> list[torch.Tensor]:
        """``grads`` with zeros for missing gradients, and one dtype per plan. This makes the layout of a reduction the
        same on all ranks, whatever autograd did on this rank."""
        plans = bound.reduce.plans
        if len(plans) == 1 and set(map(type, grads)) == _PLAIN and len(set(map(_dtype_of, grads))) == 1:
            return grads  # type: ignore[return-value]
        whole: list[torch.Tensor] = []
        for plan in plans:
            mine = grads[len(whole) : len(whole) + len(plan.steps)]
            dtypes = {grad.dtype for grad in mine if grad is not None}
            dtype = dtypes.pop() if len(dtypes) == 1 else plan.dtypes.reduce  # some were accumulated in reduce dtype
            for grad in mine:
                param = bound.params[len(whole)]
                if grad is None:
                    grad = torch.zeros(param.layout.shape, dtype=dtype, device=self._mesh.device)
                elif type(grad) is not torch.Tensor:
                    seams.refuse_gradient(param, grad)
                whole.append(grad.to(dtype))
        grads.clear()  # so that each gradient is freed once it has been sent
        return whole

    # From the reduction to the shards

    def _start_landing(self, summed: Reduction, *, ends_step: bool) -> Reduction:
        """Start landing sums over the shard axis, to which no further reduction is added."""
        self._unsharded.streams.reduce_after_compute()
        launched = Launched(summed.sums, (), None, None)
        return Reduction(summed.bound, launched, summed.present, summed.bound.landing, ends_step=ends_step)

    def _keep_partial(self, reduction: Reduction) -> Sequence[Waitable]:
        """Keep the sums over the shard axis: the user has disabled the all-reduce."""
        self._partial = reduction
        return ()

    def _land(self, reduction: Reduction) -> Sequence[Waitable]:
        """Average, and set ``.grad`` of the sharded parameters. If these live on the host, start copies instead;
        ``finish_copies`` waits for the copies and sets ``.grad``. An optimizer that steps during backward gets them at
        once, unless something else must read or land first; it waits for this stream."""
        reduce = reduction.bound.reduce
        if not self._home.is_staged:
            self._land_shards(reduction, reduce.landed(reduction.sums))
            return ()
        reduction.copies = [HostCopies(each, self._home, reduce.streams) for each in reduce.complete(reduction.sums)]
        reduction.sums = [copies.tensors for copies in reduction.copies]  # frees the memory on the device
        self._to_host.append(reduction)
        if self.on_landed is not None and not self._are_read_in_backward(reduction):
            self._land_shards(reduction, reduce.shards(reduction.sums))
        return ()

    def _are_read_in_backward(self, reduction: Reduction) -> bool:
        """Whether landing reads the values, or must follow an earlier landing, which waits for its copies."""
        is_added = any(param.sharded.grad is not None for param in reduction.bound.params)
        is_called = self.are_hooked or (self.on_missing is not None and False in reduction.present)
        follows = any(earlier.sums for earlier in self._to_host[:-1])  # all ranks land in order: see ``take_used``
        return is_added or is_called or follows or reduction.bound.is_wrapped or not reduction.ends_step

    def _land_shards(self, reduction: Reduction, shards: Sequence[torch.Tensor]) -> None:
        """Land the gradients that this rank had."""
        bound, present = reduction.bound, reduction.present
        landed = Landed(bound.params, shards)
        if bound.is_wrapped:
            had = dict(zip(bound.params, present, strict=True))
            landed = _rewrapped(landed)
            present = [had[param] for param in landed.params]
        reduction.sums = []  # no longer needed; if ``.grad`` exists, the values are added to it
        used = bound.used
        if False in present:
            missing, landed = landed.where([not had for had in present]), landed.where(present)
            used = self._flags(landed.params)
            if self.on_missing is not None:
                self.on_missing(missing, len(self._used))
        self._used = (self._used + used)[-MAX_USED:]
        if bound.reduce.lands_gradients:
            reduction.added_to = [param.sharded.grad for param in landed.params]
        landed.land()
        if self.on_landed is not None:
            self.on_landed(list(map(_sharded_of, landed.params)), reduction.ends_step)


def _add_earlier(earlier: Reduction, reduction: Reduction) -> Sequence[Waitable]:
    """Add the sums of ``earlier`` over the shard axis."""
    for mine, other in zip(reduction.sums, earlier.sums, strict=True):
        _torch.foreach_add(mine, other)
    present = zip(reduction.present, earlier.present, strict=True)
    reduction.present = [now or before for now, before in present]
    return ()


def _all_reduce(reduction: Reduction) -> Sequence[Waitable]:
    return reduction.bound.reduce.all_reduce(reduction.sums)


def _add_gradients(params: list[nn.Parameter], shards: list[torch.Tensor], before: list[torch.Tensor | None]) -> None:
    targets, values = [], []
    for param, earlier, shard in zip(params, before, shards, strict=True):
        if earlier is None:
            _torch.set_grads([param], [shard])
        else:
            targets.append(_torch.local_of(earlier))
            values.append(shard)
    _torch.foreach_add(targets, values)


def _per_step(param: ShardedParam, grad: torch.Tensor | None) -> Iterator[torch.Tensor | None]:
    """What each step for ``param`` reduces. A plain gradient is reduced once for each inner tensor."""
    names = param.inner_gradients()
    if grad is None or not names or _torch.inner_names(grad) != names:
        return repeat(grad)
    return iter([getattr(grad, name) for name in names])


def _rewrapped(landed: Landed) -> Landed:
    """``landed`` with one gradient per parameter: reduced inner tensors become one tensor of the parameter's class."""
    by_param: dict[ShardedParam, list[torch.Tensor]] = {}
    for param, shard in zip(*landed, strict=True):
        by_param.setdefault(param, []).append(shard)
    for param, shards in by_param.items():
        if names := param.inner_gradients():  # subclasses compare storage offsets
            inner = [alias(shard, int(shard.storage_offset()), shard.shape, shard.stride()) for shard in shards]
            shards[:] = [_torch.rewrapped(_torch.local_of(param.sharded), dict(zip(names, inner, strict=True)))]
    return Landed(list(by_param), [shards[0] for shards in by_param.values()])
