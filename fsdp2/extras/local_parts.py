"""Plain local tensors that say which part of a global tensor they are: torch's ``CheckpointableTensor``.

A tensor-parallel library may give each rank plain tensors with the four attributes of that protocol. A shard of such a
parameter is a DTensor of this rank's part only, which checkpoints would mistake for the whole parameter. So the spec
keeps the geometry, and ``checkpoint.checkpointable`` turns it into what checkpoints read.

Rule: a shard is an interval along one dim, so its intersection with a box of the geometry is a box or empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core import ParallelMesh, is_plain, plans

_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


class Box(NamedTuple):
    """A box of entries that is contiguous both in the global tensor and in the local one."""

    global_offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    size: tuple[int, ...]

    def between(self, dim: int, start: int, stop: int) -> Box | None:
        """The part of the box in an interval of the local tensor's ``dim``, counted from ``start``; None if empty."""
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
    """Where a local tensor lies in a global tensor of ``shape``. Entries outside all boxes are padding."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def between(self, dim: int, start: int, stop: int) -> Geometry:
        """The geometry of the interval from ``start`` to ``stop`` along ``dim`` of the local tensor."""
        return Geometry(self.shape, tuple(cut for box in self.boxes if (cut := box.between(dim, start, stop))))

    def put_on(self, tensor: torch.Tensor) -> None:
        """Give ``tensor`` the attributes of the protocol."""
        columns = tuple(zip(*self.boxes, strict=True)) or ((), (), ())
        for name, value in zip(_FIELDS, (self.shape, *columns), strict=True):
            setattr(tensor, name, value)


def geometry_of(name: str, tensor: torch.Tensor) -> Geometry | None:
    """The geometry in the attributes of ``tensor``; None if one of the four is missing, which is torch's rule, too."""
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
class LocalPartSpec(plans.ParamSpec):
    """A plain parameter that is this rank's part of a global one. ``geometry`` is that of the unsharded parameter."""

    geometry: Geometry = field(kw_only=True)

    def unsharded_parameter(self, local: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        made = super().unsharded_parameter(local, requires_grad=requires_grad)
        self.geometry.put_on(made)
        return made


def written_spec(name: str, param: torch.Tensor, dim: int, parallel: ParallelMesh) -> plans.ParamSpec | None:
    """Read the geometry of a parameter. Types of spmd_types take precedence: with them, shards are DTensors that know
    where they lie."""
    if isinstance(param, DTensor) or (geometry := geometry_of(name, param)) is None:
        return None
    if not is_plain(param):
        raise ValueError(
            f"fully_shard: parameter '{name}' is a {type(param).__name__} with the attribute global_shape of "
            "torch's CheckpointableTensor, expected a plain nn.Parameter: how its shards lie in the global tensor "
            "is known to its class only. Delete the attributes, or make the parameter a plain one."
        )
    plain = plans.param_spec(name, param, dim, parallel)
    return LocalPartSpec(plain.sharded, plain.unsharded, plain.data_parallel_axes, geometry=geometry)
