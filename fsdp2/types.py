"""What users pass in, implement or catch: policies, protocols, errors. Every other file may import it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype parameters, gradients and activations have. Shards keep theirs, and so does the optimizer.

    Attributes:
        param_dtype: of unsharded parameters, the all-gather and compute; ``None`` keeps the original dtype. Integer
            parameters are never cast.
        reduce_dtype: of gradient reduction, and of gradients accumulated without communication. ``None``: the
            parameter's ``grad_dtype`` if one was set, else the dtype of the unsharded parameter.
        output_dtype: floating-point tensors in the forward's output are cast to it. ``None`` leaves them alone.
        cast_forward_inputs: whether floating-point tensors in the forward's inputs are cast to ``param_dtype``.
        param_dtype_override_fn: called with each parameter that is to be sharded. Returns its dtype, to keep it
            unsharded, too; or ``param_dtype`` or None, for the default. All ranks must return the same.

    Source: the same class of PyTorch's FSDP2; module-level mixed precision of Zhao et al., VLDB 2023, section 4.4.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)

    def __repr__(self) -> str:
        """As torch prints it; the override is left out while it is unset."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        if self.param_dtype_override_fn is None:
            del values["param_dtype_override_fn"]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading: shards, gradients and optimizer states live on the mesh's device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and so optimizer states live on the host; the optimizer steps there. Without effect on a CPU
    mesh.

    Attributes:
        pin_memory: whether they take pinned memory, so that copies overlap with compute. Pass False if there is not
            enough.

    Source: the same class of PyTorch's FSDP2; offloaded optimizer states as in Ren et al., "ZeRO-Offload", USENIX ATC
    2021.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a full mesh are data-parallel, for parameters that are DTensors on that mesh.

    Attributes:
        shard: the axes that parameters are sharded over, flattened into one. ``None``: gradients are averaged only.
        replicate: the axes that the shards are replicated on (HSDP).

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


class TiedWeights(Enum):
    """What ``fully_shard`` does with a parameter that an inner unit has taken, and that is bound outside of it, too."""

    MOVE = "move"  # to the unit that is being made, which is the nearest one around all its places
    REFUSE = "refuse"  # raise; nothing has changed then


class Comm(ABC):
    """Communication of the user's own. Subclass :class:`AllGather` or :class:`ReduceScatter`."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A contiguous, uninitialised tensor for one message, on the stream of the message. It may be the same memory
        every time: what it held has been copied away before it is written again."""


class AllGather(Comm):
    """An all-gather for :meth:`FSDPModule.set_custom_all_gather`. Source: the interface of PyTorch's FSDP2."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` ``[n]`` of all ranks of ``group`` into ``output_tensor`` ``[W * n]``, in rank order.

        ``output_tensor`` came from ``allocate``; ``input_tensor`` is this rank's slice of it. One call moves all that a
        unit gathers; several dtypes travel as bytes (``uint8``). With ``async_op`` (on the CPU), may return a ``Work``
        while the data travels. Without (on accelerators), the message is enqueued on the current stream.
        """


class ReduceScatter(Comm):
    """A reduce-scatter for :meth:`FSDPModule.set_custom_reduce_scatter`. Source: the interface of PyTorch's FSDP2."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` ``[W * n]`` over the ranks of ``group`` by ``op``, which is ``SUM``; rank r gets
        elements ``[r * n, (r + 1) * n)`` in ``output_tensor`` ``[n]``.

        Both tensors came from ``allocate`` and are of the reduce dtype. ``async_op`` as for an all-gather.
        """


PreResult = tuple[tuple[torch.Tensor, ...], Any]
PostResult = tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None


class _PostAllGather(Protocol):
    """The hook that both protocols have."""

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> PostResult:
        """Make the unsharded tensor.

        Args:
            all_gather_outputs: per tensor of the pre-hook, the payloads of all ranks joined along the sharded dim.
            metadata: what this rank's pre-hook returned with the payload that has been gathered.
            param_dtype: the dtype that the policy asks for, or the shard's.
            out: None in the first call; then the unsharded parameter, to be filled in place.

        Returns:
            In the first call the unsharded tensor, of the outer size or with more rows (they are cut off), and the
            tensors whose memory is to be freed with it; outputs may be among them. None if ``out`` was given.
        """


@runtime_checkable
class AllGatherExtension(_PostAllGather, Protocol):
    """What a tensor subclass implements to decide what is all-gathered in its place.

    Two further members are optional and not part of the type:

    - ``fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool``: True says that the unsharded
      tensor does not alias the outputs: they are released when the post-hook returns.
    - ``fsdp_keep_all_gather_inputs: bool``: True keeps what the pre-hook returned, metadata included, until the shard
      is written. Costs the size of the payload.
    """

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> PreResult:
        """What this rank sends; ``self`` is its shard, without padding, possibly empty.

        Args:
            mesh: the 1D mesh that the parameter is sharded over.
            outer_size, outer_stride: of the unsharded parameter.
            module: the module that holds the parameter, the first one if it is tied.
            mp_policy: as given to ``fully_shard``, but with the ``param_dtype`` of this parameter.

        Returns:
            The tensors to gather: plain, contiguous, on the mesh's device, of any dtype and shape, as many on every
            rank, and equal but for the size along the sharded dim (dim 0 where they have no such dim). And metadata
            for this rank's post-hook. Shapes and dtypes stay the same from call to call.
        """


@runtime_checkable
class MeshAllGatherExtension(_PostAllGather, Protocol):
    """The protocol with the short pre-hook, for payloads that depend on nothing but the shard."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> PreResult:
        """As in :class:`AllGatherExtension`."""


class ScheduleError(RuntimeError):
    """An operation was asked for in a state that does not allow it. Nothing was changed by the refused operation."""


class CommunicationError(RuntimeError):
    """A collective failed, or timed out; what the backend raised is its cause. Compare the events in the texts of all
    ranks: they differ where the ranks' programs parted."""


class MemoryLimitError(RuntimeError):
    """What a unit needs does not fit under :meth:`FSDPModule.set_temporary_memory_limit`, whatever is freed for it."""


class ExtensionError(TypeError):
    """An all-gather hook of a tensor subclass is missing or returned what cannot be gathered. At the first use of a
    group it is raised on all ranks, before anything is gathered."""


class Observer:
    """Watches the runtime. Subclass and override; attach with :func:`fsdp2.trace.observe`. One that raises breaks the
    step that it watches."""

    def on_event(self, event: str, unit: str) -> None:
        """A hook of module ``unit`` fired: ``event`` is ``pre_forward``, ``post_forward``, ``pre_backward``, ..."""

    def on_action(self, action: str, unit: str, nbytes: int) -> None:
        """The runtime acts on ``unit``: ``action`` is ``unshard``, ``wait``, ``reshard``, ``reduce``, ... It allocates,
        moves or releases ``nbytes`` on this rank."""

    def on_transition(self, unit: str, before: str, after: str) -> None:
        """A parameter group of ``unit`` changed its state, for example from ``SHARDED`` to ``UNSHARDING``."""
