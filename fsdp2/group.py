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
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp2 import _torch
from fsdp2.all_gather import FlatShards, Gather, GatheredMemory, LocalGather, PendingGather, flat_shards, is_local
from fsdp2.api import MixedPrecisionPolicy, ScheduleError
from fsdp2.buffers import alias
from fsdp2.comm import comm_for
from fsdp2.extended import ExtendedParams
from fsdp2.extensions import is_plain
from fsdp2.gradients import GroupGradients, GroupOptions
from fsdp2.layout import contiguous_stride
from fsdp2.mesh import ParallelMesh
from fsdp2.param import Bindings, ParamRecord, ShardedParam, check_device, check_uniform_dtypes, set_compute_dtypes
from fsdp2.plan import GatherInput, GatherPlan, Lifetime, compile_gather
from fsdp2.precision import param_dtypes
from fsdp2.reduce_scatter import PendingReduce
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
        self._gathered: GatheredMemory | None = None
        self._regions: object = None
        self._extended: ExtendedParams | None = None
        self._resting: RestingShards | None = None
        self._resting_mesh: ParallelMesh | None = None
        self._pending: PendingGather | None = None
        self._services = services_for(mesh.device)
        self.on_transition: Callable[[GroupState, GroupState], None] | None = None
        self._place_shards(list(map(_shard, records, self.params)), new=True)
        self._bindings.bind(self._sharded)

    # Set-up: from shards to bound plans

    def _place_shards(self, shards: Sequence[torch.Tensor], *, new: bool) -> None:
        """Make ``shards`` the local tensors of the sharded parameters: plain ones as copies in new flat buffers, those
        of tensor subclasses as they are."""
        self._locals = list(shards)
        self._plain = [index for index, shard in enumerate(shards) if is_plain(shard)]
        self.plan = compile_gather(self._plain_inputs(), self._comm)
        all_meta = all(shard.is_meta for shard in shards)
        self._flats: FlatShards = flat_shards(self.plan, torch.device("meta") if all_meta else self.mesh.device)
        self._seen_versions: list[int] | None = None
        with torch.inference_mode(False), torch.no_grad():
            for step in self.plan.steps:
                shape = self.params[step.index].shard_shape
                if shards[step.index].is_meta:  # takes its place in the buffer when it has been materialised
                    local = torch.empty(shape, dtype=step.source, device="meta")
                else:
                    local = alias(self._flats[step.source], step.shard_offset, shape, contiguous_stride(shape))
                    local.copy_(shards[step.index])
                self._locals[step.index] = local
            for param, local in zip(self.params, self._locals, strict=True):
                if new:
                    param.sharded = param.sharded_parameter(local, requires_grad=param.sharded.requires_grad)
                else:
                    _torch.set_local(param.sharded, local)
        self._sharded = [param.sharded for param in self.params]
        self._versioned = [tensor for param in self.params for tensor in param.versioned()]
        self._unbind()

    def _plain_inputs(self) -> dict[int, GatherInput]:
        return {index: self.params[index].plan_input for index in self._plain}

    def _unbind(self) -> None:
        self._gather: Gather | LocalGather | None = None
        self._unsharded: list[nn.Parameter] = []
        self._trainable: tuple[int, ...] = ()
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
        locals_ = [self._private(index, _torch.local_of(bound)) for index, bound in enumerate(current)]
        for param, bound, param_dtype in zip(self.params, current, dtypes, strict=True):
            param.adopt(bound, param_dtype)
        self._place_shards(locals_, new=False)
        self._services.streams.gather_after_compute()  # compute has just written the flat shard buffers
        self._bindings.bind(current)
        self.is_stale = False

    def _private(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """``local`` to be placed anew. If it was given hooks where it lay in the flat buffer, the object stays, with
        memory of its own."""
        if is_plain(local):
            return local.detach()
        if local is self._locals[index] and index in self._plain and not local.is_meta:
            with torch.no_grad():
                local.set_(local.clone().untyped_storage(), 0, local.shape, local.stride())
        return local

    def _is_in_place(self, index: int, bound: torch.Tensor) -> bool:
        mine, found = self._locals[index], _torch.local_of(bound)
        if bound is not self.params[index].sharded or is_plain(found) != (index in self._plain):
            return False
        if not is_plain(found):
            return found is mine
        same_memory = found.data_ptr() == mine.data_ptr() or mine.numel() == 0
        return same_memory and found.dtype is mine.dtype and found.device == mine.device and found.shape == mine.shape

    def _bind_plans(self) -> Gather | LocalGather:
        """Compile and bind the gather.

        Raises:
            ExtensionError: hooks are missing, or returned what cannot be gathered; on all ranks alike.
            RuntimeError: a parameter is still on the meta device.
            ValueError: trainable parameters differ in dtype.
        """
        self._check_materialised()
        self._check_uniform_dtypes()
        # These tensors outlive the pass that first needs them.
        with torch.inference_mode(False), torch.no_grad(), self._services.streams.on_gather():
            inputs = self._plain_inputs()
            first_key = len(self.params)
            if len(inputs) < first_key:
                inputs |= self._bind_hooks().inputs(first_key, self._consumed_lifetime)
            else:
                self._extended = None
            self.plan = compile_gather(inputs, self._comm)
            self._keep_regions()
            gather: Gather | LocalGather
            if is_local(self.plan, self.mesh):
                gather = LocalGather(self.plan, self._flats, self._services.streams)
            else:
                gather = self._bound_gather()
            if self._extended is not None:
                self._extended.bind_outputs(gather.outputs, first_key)
        self._gather = gather
        self._requires_grad = [param.requires_grad for param in self._sharded]
        return gather

    def _bind_hooks(self) -> ExtendedParams:
        hooked = [param for index, param in enumerate(self.params) if index not in self._plain]
        self._extended = ExtendedParams(hooked, self.mesh, self.policy, self._services, self._extended)
        return self._extended

    @property
    def _consumed_lifetime(self) -> Lifetime:
        """How long what hooks consume is kept: the post-forward mesh wants a part of it."""
        return Lifetime.ARRIVAL if self._resting_mesh is None else Lifetime.UNSHARDED

    def _keep_regions(self) -> None:
        """The unsharded parameters stay the same objects if they lie where they did: autograd may have saved them."""
        regions = _regions(self.plan, is_local=is_local(self.plan, self.mesh), flats=self._flats)
        if regions != self._regions or self._gathered is None:
            self._gathered = GatheredMemory(self.plan, self.mesh.device)
            for param in self.params:
                param.forget_unsharded()
        self._regions = regions

    def _bound_gather(self) -> Gather:
        assert self._gathered is not None
        rank, services = self.mesh.shard.rank, self._services
        return Gather(self.plan, self._flats, self._gathered, rank, self._comm, services, self._extended)

    def _adopt_unsharded(self) -> None:
        """The first gather has arrived: what it filled becomes the parameters that compute reads."""
        assert self._gather is not None
        with torch.inference_mode(False), torch.no_grad():
            for index in self._plain:
                param = self.params[index]
                if param.unsharded is None:
                    param.unsharded = param.unsharded_parameter(self._gather.outputs[index])
        self._unsharded = [param.unsharded for param in self.params if param.unsharded is not None]
        if self._extended is not None:
            set_compute_dtypes(self.params, self.policy)
        self._sync_requires_grad()

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
            if self._unsharded and self._requires_grad_changed():
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
        return [tensor._version for tensor in self._versioned]

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
            self._drop_gather()
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
                mesh, services = self._resting_mesh, self._services
                self._resting = RestingShards(self.params, self._gather, self._extended, mesh, services)
        self._resting.cut()
        self._bindings.bind(self._resting.parameters)
        self._release()

    def _finish_gather(self) -> None:
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        if self._resting is not None:
            self._resting.release()
        if not self._unsharded:
            self._adopt_unsharded()

    def _drop_gather(self) -> None:
        assert self._pending is not None
        self._pending.drop()
        self._pending = None
        if self._resting is not None:
            self._resting.release()

    def _release(self) -> None:
        assert self._gather is not None
        self._gather.release()

    def _check_uniform_dtypes(self) -> None:
        check_uniform_dtypes((param.full_name, param.dtypes.orig, param.sharded.requires_grad) for param in self.params)

    def _sync_requires_grad(self) -> None:
        """Follow what the user set on the sharded parameters.

        Raises:
            ValueError: parameters that are trainable now differ in dtype.
        """
        self._check_uniform_dtypes()
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
        if not self._unsharded:
            return None
        if not self.options.requires_gradient_sync:
            self.gradients.keep_unreduced()
            return None
        return self.gradients.reduce(self._trainable, self.options, self._services)


def _report_halfway(group: weakref.ref[ParamGroup], _: torch.Tensor) -> None:
    """Autograd holds this where the garbage collector does not look: a strong reference would keep the group alive."""
    if (alive := group()) is not None:
        alive.report_halfway()


def _shard(record: ParamRecord, param: ShardedParam) -> torch.Tensor:
    return param.shard_of(record.param.detach()) if record.local is None else record.local


def _regions(plan: GatherPlan, *, is_local: bool, flats: FlatShards) -> object:
    """Where the unsharded parameters lie, and what lies there: in the group's storage, or right in the flat shards."""
    places = [(s.index, s.offset_nbytes, s.layout.shape, s.dtype, s.lifetime) for s in plan.steps]
    return sorted(places, key=lambda place: place[0]), [id(flat) for flat in flats.values()] if is_local else []
