"""One sharded parameter: its forms, and the places in modules where it is bound.

``ParamRecord`` is what ``fully_shard`` resolved before it changed anything. ``ShardedParam`` lives on: it owns the
sharded ``nn.Parameter`` (a DTensor whose local tensor is a slice of the group's flat shard buffer) and the unsharded
one. Rule: the unsharded ``nn.Parameter`` object never changes while its dtype stays, because autograd saves it (I1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fsdp2 import _torch
from fsdp2.layout import ShardLayout, contiguous_stride
from fsdp2.mesh import ParallelMesh
from fsdp2.plan import PlanInput
from fsdp2.precision import ParamDtypes


class Slot(NamedTuple):
    """A place where a parameter is bound; tied parameters have several."""

    module: nn.Module
    name: str


@dataclass(frozen=True)
class ParamRecord:
    """One parameter as resolved: nothing here is changed by sharding it. ``name`` is relative to the module given."""

    name: str
    param: nn.Parameter
    slots: tuple[Slot, ...]
    layout: ShardLayout
    placements: tuple[Placement, ...]
    dtypes: ParamDtypes


class ShardedParam:
    """A parameter under management.

    Attributes:
        name, full_name: from the module given to ``fully_shard``, and from the root, once there is one.
        sharded: bound between passes; what optimizers and state dicts see.
        unsharded: bound in forward and backward; created at first use, memory owned by the group.
        accumulated: gradients in reduce dtype that were not communicated yet, where that differs from compute dtype.
    """

    def __init__(self, record: ParamRecord, mesh: ParallelMesh) -> None:
        self.name = record.name
        self.full_name = record.name
        self.slots = record.slots
        self.layout = record.layout
        self.dtypes = record.dtypes
        self.placements = record.placements
        self.mesh = mesh
        self.stride = contiguous_stride(record.layout.shape)
        self.sharded: nn.Parameter = record.param
        self.unsharded: nn.Parameter | None = None
        self.accumulated: torch.Tensor | None = None

    @property
    def plan_input(self) -> PlanInput:
        return PlanInput(self.name, self.layout, self.dtypes)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard, without padding."""
        return self.layout.shard_shape(self.mesh.shard.rank)

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the unsharded ``full``, as a view."""
        start, stop = self.layout.interval(self.mesh.shard.rank)
        return full.narrow(self.layout.dim, start, stop - start)

    def sharded_parameter(self, local: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """``local`` as the DTensor parameter that this rank's shard is bound as."""
        return _dtensor_parameter(local, self.mesh, self.placements, self, requires_grad)

    def resting_parameter(self, local: torch.Tensor, mesh: ParallelMesh) -> nn.Parameter:
        """``local`` as the DTensor parameter on the post-forward ``mesh``."""
        placements = mesh.placements(self.layout.dim)
        return _dtensor_parameter(local, mesh, placements, self, self.sharded.requires_grad)

    def unsharded_parameter(self, data: torch.Tensor) -> nn.Parameter:
        """``data`` of the unsharded shape as the parameter that compute reads."""
        return nn.Parameter(data, requires_grad=self.sharded.requires_grad)

    def current(self) -> nn.Parameter:
        """The parameter that is bound in the first slot now; users may have replaced ours."""
        module, name = self.slots[0]
        bound = getattr(module, name, None)
        if not isinstance(bound, DTensor) or tuple(bound.shape) != self.layout.shape:
            found = "nothing" if bound is None else f"{type(bound).__name__} of shape {tuple(bound.shape)}"
            raise TypeError(
                f"parameter '{self.full_name}': expected a DTensor of shape {self.layout.shape} on the mesh given to "
                f"fully_shard, found {found}. Load a state dict of DTensors, or load before fully_shard."
            )
        return bound  # type: ignore[return-value]

    def adopt(self, param: nn.Parameter, dtypes: ParamDtypes) -> None:
        """Manage ``param`` from now on, in all slots."""
        self.sharded = param
        if dtypes != self.dtypes:
            self.dtypes = dtypes
            self._keep_unreduced_gradient()
            self.unsharded = None

    def resting_layout(self, num_shards: int) -> ShardLayout:
        return replace(self.layout, num_shards=num_shards)

    def _keep_unreduced_gradient(self) -> None:
        if self.unsharded is not None and self.unsharded.grad is not None:
            self.accumulated = self.unsharded.grad.to(self.dtypes.reduce)


def check_uniform_dtypes(params: Iterable[tuple[str, torch.dtype, bool]]) -> None:
    """Refuse trainable parameters of different dtypes in one group; ``params`` yields (name, dtype, trainable).

    Raises:
        ValueError: names the first parameter that differs from the first trainable one.
    """
    trainable = [(name, dtype) for name, dtype, requires_grad in params if requires_grad]
    for name, dtype in trainable:
        if dtype is not trainable[0][1]:
            raise ValueError(
                f"fully_shard: parameter '{name}' is {dtype}, but '{trainable[0][0]}' of the same group is "
                f"{trainable[0][1]}; the trainable parameters of one group are reduced together in one dtype. "
                "Convert the module to one dtype, or call fully_shard on the differing submodule first."
            )


def check_device(name: str, found: torch.device, expected: torch.device) -> None:
    """Refuse a shard that is neither on the mesh's device nor on the meta device.

    Raises:
        ValueError: names the parameter and both devices.
    """
    if found != expected and found.type != "meta":
        raise ValueError(
            f"parameter '{name}' is on {found}, but its mesh is on {expected}. "
            f"Move the model with model.to('{expected}'), or load a state dict from that device."
        )


class Bindings:
    """Writes one form of each parameter into all slots of a group, without ``nn.Module.__setattr__`` where possible."""

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._plain: list[tuple[dict[str, nn.Parameter | None], str, int]] = []
        self._custom: list[tuple[nn.Module, str, int]] = []
        for index, param in enumerate(params):
            for module, name in param.slots:
                if _torch.sets_attributes_plainly(module):
                    self._plain.append((_torch.parameters_dict(module), name, index))
                else:
                    self._custom.append((module, name, index))

    def bind(self, forms: Sequence[nn.Parameter]) -> None:
        """Bind ``forms[i]`` in the slots of parameter i."""
        for parameters, name, index in self._plain:
            parameters[name] = forms[index]
        for module, name, index in self._custom:
            setattr(module, name, forms[index])


def _dtensor_parameter(
    local: torch.Tensor,
    mesh: ParallelMesh,
    placements: tuple[Placement, ...],
    param: ShardedParam,
    requires_grad: bool,
) -> nn.Parameter:
    spec = _torch.dtensor_spec(mesh.mesh, placements, torch.Size(param.layout.shape), param.stride, local.dtype)
    return nn.Parameter(_torch.dtensor(local, spec), requires_grad=requires_grad)
