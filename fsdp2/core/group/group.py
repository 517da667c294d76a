"""A parameter group: the parameters that are unsharded, resharded and reduced together.

The group owns everything that changes during a step: which form of its parameters is bound, what is in flight, and its
gradients until they are in ``.grad`` of the shards. It does not decide *when* something happens: the executor performs
the schedule's actions on it. ``schedule.states`` defines which actions each state allows; others are refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter, is_
from typing import NoReturn

import torch
from torch import nn

from fsdp2.core import _torch, seams
from fsdp2.core.comm.backends import comm_for
from fsdp2.core.comm.offload import Home
from fsdp2.core.comm.streams import lost, streams_for
from fsdp2.core.group.all_gather import Gather, LocalGather
from fsdp2.core.group.gradients import GroupGradients, GroupOptions
from fsdp2.core.group.param import ShardedParam, Slot
from fsdp2.core.group.shards import GroupShards
from fsdp2.core.group.unsharded import UnshardedParams
from fsdp2.core.plan.mesh import ParallelMesh
from fsdp2.core.schedule.schedule import Passes
from fsdp2.core.schedule.states import TRANSITIONS, GroupEvent, GroupState
from fsdp2.core.types import DOCS, CommunicationError, ScheduleError

_get_requires_grad = attrgetter("requires_grad")
_alive: weakref.WeakSet[ParamGroup] = weakref.WeakSet()


def groups_by_slot() -> dict[Slot, tuple[ParamGroup, int]]:
    """For every slot of a managed parameter, its group and the parameter's position in the group."""
    return {slot: (group, i) for group in _alive for i, param in enumerate(group.params) for slot in param.slots}


