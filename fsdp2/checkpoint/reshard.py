"""``reshard_to``: move a sharded model and its optimizers to other ranks, without a file.

Every rank plans what it sends to each other rank (``transfers.py``), and sends only entries that the receiver lacks.
Units move one after another. Rule: everything is checked on all ranks (``reshard_checks``) before the first unit moves;
sharded parameters, optimizers and param groups stay the same objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.checkpoint.reshard_checks import (
    Belongings,
    Cut,
    Kept,
    Known,
    Survey,
    Whole,
    agreed,
    restored,
    states_by_optimizer,
)
from fsdp2.checkpoint.transfers import Cut as CutOverRanks, Transfer, transfers
from fsdp2.core import _torch
from fsdp2.core.comm.offload import Home
from fsdp2.core.group.group import ParamGroup
from fsdp2.core.group.param import ShardedParam
from fsdp2.core.marks import is_plain
from fsdp2.core.plan.layout import pack, shard_layout
from fsdp2.core.plan.mesh import AxisRole, ParallelMesh, replicated
from fsdp2.core.plan.placements import plain_spec
from fsdp2.core.runtime.unit import Unit
from fsdp2.core.runtime.unit_tree import UnitTree, tree_of
from fsdp2.core.schedule.schedule import AfterForward
from fsdp2.extras import torch_names
from fsdp2.extras.comm_memory import BackendMemory, has_memory, in_memory
from fsdp2.extras.exchange import axis_of, together
from fsdp2.extras.own_groups import post_forward_mesh, separate_axis
from fsdp2.extras.torch_names import buffers_dict
from fsdp2.tensors.cut import pinned

Place = tuple[tuple[int, ...], torch.dtype]  # the shape and dtype of a tensor in a message

_ALIGNMENT_NBYTES = 16  # of pieces in a message: the item size of the widest dtype


@torch.no_grad()
def reshard_to(model: nn.Module, optimizer: optim.Optimizer | Sequence[optim.Optimizer], new_mesh: DeviceMesh) -> bool:
    """Move ``model`` and the states of ``optimizer`` to the ranks of ``new_mesh``, in place and bit for bit.

    All ranks of the default process group must call it between steps, with the same model, optimizers and mesh; ranks
    that join later must have called ``fully_shard`` with the old mesh, too. Parameters, optimizers and param groups
    stay the same objects, and settings of units stay. Gradients in ``.grad`` also move. A rank that leaves has empty
    shards and no optimizer states afterwards; its model cannot run until another call brings it back. A rank that joins
    gets shards, optimizer states, the options of param groups, ignored parameters and buffers.

    Units move one after another, and each rank is sent only entries that it lacks. Besides the shards and states that
    a rank has before or after the move, it holds at most those of one unit twice.

    Errors are raised on all ranks, before anything has moved. A graph whose backward has not run yet is not detected:
    its backward raises.

    Args:
        model: the root of the sharded model.
        optimizer: one optimizer, or a sequence of them, which may be empty.
        new_mesh: 1D for FSDP, 2D (replicate, shard) for HSDP; of the same device type as the old mesh. Parameters stay
            sharded along the same dims.

    Returns:
        Whether this rank is in ``new_mesh``.

    Raises:
        ScheduleError: a forward or backward is running; a unit is unsharded; gradients are in flight or not reduced; a
            backward has begun a step of ``Muon``.
        ValueError: the model has model axes or several meshes, was made by ``FullyShardedDataParallel``, or is stepped
            by a ``HostAdamW``; the ranks of a mesh are not in ascending order; a setting or an optimizer state does not
            fit; models, optimizers or meshes differ between ranks.
        TypeError: an argument is of the wrong type.
        RuntimeError: a parameter is on the meta device, on a rank of the old mesh.
    """
    axis = axis_of(None)
    with together(axis):
        optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
        survey = Survey(model, optimizers, new_mesh)
    known = agreed(axis, survey) or survey.known
    roots = {id(unit.tree): unit.tree for _, unit in survey.units if unit.tree is not None}
    _Move(survey, known).run()
    for tree in roots.values():
        restore_settings(tree)
    return survey.new.has_this_rank


def restore_settings(old: UnitTree) -> None:
    """If the user has changed settings of the tree ``old``, form a new tree now; otherwise the next forward does it."""
    settings = old.schedule.finalizes_by_hand, old.schedule.is_last_backward
    if settings != (False, True) and old.root.mesh.has_this_rank:
        schedule = tree_of(old.root).schedule
        schedule.finalizes_by_hand, schedule.is_last_backward = settings


@dataclass
class _Moving:
    """One tensor that is being moved: the values of a parameter, its gradient, or a state that is cut like it.

    Attributes:
        old: this rank's old part; an empty one if it had none.
        start, new_start: the first entries of the old and the new part.
    """

    old: torch.Tensor
    dim: int
    start: int
    new_start: int
    transfers: Sequence[Transfer]

    def pieces(self, each: Transfer) -> list[torch.Tensor]:
        """The pieces that ``each`` takes from the old part."""
        return _narrowed(self.old, self.dim, each.start - self.start, each.stop - each.start)

    def places(self, each: Transfer) -> list[Place]:
        """The shapes and dtypes of the pieces that ``each`` brings."""
        size, dim = each.stop - each.start, self.dim
        leaves = map(_with_dims, _torch.leaves(self.old))
        return [((*leaf.shape[:dim], size, *leaf.shape[dim + 1 :]), leaf.dtype) for leaf in leaves]

    def fill(self, new: torch.Tensor, each: Transfer, pieces: Sequence[torch.Tensor]) -> None:
        """Write the pieces that ``each`` has brought into the new part."""
        targets = _narrowed(new, self.dim, each.start - self.new_start, each.stop - each.start)
        for target, piece in zip(targets, pieces, strict=True):
            target.copy_(piece)


def _narrowed(local: torch.Tensor, dim: int, start: int, size: int) -> list[torch.Tensor]:
    """The same entries of each plain tensor that ``local`` is made of."""
    return [_with_dims(leaf).narrow(dim, start, size) for leaf in _torch.leaves(local)]


def _with_dims(leaf: torch.Tensor) -> torch.Tensor:
    """``leaf``, detached; a scalar becomes a tensor with one entry."""
    return leaf.detach().reshape(1) if leaf.dim() == 0 else leaf.detach()


class _Move:
    """The move that ``survey`` has found possible. ``known`` says what belongs to each parameter."""

    def __init__(self, survey: Survey, known: Known | None) -> None:
        self._survey, self._rank = survey, dist.get_rank()
        self._optimizers, self._old, self._new = survey.optimizers, survey.old, survey.new
        belongings = iter([] if known is None else known.belongings)
        # On ranks outside both meshes, nothing belongs to a parameter.
        nothing = Belongings(None, {})
        self._belongings = {id(param.sharded): next(belongings, nothing) for _, _, param in survey.params}
        self._of_plain = [(param, next(belongings, nothing)) for _, param in survey.plain_params()]
        self._options = [] if known is None else known.options

    def run(self) -> None:
        """Move everything."""
        for _, unit in self._survey.units:
            self._move_unit(unit)
        self._send_plain()
        if not self._new.has_this_rank:
            for param, _ in self._of_plain:
                self._forget_states(param)
        if self._survey.is_joining:
            for optimizer, groups in zip(self._optimizers, self._options, strict=True):
                for group, options in zip(optimizer.param_groups, groups, strict=True):
                    group.update({key: restored(value, self._new.device) for key, value in options.items()})

    # One unit

    def _move_unit(self, unit: Unit) -> None:
        size = unit.config.post_forward_size
        if size is not None:
            is_smaller = size < self._new.shard.size
            unit.configure(after_forward=AfterForward.RESHARD_TO_SMALLER_MESH if is_smaller else AfterForward.RESHARD)
        unit.move_to(self._new, tuple([self._moved_group(unit, group) for group in unit.groups]))

    def _moved_group(self, unit: Unit, group: ParamGroup) -> ParamGroup:
        """A group of the same parameters on the new mesh, with their values, gradients and optimizer states."""
        mesh = self._new if AxisRole.SHARD in group.mesh.roles else replicated(self._new)
        moving = [self._moving(param, mesh, group.home) for param in group.params]
        received = self._exchanged([each for of_param in moving for each in of_param.values()])
        for param in group.params:
            param.sharded.grad = None  # ``moving`` has it
        params = [self._moved(param, mesh, group.home) for param in group.params]
        made = ParamGroup(params, mesh, group.home)
        group.forget()
        self._set_up(unit, group, made)
        for param, of_param in zip(made.params, moving, strict=True):
            self._fill(param, of_param, received, group.home)
        return made

    def _moving(self, param: ShardedParam, mesh: ParallelMesh, home: Home) -> dict[Any, _Moving]:
        """The tensors of ``param`` that move: "values", "grad" and entries of states."""
        before = CutOverRanks(param.layout, param.mesh.ranks)
        after = CutOverRanks(shard_layout(param.layout.shape, param.layout.dim, mesh.shard.size), mesh.ranks)
        start, new_start = before.interval_of(self._rank)[0], after.interval_of(self._rank)[0]
        found = transfers(before, after)
        values = _torch.local_of(param.sharded)
        olds: dict[Any, torch.Tensor] = {"values": values}
        belongings = self._belongings[id(param.sharded)]
        if belongings.grad is not None:
            grad = param.sharded.grad
            olds["grad"] = _empty(values, belongings.grad, home) if grad is None else _torch.local_of(grad)
        for (index, name), entry in belongings.states.items():
            if isinstance(entry, Cut):
                value = self._optimizers[index].state.get(param.sharded, {}).get(name)
                is_here = param.mesh.has_this_rank
                olds[index, name] = _torch.local_of(value) if is_here else _empty(values, entry, home)
        return {key: _Moving(old, param.layout.dim, start, new_start, found) for key, old in olds.items()}

    def _moved(self, param: ShardedParam, mesh: ParallelMesh, home: Home) -> ShardedParam:
        """``param`` on ``mesh``. Its values are filled in later."""
        layout = shard_layout(param.layout.shape, param.layout.dim, mesh.shard.size)
        spec = replace(param.spec, sharded=plain_spec(layout.shape, layout.dim, mesh).sharded)
        local, shape = _torch.local_of(param.sharded), layout.shard_shape(mesh.shard.rank)
        if is_plain(local):
            new = torch.zeros((), dtype=local.dtype, device=local.device).expand(shape)  # takes no memory
        else:
            new = pinned(param.name, local.new_zeros(shape), home)
        torch_names.set_placement(param.sharded, spec.sharded.mesh, spec.sharded.placements)
        return replace(param, mesh=mesh, layout=layout, spec=spec, local=new, is_cut=True)

    def _set_up(self, unit: Unit, old: ParamGroup, made: ParamGroup) -> None:
        """Take over the user's settings from ``old``."""
        mesh, size = made.mesh, unit.config.post_forward_size
        made.set_up_like(old, **_options_on(mesh, old))
        is_smaller = size is not None and mesh.has_this_rank and size < mesh.shard.size
        made.unsharded.post_forward_mesh = post_forward_mesh(mesh, size) if is_smaller and size else None
        made.on_parameters = old.on_parameters
        assert unit.hooks is not None
        made.guard(unit.hooks.guards)

    def _fill(self, param: ShardedParam, moving: dict[Any, _Moving], received: _Received, home: Home) -> None:
        """Give ``param`` its values, its gradient and its states on the new mesh."""
        key = param.sharded
        received.fill(moving.pop("values"), _torch.local_of(key))
        entries = self._belongings[id(key)].states
        if not (self._old.has_this_rank and self._new.has_this_rank):
            self._forget_states(key)
        if not self._new.has_this_rank:
            return
        made = {name: _new_part(each.old, param, home) for name, each in moving.items()}
        for name, new in made.items():
            received.fill(moving[name], new)
        tensors = dict(zip(made, _torch.dtensors_like([key] * len(made), list(made.values())), strict=True))
        if "grad" in tensors:
            key.grad = tensors["grad"]
        self._set_states(key, {name: tensors.get(name, entry) for name, entry in entries.items()})

    def _forget_states(self, param: torch.Tensor) -> None:
        for optimizer in self._optimizers:
            optimizer.state.pop(param, None)

    def _set_states(self, param: torch.Tensor, states: dict[tuple[int, Any], Any]) -> None:
        """Write ``states`` to the optimizers. A rank that was in the old mesh keeps its own values."""
        for index, entries in states_by_optimizer(states).items():
            state = self._optimizers[index].state
            before = state.get(param, {})
            state[param] = {
                name: before.get(name, restored(entry, self._new.device)) if isinstance(entry, Kept) else entry
                for name, entry in entries.items()
            }

    # Messages

    def _exchanged(self, moving: Sequence[_Moving]) -> _Received:
        """Send what other ranks lack, and receive what this rank lacks, in one collective of all ranks."""
        rank, num_ranks = self._rank, dist.get_world_size()
        pieces: list[list[torch.Tensor]] = [[] for _ in range(num_ranks)]
        places: list[list[Place]] = [[] for _ in range(num_ranks)]
        travelling = [(each, move) for each in moving for move in each.transfers if move.source != move.target]
        for each, move in travelling:
            if move.source == rank:
                pieces[move.target] += each.pieces(move)
            elif move.target == rank:
                places[move.source] += each.places(move)
        return _Received(rank, _exchange(pieces, places, self._new.device) if travelling else places)

    def _send_plain(self) -> None:
        """Send what is not sharded from the first rank of the old mesh to joining ranks, one tensor after another:
        parameters with their states, and buffers."""
        first = self._old.ranks[0][0]
        others = {rank for row in self._old.ranks for rank in row}
        joining = [rank for row in self._new.ranks for rank in row if rank not in others]
        if self._survey.is_joining:
            self._materialise_buffers()
        num_ranks = dist.get_world_size()
        for tensor in self._plain_tensors() if joining else ():
            pieces: list[list[torch.Tensor]] = [[] for _ in range(num_ranks)]
            places: list[list[Place]] = [[] for _ in range(num_ranks)]
            if self._rank == first and tensor is not None:
                for rank in joining:
                    pieces[rank].append(tensor)
            elif self._survey.is_joining and tensor is not None:
                places[first].append((tuple(tensor.shape), tensor.dtype))
            received = _exchange(pieces, places, self._new.device)
            if self._survey.is_joining and tensor is not None:
                tensor.copy_(received[first][0])

    def _plain_tensors(self) -> Iterator[torch.Tensor | None]:
        """All tensors that are not sharded, and states of such parameters; None for a state that this rank lacks."""
        yield from (tensor.detach() for tensor in self._survey.plain.values())
        for param, belongings in self._of_plain:
            if self._survey.is_joining:
                self._forget_states(param)
                made = {
                    name: torch.empty(entry.shape, dtype=entry.dtype, device=param.device)
                    if isinstance(entry, Whole)
                    else entry
                    for name, entry in belongings.states.items()
                }
                self._set_states(param, made)
            for (index, name), entry in belongings.states.items():
                if isinstance(entry, Whole):
                    yield self._optimizers[index].state.get(param, {}).get(name)

    def _materialise_buffers(self) -> None:
        made: dict[int, torch.Tensor] = {}
        for unit in (unit for _, unit in self._survey.units):
            for module in (inner for outer in unit.modules for inner in outer.modules()):
                for name, buffer in buffers_dict(module).items():
                    if buffer is not None and buffer.is_meta:
                        new = made.setdefault(id(buffer), torch.empty_like(buffer, device=self._new.device))
                        setattr(module, name, new)
        names = {name: made.get(id(tensor), tensor) for name, tensor in self._survey.plain.items()}
        self._survey.plain.update(names)


