"""The sharded form of one group's parameters: where the shards are, and whether they are still the ones bound.

Plain shards are stored one after another in flat buffers, one per dtype, so that one launch reads or writes many. The
shard of a tensor subclass is a separate object, because only the subclass knows where its values are. Users may
replace, move, cast or materialise shards: ``refresh`` adopts what is bound now.

Optimizers write shards. With ``foreach=True``, they write lists of DTensors, and torch updates neither the versions of
the DTensors nor those of their local tensors. So each optimizer step is recorded on the groups of its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp2.core import _torch, marks, seams
from fsdp2.core.comm.memory import alias
from fsdp2.core.comm.offload import Home
from fsdp2.core.group.all_gather import FlatShards, flat_shards
from fsdp2.core.group.param import ShardedParam
from fsdp2.core.marks import SHARDED_AS, STANDS_FOR, is_plain
from fsdp2.core.plan.dtypes import check_grad_dtype, param_dtypes
from fsdp2.core.plan.layout import contiguous_stride
from fsdp2.core.plan.mesh import ParallelMesh
from fsdp2.core.plan.placements import local_part
from fsdp2.core.plan.plan import GatherPlan, PlanInput, Routing, compile_gather
from fsdp2.core.types import DOCS


def count_steps(params: Sequence[torch.Tensor], steps: list[int]) -> None:
    """Add 1 to ``steps[0]`` at every step of an optimizer that has at least one of ``params``."""
    _note_optimizer_steps()
    for param in params:
        setattr(param, marks.STEPS, steps)


@cache
def _note_optimizer_steps() -> None:
    """Count optimizer steps from now on, in the whole process, and let optimizers step shards."""
    register_optimizer_step_pre_hook(_check_step)
    register_optimizer_step_post_hook(_note_step)


def _check_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling():  # the compiler cannot trace attributes of parameters
        return
    if any(marks.STEPS not in its and (STANDS_FOR in its or SHARDED_AS in its) for its in _attributes(optimizer)):
        seams.take_over_optimizer(optimizer)


def _attributes(optimizer: torch.optim.Optimizer) -> list[Mapping[str, Any]]:
    """The attributes of each parameter that has any. This loops in C, so that other models' optimizers stay fast."""
    return [found for group in optimizer.param_groups for found in filter(None, map(vars, group["params"]))]


def _note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and not _attributes(optimizer):
        return
    params = (param for group in optimizer.param_groups for param in group["params"])
    counts = {id(steps): steps for param in params if (steps := vars(param).get(marks.STEPS))}
    for steps in counts.values():
        steps[0] += 1
    if is_compiling:
        return
    plain = [param for group in optimizer.param_groups for param in group["params"] if marks.STEPS not in vars(param)]
    if plain:
        seams.warn_of_plain_step(optimizer, plain, max((num_ranks for _, num_ranks in counts.values()), default=0))


