"""A parameter group: the parameters that are unsharded, resharded and reduced together.

It owns what changes over a step: which form of its parameters is bound, what is in flight, and the gradients that are
not reduced yet. It decides nothing about *when*; ``runtime`` performs the schedule's actions on it. The state machine
is ``TRANSITIONS``: a pair that is not in it is refused, and nothing changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from fsdp2 import _torch
from fsdp2.api import MixedPrecisionPolicy, ScheduleError
from fsdp2.buffers import alias
from fsdp2.collectives import (
    FlatShards,
    Gather,
    LocalGather,
    PendingGather,
    PendingReduce,
    flat_shards,
    is_local,
)
from fsdp2.comm import comm_for
from fsdp2.gradients import GroupGradients, GroupOptions
from fsdp2.layout import contiguous_stride
from fsdp2.mesh import ParallelMesh
from fsdp2.param import Bindings, ParamRecord, ShardedParam, check_device, check_uniform_dtypes
from fsdp2.plan import compile_gather
from fsdp2.precision import param_dtypes
from fsdp2.resting import RestingShards
from fsdp2.services import services_for


class GroupState(Enum):
    """Which form of the parameters is bound, and whether another is on its way."""

    __hash__ = object.__hash__  # Enum's own is Python; transitions are looked up in the hot path

    SHARDED = "SHARDED"
    UNSHARDING = "UNSHARDING"
    UNSHARDED = "UNSHARDED"
    SHARDED_POST_FORWARD = "SHARDED_POST_FORWARD"


class GroupEvent(Enum):
    __hash__ = object.__hash__

    UNSHARD = "unshard"
    WAIT = "wait"
    RESHARD = "reshard"
    RESHARD_POST_FORWARD = "reshard to the post-forward mesh"


_S, _E = GroupState, GroupEvent
# (state, event) -> state. A pair that maps to its own state does nothing; a missing pair is a ScheduleError.
TRANSITIONS: dict[tuple[GroupState, GroupEvent], GroupState] = {
    (_S.SHARDED, _E.UNSHARD): _S.UNSHARDING,
    (_S.SHARDED, _E.RESHARD): _S.SHARDED,
    (_S.SHARDED, _E.RESHARD_POST_FORWARD): _S.SHARDED,  # the user resharded inside the forward
    (_S.UNSHARDING, _E.UNSHARD): _S.UNSHARDING,
    (_S.UNSHARDING, _E.WAIT): _S.UNSHARDED,
    (_S.UNSHARDING, _E.RESHARD): _S.SHARDED,  # prefetched and not used
    (_S.UNSHARDED, _E.UNSHARD): _S.UNSHARDED,
    (_S.UNSHARDED, _E.WAIT): _S.UNSHARDED,
    (_S.UNSHARDED, _E.RESHARD): _S.SHARDED,
    (_S.UNSHARDED, _E.RESHARD_POST_FORWARD): _S.SHARDED_POST_FORWARD,
    (_S.SHARDED_POST_FORWARD, _E.UNSHARD): _S.UNSHARDING,
    (_S.SHARDED_POST_FORWARD, _E.RESHARD): _S.SHARDED,
    (_S.SHARDED_POST_FORWARD, _E.RESHARD_POST_FORWARD): _S.SHARDED_POST_FORWARD,
}


class ParamGroup:
    """See the module's text. Created by ``fully_shard`` from resolved records, which sharding cannot fail on."""

    def __init__(self, records: Sequence[ParamRecord], mesh: ParallelMesh, policy: MixedPrecisionPolicy) -> None:
        self.name = ""
        self.mesh = mesh
        self.policy = policy
        self.options = GroupOptions()
        self.state = GroupState.SHARDED
        self.is_stale = True  # users may replace parameters between fully_shard and the first use
        self.story: Callable[[], str] = lambda: "none"  # the root's recent events, for error messages
        self._on_halfway: Callable[[], None] = lambda: None
        self._halfway: RemovableHandle | None = None
        self.params = [ShardedParam(record, mesh) for record in records]
        self._comm = comm_for(mesh.shard, mesh.device)
        self.gradients = GroupGradients(self.params, mesh, self._comm)
        self._bindings = Bindings(self.params)
        self._storage = torch.UntypedStorage(0, device=mesh.device)
        self._resting: RestingShards | None = None
        self._resting_mesh: ParallelMesh | None = None
        self._pending: PendingGather | None = None
        self._services = services_for(mesh.device)
        self.on_transition: Callable[[GroupState, GroupState], None] | None = None
        self._place_shards([param.shard_of(param.sharded.detach()) for param in self.params], new=True)
        self._bindings.bind(self._sharded)

    # Set-up: from shards to bound plans

    def _place_shards(self, shards: Sequence[torch.Tensor], *, new: bool) -> None:
        """Copy ``shards`` into new flat buffers and make them the local tensors of the sharded parameters."""
        self.plan = compile_gather([param.plan_input for param in self.params], self._comm)
        all_meta = all(shard.is_meta for shard in shards)
        self._flats: FlatShards = flat_shards(self.plan, torch.device("meta") if all_meta else self.mesh.device)
        self._seen_versions: list[int] | None = None
        self._locals: dict[int, torch.Tensor] = {}
        with torch.inference_mode(False), torch.no_grad():
            for step in self.plan.steps:
                param = self.params[step.index]
                shape = param.shard_shape
                if shards[step.index].is_meta:  # takes its place in the buffer when it has been materialised
                    local = torch.empty(shape, dtype=step.source, device="meta")
                else:
                    local = alias(self._flats[step.source], step.shard_offset, shape, contiguous_stride(shape))
                    local.copy_(shards[step.index])
                self._locals[step.index] = local
                if new:
                    param.sharded = param.sharded_parameter(local, requires_grad=param.sharded.requires_grad)
                else:
                    _torch.set_local(param.sharded, local)
        self._sharded = [param.sharded for param in self.params]
        self._unbind()

    def _unbind(self) -> None:
        self._gather: Gather | LocalGather | None = None
        self.gradients.unbind()
        self._resting = None

    def attach(self, name: str, story: Callable[[], str], on_halfway: Callable[[], None]) -> None:
        """Work under another root from now on, as unit ``name`` (empty for the root itself). ``story`` tells that
        root's recent events; ``on_halfway`` is called in backward on the CPU when half of the gradients are there."""
        self.name, self.story, self._on_halfway = name or "(root)", story, on_halfway
        for param in self.params:
            param.full_name = f"{name}.{param.name}" if name else param.name

    def rest_on(self, mesh: ParallelMesh | None) -> None:
        """Between forward and backward, rest on this smaller mesh when asked to."""
        self._resting_mesh, self._resting = mesh, None

    def refresh(self) -> None:
        """Take over parameters that the user replaced, moved, cast or materialised since the last call.

        Raises:
            TypeError: a parameter is no DTensor any more, or has another shape.
            ValueError: a parameter is on another device than the mesh, or trainable ones have come to differ in dtype.
        """
        current = [param.current() for param in self.params]
        if all(map(self._is_in_place, range(len(current)), current)):
            self.is_stale = False
            return
        for param, bound in zip(self.params, current, strict=True):
            check_device(param.full_name, _torch.local_of(bound).device, self.mesh.device)
        dtypes = [param_dtypes(param.dtype, self.policy) for param in current]
        check_uniform_dtypes(
            (param.full_name, param_dtype.orig, bound.requires_grad)
            for param, param_dtype, bound in zip(self.params, dtypes, current, strict=True)
        )
        if any(dtype != param.dtypes for dtype, param in zip(dtypes, self.params, strict=True)):
            self._storage = torch.UntypedStorage(0, device=self.mesh.device)
        locals_ = [_torch.local_of(bound).detach() for bound in current]
        for param, bound, param_dtype in zip(self.params, current, dtypes, strict=True):
            param.adopt(bound, param_dtype)
        self._place_shards(locals_, new=False)
        self._services.streams.gather_after_compute()  # compute has just written the flat shard buffers
        self._bindings.bind(current)
        self.is_stale = False

    def _is_in_place(self, index: int, bound: torch.Tensor) -> bool:
        mine, found = self._locals[index], _torch.local_of(bound)
        same_memory = found.data_ptr() == mine.data_ptr() or mine.numel() == 0
        same_kind = found.dtype is mine.dtype and found.device == mine.device and found.shape == mine.shape
        return bound is self.params[index].sharded and same_memory and same_kind

    def _bind_plans(self) -> Gather | LocalGather:
        self._check_materialised()
        with torch.inference_mode(False), torch.no_grad():  # these tensors outlive the pass that first needs them
            gather: Gather | LocalGather
            if is_local(self.plan, self.mesh):
                gather = LocalGather(self.plan, self._flats, self._services.streams)
            else:
                gather = self._bound_gather()
            for param, data in zip(self.params, gather.unsharded, strict=True):
                if param.unsharded is None or isinstance(gather, LocalGather):
                    param.unsharded = param.unsharded_parameter(data)
        self._gather = gather
        self._unsharded = [param.unsharded for param in self.params if param.unsharded is not None]
        self._sync_requires_grad()
        return gather

    def _bound_gather(self) -> Gather:
        rank, services = self.mesh.shard.rank, self._services
        return Gather(self.plan, self._flats, self._storage, rank, self._comm, services.memory, services.streams)

    def _check_materialised(self) -> None:
        for param in self.params:
            if _torch.local_of(param.sharded).is_meta:
                raise RuntimeError(
                    f"parameter '{param.full_name}' is still on the meta device. "
                    "Materialise the model before its first forward: model.to_empty(device=...), then initialise the "
                    "values, for example with reset_parameters() of each module."
                )

    # Parameters

    def unshard(self) -> bool:
        """Start gathering the unsharded parameters. Returns whether a gather was started."""
        before = self._transition(GroupEvent.UNSHARD)
        if self.state is before:
            return False
        try:
            if self.is_stale:
                self.refresh()
            gather = self._gather or self._bind_plans()
            if self._requires_grad_changed():
                self._sync_requires_grad()
            if before is GroupState.SHARDED:
                self._seen_versions = None
            if before is GroupState.SHARDED_POST_FORWARD and self._resting is not None:
                self._pending = self._resting.issue()
            else:
                self._pending = gather.issue()
        except BaseException:
            self.state = before  # nothing is in flight: a refused gather leaves the group as it was
            raise
        return True

    def wait(self) -> None:
        """Bind the unsharded parameters; the current stream may read them."""
        before = self._transition(GroupEvent.WAIT)
        if before is GroupState.UNSHARDED:
            return
        try:
            self._finish_gather()
        except BaseException:
            self.state = before
            raise
        self._bindings.bind(self._unsharded)

    def note_versions(self) -> None:
        """What has been gathered up to here, or rests on a smaller mesh, is outdated once the shards are written."""
        if self.state is not GroupState.SHARDED and self._seen_versions is None:
            self._seen_versions = self._shard_versions()

    def is_outdated(self) -> bool:
        """Whether the shards were written (by an optimizer), or frozen, since ``note_versions``."""
        if self.state is GroupState.SHARDED or self._seen_versions is None:
            return False
        return self._seen_versions != self._shard_versions() or self._requires_grad_changed()

    def _requires_grad_changed(self) -> bool:
        return [param.requires_grad for param in self._sharded] != self._requires_grad

    def _shard_versions(self) -> list[int]:
        """Optimizers write through the DTensor, ``to_local()`` writes its local tensor: each counts its own."""
        versions = [param._version for param in self._sharded]
        return versions + [local._version for local in self._locals.values()]

    def wait_if_unsharding(self) -> None:
        """Wait for a gather that was started by hand, unless something else has waited for it, or undone it."""
        if self.state is GroupState.UNSHARDING:
            self.wait()

    def reshard(self) -> None:
        """Bind the shards and release the unsharded parameters."""
        before = self._transition(GroupEvent.RESHARD)
        if before is GroupState.SHARDED:
            return
        if before is GroupState.UNSHARDING:
            self._finish_gather()
        self._bindings.bind(self._sharded)
        if before is GroupState.SHARDED_POST_FORWARD:
            assert self._resting is not None
            self._resting.release()
        else:
            self._release()

    def reshard_post_forward(self) -> None:
        """Cut the unsharded parameters down to shards of the post-forward mesh."""
        before = self._transition(GroupEvent.RESHARD_POST_FORWARD)
        if before is not GroupState.UNSHARDED:
            return
        if self._resting is None:
            assert isinstance(self._gather, Gather)
            assert self._resting_mesh is not None
            with torch.inference_mode(False), torch.no_grad():
                self._resting = RestingShards(self.params, self._gather, self._resting_mesh, self._services)
        self._resting.cut()
        self._bindings.bind(self._resting.parameters)
        self._release()

    def _finish_gather(self) -> None:
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        if self._resting is not None:
            self._resting.release()

    def _release(self) -> None:
        assert self._gather is not None
        self._gather.release()

    def _sync_requires_grad(self) -> None:
        """Follow what the user set on the sharded parameters.

        Raises:
            ValueError: parameters that are trainable now differ in dtype.
        """
        check_uniform_dtypes((param.full_name, param.dtypes.orig, param.sharded.requires_grad) for param in self.params)
        self._requires_grad = [param.requires_grad for param in self._sharded]
        for unsharded, requires_grad in zip(self._unsharded, self._requires_grad, strict=True):
            unsharded.requires_grad_(requires_grad)
        self._trainable = tuple(i for i, requires_grad in enumerate(self._requires_grad) if requires_grad)
        self._watch_halfway()

    def _watch_halfway(self) -> None:
        """On the CPU, have ``on_halfway`` called when about half of this group's gradients, in bytes, are there."""
        if self._halfway is not None:
            self._halfway.remove()
            self._halfway = None
        if self.mesh.device.type != "cpu":  # would hold up compute wherever communication is the slower of the two
            return
        left = sum(self._unsharded[i].numel() for i in self._trainable) / 2
        for i in reversed(self._trainable):  # backward reaches the parameters that forward used last first
            left -= self._unsharded[i].numel()
            if left <= 0:
                report = partial(_report_halfway, weakref.ref(self))
                self._halfway = self._unsharded[i].register_post_accumulate_grad_hook(report)
                return

    def report_halfway(self) -> None:
        """Half of the gradients are there."""
        self._on_halfway()

    def _transition(self, event: GroupEvent) -> GroupState:
        before = self.state
        after = TRANSITIONS.get((before, event))
        if after is None:
            raise ScheduleError(
                f"unit '{self.name}': {event.value} while {before.value}. Last events: {self.story()}.\n"
                "A module that ran outside the forward of its root is the usual cause; see docs/guide.md#roots."
            )
        self.state = after
        if after is not before and self.on_transition is not None:
            self.on_transition(before, after)
        return before

    # Gradients

    def reduce(self) -> PendingReduce | None:
        """Start reducing what this and earlier backwards left, or keep it where the user asked for no communication.

        Returns None if nothing was started.
        """
        if self._gather is None:
            return None
        if not self.options.requires_gradient_sync:
            self.gradients.keep_unreduced()
            return None
        return self.gradients.reduce(self._trainable, self.options, self._services)


def _report_halfway(group: weakref.ref[ParamGroup], _: torch.Tensor) -> None:
    """Autograd holds this where the garbage collector does not look: a strong reference would keep the group alive."""
    if (alive := group()) is not None:
        alive.report_halfway()
