"""The two protocols of all-gather hooks, as types."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.core import MixedPrecisionPolicy

PreResult = tuple[tuple[torch.Tensor, ...], Any]
PostResult = tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None


class _PostAllGather(Protocol):
    """The hook that both protocols share."""

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
            all_gather_outputs: for each tensor of the pre-hook, the payloads of all ranks joined along the sharded dim.
            metadata: what this rank's pre-hook returned with the gathered payload.
            param_dtype: the dtype that the policy asks for; without one, the shard's dtype.
            out: None in the first call; the unsharded parameter in later calls, to be filled in place.

        Returns:
            In the first call, the unsharded tensor and the tensors whose memory the runtime frees with it (outputs may
            be among these). The unsharded tensor has the outer size; extra rows are cut off. None if ``out`` was given.
        """


@runtime_checkable
class AllGatherExtension(_PostAllGather, Protocol):
    """A tensor subclass implements this to choose what is all-gathered instead of its shard.

    One more method is optional and not part of the type:
    ``fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool``: True if the unsharded tensor does
    not alias the outputs. The runtime then releases the outputs when the post-hook returns.
    """

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> PreResult:
        """Return what this rank sends. ``self`` is this rank's shard, without padding, possibly empty.

        Args:
            mesh: the 1D mesh that shards the parameter.
            outer_size, outer_stride: size and strides of the unsharded parameter.
            module: the module that holds the parameter; for a tied parameter, the first such module.
            mp_policy: the policy given to ``fully_shard``, with the ``param_dtype`` of this parameter.

        Returns:
            The tensors to gather, and metadata for this rank's post-hook. The tensors are contiguous, on the mesh's
            device, of any dtype and shape. All ranks return the same number, with equal dtypes and shapes; only the
            size along the sharded dim (dim 0 without such a dim) may differ. Shapes and dtypes are fixed. For a wrapper
            tensor, the inner tensors are sent; they have the wrapper's shape, and the post-hook gets a wrapper.
        """


@runtime_checkable
class MeshAllGatherExtension(_PostAllGather, Protocol):
    """The same protocol with a shorter pre-hook, for payloads that depend only on the shard."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> PreResult:
        """The same as in :class:`AllGatherExtension`."""
