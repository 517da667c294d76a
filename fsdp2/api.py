"""What users pass in, implement or catch.

Plain words of the package: policies, errors and the ``Observer`` seam. This room knows no stream, no process group and
no plan; every other room may import it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "ExtensionError",
    "MixedPrecisionPolicy",
    "Observer",
    "OffloadPolicy",
    "ParamPlacement",
    "ScheduleError",
]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype parameters, gradients and activations have, for one ``fully_shard`` call.

    The sharded parameters keep their original dtype, so the optimizer always steps in that dtype.

    Attributes:
        param_dtype: dtype of the unsharded parameters, hence of the all-gather and of forward and backward compute.
            ``None`` keeps the original dtype. Integer parameters are never cast.
        reduce_dtype: dtype of gradient reduction, and of gradients accumulated without communication. ``None`` means
            the dtype of the unsharded parameters.
        output_dtype: floating-point tensors in the forward's output are cast to it. ``None`` leaves them alone.
        cast_forward_inputs: whether floating-point tensors in the forward's inputs are cast to ``param_dtype``.

    Source: the same class of PyTorch's FSDP2; module-level mixed precision of Zhao et al., VLDB 2023, section 4.4.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading: shards, gradients and optimizer states live on the mesh's device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards and gradients live on the host. Accepted by name only: ``fully_shard`` refuses it until it is built.

    Attributes:
        pin_memory: whether host memory is pinned, so that copies overlap with compute.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a full mesh are data-parallel, for parameters that are DTensors on that mesh.

    Attributes:
        shard: name, or names, of the axes that parameters are sharded over. Several are flattened into one. ``None``:
            parameters are not sharded, only their gradients are averaged (DDP).
        replicate: name, or names, of the axes that the shards are replicated on (HSDP).

    Raises:
        ValueError: neither is given.

    Source: the same class of PyTorch's FSDP2.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shard_names and not self.replicate_names:
            raise ValueError("DataParallelMeshDims: give the name of at least one axis, as shard or as replicate.")

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
    """What ``shard_placement_fn`` may return for a parameter that is sharded over other ranks than the rest.

    Attributes:
        placement: the tensor dimension to cut; ``None`` means ``Shard(0)``.
        mesh: 1D (shard) or 2D (replicate, shard), for example the mesh of the ranks that hold the same experts.
    """

    placement: Shard | None
    mesh: DeviceMesh


class ScheduleError(RuntimeError):
    """An operation was asked for in a state that does not allow it. Nothing was changed by the refused operation."""


class ExtensionError(TypeError):
    """An all-gather hook of a tensor subclass is missing or returned what cannot be gathered; see ``extensions``.

    At the first use of a group it is raised on all ranks, whichever found it, before anything is gathered.
    """


class Observer:
    """Watches the runtime without changing it. Subclass and override; attach with :func:`fsdp2.trace.observe`.

    An observer that raises breaks the step it watches: keep the methods cheap and total.
    """

    def on_event(self, event: str, unit: str) -> None:
        """A hook of module ``unit`` fired: ``event`` is ``pre_forward``, ``post_forward``, ``pre_backward``, ..."""

    def on_action(self, action: str, unit: str, nbytes: int) -> None:
        """The runtime acts on ``unit``: ``action`` is ``unshard``, ``wait``, ``reshard``, ``reduce``, ...

        ``nbytes`` is the size of what is allocated, moved or released on this rank; 0 where nothing is.
        """

    def on_transition(self, unit: str, before: str, after: str) -> None:
        """A parameter group of ``unit`` changed its state, for example from ``SHARDED`` to ``UNSHARDING``."""
