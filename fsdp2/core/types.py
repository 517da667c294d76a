"""What users pass in, implement or catch: policies, interfaces, errors. Every other file may import this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

DOCS = "https://github.com/fsdp2/fsdp2/blob/main/docs"  # errors point to pages that are not in the wheel


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of parameters, gradients and activations. Shards and optimizer states keep their own dtype.

    Attributes:
        param_dtype: dtype of unsharded parameters, the all-gather and compute; ``None`` keeps the original dtype.
            Integer parameters are never cast.
        reduce_dtype: dtype of gradient reduction, and of gradients accumulated without communication. ``None``: the
            parameter's ``grad_dtype`` if one was set, else the dtype of the shards with torch 2.15 or newer, and that
            of the unsharded parameter with older versions, as in torch.
        output_dtype: floating-point tensors in the forward's output are cast to it. ``None`` leaves them alone.
        cast_forward_inputs: whether floating-point tensors in the forward's inputs are cast to ``param_dtype``.
        param_dtype_override_fn: called once per parameter; returns the compute dtype of this parameter: its own dtype,
            ``param_dtype``, or None for ``param_dtype``. It must return the same on all ranks.
        reduce_wire: a dtype narrower than ``reduce_dtype``, or a :class:`fsdp2.tensors.GradientWire`: the format in
            which gradients are sent. They are summed in ``reduce_dtype``.

    Source: the same class of PyTorch's FSDP2; module-level mixed precision of Zhao et al., VLDB 2023, section 4.4.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)
    reduce_wire: Any = field(default=None, kw_only=True, hash=False)

    def __repr__(self) -> str:
        """As torch's prints, and the wire if there is one."""
        shown = [each.name for each in fields(self) if each.name != "reduce_wire" or self.reduce_wire is not None]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading: shards, gradients and optimizer states live on the mesh's device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer states live on the host, and the optimizer steps there. No effect on a CPU mesh.

    Attributes:
        pin_memory: whether shards and gradients are in pinned memory, so that copies overlap with compute. Pass False
            if the host cannot pin enough memory.

    Source: the same class of PyTorch's FSDP2; offloaded optimizer states as in Ren et al., "ZeRO-Offload", USENIX ATC
    2021.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The data-parallel axes of a full mesh, for parameters that are DTensors on this mesh.

    Attributes:
        shard: the axes that shard the parameters, flattened into one. With ``None``, gradients are only averaged.
        replicate: the axes that hold copies of the shards (HSDP).

    Raises:
        ValueError: neither of the two is given.

    Source: the same class of PyTorch's FSDP2.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shard_names and not self.replicate_names:
            raise ValueError(
                "DataParallelMeshDims: shard and replicate name no axis. Pass the name of at least one axis."
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


@dataclass(frozen=True)
class ParamPlacement:
    """``shard_placement_fn`` may return this to shard a parameter over different ranks than the other parameters.

    Attributes:
        placement: the tensor dimension to shard, or ``Replicate()``; ``None`` means ``Shard(0)``.
        mesh: 1D (shard) or 2D (replicate, shard), for example the mesh of the ranks that hold the same experts.
    """

    placement: Shard | Replicate | None
    mesh: DeviceMesh


class ScheduleError(RuntimeError):
    """The current state does not allow the operation. The refused operation changed nothing."""

    __module__ = "fsdp2"  # tracebacks show the name that users catch


class CommunicationError(RuntimeError):
    """A collective failed or timed out; the backend's exception is the cause. Compare the events in the messages of all
    ranks: the first difference shows where the ranks' programs diverged."""

    __module__ = "fsdp2"


class MemoryLimitError(RuntimeError):
    """A unit does not fit under :meth:`FSDPModule.set_temporary_memory_limit`, whatever the runtime frees."""

    __module__ = "fsdp2"


class ExtensionError(TypeError):
    """An all-gather hook of a tensor subclass is missing, or its result cannot be gathered. At the first use of a
    group, all ranks raise this error before anything is gathered."""

    __module__ = "fsdp2"


class Observer:
    """Watches the runtime. Subclass it, override its methods, and attach it with :func:`fsdp2.report.trace.observe`. An
    exception in an observer breaks the step."""

    def on_event(self, event: str, unit: str) -> None:
        """A hook of module ``unit`` fired: ``event`` is ``pre_forward``, ``post_forward``, ``pre_backward``, ..."""

    def on_action(self, action: str, unit: str, nbytes: int) -> None:
        """The runtime acts on ``unit``: ``action`` is ``unshard``, ``wait``, ``reshard``, ``reduce``, ... The action
        allocates, moves or releases ``nbytes`` on this rank."""

    def on_start(self, work: str, unit: str) -> None:
        """This thread starts ``work`` for ``unit``: an action, even if there is nothing to do; or, inside an action, a
        part of a reduction: ``reduce_launch``, ``reduce_finish`` (frees what the reduction reads), ``reduce_land``."""

    def on_stop(self, work: str, unit: str) -> None:
        """``work`` for ``unit`` is done or, on an accelerator, enqueued. Not called if it raised."""

    def on_transition(self, unit: str, before: str, after: str) -> None:
        """A parameter group of ``unit`` changed its state, for example from ``SHARDED`` to ``UNSHARDING``."""
