"""What gradients have lost on their way, kept by wires with error feedback: in checkpoints, and on other meshes.

On every rank lies what its own payloads have lost, of all parameters. A checkpoint holds the mean over the ranks,
cut like the parameters, so that any number of ranks can load it.

Rule: after ``wire_residuals``, the ranks hold what they would hold if they had loaded its result. So a run that saves
and goes on is equal to one that loads, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core import ParamGroup, ShardedParam, _torch, comms, plans, units_under
from fsdp2.extras.gradient_wires import WiredReduce, as_real, keeps_residuals
from fsdp2.extras.output import listed
from fsdp2.extras.units import sharded_unit

_MAX_NAMES = 4


def wire_residuals(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the gradients of ``model`` have lost on their way and still owe, for a checkpoint. Call it on all ranks,
    between steps.

    Returns a DTensor by the name of each trainable parameter whose unit has a ``reduce_wire`` with error feedback: cut
    like the parameter, in reduce dtype, zeros before the first step. Like a gradient, it is the mean over all ranks.
    The call sends all that ranks owe to the owners of the shards, so that the run continues exactly as one that loads
    the result with :func:`load_wire_residuals`.

    Raises:
        ValueError: ``model`` is not sharded.
    """
    found: dict[str, torch.Tensor] = {}
    for rows in _wired(model, "wire_residuals"):
        flats = rows.collected()
        rows.give(flats)
        found.update({name: rows.shard(flats, place) for name, place in rows.places().items()})
    return found


def load_wire_residuals(model: nn.Module, residuals: Mapping[str, torch.Tensor]) -> None:
    """Owe what ``residuals`` hold from the next step on. They are the result of :func:`wire_residuals`, perhaps of a
    model on other ranks, into which a checkpoint has been loaded. With one rank, which sends nothing, it has no effect.

    Raises:
        ValueError: ``model`` is not sharded; or names or shapes differ from those of ``wire_residuals(model)``.
    """
    wired = list(_wired(model, "load_wire_residuals"))
    places = {name: place for rows in wired for name, place in rows.places().items()}
    differing = sorted(places.keys() ^ residuals.keys())
    shapes = {name: place.param.sharded.shape for name, place in places.items()}
    differing = differing or [name for name, shape in shapes.items() if residuals[name].shape != shape]
    if differing:
        names = listed((f"'{name}'" for name in differing), _MAX_NAMES)
        raise ValueError(
            f"load_wire_residuals: the names or shapes of {names} are not those of wire_residuals(model). Load the "
            "checkpoint into the result of wire_residuals(model), where the same parameters are trainable as in the "
            "saved model."
        )
    for rows in wired:
        flats = rows.zeros()
        for name, place in rows.places().items():
            rows.shard(flats, place).to_local().copy_(_torch.local_of(residuals[name]))
        rows.give(flats)


class _Place(NamedTuple):
    """Where the shard of ``param`` lies: by the number of its plan, and the step in it."""

    param: ShardedParam
    plan: int
    step: plans.ReduceStep


class _Call(NamedTuple):
    """What one call of the comm reduces: part of the sums of a plan, in real numbers. ``column``: where it starts in a
    row of the residual of ``dtype``, whose length is ``width``."""

    dtype: torch.dtype
    plan: int
    start: int
    numel: int
    column: int = 0
    width: int = 0


