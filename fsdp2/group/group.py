"""A parameter group: the parameters that are unsharded, resharded and reduced together.

It owns what changes over a step: which form of its parameters is bound, what is in flight, and the gradients that are
not reduced yet. It decides nothing about *when*; the schedule's actions are performed on it. Which action is possible
when, ``states`` says: any other is refused, and nothing changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial

import torch.distributed as dist
from torch import nn

from fsdp2.comm.backends import comm_for
from fsdp2.comm.custom import reduce_comm
from fsdp2.comm.offload import Home
from fsdp2.comm.services import compute_stream_services, services_for
from fsdp2.group.all_gather import PendingGather
from fsdp2.group.bindings import Bindings
from fsdp2.group.gradients import GradientState, GroupGradients, GroupOptions, Unused
from fsdp2.group.param import ParamRecord, ShardedParam, Slot
from fsdp2.group.reduce_scatter import PendingReduce
from fsdp2.group.shards import GroupShards
from fsdp2.group.unsharded import GatheredParams
from fsdp2.group.watch import GradientWatch
from fsdp2.plan.mesh import ParallelMesh
from fsdp2.schedule.states import TRANSITIONS, GroupEvent, GroupState
from fsdp2.tools.budget import UnitBytes
from fsdp2.types import CommunicationError, ScheduleError

_alive: weakref.WeakSet[ParamGroup] = weakref.WeakSet()


def groups_by_slot() -> dict[Slot, tuple[ParamGroup, int]]:
    """For every slot that some group binds parameters in, that group and the parameter's position in it."""
    return {slot: (group, i) for group in _alive for i, param in enumerate(group.params) for slot in param.slots}