class GroupShards:
    """The shards of one group.

    Attributes:
        flats: the flat buffers of the plain shards.
        plain: indices of the parameters whose shards lie in ``flats``.
        sharded, locals: the parameters that are bound between passes, and their local tensors.
        storages: keys of the storages of ``sharded``, which tell whether the user has assigned to ``data``.
    """

    def __init__(
        self,
        params: list[ShardedParam],
        mesh: ParallelMesh,
        home: Home,
        routing: Routing,
    ) -> None:
        self._params, self._mesh, self._home, self._routing = params, mesh, home, routing
        self._steps = [0, mesh.data_parallel_size]
        shards = [param.shard_of(local_part(param.sharded)) if param.local is None else param.local for param in params]
        if not mesh.has_this_rank:  # no one materialises them; optimizers read the device
            shards = [shard.new_zeros(shard.shape, device=home.device) if shard.is_meta else shard for shard in shards]
        self._place(shards)
        for param, local in zip(params, self.locals, strict=True):
            param.local = None
            if not param.is_cut:
                param.sharded = param.sharded_parameter(local, requires_grad=param.sharded.requires_grad)
        self._note()

    def give_up(self, index: int) -> None:
        """Stop managing the parameter at ``index``: another group does from now on."""
        del self._params[index]
        self._replace(self.locals[:index] + self.locals[index + 1 :])

    def take(self, param: ShardedParam) -> None:
        """Manage ``param`` from now on."""
        self._params.append(param)
        self._replace([*self.locals, _torch.local_of(param.sharded)])

    def are_written(self) -> bool:
        """Whether the shards have been written since they were placed."""
        return _torch.versions_of(self._versioned) != self._placed_versions

    def plain_inputs(self) -> dict[int, PlanInput]:
        """The plan inputs for the plain parameters."""
        params = ((index, self._params[index]) for index in self.plain)
        return {index: PlanInput(param.name, param.layout, param.dtypes) for index, param in params}

    def refresh(self) -> bool:
        """Adopt parameters that the user has replaced, moved, cast or materialised since the last call, or that have
        got hooks or a different ``grad_dtype``. Returns whether there were any.

        Raises:
            TypeError: a parameter is no longer a DTensor, or has a different shape.
            ValueError: a parameter is on the wrong device, or its ``grad_dtype`` does not define the reduce dtype.
        """
        current = [param.current() for param in self._params]
        if all(map(self._is_in_place, range(len(current)), current)):
            self._follow_locals()
            return False
        for param, bound in zip(self._params, current, strict=True):
            seams.check_device(param.full_name, _torch.local_of(bound).device, self._home)
            check_grad_dtype(param.full_name, param.grad_dtype_of(bound), param.policy)
        for index, bound in enumerate(current):
            if index not in self.plain and is_plain(_torch.local_of(bound)):
                seams.warn_of_plain(self._params[index], type(self.locals[index]))
        locals_ = [self._private(index, _torch.local_of(bound)) for index, bound in enumerate(current)]
        for param, bound in zip(self._params, current, strict=True):
            param.adopt(bound, param_dtypes(bound.dtype, param.policy, param.grad_dtype_of(bound)))
        if not seams.adopt_memory(self, current, locals_):
            self._place(locals_)
        self._note()
        return True

    def are_materialised(self) -> bool:
        """Whether all shards were on the meta device, and are now on the device where they belong."""
        if any(not local.is_meta for local in self.locals):
            return False
        devices = [_torch.local_of(param.current()).device for param in self._params]
        return all(device == self._home.device for device in devices)

    def share(self, tensor: torch.Tensor) -> None:
        """Note that ``tensor`` shares the memory of a flat buffer: writes and optimizer steps on it are writes to the
        shards. Call this again after the shards have moved."""
        count_steps([tensor], self._steps)
        self._sharing.append(tensor)
        self._versioned.append(tensor)
        self._placed_versions += _torch.versions_of([tensor])

    @property
    def num_steps(self) -> int:
        """How often optimizers have stepped the parameters."""
        return self._steps[0]

    def write_stamp(self) -> list[int]:
        """A stamp that changes when a shard is written, and at every optimizer step, since a step may write shards.
        The number of steps comes first."""
        return [self._steps[0], *_torch.versions_of(self._versioned)]

    def check_ready(self) -> None:
        """Refuse to gather parameters without values.

        Raises:
            RuntimeError: a parameter is still on the meta device.
        """
        for param in self._params:
            if _torch.local_of(param.sharded).is_meta:
                raise RuntimeError(
                    f"parameter '{param.full_name}' is still on the meta device. "
                    "Before the first forward, call model.to_empty(device=...). Then load a checkpoint, or initialise "
                    f"the values: see {DOCS}/checkpoints.md#initialise-on-the-meta-device."
                )

    def _place(self, shards: list[torch.Tensor]) -> None:
        """Copy plain ``shards`` into new flat buffers; leave shards of tensor subclasses as they are."""
        self.plain = [index for index, shard in enumerate(shards) if is_plain(shard)]
        plan = compile_gather(self.plain_inputs(), self._routing)
        all_meta = all(shard.is_meta for shard in shards)
        device, pin_memory = self._home.device, self._home.pin_memory and not all_meta
        if not self._mesh.shard.has_this_rank:  # without a gather here, empty shards need no memory or padding
            plan = replace(plan, shard_numels=tuple((dtype, 0) for dtype, _ in plan.shard_numels))
        self._sharing: list[torch.Tensor] = []  # other tensors that share the memory of a flat buffer
        self.flats: FlatShards = flat_shards(plan, torch.device("meta") if all_meta else device, pin_memory=pin_memory)
        self.locals = shards.copy()
        with torch.inference_mode(False), torch.no_grad():
            for step in plan.steps:
                shape = self._params[step.index].shard_shape
                if shards[step.index].is_meta:  # moves into the buffer once the user has materialised it
                    local = torch.empty(shape, dtype=step.source, device="meta")
                else:
                    local = alias(self.flats[step.source], step.shard_offset, shape, contiguous_stride(shape))
                    local.copy_(shards[step.index])
                self.locals[step.index] = local

    def _replace(self, shards: list[torch.Tensor]) -> None:
        """Place ``shards`` in new buffers. The sharded parameters stay the same objects."""
        self._place(shards)
        self._note()

    def lie_in(self, other: GroupShards, shards: Sequence[torch.Tensor]) -> None:
        """Use the buffers of ``other``, where ``shards`` are laid out as they would be in this group's buffers. Each
        optimizer step counts for both groups."""
        self.plain = list(range(len(shards)))
        self.flats, self._steps, self._sharing = other.flats, other._steps, []
        self.locals = list(shards)

    @property
    def layout(self) -> tuple[Home, GatherPlan]:
        """Where the shards live, and how they would be laid out if all were plain."""
        params = enumerate(self._params)
        inputs = {index: PlanInput(param.name, param.layout, param.dtypes) for index, param in params}
        return self._home, compile_gather(inputs, self._routing)

    def _note(self) -> None:
        """Make ``locals`` the local tensors of the sharded parameters, and watch these tensors from now on."""
        self.sharded: list[nn.Parameter] = [param.sharded for param in self._params]
        for sharded, local in zip(self.sharded, self.locals, strict=True):
            _torch.set_local(sharded, local)  # nn.Parameter has detached it
        self.storages = list(map(_torch.key_of_storage, map(_torch.storage_of, self.sharded)))
        count_steps(self.sharded, self._steps)
        self._versioned = [tensor for param in self._params for tensor in param.versioned()] + self._sharing
        self._placed_versions = _torch.versions_of(self._versioned)

    def _follow_locals(self) -> None:
        """Adopt the local tensors that are bound now. Conversions that change nothing, such as ``model.to`` the
        model's own device, create other objects with the same memory, and remove our attributes from parameters."""
        found = [_torch.local_of(param.sharded) for param in self._params]
        if not all(map(is_, found, self.locals)):
            self.locals = found
            for param in self._params:
                param.adopt(param.sharded, param.dtypes)
            self._note()
            self._placed_versions = []  # it is unknown whether they were written before

    def _private(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """``local``, ready to be placed again. If it got hooks while it was in the flat buffer, the object stays the
        same, but moves to separate memory.

        Raises:
            ExtensionError: it cannot be pinned.
        """
        if is_plain(local):
            return local.detach()
        if local is self.locals[index] and index in self.plain and not local.is_meta:
            with torch.no_grad():
                local.set_(local.clone().untyped_storage(), 0, local.shape, local.stride())
        return seams.pin_subclass(self._params[index].full_name, local, self._home)

    def _is_in_place(self, index: int, bound: torch.Tensor) -> bool:
        mine, found = self.locals[index], _torch.local_of(bound)
        param = self._params[index]
        if bound is not param.sharded or is_plain(found) != (index in self.plain):
            return False
        if param.grad_dtype_of(bound) != param.grad_dtype:
            return False
        if not is_plain(found):
            return found is mine
        same_memory = found.data_ptr() == mine.data_ptr() or mine.numel() == 0
        return same_memory and found.dtype is mine.dtype and found.device == mine.device and found.shape == mine.shape