class _Residuals:
    """The residuals of one group of ``unit``, whose sums ``comm`` computes."""

    def __init__(
        self,
        unit: str,
        group: ParamGroup,
        trainable: Sequence[int],
        reduces: Sequence[plans.ReducePlan],
        comm: WiredReduce,
    ) -> None:
        self._prefix = f"{unit}." if unit else ""
        self._group, self._trainable, self._plans, self._comm = group, trainable, reduces, comm
        self._shard, self._replicate = group.mesh.shard, group.mesh.replicate

    def places(self) -> dict[str, _Place]:
        params = self._group.params
        # As in GroupGradients: a parameter whose gradient is a wrapper has a step for each inner tensor.
        steps = [(params[i], name) for i in self._trainable for name in params[i].inner_gradients() or ("",)]
        found = {}
        for index, plan in enumerate(self._plans):
            for step in plan.steps:
                param, inner = steps[step.index]
                name = f"{self._prefix}{param.name}"
                found[f"{name}.{inner}" if inner else name] = _Place(param, index, step)
        return found

    def zeros(self) -> list[torch.Tensor]:
        """The sums of each plan."""
        device = self._group.mesh.device
        return [torch.zeros(plan.flat_numel, dtype=plan.dtypes.reduce, device=device) for plan in self._plans]

    def shard(self, flats: list[torch.Tensor], place: _Place) -> DTensor:
        shape = place.param.shard_shape
        part = flats[place.plan][place.step.offset :][: torch.Size(shape).numel()]
        return place.param.spec.sharded.dtensor(part.view(shape))

    @torch.no_grad()
    def collected(self) -> list[torch.Tensor]:
        """What all ranks together owe to the gradients of this rank's shards, which are means over all ranks."""
        self._group.unsharded.streams.compute_after_reduce()
        flats = self.zeros()
        for key, calls in groupby(self._calls(), key=lambda call: (call.dtype, call.width)):
            total = self._comm.shards.total_residual(*key, self._group.mesh.device)
            for call in calls:
                _part(flats, call).copy_(total[call.column :][: call.numel])
        for index, flat in enumerate(map(as_real, flats)):
            if self._replicate.size > 1:
                flat += self._of_replicas(index, flat.numel())
                comms.wait_for(comms.launched(comms.all_reduce, self._replicate.group, flat))
            flat /= self._group.mesh.data_parallel_size
        return flats

    @torch.no_grad()
    def give(self, flats: list[torch.Tensor]) -> None:
        """Let each rank owe its part of ``flats`` to its own shards, and nothing else. All replicas owe as much."""
        self._comm.disown()
        for key, calls in groupby(self._calls(), key=lambda call: (call.dtype, call.width)):
            rows = self._comm.shards.residual(*key, self._group.mesh.device).zero_()
            for call in calls:
                rows[self._shard.rank, call.column :][: call.numel] = _part(flats, call) * self._shard.size
        if self._replicate.size > 1:
            for index, flat in enumerate(map(as_real, flats)):
                lost = self._of_replicas(index, flat.numel())
                lost.copy_(flat) if self._shard.size == 1 else lost.zero_()

    def _calls(self) -> Iterator[_Call]:
        """All calls, those of one dtype after another, as the comm packs them."""
        if self._shard.size == 1:
            return
        calls: dict[torch.dtype, list[_Call]] = {}
        for index, plan in enumerate(self._plans):
            dtype = plan.dtypes.reduce
            per_element = 2 if dtype.is_complex else 1
            for start, numel in plan.calls:
                if numel:
                    call = _Call(dtype.to_real(), index, start * per_element, numel * per_element)
                    calls.setdefault(call.dtype, []).append(call)
        for alike in calls.values():
            columns, width = self._comm.shards.columns([call.numel for call in alike])
            for call, column in zip(alike, columns, strict=True):
                yield call._replace(column=column, width=width)

    def _of_replicas(self, index: int, numel: int) -> torch.Tensor:
        """What this rank's sums of a plan have lost on their way to other replicas."""
        exchange = self._comm.replicas(self._replicate.group)
        rows = exchange.residual(index, exchange.part_numel(numel), self._group.mesh.device)
        return rows.view(-1)[:numel]


def _part(flats: list[torch.Tensor], call: _Call) -> torch.Tensor:
    return as_real(flats[call.plan])[call.start :][: call.numel]


def _wired(model: nn.Module, caller: str) -> Iterator[_Residuals]:
    """The groups under ``model`` whose wire keeps residuals."""
    sharded_unit(model, caller)
    for name, unit in units_under(model):
        for group in unit.groups:
            group.take_flags()
            trainable = [i for i, requires_grad in enumerate(group.unsharded.requires_grad) if requires_grad]
            reduces, comm = group.gradients.plans(trainable) if trainable else ((), None)
            if isinstance(comm, WiredReduce) and keeps_residuals(comm.wire):
                yield _Residuals(name, group, trainable, reduces, comm)
