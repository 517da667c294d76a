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
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint.reshard_checks import (
    GRAD,
    Empty,
    Key,
    Known,
    Survey,
    agreed,
    described,
    made,
    restored,
)
from fsdp2.checkpoint.transfers import Cut, Transfer, transfers
from fsdp2.core import (
    AfterForward,
    ParallelMesh,
    ParamGroup,
    ShardedParam,
    Unit,
    UnitTree,
    _torch,
    comms,
    is_plain,
    plans,
    tree_of,
)
from fsdp2.extras import torch_names
from fsdp2.extras.comm_memory import BackendMemory, has_memory, in_memory
from fsdp2.extras.exchange import axis_of, together
from fsdp2.extras.own_groups import post_forward_mesh, separate_axis
from fsdp2.extras.torch_names import buffers_dict
from fsdp2.optim.adamw8bit.optimizer import in_full_precision
from fsdp2.tensors.cut import pinned

Place = tuple[tuple[int, ...], torch.dtype]  # the shape and dtype of a tensor in a message
Arrived = Sequence[Iterator[torch.Tensor]]  # the pieces from each rank, in the order of tensors and their transfers

_VALUES = (-1, "values")  # the key of a parameter's values next to what belongs to it
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
    a rank has before or after the move, it holds at most those of one unit twice. States of an ``AdamW8bit`` move in
    fp32, and take 8 bytes per element until the call returns.

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
    optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    with in_full_precision(optimizers):
        with together(axis):
            survey = Survey(model, optimizers, new_mesh)
        move = _Move(survey, agreed(axis, survey))
        roots = {id(unit.tree): unit.tree for _, unit in survey.units if unit.tree is not None}
        move.run()
    for tree in roots.values():
        restore_settings(tree)
    return survey.new.has_this_rank


def restore_settings(old: UnitTree) -> None:
    """If the user has changed settings of the tree ``old``, form a new tree now; otherwise the next forward does it."""
    settings = old.schedule.finalizes_by_hand, old.schedule.is_last_backward
    if settings == (False, True):
        return
    if not old.root.mesh.has_this_rank:
        old.root.tree = old  # which keeps them until another move brings this rank back
        return
    schedule = tree_of(old.root).schedule
    schedule.finalizes_by_hand, schedule.is_last_backward = settings


def successor(
    unit: Unit,
    old: ParamGroup,
    params: list[ShardedParam],
    home: comms.Home,
    mesh: ParallelMesh,
    smaller: ParallelMesh | None,
) -> ParamGroup:
    """A group of ``params`` that takes the place of ``old`` in ``unit``, with the user's settings. ``smaller`` is its
    post-forward mesh."""
    with torch.inference_mode(False):
        made = ParamGroup(params, mesh, home)
    old.forget()
    made.set_up_like(old, **({} if mesh is old.mesh else _options_on(mesh, old)))
    made.unsharded.post_forward_mesh = smaller
    made.on_parameters, made.shows = old.on_parameters, old.shows
    assert unit.hooks is not None
    made.guard(unit.hooks.guards)
    return made


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
        return self._narrowed(self.old, each.start - self.start, each.stop - each.start)

    def places(self, each: Transfer) -> list[Place]:
        """The shapes and dtypes of the pieces that ``each`` brings."""
        size, dim = each.stop - each.start, self.dim
        leaves = self._narrowed(self.old, 0, 0)
        return [((*leaf.shape[:dim], size, *leaf.shape[dim + 1 :]), leaf.dtype) for leaf in leaves]

    def fill(self, new: torch.Tensor, rank: int, arrived: Arrived) -> None:
        """Write the new part on ``rank``, from the old part and from what has ``arrived``."""
        for each in self.transfers:
            if each.target == rank:
                targets = self._narrowed(new, each.start - self.new_start, each.stop - each.start)
                is_here = each.source == rank
                pieces = self.pieces(each) if is_here else [next(arrived[each.source]) for _ in targets]
                for target, piece in zip(targets, pieces, strict=True):
                    target.copy_(piece)

    def _narrowed(self, local: torch.Tensor, start: int, size: int) -> list[torch.Tensor]:
        """The same entries of each plain tensor that ``local`` is made of. A scalar has one entry."""
        leaves = [leaf.detach() for leaf in _torch.leaves(local)]
        return [(leaf.reshape(1) if leaf.dim() == 0 else leaf).narrow(self.dim, start, size) for leaf in leaves]