class ParamGroup:
    """Shards ``params``. ``fully_shard`` has validated them, so this cannot fail.

    Attributes:
        comm: runs the collectives over the shard axis, unless the user has set other comms.
        keeps_storage: resharding keeps the memory of the unsharded parameters.
        keeps_post_forward: the shards on the post-forward mesh stay until the parameters change.
        is_stale: users may have replaced parameters since the last check.
        stamp: the write stamp of the shards when ``note_writes`` was called; None before that.
        shows: makes what compute reads from the unsharded parameters, if that is something else.
        on_transition: called on each change of state, if there is an observer.
        on_parameters: called after the unsharded parameters are made, or the set of trainable ones changes.
        on_gather: called when shards are about to be gathered.
    """

    def __init__(self, params: Sequence[ShardedParam], mesh: ParallelMesh, home: Home) -> None:
        self.name = ""
        self.mesh, self.home = mesh, home
        self.options = GroupOptions()
        self.keeps_storage = self.keeps_post_forward = False
        self.state = GroupState.SHARDED
        self.is_stale = True  # users may replace parameters between fully_shard and the first use
        self.shows: Callable[[Sequence[nn.Parameter]], Sequence[nn.Parameter]] | None = None
        self.on_transition: Callable[[GroupState, GroupState], None] | None = None
        self.on_parameters: Callable[[ParamGroup], None] | None = None
        self.on_gather: Callable[[], None] | None = None
        self.params = list(params)
        self.comm = comm = comm_for(mesh.shard, mesh.device)
        self.shards = GroupShards(self.params, mesh, home, comm.routing)
        self.unsharded = UnshardedParams(self.params, self.shards, mesh, home, comm)
        self.gradients = GroupGradients(self.params, self.unsharded, mesh, comm, home)
        self._story: Callable[[], str] = lambda: "none"
        self._passes = Passes(0)
        self._on_flags: Callable[[], object] = lambda: None
        self.stamp: list[int] | None = None
        self._in_flight: Gather | LocalGather | None = None
        self._bindings = Bindings(self.params)
        self._bindings.bind(self.shards.sharded)
        _alive.add(self)

    # What the user configures

    def guard(self, guards: Sequence[seams.Guard]) -> None:
        """Guard calls of modules with ``guards`` whenever their parameters are shards. Requires bound shards."""
        bindings = self._bindings
        self.is_stale |= bindings.rebind(bindings.forms, are_shards=False)
        bindings.guards = guards
        self.is_stale |= bindings.rebind(bindings.forms, are_shards=True)

    def attach(self, name: str, story: Callable[[], str], passes: Passes, on_flags: Callable[[], object]) -> None:
        """Work under another root from now on, as unit ``name`` (empty for the root itself). ``story`` returns the
        recent events of that root, and ``passes`` says what it is doing. ``on_flags`` is called when ``take_flags``
        finds changed flags."""
        self.name, self._story, self._passes, self._on_flags = name or "(root)", story, passes, on_flags
        for param in self.params:
            param.full_name = f"{name}.{param.name}" if name else param.name

    @property
    def running(self) -> str:
        """Which pass the root is in: see ``Passes``."""
        return self._passes.running

    def configure(self, **changes: object) -> None:
        """Replace options. Collectives in flight keep the old options."""
        before, self.options = self.options, replace(self.options, **changes)  # type: ignore[arg-type]
        self.gradients.configure(self.options)
        if self.options.gathers_by is not before.gathers_by:
            self.unsharded.set_comm(self.options.gathers_by)

    def keep_post_forward(self, enabled: bool) -> None:
        """Set whether the shards on the post-forward mesh stay until the parameters change."""
        self.keeps_post_forward = enabled
        if not enabled and self.state is GroupState.SHARDED:
            self.unsharded.release_post_forward()

    def gather_on_compute_stream(self, enabled: bool) -> None:
        """Set whether to gather without a separate gather stream. The CPU never has one."""
        device = self.mesh.device
        streams = streams_for(device).gathering_on_compute if enabled else streams_for(device)
        if streams is not self.unsharded.streams:
            self.reshard()
            self.unsharded.move_to(streams)
            self._unbind()

    @property
    def gathers_on_compute(self) -> bool:
        """Whether the compute stream reads the shards: it gathers, or there is nothing to gather."""
        return self.mesh.shard.size == 1 or self.unsharded.streams is not streams_for(self.mesh.device)

    def set_up_like(self, other: ParamGroup, **changes: object) -> None:
        """Adopt what the user has set on ``other``, except for ``changes``, which are options for this group's mesh."""
        self.keeps_storage, self.keeps_post_forward = other.keeps_storage, other.keeps_post_forward
        self.configure(**{**vars(other.options), **changes})
        self.gather_on_compute_stream(other.unsharded.streams is not streams_for(self.mesh.device))

    def lost(self, what: str, error: CommunicationError) -> CommunicationError:
        """Return ``error``, raised by a collective of this group, with the recent events added."""
        return lost(f"{what} of unit '{self.name}'", error, self._story(), self.mesh.process_groups)

    # Replaced parameters

    def may_give_up(self, param: ShardedParam) -> bool:
        """Whether the group has never been used, so that ``param`` still has its original values."""
        is_fresh = self.unsharded.gather is None and all(each.sharded.grad is None for each in self.params)
        return is_fresh and self._is_intact() and not self.shards.are_written() and param in self.params

    def give_up(self, param: ShardedParam) -> None:
        """Stop managing ``param``: another group does from now on."""
        self.shards.give_up(self.params.index(param))
        self._follow_params()

    def hold(self, param: ShardedParam, slots: Sequence[Slot]) -> None:
        """Manage ``param``, whether new or not, in these ``slots`` as well. Other groups have released them."""
        if param not in self.params:
            self.shards.take(param)
        param.slots = tuple(dict.fromkeys([*param.slots, *slots]))
        self._follow_params()

    def _follow_params(self) -> None:
        """Adopt a change of ``params`` or of their slots, before the first use."""
        self._unbind()
        guards, self._bindings = self._bindings.guards, Bindings(self.params)
        self._bindings.bind(self.shards.sharded)
        self.guard(guards)

    def forget(self) -> None:
        """Manage nothing any more: the parameters were restored, or belong to another group."""
        _alive.discard(self)
        self.guard(())
        if self.unsharded.gather is not None:
            self.unsharded.gather.release()  # also memory that was kept

    def take_replaced(self) -> None:
        """Bind the shards, and adopt parameters that the user has put in their place."""
        self.reshard()
        if self.is_stale or not self._is_intact():
            self._refresh()

    def take_materialised(self) -> None:
        """If all shards were on the meta device and the user has materialised them, move them to the flat buffers now.
        If this waited for each unit's first use, a caching allocator might keep both copies."""
        if self.shards.are_materialised():
            self._refresh()

    def _refresh(self) -> None:
        """Adopt parameters that the user has replaced, moved, cast, materialised or tied since the last call."""
        ties = seams.ties_inside(self)
        if self.shards.refresh():
            self.stamp = None
            self._unbind()
            self.unsharded.streams.gather_after_compute()  # compute has just written the flat shard buffers
            self._bindings.bind(self.shards.sharded)
        for param, owner in ties.items():  # gathered once, with one sum of gradients
            owner.slots += param.slots
            self.give_up(param)
        self.is_stale = False

    def _is_intact(self) -> bool:
        """Whether the parameters and their local tensors are still those that were bound."""
        shards = self.shards
        has_moved = not all(map(is_, map(_torch.local_of, shards.sharded), shards.locals))  # by swap_tensors
        return not has_moved and self._bindings.are_intact()

    def _unbind(self) -> None:
        self.unsharded.unbind()
        self.gradients.unbind()

    # Changes of form

    def are_current(self) -> bool:
        """Whether the bound shards are those of the last gather, and unsharded or kept parameters have their values.
        This covers everything that may change shards: users who replace, move or load parameters, writes in place,
        and optimizer steps (I6)."""
        if self.is_stale or not self._is_intact():
            return False
        return self.stamp is None or self.stamp == self.shards.write_stamp()

    def unshard(self) -> None:
        """Start gathering the unsharded parameters, unless current ones are unsharded or in flight. A backward uses
        the values of its forward as far as these still exist."""
        is_outdated = not self._passes.in_backward and not self.are_current()
        if is_outdated and self.state is not GroupState.LENT:  # else the state table refuses it below
            self.reshard()
            self.unsharded.release_post_forward()
        before = self._transition(GroupEvent.UNSHARD)
        if self.state is before:
            return
        unsharded = self.unsharded
        try:
            if self.on_gather is not None:
                self.on_gather()
            if self.is_stale or (is_outdated and not self._is_intact()):
                self._refresh()
            if unsharded.gather is None:  # the same on all ranks, even after a post-hook failed on one
                unsharded.bind()
            self._in_flight = unsharded.gather
            resting = unsharded.post_forward
            if resting is not None and resting.has_values:
                self._in_flight = resting.gather
            elif before is GroupState.SHARDED:
                self.stamp = None
            assert self._in_flight is not None
            if _torch.is_profiling():
                _torch.in_range("all_gather", self.name, self._in_flight.issue)
            else:
                self._in_flight.issue()
        except BaseException as error:
            self._gather_failed(before, error)

    def wait(self) -> None:
        """Bind the unsharded parameters. After this call, the current stream may read them."""
        if not self._passes.in_backward:
            self.take_flags()
        before = self._transition(GroupEvent.WAIT)
        if before is GroupState.UNSHARDED:
            if self._passes.in_backward:  # a recomputation must not read shards that functional_call has put back
                self.show()
            return
        unsharded = self.unsharded
        is_first = not unsharded.parameters
        assert self._in_flight is not None
        try:
            if _torch.is_profiling():
                _torch.in_range("all_gather_copy_out", self.name, self._in_flight.wait)
            else:
                self._in_flight.wait()
            if is_first:
                unsharded.adopt()
        except BaseException as error:
            self._gather_failed(before, error)
        self._in_flight = None
        if unsharded.post_forward is not None and not self.keeps_post_forward:
            unsharded.post_forward.release()
        if is_first:
            self._tell_parameters()
        elif unsharded.versioned:  # they again hold the values that autograd saved
            _torch.set_versions(unsharded.versioned, unsharded.saved_versions)
        self.show()

    def use(self) -> None:
        """Make the unsharded parameters usable: gather them, unless this was done or is in flight, and bind them."""
        if self.state is not GroupState.UNSHARDING or self.stamp is not None:
            self.unshard()
        self.wait()

    def show(self) -> None:
        """Bind what compute reads. Requires that the unsharded parameters have been gathered."""
        parameters = self.unsharded.parameters
        shown = parameters if self.shows is None else self.shows(parameters)
        self.is_stale |= self._bindings.rebind(shown, are_shards=False)

    def reshard(self) -> None:
        """Bind the shards and release the unsharded parameters."""
        before = self._transition(GroupEvent.RESHARD)
        if before is GroupState.SHARDED:
            return
        unsharded = self.unsharded
        self.take_flags()
        if before is GroupState.UNSHARDED and self.keeps_post_forward and unsharded.post_forward_mesh is not None:
            unsharded.cut()
        try:
            if before is GroupState.UNSHARDING:
                gather, self._in_flight = self._in_flight, None
                assert gather is not None
                gather.drop()
        except CommunicationError as error:
            raise self.lost("all-gather", error) from error.__cause__
        finally:
            if unsharded.post_forward is not None and not self.keeps_post_forward:
                unsharded.post_forward.release()
            self.is_stale |= self._bindings.rebind(self.shards.sharded, are_shards=True)
            if before is not GroupState.SHARDED_POST_FORWARD:
                self._release()

    def show_shards(self) -> None:
        """Bind the shards, also where ``functional_call`` has put back what is freed. Callers may write them."""
        if self.state is GroupState.SHARDED:
            self.is_stale |= self._bindings.rebind(self.shards.sharded, are_shards=True)
        self.unsharded.release_post_forward()

    def _release(self) -> None:
        """Free the unsharded parameters once compute has read them, or keep their memory for the next gather.

        Freed memory must not be read (I16): it is address 0 on the CPU, and arbitrary data on an accelerator. While its
        memory is freed, a tensor has another version than in forward, so autograd raises when a backward reads it.
        """
        unsharded = self.unsharded
        assert unsharded.gather is not None
        if unsharded.versioned and not self.keeps_storage:
            torch.autograd.graph.increment_version(unsharded.versioned)
        unsharded.gather.release(keeps_memory=self.keeps_storage)

    def reshard_post_forward(self) -> None:
        """Keep only shards on the post-forward mesh, if this group has one; else reshard."""
        if self.unsharded.post_forward_mesh is None:
            self.reshard()
            return
        before = self._transition(GroupEvent.RESHARD_POST_FORWARD)
        if before is GroupState.UNSHARDED:
            self.take_flags()
            self.is_stale |= self._bindings.rebind(self.unsharded.cut(), are_shards=True)
            self._release()

    def lend(self) -> None:
        """Leave the slots, where shards are bound, to the caller until ``take_back``."""
        self.shards.check_ready()
        self._transition(GroupEvent.LEND)

    def take_back(self) -> None:
        """Bind the shards in all slots, whatever is bound there."""
        self._transition(GroupEvent.TAKE_BACK)
        self._bindings.bind(self.shards.sharded)

    def note_writes(self) -> None:
        """Record the shards' write stamp. If the shards are written after this call, gathered parameters and shards
        on a smaller mesh are outdated."""
        if self.stamp is None and (self.state is not GroupState.SHARDED or self.keeps_post_forward):
            self.stamp = self.shards.write_stamp()

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since ``note_writes``. The same on all ranks: none looks at its shards."""
        return self.stamp is not None and self.stamp[0] != self.shards.num_steps

    def take_flags(self) -> None:
        """Give all forms of each parameter the ``requires_grad`` that the user has set on the bound form or on the
        sharded one. Users may do so at any time, so each event that depends on flags calls this first (I18)."""
        unsharded, sharded_params = self.unsharded, self.shards.sharded
        bound_params = sharded_params if self.shows is not None else self._bindings.forms
        with _torch.plain_access():
            sharded = list(map(_get_requires_grad, sharded_params))
            bound = sharded if bound_params is sharded_params else list(map(_get_requires_grad, bound_params))
        noted = unsharded.requires_grad
        if sharded == noted and bound == noted:
            return
        if noted:
            changed = [of_bound is not before for of_bound, before in zip(bound, noted, strict=True)]
            flags = [b if is_changed else s for b, is_changed, s in zip(bound, changed, sharded, strict=True)]
            self.gradients.owe(index for index, flag in enumerate(flags) if noted[index] and not flag)
            for param, is_trainable in zip(sharded_params, flags, strict=True):
                param.requires_grad_(is_trainable)
        else:
            flags = sharded
        unsharded.follow_requires_grad(flags)
        self._tell_parameters()
        self._on_flags()

    def _tell_parameters(self) -> None:
        if self.on_parameters is not None:
            self.on_parameters(self)

    def _transition(self, event: GroupEvent) -> GroupState:
        before = self.state
        after = TRANSITIONS.get((before, event))
        if after is None:
            hint = f"Usual cause: a module ran outside the forward of its root. See {DOCS}/guide/wrapping.md#roots."
            if before is GroupState.LENT:
                hint = "An fsdp2.unsharded(...) block holds the parameters of this unit. Leave that block first."
            raise ScheduleError(
                f"unit '{self.name}' cannot {event.value} in state {before.value}. "
                f"Last events: {self._story()}.\n{hint}"
            )
        if after is not before and self.on_transition is not None:
            self.on_transition(before, after)  # called first, so that nothing has changed if it raises
        self.state = after
        return before

    def _gather_failed(self, before: GroupState, error: BaseException) -> NoReturn:
        """Raise ``error``. The group is as it was ``before``, and nothing is in flight."""
        after, self.state = self.state, before
        if self.on_transition is not None:
            self.on_transition(after, before)
        if isinstance(error, CommunicationError):
            raise self.lost("all-gather", error) from error.__cause__
        raise error

    # Gradients

    def keep_gradients(self) -> None:
        """Keep this backward's gradients on this rank."""
        if self.unsharded.parameters:
            self.gradients.keep_unreduced()


