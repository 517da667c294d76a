"""Checks of ``reshard_to``: whether a model can move, and whether all ranks agree.

``Survey`` records what one rank finds and refuses what cannot move. ``agreed`` compares the surveys of all ranks. Rule:
once both have returned, no rank can refuse anything later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2.core import (
    Axis,
    FSDPModule,
    GroupState,
    ParallelMesh,
    ParamGroup,
    ScheduleError,
    ShardedParam,
    Unit,
    _torch,
    find_tensors,
    is_plain,
    plans,
    units_under,
)
from fsdp2.extras.comm_memory import SymmetricMemory, has_memory
from fsdp2.extras.exchange import exchange
from fsdp2.extras.lending import check_idle
from fsdp2.extras.plain_names import plain_name, plain_paths
from fsdp2.extras.rank_checks import first_difference
from fsdp2.extras.units import sharded_unit
from fsdp2.optim.host_adamw.optimizer import HostAdamW, stepped_by
from fsdp2.optim.muon import Muon

CALLER = "reshard_to"
_BY_CHECKPOINT = "Save the model through torch.distributed.checkpoint, and load it into a newly sharded model."

# What belongs to a parameter, as plain data. Joining ranks get it from a rank that has it.


@dataclass(frozen=True)
class Kept:
    """A value that is the same on every rank: a number, or a tensor of one element, kept here on the host."""

    value: Any
    is_on_device: bool = False


@dataclass(frozen=True)
class Empty:
    """A tensor that the move fills: a plain one of ``dtype``, or, if that is None, one of the parameter's class. If the
    parameter is sharded, the tensor is cut like it; else it has ``shape``."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]


Key: TypeAlias = tuple[int, Any]  # of a parameter's state: the position of its optimizer, and its name there
Belongings: TypeAlias = dict[Key, Kept | Empty]
GRAD = (-1, "grad")  # the key of the gradient


@dataclass(frozen=True)
class Known:
    """What ranks of the old mesh tell others: the belongings of each parameter, and the options of each param group of
    each optimizer."""

    belongings: list[Belongings]
    options: list[list[dict[str, Kept]]]


def kept(value: Any) -> Kept:
    """``value`` in a form that can be sent to another rank."""
    if isinstance(value, torch.Tensor):
        return Kept(value.detach().cpu(), value.device.type != "cpu")
    return Kept(value)


def restored(entry: Kept, device: torch.device) -> Any:
    """The value of ``entry`` on this rank, whose mesh is on ``device``."""
    if isinstance(entry.value, torch.Tensor):
        return entry.value.to(device if entry.is_on_device else "cpu", copy=True)
    return entry.value


def described(tensor: torch.Tensor) -> Empty:
    """What another rank needs to know of ``tensor`` to make one like it."""
    return Empty(tensor.dtype if is_plain(tensor) else None, tuple(tensor.shape))


def made(entry: Empty, param: torch.Tensor) -> torch.Tensor:
    """The tensor that ``entry`` describes, for ``param`` as this rank has it."""
    if not isinstance(param, DTensor):
        return torch.empty(entry.shape, dtype=entry.dtype, device=param.device)
    local = _torch.local_of(param)
    if entry.dtype is None:
        new = local.new_zeros(local.shape)
    else:
        new = torch.empty(local.shape, dtype=entry.dtype, device=local.device)
    return _torch.dtensors_like([param], [new])[0]


# What one rank finds


