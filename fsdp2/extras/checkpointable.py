"""Plain local tensors that say which part of a global tensor they are: torch's ``CheckpointableTensor``.

A library of tensor parallelism may give each rank plain tensors, with the four attributes of that protocol. A shard of
such a parameter is a DTensor of this rank's part only, which checkpoints would take for the whole. So the geometry is
kept in the spec, and state dicts get what checkpoints read: plain tensors, with the place of this rank's shard.

Rule: a shard is an interval along one dim. So of a box of the geometry, a shard has a box or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.api.adapters import ParamTypes, register_param_types
from fsdp2.group.group import groups_by_slot
from fsdp2.group.hooked_params import is_plain
from fsdp2.group.param import Slot
from fsdp2.plan.mesh import ParallelMesh
from fsdp2.plan.placements import ParamSpec, TensorSpec, param_spec

_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
# Modules around modules, whose names state dicts leave out.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


class Box(NamedTuple):
    """Entries that lie together, in the global tensor and in the local one."""

    global_offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    size: tuple[int, ...]

    def between(self, dim: int, start: int, stop: int) -> Box | None:
        """What lies in the interval of ``dim`` of the local tensor, counted from ``start``; None if nothing does."""
        first, end = self.local_offset[dim], self.local_offset[dim] + self.size[dim]
        low, high = max(first, start), min(end, stop)
        if low >= high:
            return None
        return Box(
            _with(self.global_offset, dim, self.global_offset[dim] + low - first),
            _with(self.local_offset, dim, low - start),
            _with(self.size, dim, high - low),
        )


def _with(entries: tuple[int, ...], dim: int, entry: int) -> tuple[int, ...]:
    return (*entries[:dim], entry, *entries[dim + 1 :])


@dataclass(frozen=True)
class Geometry:
    """Where a local tensor lies in a global one of ``shape``. What no box has is padding."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def between(self, dim: int, start: int, stop: int) -> Geometry:
        """That of the interval from ``start`` to ``stop`` along ``dim`` of the local tensor."""
        return Geometry(self.shape, tuple(cut for box in self.boxes if (cut := box.between(dim, start, stop))))

    def put_on(self, tensor: torch.Tensor) -> None:
        """Give ``tensor`` the attributes of the protocol."""
        columns = tuple(zip(*self.boxes, strict=True)) or ((), (), ())
        for name, value in zip(_FIELDS, (self.shape, *columns), strict=True):
            setattr(tensor, name, value)


def geometry_of(name: str, tensor: torch.Tensor) -> Geometry | None:
    """What is written on ``tensor``; None if one of the four attributes is missing, as torch has it.

    Raises:
        ValueError: the attributes do not fit each other, or the tensor.
    """
    written = tuple(getattr(tensor, each, None) for each in _FIELDS)
    if any(each is None for each in written):
        return None
    local = tuple(tensor.shape)
    try:
        shape = _integers(written[0])
        boxes = tuple(Box(*map(_integers, box)) for box in zip(*written[1:], strict=True))
        fits = all(_is_inside(box.global_offset, box.size, shape) for box in boxes)
        fits = fits and all(_is_inside(box.local_offset, box.size, local) for box in boxes)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        found = ", ".join(f"{key}={value}" for key, value in zip(_FIELDS, written, strict=True))
        raise ValueError(
            f"fully_shard: parameter '{name}' of shape {local} has {found}. Expected, as in torch's "
            "CheckpointableTensor, an offset in the global tensor, one in the local tensor and a size for each box, "
            f"all of {len(local)} numbers, and boxes inside both tensors. Correct these attributes, or delete them."
        )
    return Geometry(shape, boxes)


def _integers(values: Any) -> tuple[int, ...]:
    return tuple(int(each) for each in values)