class ParamGroup:
    """See the module's text. Created by ``fully_shard`` from resolved records, which sharding cannot fail on."""

    def __init__(self, records: Sequence[ParamRecord], mesh: ParallelMesh, home: Home) -> None:
        self.name = ""
        self.mesh, self.home = mesh, home
        self.options = GroupOptions()
        self.keeps_storage = False  # resharding leaves the memory of the unsharded parameters where it is
        self.state = GroupState.SHARDED
        self.is_stale = True  # users may replace parameters between fully_shard and the first use
        self.story: Callable[[], str] = lambda: "none"  # the root's recent events, for error messages
        self._watch = GradientWatch()
        self._own: set[ShardedParam] = set()  # bound in the unit's own modules
        self._on_own: weakref.WeakMethod[Callable[[], None]] | None = None
        self.params = [ShardedParam(record, mesh) for record in records]
        comm = comm_for(mesh.shard, mesh.device)
        self.shards = GroupShards(records, self.params, home, comm)
        self.gathered = GatheredParams(self.params, self.shards, mesh, home, comm)
        self.gradients = GroupGradients(self.params, mesh, comm, home)
        self.gradients.on_bound = partial(_watch_gradients, weakref.ref(self))
        self.on_transition: Callable[[GroupState, GroupState], None] | None = None
        self._pending: PendingGather | None = None
        self._seen_stamp: list[int] | None = None
        self._footprint: UnitBytes | None = None
        self._bindings = Bindings(self.params)
        self._bindings.bind(self.shards.sharded)
        _alive.add(self)

    # What the user configures

    def attach(
        self,
        name: str,
        story: Callable[[], str],
        on_halfway: Callable[[], None],
        on_early: Callable[[], None] | None,
    ) -> None:
        """Work under another root from now on, as unit ``name`` (empty for the root itself). ``story`` tells that
        root's recent events. ``on_early`` is called in backward when the gradients are there that are reduced ahead of
        the rest; None: there are none. If so, ``on_halfway`` is called, on the CPU, when half of the gradients are
        there."""
        self.name, self.story, self._watch.on_halfway = name or "(root)", story, on_halfway
        self.gradients.split(on_early is not None)
        if on_early is not None:
            self._watch.on_early = on_early
        for param in self.params:
            param.full_name = f"{name}.{param.name}" if name else param.name

    def watch_own(self, modules: Container[nn.Module], on_gradient: weakref.WeakMethod[Callable[[], None]]) -> None:
        """Call ``on_gradient`` for every gradient of a parameter that is bound in one of ``modules``."""
        self._own = {param for param in self.params if any(slot.module in modules for slot in param.slots)}
        self._on_own = on_gradient

    def rest_on(self, mesh: ParallelMesh | None) -> None:
        """Between forward and backward, rest on this smaller mesh when asked to."""
        self.gathered.rest_on(mesh)
        self._footprint = None

    def configure(self, **changes: object) -> None:
        """Replace options. What is in flight arrives as it was sent."""
        before, self.options = self.options, replace(self.options, **changes)  # type: ignore[arg-type]
        self._footprint = None
        after, mesh = self.options, self.mesh
        if after.all_gather is not before.all_gather:
            self.gathered.carry_by(after.all_gather)
        if after.reduce_scatter is not before.reduce_scatter or after.reduce_axis is not before.reduce_axis:
            axis = after.reduce_axis or mesh.shard
            default = self.gathered.comm if axis is mesh.shard else comm_for(axis, mesh.device)
            self.gradients.carry_by(reduce_comm(default, axis, mesh.device, after.reduce_scatter))

    def gather_on_compute_stream(self, enabled: bool) -> None:
        """Whether to gather without a stream for gathers; on the CPU there is none anyway."""
        device = self.mesh.device
        services = compute_stream_services(device) if enabled else services_for(device)
        if services is not self.gathered.services:
            self.reshard()
            self.gathered.move_to(services)
            self._unbind()

    def set_up_like(self, other: ParamGroup) -> None:
        """Take over what the user has set on ``other``."""
        self.rest_on(other.gathered.resting_mesh)
        self.keeps_storage = other.keeps_storage
        self.configure(**vars(other.options))
        self.gather_on_compute_stream(other.gathered.services is not services_for(self.mesh.device))

    # What others ask

    @property
    def has_hooks(self) -> bool:
        """Whether all-gather hooks decide what some parameter sends."""
        return self.gathered.has_hooks

    @property
    def unsharded_nbytes(self) -> int:
        """Size of the unsharded parameters with what hooks make of them; 0 as long as nobody has asked for them."""
        return self.gathered.nbytes

    @property
    def footprint(self) -> UnitBytes:
        """What this group takes beside its shards, in bytes that all ranks agree on; what hooks send is counted from
        the first gather on."""
        if self._footprint is None:
            trainable = [i for i, requires_grad in enumerate(self.shards.requires_grad()) if requires_grad]
            self._footprint = self.gathered.footprint + self.gradients.footprint(trainable)
        return self._footprint

    def lost(self, what: str, error: CommunicationError) -> CommunicationError:
        """``error`` of a collective of this group, with what led to it."""
        rank = dist.get_rank()
        return CommunicationError(
            f"{what} of unit '{self.name}' failed on rank {rank}: {error}\nLast events there: {self.story()}."
        )

    # What users put in the place of shards

    def may_give_up(self, param: ShardedParam) -> bool:
        """Whether nothing has happened to the group since it was made, so that ``param`` has the values that it was
        sharded with."""
        is_fresh = not self.gathered.is_bound and self.gradients.state is GradientState.NONE
        return is_fresh and self._is_intact() and not self.shards.are_written() and param in self.params

    def give_up(self, param: ShardedParam) -> None:
        """Another group manages ``param`` from now on."""
        self.shards.give_up(self.params.index(param))
        self._unbind()
        self._bindings = Bindings(self.params)
        self._bindings.bind(self.shards.sharded)

    def settle(self) -> None:
        """Bind the shards, and take over what the user has put in their place."""
        self.reshard()
        if self.is_stale or not self._is_intact():
            self._refresh()

    def _refresh(self) -> None:
        """Take over parameters that the user replaced, moved, cast or materialised since the last call."""
        if self.shards.refresh():
            self._seen_stamp = None
            self._unbind()
            self.gathered.services.streams.gather_after_compute()  # compute has just written the flat shard buffers
            self._bindings.bind(self.shards.sharded)
        self.is_stale = False

    def _rebind(self, forms: Sequence[nn.Parameter]) -> None:
        if not self._bindings.rebind(forms):
            self.is_stale = True  # the user has put something else there: it is taken over before the next gather

    def _is_intact(self) -> bool:
        """Whether nobody has replaced parameters, or what they are made of, since they were bound."""
        return self._bindings.are_intact() and self.shards.are_in_place()

    def _unbind(self) -> None:
        self.gathered.unbind()
        self.gradients.unbind()
        self._footprint = None

    # From form to form

    def unshard(self) -> bool:
        """Start gathering the unsharded parameters. Returns whether a gather was started."""
        before = self._transition(GroupEvent.UNSHARD)
        if self.state is before:
            return False
        gathered = self.gathered
        try:
            if self.is_stale or (before is GroupState.SHARDED and not self._is_intact()):
                self._refresh()
            if not gathered.parameters:  # never yet; or hooks failed, and may have been mended
                gathered.bind()
            elif gathered.requires_grad != self.shards.requires_grad():
                self._follow_requires_grad()
            if before is GroupState.SHARDED:
                self._seen_stamp = None
            self._pending = gathered.issue(is_resting=before is GroupState.SHARDED_POST_FORWARD)
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
        self.gathered.open()
        self._rebind(self.gathered.parameters)

    def note_writes(self) -> None:
        """What has been gathered up to here, or rests on a smaller mesh, is outdated once the shards are written."""
        if self.state is not GroupState.SHARDED and self._seen_stamp is None:
            self._seen_stamp = self.shards.write_stamp()

    def is_outdated(self) -> bool:
        """Whether the shards were written (by an optimizer), frozen or replaced since ``note_writes``."""
        if self.state is GroupState.SHARDED or self._seen_stamp is None:
            return False
        return (
            self._seen_stamp != self.shards.write_stamp()
            or self.gathered.requires_grad != self.shards.requires_grad()
            or not self._is_intact()
        )

    def wait_for_reads(self) -> None:
        """Have the CPU wait until no copy to the device reads the shards any more."""
        self.gathered.wait_for_reads()

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
        self._rebind(self.shards.sharded)
        if before is GroupState.SHARDED_POST_FORWARD:
            self.gathered.free_resting()
        else:
            self.gathered.release(keeps_memory=self.keeps_storage)

    def reshard_post_forward(self) -> None:
        """Cut the unsharded parameters down to shards of the post-forward mesh, if this group has one."""
        if self.gathered.resting_mesh is None:
            self.reshard()
            return
        before = self._transition(GroupEvent.RESHARD_POST_FORWARD)
        if before is GroupState.UNSHARDED:
            self._rebind(self.gathered.cut())
            self.gathered.release(keeps_memory=self.keeps_storage)

    def lend(self) -> None:
        """Leave the slots, in which shards are bound, to the caller until ``take_back``."""
        self.shards.check_ready()
        self._transition(GroupEvent.LEND)

    def take_back(self) -> None:
        """Bind the shards, whatever is in the slots."""
        self._transition(GroupEvent.TAKE_BACK)
        self._bindings.bind(self.shards.sharded)

    def _finish_gather(self) -> None:
        assert self._pending is not None
        try:
            self._pending.wait()
        except CommunicationError as error:
            raise self.lost("all-gather", error) from error.__cause__
        self._pending = None
        self.gathered.free_resting()
        if not self.gathered.parameters:
            self.gathered.adopt()
            self._follow_requires_grad()

    def _drop_gather(self) -> None:
        assert self._pending is not None
        self._pending.drop()
        self._pending = None
        self.gathered.free_resting()

    def _transition(self, event: GroupEvent) -> GroupState:
        before = self.state
        after = TRANSITIONS.get((before, event))
        if after is None:
            hint = "A module that ran outside the forward of its root is the usual cause; see docs/guide.md#roots."
            if before is GroupState.LENT:
                hint = "Its parameters are lent to fsdp2.unsharded(...): leave that block first."
            raise ScheduleError(
                f"unit '{self.name}': {event.value} while {before.value}. Last events: {self.story()}.\n{hint}"
            )
        if after is not before and self.on_transition is not None:
            self.on_transition(before, after)  # should it raise, nothing has changed
        self.state = after
        return before

    # Gradients

    def keep_gradients(self) -> None:
        """Keep what this backward left on this rank."""
        if self.gathered.parameters:
            self.gradients.keep_unreduced()

    def reduce(self, unused: Unused) -> PendingReduce | None:
        """Start reducing what this and earlier backwards left; None if there is nothing to reduce."""
        gathered = self.gathered
        if not gathered.parameters:
            return None
        return self.gradients.reduce(gathered.trainable, self.options, gathered.services, unused)

    def begin_reduce(self) -> PendingReduce | None:
        """Start reducing what is reduced ahead of the rest; ``reduce`` goes on with that."""
        return self.gradients.begin(self.gathered.trainable, self.options)

    def reduce_partial(self) -> PendingReduce | None:
        """Start summing over the replicate axis what backwards have summed over the shard axis only; None if there is
        nothing, or if the user wants that to stay."""
        return self.gradients.reduce_partial(self.options, self.gathered.services)

    def _follow_requires_grad(self) -> None:
        """Follow what the user set on the sharded parameters."""
        self.gathered.follow_requires_grad()
        self._footprint = None
        self.watch_gradients()
        if self._on_own is not None:
            own = [self.params[i].unsharded for i in self.gathered.trainable if self.params[i] in self._own]
            self._watch.for_each_of([param for param in own if param is not None], self._on_own)

    def watch_gradients(self) -> None:
        """Have the watch tell when gradients are there that are reduced ahead of the rest, or half of all."""
        gathered = self.gathered
        early = self.gradients.early(gathered.trainable)
        if early:
            self._watch.for_all_of([param.unsharded for param in early if param.unsharded is not None])
        elif gathered.services.streams.runs_ahead:  # there it would hold up compute where communication is slower
            self._watch.stop()
        else:
            self._watch.for_half_of([gathered.parameters[i] for i in gathered.trainable])


def _watch_gradients(group: weakref.ref[ParamGroup]) -> None:
    """The gradients are referred to by the group: a strong reference back would keep it alive."""
    if (alive := group()) is not None:
        alive.watch_gradients()