class Bindings:
    """Writes one form of each parameter into all slots of a group, without ``nn.Module.__setattr__`` where possible.
    ``rebind`` does not overwrite what the user has put into a slot since.

    Attributes:
        forms: what was bound last for each parameter of the group.
        guards: the guards of modules that compute with the parameters.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._slots: list[tuple[dict[str, nn.Parameter | None], str, int, nn.Module | None, ShardedParam]] = []
        for index, param in enumerate(params):
            for module, name in param.slots:
                custom = None if _torch.sets_attributes_plainly(module) else module  # has a custom __setattr__
                self._slots.append((_torch.parameters_dict(module), name, index, custom, param))
        self.forms: Sequence[nn.Parameter] = ()
        self.guards: Sequence[seams.Guard] = ()

    def bind(self, forms: Sequence[nn.Parameter]) -> None:
        """Bind ``forms[i]`` in the slots of parameter i, whatever is bound there."""
        for parameters, name, index, custom, _ in self._slots:
            if custom is None:
                parameters[name] = forms[index]
            else:
                setattr(custom, name, forms[index])
        self.forms = forms

    def rebind(self, forms: Sequence[nn.Parameter], *, are_shards: bool) -> bool:
        """Bind ``forms[i]`` in each slot that still holds the form bound before, or one that ``functional_call`` has
        put back. Install the guards if these are shards, and remove them if compute can read the forms. Returns whether
        the user has replaced parameters, which the next gather adopts."""
        before, self.forms, are_replaced = self.forms, forms, False
        for parameters, name, index, custom, param in self._slots:
            bound = parameters.get(name) if custom is None else getattr(custom, name, None)
            if not (bound is before[index] or bound is param.sharded or bound is param.unsharded is not None):
                are_replaced = True
            elif custom is None:
                parameters[name] = forms[index]
            else:
                setattr(custom, name, forms[index])
        for attributes, call in self.guards:
            expected, wanted = (None, call) if are_shards else (call, None)
            if attributes.get(_torch.CALL) is expected:  # else the user has compiled the module
                attributes[_torch.CALL] = wanted
        return are_replaced

    def are_intact(self) -> bool:
        """Whether every slot still holds the form that was bound last."""
        for parameters, name, index, custom, _ in self._slots:
            if (parameters.get(name) if custom is None else getattr(custom, name, None)) is not self.forms[index]:
                return False
        return True