class Survey:
    """A model and its optimizers, as this rank finds them.

    Attributes:
        units: the units with their names.
        old, new: the meshes.
        first, joining: the first rank of the old mesh, and the ranks that are only in the new one.
        params: the sharded parameters with their names, unit by unit.
        plain: what is not sharded, by name: ignored parameters, and buffers.
        known: set on ranks of the old mesh only.
        lines, own_lines: what must be equal on all ranks, and what must be equal on all ranks of the old mesh.

    Raises:
        ScheduleError: something is unsharded, in flight or not reduced.
        ValueError, TypeError: the model, an optimizer or the new mesh does not allow the move.
        RuntimeError: a parameter is on the meta device.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[optim.Optimizer], new_mesh: DeviceMesh) -> None:
        first = sharded_unit(model, CALLER)
        check_idle(model, CALLER)
        self.units = [(name, unit) for name, unit in units_under(model)]
        self.old, self.new, self.optimizers = first.mesh, _new_mesh(new_mesh, first.mesh), optimizers
        old, new = ([rank for row in mesh.ranks for rank in row] for mesh in (self.old, self.new))
        self.first, self.joining = old[0], [rank for rank in new if rank not in old]
        for name, unit in self.units:
            self._check_unit(name or "(root)", unit)
        paths = plain_paths([model])
        self.params = [
            (f"{paths.get(param.slots[0].module, name)}.{param.slots[0].name}".removeprefix("."), group, param)
            for name, unit in self.units
            for group in unit.groups
            for param in group.params
        ]
        for name, group, param in self.params:
            _check_param(name, group, param)
        self.plain = self._plain_tensors(model)
        self._names = {id(param.sharded): name for name, _, param in self.params}
        self._names |= {id(tensor): name for name, tensor in self.plain.items()}
        for optimizer in optimizers:
            self._check_optimizer(optimizer)
        self.lines = list(self._shared_lines())
        self.known = self._known() if self.old.has_this_rank else None
        self.own_lines = [] if self.known is None else list(self._own_lines(self.known))

    def all_params(self) -> list[tuple[str, nn.Parameter, ShardedParam | None]]:
        """All parameters with their names, in the same order on all ranks; None for those that are not sharded."""
        sharded = [(name, param.sharded, param) for name, _, param in self.params]
        return sharded + [(name, each, None) for name, each in self.plain.items() if isinstance(each, nn.Parameter)]

    def _check_unit(self, name: str, unit: Unit) -> None:
        if not all(isinstance(module, FSDPModule) for module in unit.modules):
            raise _unmovable(
                f"unit '{name}' was made by FullyShardedDataParallel, which {CALLER} does not move. Shard with "
                "fully_shard. Or:"
            )
        if unit.mesh.spmd is not None:
            raise _unmovable(
                f"unit '{name}' was sharded with dp_mesh_dims, on a mesh that has model axes, too. {CALLER} moves only "
                "parameters without model axes."
            )
        if unit.mesh.mesh != self.old.mesh:
            raise _unmovable(
                f"unit '{name}' is on {unit.mesh.mesh}, but the root is on {self.old.mesh}. {CALLER} moves models that "
                "are on one mesh."
            )
        tree = unit.tree
        if tree is not None and tree.root not in [each for _, each in self.units]:
            raise ValueError(
                f"{CALLER}: the given module is inside of {tree.class_name}, which is the root of unit '{name}'. Pass "
                "that root: all units under one root must be on one mesh."
            )
        self._check_settings(name, unit)
        check_nothing_in_flight(CALLER, name, unit)
        if any(stepped_by(group) is not None for group in unit.groups):
            raise _of_host_adamw()
        for group in unit.groups if self.old.has_this_rank else ():
            group.take_replaced()
            group.shards.check_ready()

    def _check_settings(self, name: str, unit: Unit) -> None:
        size, num_shards = unit.config.post_forward_size, self.new.shard.size
        if size is not None and size < num_shards and num_shards % size:
            raise ValueError(
                f"{CALLER}: unit '{name}' has reshard_after_forward={size}, which does not divide the {num_shards} "
                f"ranks of the new shard axis. Call set_reshard_after_forward(True) or (False) before {CALLER}."
            )
        for group in unit.groups:
            if group.mesh.mesh != unit.mesh.mesh:
                raise _unmovable(
                    f"unit '{name}' has parameters on {group.mesh.mesh}, where shard_placement_fn has put them, "
                    f"besides those on {unit.mesh.mesh}. {CALLER} moves units that are on one mesh."
                )
            options = group.options
            if has_memory(group, SymmetricMemory):
                raise _unmovable(f"unit '{name}' has symmetric memory, which knows the addresses of the old ranks.")
            hook = options.all_reduce_hook
            if hook is not None and hook.stream is not None and self.new.replicate.group is not None:
                raise ValueError(
                    f"{CALLER}: the all-reduce hook of unit '{name}' has a stream of its own, but the new mesh has a "
                    f"replicate axis (HSDP). Before {CALLER}, call set_all_reduce_hook without stream."
                )

    def _plain_tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        sharded = {id(param.sharded) for _, _, param in self.params}
        found = [*model.named_parameters(), *model.named_buffers()]
        plain = {plain_name(model, name): tensor for name, tensor in found if id(tensor) not in sharded}
        for name, tensor in plain.items():
            if isinstance(tensor, DTensor):
                raise _unmovable(f"'{name}' is a DTensor that fully_shard does not manage, so {CALLER} cannot move it.")
            if tensor.is_meta and (isinstance(tensor, nn.Parameter) or dist.get_rank() not in self.joining):
                raise RuntimeError(
                    f"{CALLER}: '{name}' is on the meta device. It is not sharded, so it needs memory on every rank "
                    "before the call. Build it on a real device, or give it memory with to_empty(device=...) before "
                    "the optimizer is made."
                )
        return plain

    def _check_optimizer(self, optimizer: optim.Optimizer) -> None:
        if not isinstance(optimizer, optim.Optimizer):
            raise TypeError(
                f"{CALLER}: expected a torch.optim.Optimizer or a sequence of them, got a {type(optimizer).__name__}. "
                "If the object wraps an optimizer, pass that optimizer."
            )
        if isinstance(optimizer, HostAdamW):
            raise _of_host_adamw()
        if isinstance(optimizer, Muon) and optimizer.has_begun:
            raise ScheduleError(
                f"{CALLER}: backward has begun a step of Muon, in overlap_backward(), so gradients are on their way. "
                f"Call step() before {CALLER}."
            )
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) not in self._names:
                    raise ValueError(
                        f"{CALLER}: param group {index} of {type(optimizer).__name__} has a parameter of shape "
                        f"{tuple(param.shape)} that is not in the model. Pass the model that has all parameters of the "
                        "optimizer, and build the optimizer after fully_shard."
                    )

    def _known(self) -> Known:
        options = [
            [{key: kept(value) for key, value in group.items() if key != "params"} for group in each.param_groups]
            for each in self.optimizers
        ]
        return Known([self._belongings_of(*each) for each in self.all_params()], options)

    def _belongings_of(self, name: str, key: nn.Parameter, param: ShardedParam | None) -> Belongings:
        """What belongs to ``key``; ``param`` is given if ``key`` is a sharded parameter."""
        found: Belongings = {}
        if param is not None and key.grad is not None:
            found[GRAD] = _described(name, "the gradient", key.grad, param)
        for index, optimizer in enumerate(self.optimizers):
            for entry, value in optimizer.state.get(key, {}).items():
                what = f"{type(optimizer).__name__} has the state '{entry}'"
                found[index, entry] = _described(name, what, value, param)
        return found

    def _shared_lines(self) -> Iterator[str]:
        yield f"the new mesh has the ranks {self.new.ranks} on {self.new.device.type}"
        yield f"the model is on the ranks {self.old.ranks} on {self.old.device.type}"
        for name, unit in self.units:
            yield f"unit '{name or '(root)'}' with {sum(len(group.params) for group in unit.groups)} parameters"
        for name, _, param in self.params:
            kind = type(_torch.local_of(param.sharded)).__name__
            yield (
                f"parameter '{name}': {kind} {param.dtypes.orig} {param.layout.shape}, dim {param.layout.dim}, "
                f"{'trainable' if param.sharded.requires_grad else 'frozen'}"
            )
        for name, tensor in self.plain.items():
            what = "parameter that is not sharded" if isinstance(tensor, nn.Parameter) else "buffer"
            yield f"{what} '{name}': {tensor.dtype} {tuple(tensor.shape)}"
        for optimizer in self.optimizers:
            for index, group in enumerate(optimizer.param_groups):
                names = ", ".join(self._names[id(param)] for param in group["params"])
                yield f"param group {index} of {type(optimizer).__name__}: {names}"

    def _own_lines(self, known: Known) -> Iterator[str]:
        for (name, *_), each in zip(self.all_params(), known.belongings, strict=True):
            has = ["a gradient" if key == GRAD else f"'{key[1]}' {_kind(value)}" for key, value in each.items()]
            yield f"parameter '{name}' has {', '.join(has) or 'neither gradient nor states'}"


def _new_mesh(mesh: object, old: ParallelMesh) -> ParallelMesh:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{CALLER}: new_mesh must be a torch.distributed.device_mesh.DeviceMesh, not {type(mesh).__name__}. Build "
            "it on all ranks, for example by DeviceMesh(device_type, [0, 1])."
        )
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"{CALLER}: new_mesh has {mesh.ndim} axes {tuple(mesh.shape)}, expected 1 (shard) or 2 (replicate, shard)."
        )
    if mesh.device_type != old.device.type:
        raise ValueError(
            f"{CALLER}: new_mesh is on {mesh.device_type}, but the model is on {old.device.type}. Pass a mesh on "
            f"{old.device.type}: {CALLER} changes the ranks, not the kind of device."
        )
    for name, each in (("new_mesh has", mesh.mesh), ("the model is on", old.mesh.mesh)):
        if any((each.diff(dim=axis) < 0).any() for axis in range(each.ndim)):
            raise ValueError(
                f"{CALLER}: {name} the ranks {each.tolist()}, expected ascending ranks along each axis: process groups "
                "sort them, so a rank's place in its group would not be its place in the mesh. Build the mesh with "
                "sorted ranks."
            )
    return plans.parallel_mesh(mesh)


def _unmovable(problem: str) -> ValueError:
    return ValueError(f"{CALLER}: {problem} {_BY_CHECKPOINT}")


def _of_host_adamw() -> ValueError:
    return _unmovable(f"a HostAdamW steps this model, and {CALLER} moves nothing on the host.")


def check_nothing_in_flight(caller: str, name: str, unit: Unit) -> None:
    tree = unit.tree
    if tree is not None and (tree.is_reducing or tree.schedule.awaits_finalization):
        raise ScheduleError(
            f"{caller}: a backward of {tree.class_name} waits to be finalized. Call finalize_backward(), and wait() on "
            f"its handle, before {caller}."
        )
    if tree is not None and tree.executor.has_unwaited:
        raise ScheduleError(
            f"{caller}: gradient reductions of {tree.class_name} are in flight. Call {caller} after a backward with "
            "set_is_last_backward(True)."
        )
    for group in unit.groups:
        if group.state is GroupState.LENT:
            raise ScheduleError(
                f"{caller}: an fsdp2.unsharded(...) block holds the parameters of unit '{name}'. Leave that block "
                "first."
            )
        if group.state is not GroupState.SHARDED:
            found = "has a gather in flight" if group.state is GroupState.UNSHARDING else f"is {group.state.value}"
            raise ScheduleError(f"{caller}: unit '{name}' {found}. Call reshard() on its module before {caller}.")
        if group.gradients.are_unreduced or group.gradients.are_partial:
            raise ScheduleError(
                f"{caller}: unit '{name}' has gradients that are not reduced: earlier backwards ran "
                "without set_requires_gradient_sync(True) or set_requires_all_reduce(True). Run a backward that "
                f"reduces, or call reset_iter_state(), before {caller}."
            )


def _check_param(name: str, group: ParamGroup, param: ShardedParam) -> None:
    if param.spec.unsharded is not None:
        raise _unmovable(
            f"parameter '{name}' is also cut by tensor parallelism. {CALLER} moves only parameters without model axes."
        )
    local, dim = _torch.local_of(param.sharded), param.layout.dim
    if is_plain(local) or not group.mesh.has_this_rank:
        return
    leaves = _torch.leaves(local)
    is_cut = all(leaf.dim() > dim and leaf.size(dim) == local.size(dim) for leaf in leaves)
    if leaves[0] is local or type(local) in (torch.Tensor, nn.Parameter) or not is_cut:
        raise _unmovable(
            f"parameter '{name}' is a {type(local).__name__} whose inner tensors are not cut along dim {dim} as it is, "
            f"so {CALLER} cannot move slices of it."
        )


def _kind(entry: Kept | Empty) -> str:
    return "(one value)" if isinstance(entry, Kept) else f"({entry.dtype or 'as the parameter'})"


def _described(name: str, what: str, value: Any, param: ShardedParam | None) -> Kept | Empty:
    """Describe ``value``, which belongs to the parameter ``name`` and was found as ``what``."""
    if param is not None and isinstance(value, DTensor) and value.shape == param.sharded.shape:
        spec, local = param.spec.sharded, _torch.local_of(value)
        is_placed_alike = value.device_mesh == spec.mesh and value.placements == spec.placements
        if is_placed_alike and (is_plain(local) or type(local) is type(_torch.local_of(param.sharded))):
            return described(local)
    elif isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
        if value.numel() == 1:
            return kept(value)
        if param is None and is_plain(value):
            return described(value)
    elif not find_tensors(value, []):
        return kept(value)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    raise _unmovable(
        f"parameter '{name}': {what}, a {type(value).__name__}{shape}. {CALLER} moves numbers, tensors of one element, "
        "and tensors that are cut like their parameter."
    )


# What all ranks agree on


def agreed(axis: Axis, survey: Survey) -> Known | None:
    """Compare the surveys of all ranks. Returns what the first rank of the old mesh knows; None if no rank joins.

    Raises:
        ValueError: surveys differ. All ranks raise it; it names the ranks and the first difference.
    """
    has_own = survey.known is not None
    told = survey.known if survey.joining and dist.get_rank() == survey.first else None
    found = exchange(axis, (_digest(survey.lines), _digest(survey.own_lines) if has_own else None, told))
    problem = None
    if len({shared for shared, _, _ in found}) > 1:
        problem = exchange(axis, survey.lines)
        remedy = "Build the same model, optimizers and meshes on all ranks, with the same calls of fully_shard."
    elif len({own for _, own, _ in found} - {None}) > 1:
        problem = exchange(axis, survey.own_lines if has_own else None)
        remedy = "Give all ranks of the mesh the same gradients and optimizer states."
    if problem is not None:
        _, said = first_difference([(rank, lines) for rank, lines in enumerate(problem) if lines is not None])
        raise ValueError("\n".join([f"{CALLER}: ranks differ. Nothing has moved.", *said, remedy]))
    return next((known for _, _, known in found if known is not None), None)


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
