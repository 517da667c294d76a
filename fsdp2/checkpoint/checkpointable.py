"""State dicts of plain local tensors, as ``torch.distributed.checkpoint`` reads and writes them: with the place of each
rank's shard in the global tensor. ``extras.local_parts`` keeps that place while a parameter is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core import Slot, _torch, groups_by_slot, plans
from fsdp2.extras.local_parts import Geometry, LocalPartSpec, geometry_of
from fsdp2.extras.plain_names import plain_name


@dataclass(frozen=True)
class _Place:
    """Where this rank's part of a parameter lies; the part has ``shape``. ``sharded`` is None if no unit has the
    parameter."""

    name: str
    shape: tuple[int, ...]
    sharded: plans.TensorSpec | None
    geometry: Geometry


def to_checkpointable(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare ``state_dict`` for ``torch.distributed.checkpoint``, for a model whose parameters are plain local tensors
    with the attributes ``global_shape``, ``global_offsets``, ``local_offsets`` and ``local_sizes``.

    In the result, each tensor of such a parameter, including its optimizer states, is a plain tensor that shares memory
    with the original and whose attributes say which boxes of the global tensor it holds. Everything else is unchanged.
    This lets checkpoints load on other ranks and meshes, and into unsharded models. Communicates nothing.

    ``dcp`` reads the attributes if torch has ``torch.distributed.checkpoint.CheckpointableTensor``. In an older torch,
    ``dcp.save`` and ``dcp.load`` of the result raise on all ranks: they would mistake one rank's part for the whole.

    Args:
        model: a model with sharded parameters, or with plain ones that have the attributes.
        state_dict: the state dict of this model or its optimizers, keyed by parameter name: what ``model.state_dict()``
            or ``torch.distributed.checkpoint.state_dict.get_state_dict`` returned, or a dict of these.

    Raises:
        ValueError: a tensor is not cut like its parameter, because the state dict is full or an optimizer keeps a state
            of another shape; or a DTensor does not have the name of a parameter of ``model``.
    """
    return _mapped(state_dict, _Places(model).with_geometry)


def from_checkpointable(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Undo ``to_checkpointable``, keeping what has been loaded into its result: tensors of sharded parameters become
    DTensors again, which share memory. Pass the result to ``set_state_dict`` or ``load_state_dict``.

    Args:
        model: as for ``to_checkpointable``.
        state_dict: the result of ``to_checkpointable``.

    Raises:
        ValueError: a tensor is not what ``to_checkpointable`` returned for its parameter.
    """
    return _mapped(state_dict, _Places(model).as_shard)


class _Places:
    """Looks up the places of a model's tensors by their names in its state dicts."""

    def __init__(self, model: nn.Module) -> None:
        self._by_name = dict(_places(model))
        self._has_any = any(self._by_name.values())

    def _name_in(self, path: tuple[str, ...]) -> str:
        """The longest name that is a part of ``path``: keys in optimizer state dicts contain more than the name."""
        parts = ".".join(path).split(".")
        spans = ((i, i + n) for n in range(len(parts), 0, -1) for i in range(len(parts) - n + 1))
        names = (".".join(parts[start:stop]) for start, stop in spans)
        return next((name for name in names if name in self._by_name), "")

    def with_geometry(self, path: tuple[str, ...], value: torch.Tensor) -> torch.Tensor:
        name = self._name_in(path)
        if not name and self._has_any and isinstance(value, DTensor):
            raise ValueError(
                f"to_checkpointable: the model has no parameter '{'.'.join(path)}', so its place in a global tensor is "
                "unknown. Pass the module whose state dict it is, with the names from there."
            )
        place = self._by_name.get(name)
        if place is None or value.dim() == 0:  # a scalar is the same on all ranks
            return value
        local = _torch.local_of(value) if isinstance(value, DTensor) else value
        _check(place, path, value, is_cut=isinstance(value, DTensor) == (place.sharded is not None), local=local)
        made = local.detach()
        place.geometry.put_on(made)
        _refuse_older_torch(made)
        return made

    def as_shard(self, path: tuple[str, ...], value: torch.Tensor) -> torch.Tensor:
        place = self._by_name.get(self._name_in(path))
        if place is None or place.sharded is None or value.dim() == 0:
            return value
        _check(place, path, value, is_cut=not isinstance(value, DTensor), local=value)
        return place.sharded.dtensor(value.detach())


def _places(model: nn.Module) -> Iterator[tuple[str, _Place | None]]:
    """All names in state dicts, with the places of those parameters that have the attributes."""
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
            elif tensor is not None and not isinstance(tensor, DTensor) and (at := geometry_of(name, tensor)):
                place = _Place(name, tuple(tensor.shape), None, at)
            yield name, place
            yield plain_name(model, name), place


def _mapped(value: Any, leaf: Callable[[tuple[str, ...], Any], Any], path: tuple[str, ...] = ()) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(each, leaf, (*path, str(key))) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, leaf, (*path, str(i))) for i, each in enumerate(value))
    return leaf(path, value) if isinstance(value, torch.Tensor) else value


def _check(place: _Place, path: tuple[str, ...], value: torch.Tensor, *, is_cut: bool, local: torch.Tensor) -> None:
    if not is_cut or tuple(local.shape) != place.shape:
        raise ValueError(
            f"to_checkpointable: '{'.'.join(path)}' is a {type(value).__name__} that has {tuple(local.shape)} on this "
            f"rank, but this rank's part of parameter '{place.name}' has {place.shape}. So its place in the global "
            f"tensor {place.geometry.shape} is unknown. Ask for no full state dict, and leave out what an optimizer "
            "keeps in another shape."
        )


def _refuse_older_torch(tensor: torch.Tensor) -> None:
    """Make ``dcp.save`` raise where it would ignore the attributes. It looks for these methods on tensors first."""
    import torch.distributed.checkpoint as dcp

    if not hasattr(dcp, "CheckpointableTensor"):
        for name in ("__create_write_items__", "__create_chunk_list__"):
            setattr(tensor, name, _unread)


def _unread(*_: object) -> Any:
    raise NotImplementedError(
        "to_checkpointable: torch.distributed.checkpoint of this torch has no CheckpointableTensor. It would take this "
        "rank's part of a tensor for the whole. Use a newer torch for checkpoints of plain local tensors."
    )