class _Received:
    """The pieces that have arrived from each rank, in the order of the tensors and their transfers."""

    def __init__(self, rank: int, pieces: Sequence[Sequence[Any]]) -> None:
        self._rank, self._pieces = rank, list(map(iter, pieces))

    def fill(self, moving: _Moving, new: torch.Tensor) -> None:
        """Write into ``new``, the new part of the next tensor."""
        for each in moving.transfers:
            if each.target != self._rank:
                continue
            if each.source == self._rank:
                pieces = moving.pieces(each)
            else:
                pieces = [next(self._pieces[each.source]) for _ in _torch.leaves(moving.old)]
            moving.fill(new, each, pieces)


def _empty(values: torch.Tensor, entry: Cut, home: Home) -> torch.Tensor:
    """The old part of a tensor on a rank that had none of it; ``values`` is its empty part of the parameter."""
    if entry.dtype is None:
        return values
    return torch.empty(values.shape, dtype=entry.dtype, device=home.device)


def _new_part(old: torch.Tensor, param: ShardedParam, home: Home) -> torch.Tensor:
    """Memory for the new part of a tensor that is cut like ``param``; ``old`` is its old part."""
    if is_plain(old):
        return torch.empty(param.shard_shape, dtype=old.dtype, device=home.device)
    return old.new_zeros(param.shard_shape)