class _Move:
    """The move that ``survey`` has found possible. ``known`` is None if no rank joins."""

    def __init__(self, survey: Survey, known: Known | None) -> None:
        self._survey, self._rank = survey, dist.get_rank()
        self._optimizers, self._old, self._new = survey.optimizers, survey.old, survey.new
        if not self._old.has_this_rank:
            self._forget_all_states()
            if known is not None:
                self._admit(known)

    def _admit(self, known: Known) -> None:
        """Give this rank, which is not in the old mesh, all that belongs to a parameter there, in tensors without
        values. From then on, it takes part in the move like the others."""
        for (_, param, _), belongings in zip(self._survey.all_params(), known.belongings, strict=True):
            for key, entry in belongings.items():
                value = made(entry, param) if isinstance(entry, Empty) else restored(entry, self._new.device)
                self._set(param, key, value)
        if self._rank in self._survey.joining:
            self._materialise_buffers()
            for optimizer, groups in zip(self._optimizers, known.options, strict=True):
                for group, options in zip(optimizer.param_groups, groups, strict=True):
                    group.update({name: restored(value, self._new.device) for name, value in options.items()})

    def run(self) -> None:
        """Move everything."""
        for _, unit in self._survey.units:
            self._move_unit(unit)
        self._send_plain()
        if not self._new.has_this_rank:
            self._forget_all_states()

    def _move_unit(self, unit: Unit) -> None:
        size = unit.config.post_forward_size
        if size is not None:
            is_smaller = size < self._new.shard.size
            unit.configure(after_forward=AfterForward.RESHARD_TO_SMALLER_MESH if is_smaller else AfterForward.RESHARD)
        unit.move_to(self._new, tuple([self._moved_group(unit, group) for group in unit.groups]))

    def _moved_group(self, unit: Unit, group: ParamGroup) -> ParamGroup:
        """A group of the same parameters on the new mesh, with their values, gradients and optimizer states."""
        mesh = self._new if plans.AxisRole.SHARD in group.mesh.roles else plans.replicated(self._new)
        moving = [self._moving(param, mesh) for param in group.params]
        arrived = self._exchanged([each for of_param in moving for each in of_param.values()])
        params = [self._moved(param, mesh, group.home) for param in group.params]
        size = unit.config.post_forward_size
        is_smaller = size is not None and mesh.has_this_rank and size < mesh.shard.size
        smaller = post_forward_mesh(mesh, size) if is_smaller and size else None
        moved = successor(unit, group, params, group.home, mesh, smaller)
        for param, of_param in zip(moved.params, moving, strict=True):
            self._fill(param.sharded, of_param, arrived)
        return moved

    def _moving(self, param: ShardedParam, mesh: ParallelMesh) -> dict[Key, _Moving]:
        """The tensors of ``param`` that move: its values, its gradient, and the states that are cut like it."""
        before = Cut(param.layout, param.mesh.ranks)
        after = Cut(plans.shard_layout(param.layout.shape, param.layout.dim, mesh.shard.size), mesh.ranks)
        start, new_start = before.interval_of(self._rank)[0], after.interval_of(self._rank)[0]
        found = transfers(before, after)
        tensors: dict[Key, torch.Tensor] = {_VALUES: param.sharded}
        if param.sharded.grad is not None:
            tensors[GRAD], param.sharded.grad = param.sharded.grad, None
        tensors |= {key: value for key, value in self._states_of(param.sharded) if isinstance(value, DTensor)}
        return {
            key: _Moving(_torch.local_of(tensor), param.layout.dim, start, new_start, found)
            for key, tensor in tensors.items()
        }

    def _moved(self, param: ShardedParam, mesh: ParallelMesh, home: comms.Home) -> ShardedParam:
        """``param`` on ``mesh``. Its values are filled in later."""
        layout = plans.shard_layout(param.layout.shape, param.layout.dim, mesh.shard.size)
        spec = replace(param.spec, sharded=plans.plain_spec(layout.shape, layout.dim, mesh).sharded)
        local, shape = _torch.local_of(param.sharded), layout.shard_shape(mesh.shard.rank)
        if is_plain(local):
            new = torch.zeros((), dtype=local.dtype, device=local.device).expand(shape)  # takes no memory
        else:
            new = pinned(param.name, local.new_zeros(shape), home)
        torch_names.set_placement(param.sharded, spec.sharded.mesh, spec.sharded.placements)
        return replace(param, mesh=mesh, layout=layout, spec=spec, local=new, is_cut=True)

    def _fill(self, sharded: nn.Parameter, moving: dict[Key, _Moving], arrived: Arrived) -> None:
        """Give the parameter its values, its gradient and its states on the new mesh."""
        moving.pop(_VALUES).fill(_torch.local_of(sharded), self._rank, arrived)
        if not self._new.has_this_rank:
            self._forget_states(sharded)
            return
        for key, each in moving.items():
            new = made(described(each.old), sharded)
            each.fill(_torch.local_of(new), self._rank, arrived)
            self._set(sharded, key, new)

    def _states_of(self, param: torch.Tensor) -> Iterator[tuple[Key, Any]]:
        """The states that optimizers have for ``param``, in the same order on all ranks."""
        for index, optimizer in enumerate(self._optimizers):
            yield from (((index, name), value) for name, value in optimizer.state.get(param, {}).items())

    def _set(self, param: torch.Tensor, key: Key, value: Any) -> None:
        if key == GRAD:
            param.grad = value
        else:
            index, name = key
            self._optimizers[index].state[param][name] = value

    def _forget_all_states(self) -> None:
        for _, param, _ in self._survey.all_params():
            self._forget_states(param)

    def _forget_states(self, param: torch.Tensor) -> None:
        for optimizer in self._optimizers:
            optimizer.state.pop(param, None)

    def _exchanged(self, moving: Sequence[_Moving]) -> Arrived:
        """Send what other ranks lack, and receive what this rank lacks, as bytes, in one collective of all ranks."""
        rank, num_ranks, device = self._rank, dist.get_world_size(), self._new.device
        pieces: list[list[torch.Tensor]] = [[] for _ in range(num_ranks)]
        places: list[list[Place]] = [[] for _ in range(num_ranks)]
        travelling = [(each, move) for each in moving for move in each.transfers if move.source != move.target]
        for each, move in travelling:
            if move.source == rank:
                pieces[move.target] += each.pieces(move)
            elif move.target == rank:
                places[move.source] += each.places(move)
        if not travelling:  # on all ranks
            return []
        sent, sent_sizes, views = _messages([[(tuple(p.shape), p.dtype) for p in each] for each in pieces], device)
        for view, piece in zip(chain.from_iterable(views), chain.from_iterable(pieces), strict=True):
            view.copy_(piece)
        got, got_sizes, received = _messages(places, device)
        dist.all_to_all_single(got, sent, got_sizes, sent_sizes)
        return [iter(each) for each in received]

    def _send_plain(self) -> None:
        """Send what is not sharded from the first rank of the old mesh to joining ranks, one tensor after another:
        parameters with their states, and buffers."""
        whole = [Transfer(self._survey.first, rank, 0, 1) for rank in self._survey.joining]  # of a tensor with one row
        for tensor in self._plain_tensors() if whole else ():
            row = tensor.unsqueeze(0)
            moving = _Moving(row, 0, 0, 0, whole)
            moving.fill(row, self._rank, self._exchanged([moving]))

    def _plain_tensors(self) -> Iterator[torch.Tensor]:
        """All tensors that are not sharded, and states of such parameters."""
        for tensor in self._survey.plain.values():
            yield from (leaf.detach() for leaf in _torch.leaves(tensor))
        for param in self._survey.plain.values():
            for _, value in self._states_of(param):
                if isinstance(value, torch.Tensor) and value.numel() != 1:  # values of one element are alike
                    yield value

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