def _is_inside(offset: tuple[int, ...], size: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(low >= 0 and n >= 0 and low + n <= end for low, n, end in zip(offset, size, shape, strict=True))


@dataclass(frozen=True)
class LocalPartSpec(ParamSpec):
    """A plain parameter that is this rank's part of a global one. ``geometry``: of the unsharded parameter."""

    geometry: Geometry = field(kw_only=True)

    def unsharded_parameter(self, local: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        made = super().unsharded_parameter(local, requires_grad=requires_grad)
        self.geometry.put_on(made)
        return made


class _LocalParts(ParamTypes):
    """Reads the geometry of parameters. Types of spmd_types come first: with these, shards are DTensors that know their
    place."""

    def spec(self, name: str, param: torch.Tensor, dim: int, parallel: ParallelMesh) -> ParamSpec | None:
        if isinstance(param, DTensor) or (geometry := geometry_of(name, param)) is None:
            return None
        if not is_plain(param):
            raise ValueError(
                f"fully_shard: parameter '{name}' is a {type(param).__name__} with the attribute global_shape of "
                "torch's CheckpointableTensor, expected a plain nn.Parameter: how its shards lie in the global tensor "
                "is known to its class only. Delete the attributes, or make the parameter a plain one."
            )
        plain = param_spec(name, param, dim, parallel)
        return LocalPartSpec(plain.sharded, plain.unsharded, plain.data_parallel_axes, geometry=geometry)


# State dicts


@dataclass(frozen=True)
class _Place:
    """Of what this rank has of a parameter, of ``shape``. ``sharded``: None if no unit has the parameter. ``geometry``:
    None if none is written on it."""

    name: str
    shape: tuple[int, ...]
    sharded: TensorSpec | None
    geometry: Geometry | None


def to_checkpointable(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """``state_dict``, ready for ``torch.distributed.checkpoint``, of a model whose parameters are plain local tensors
    with the attributes ``global_shape``, ``global_offsets``, ``local_offsets`` and ``local_sizes``.

    For each tensor of such a parameter, its optimizer states included, it has a plain tensor that shares memory, and
    that says by these attributes which boxes of the global tensor it has. Everything else is as before. So checkpoints
    load on other ranks and meshes, and into models that are not sharded at all. Communicates nothing.

    ``dcp`` reads the attributes if torch has ``torch.distributed.checkpoint.CheckpointableTensor``. In an older torch,
    ``dcp.save`` and ``dcp.load`` of the result raise on all ranks: they would take one rank's part for the whole.

    Args:
        model: with sharded parameters, or with plain ones that have the attributes.
        state_dict: of this model or its optimizers, by names of parameters: what ``model.state_dict()`` or
            ``torch.distributed.checkpoint.state_dict.get_state_dict`` returned, or a dict of these.

    Raises:
        ValueError: a tensor of such a parameter is not cut like it: the state dict is full, or an optimizer keeps
            something of another shape.
    """
    return _mapped(state_dict, partial(_with_geometry, _Places(model)))


def from_checkpointable(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What ``to_checkpointable`` was given, with what has been loaded into its result since: tensors of sharded
    parameters are DTensors again, and share memory. Give it to ``set_state_dict``, or to ``load_state_dict``.

    Args:
        model: as for ``to_checkpointable``.
        state_dict: the result of ``to_checkpointable``.

    Raises:
        ValueError: a tensor is not what ``to_checkpointable`` has returned for its parameter.
    """
    return _mapped(state_dict, partial(_as_shard, _Places(model)))


class _Places:
    """What a model has under the names in its state dicts."""

    def __init__(self, model: nn.Module) -> None:
        self._by_name = dict(_places(model))

    def at(self, path: tuple[str, ...]) -> _Place | None:
        """The one with the longest name that is a part of ``path``: state dicts of optimizers say more than a name."""
        parts = ".".join(path).split(".")
        spans = ((i, i + n) for n in range(len(parts), 0, -1) for i in range(len(parts) - n + 1))
        names = (".".join(parts[start:stop]) for start, stop in spans)
        return next((self._by_name[name] for name in names if name in self._by_name), None)


def _places(model: nn.Module) -> Iterator[tuple[str, _Place | None]]:
    managed = groups_by_slot()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, tensor in (*_torch.parameters_dict(module).items(), *module.named_buffers(recurse=False)):
            name = f"{prefix}.{key}" if prefix else key
            place = None
            if (found := managed.get(Slot(module, key))) is not None:
                param = found[0].params[found[1]]
                layout = param.layout
                if isinstance(spec := param.spec, LocalPartSpec) and layout.shape:
                    geometry = spec.geometry.between(layout.dim, *layout.interval(param.mesh.shard.rank))
                    place = _Place(name, param.shard_shape, spec.sharded, geometry)
            elif tensor is not None and not isinstance(tensor, DTensor):
                place = _Place(name, tuple(tensor.shape), None, geometry_of(name, tensor))
            yield name, place
            yield ".".join(part for part in name.split(".") if part not in _WRAPPERS), place


def _mapped(value: Any, leaf: Callable[[tuple[str, ...], Any], Any], path: tuple[str, ...] = ()) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(each, leaf, (*path, str(key))) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, leaf, (*path, str(i))) for i, each in enumerate(value))
    return leaf(path, value) if isinstance(value, torch.Tensor) else value


def _with_geometry(places: _Places, path: tuple[str, ...], value: torch.Tensor) -> torch.Tensor:
    place = places.at(path)
    if place is None or place.geometry is None or value.dim() == 0:  # scalars lie nowhere else
        return value
    local = _torch.local_of(value) if isinstance(value, DTensor) else value
    _check(place, path, value, is_cut=isinstance(value, DTensor) == (place.sharded is not None), local=local)
    made = local.detach()
    place.geometry.put_on(made)
    _refuse_older_torch(made)
    return made


def _as_shard(places: _Places, path: tuple[str, ...], value: torch.Tensor) -> torch.Tensor:
    place = places.at(path)
    if place is None or place.geometry is None or place.sharded is None or value.dim() == 0:
        return value
    _check(place, path, value, is_cut=not isinstance(value, DTensor), local=value)
    return place.sharded.dtensor(value.detach())


def _check(place: _Place, path: tuple[str, ...], value: torch.Tensor, *, is_cut: bool, local: torch.Tensor) -> None:
    if not is_cut or tuple(local.shape) != place.shape:
        raise ValueError(
            f"to_checkpointable: '{'.'.join(path)}' is a {type(value).__name__} that has {tuple(local.shape)} on this "
            f"rank, but this rank's part of parameter '{place.name}' has {place.shape}. So its place in the global "
            f"tensor {place.geometry.shape if place.geometry else ()} is unknown. Ask for no full state dict, and "
            "leave out what an optimizer keeps in another shape."
        )


def _refuse_older_torch(tensor: torch.Tensor) -> None:
    """Make ``dcp.save`` raise where it would ignore the attributes. It asks tensors for these methods first."""
    import torch.distributed.checkpoint as dcp

    if not hasattr(dcp, "CheckpointableTensor"):
        for name in ("__create_write_items__", "__create_chunk_list__"):
            setattr(tensor, name, _unread)


def _unread(*_: object) -> Any:
    raise NotImplementedError(
        "to_checkpointable: torch.distributed.checkpoint of this torch has no CheckpointableTensor. It would take this "
        "rank's part of a tensor for the whole. Use a newer torch for checkpoints of plain local tensors."
    )


def register() -> None:
    """Keep the geometry of parameters in each call of ``fully_shard`` from now on."""
    register_param_types(_LocalParts())
