"""DTensors made and read without their Python, and meshes made of others."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import cast

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def dtensor_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """The spec that ``dtensor`` needs. ``DTensor.from_local`` builds one per call and runs autograd."""
    return DTensorSpec(mesh, tuple(placements), TensorMeta(shape, stride, dtype))


def dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """``local`` as a DTensor, no check, no autograd: 1 us where ``DTensor.from_local`` takes 50.

    ``DTensor.__new__`` does all the work; ``__init__``, which is skipped, only tells exporters about it. It copies the
    local tensor's storage offset, and ``copy.deepcopy`` then refuses the DTensor: a stand-in without an offset avoids
    that.
    """
    plain = type(local) is torch.Tensor  # subclasses have no offset, and may lack new_empty
    made = DTensor.__new__(DTensor, local.new_empty(0) if plain else local, spec, requires_grad=False)
    made._local_tensor = local
    return made


def dtensors_like(params: Sequence[torch.Tensor], locals_: Sequence[torch.Tensor]) -> list[DTensor]:
    """``locals_`` as DTensors that are sharded like ``params``, of the same dtype and on the same device."""
    made = []
    for like, local in zip(cast(Sequence[DTensor], params), locals_, strict=True):
        each = DTensor.__new__(DTensor, like._local_tensor, like._spec, requires_grad=False)  # its local has no offset
        each._local_tensor = local
        made.append(each)
    return made


def dtensors_placed_like(params: Sequence[torch.Tensor], locals_: Sequence[torch.Tensor]) -> list[DTensor]:
    """The same, but of the dtypes of ``locals_``."""
    pairs = zip(cast(Sequence[DTensor], params), locals_, strict=True)
    return [
        dtensor(local, dtensor_spec(like.device_mesh, like.placements, like.shape, like.stride(), local.dtype))
        for like, local in pairs
    ]


get_local = attrgetter("_local_tensor")  # a DTensor's local tensor, without Python


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local tensor itself; ``to_local()`` returns a new, differentiable view."""
    return tensor._local_tensor  # type: ignore[attr-defined]


def locals_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The local tensors of many DTensors."""
    return list(map(get_local, tensors))


def locals_placed_like(
    params: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """The local tensors of ``tensors``; None for those that are no DTensor, or not placed like their parameter. Made
    for many: where the runtime has made the DTensor, its spec is the parameter's, and one test tells."""
    return [
        tensor._local_tensor
        if isinstance(tensor, DTensor) and (tensor._spec is param._spec or _is_placed_like(param, tensor))
        else None
        for param, tensor in zip(cast(Sequence[DTensor], params), tensors, strict=True)
    ]


def specs_of(tensors: Sequence[torch.Tensor]) -> list[object]:
    """The spec of each DTensor, None of others. It says how the tensor is placed, and is never changed."""
    return [getattr(tensor, "_spec", None) for tensor in tensors]


def _is_placed_like(param: DTensor, tensor: DTensor) -> bool:
    local = tensor._local_tensor
    is_plain = type(local) is torch.Tensor and local.shape == param._local_tensor.shape
    return is_plain and tensor.placements == param.placements and tensor.device_mesh == param.device_mesh


def set_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Point a DTensor at other local memory; the object stays, so optimizers and ties keep their references."""
    cast(DTensor, tensor)._local_tensor = local


def arrived_local(tensor: DTensor) -> torch.Tensor:
    """A DTensor's local tensor, after the collective that makes it: DTensor leaves some pending."""
    local = tensor._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def strided_shard(dim: int, split_factor: int) -> Placement:
    """A part of each of ``split_factor`` pieces along ``dim`` that axes further right have made."""
    return cast(Placement, _StridedShard(dim, split_factor=split_factor))


def shards_dim(placement: Placement, dim: int) -> bool:
    """Whether ``placement`` cuts tensor dimension ``dim``; strided shards are no ``Shard`` for ``is_shard()``."""
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def concatenated_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """The axes of ``meshes``, parts of one mesh, behind each other. Public API only takes axes in their order."""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)


def flattened_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of ``mesh`` as one axis, with a process group of its own, made once per name."""
    return mesh._flatten(name)