def _options_on(mesh: ParallelMesh, group: ParamGroup) -> dict[str, Any]:
    """The options of ``group`` that name process groups, for those of ``mesh``."""
    changes: dict[str, Any] = {}
    if group.options.reduce_axis is not None:
        changes["reduce_axis"] = separate_axis(mesh.shard, mesh.device)
    if has_memory(group, BackendMemory) and mesh.shard.group is not None:
        changes |= in_memory(BackendMemory(mesh.shard.group))
    return changes


def _messages(
    places: Sequence[Sequence[Place]], device: torch.device
) -> tuple[torch.Tensor, list[int], list[list[torch.Tensor]]]:
    """Memory for a message to or from each rank, as bytes; the size of each message, and the tensors in it."""
    nbytes = [[torch.Size(shape).numel() * dtype.itemsize for shape, dtype in each] for each in places]
    packed = [plans.pack(each, _ALIGNMENT_NBYTES) for each in nbytes]
    sizes = [size for _, size in packed]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    tensors = []
    for message, each, lengths, (offsets, _) in zip(memory.split(sizes), places, nbytes, packed, strict=True):
        parts = [message[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]
        tensors.append([part.view(dtype).view(shape) for part, (shape, dtype) in zip(parts, each, strict=True)])
    return memory, sizes, tensors