def _options_on(mesh: ParallelMesh, group: ParamGroup) -> dict[str, Any]:
    """The options of ``group`` that name process groups, for those of ``mesh``."""
    changes: dict[str, Any] = {}
    if group.options.reduce_axis is not None:
        changes["reduce_axis"] = separate_axis(mesh.shard, mesh.device)
    if has_memory(group, BackendMemory) and mesh.shard.group is not None:
        changes |= in_memory(BackendMemory(mesh.shard.group))
    return changes


def _exchange(
    pieces: Sequence[Sequence[torch.Tensor]], places: Sequence[Sequence[Place]], device: torch.device
) -> list[list[torch.Tensor]]:
    """Send ``pieces[i]`` to rank i, and return the tensors that rank i has sent, with the shapes and dtypes
    ``places[i]``. Collective on all ranks. Everything is sent as bytes."""
    sent, sent_sizes, views = _messages([[(tuple(p.shape), p.dtype) for p in each] for each in pieces], device)
    for view, piece in zip(chain.from_iterable(views), chain.from_iterable(pieces), strict=True):
        view.copy_(piece)
    got, got_sizes, received = _messages(places, device)
    dist.all_to_all_single(got, sent, got_sizes, sent_sizes)
    return received


def _messages(
    places: Sequence[Sequence[Place]], device: torch.device
) -> tuple[torch.Tensor, list[int], list[list[torch.Tensor]]]:
    """Memory for a message to or from each rank, as bytes; the size of each message, and the tensors in it."""
    nbytes = [[torch.Size(shape).numel() * dtype.itemsize for shape, dtype in each] for each in places]
    packed = [pack(each, _ALIGNMENT_NBYTES) for each in nbytes]
    sizes = [size for _, size in packed]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    tensors = []
    for message, each, lengths, (offsets, _) in zip(memory.split(sizes), places, nbytes, packed, strict=True):
        parts = [message[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]
        tensors.append([part.view(dtype).view(shape) for part, (shape, dtype) in zip(parts, each, strict=True)])
    return memory, sizes, tensors
