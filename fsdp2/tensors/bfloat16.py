"""Parameters that are all-gathered in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.extras.checked import checked
from fsdp2.tensors.wire import WireFormatTensor
from fsdp2.tensors.wrapper import Tensors


class BFloat16AllGatherTensor(WireFormatTensor):
    """A parameter that is all-gathered in bfloat16, whatever the dtype of its master values and of compute. If compute
    also uses bfloat16, the unsharded parameter is the gathered memory itself.

    Args:
        data: master values, usually float32. The tensor shares their memory.
        pad: whether this class pads short shards with rows of zeros. ``torch.distributed.fsdp`` needs the padding if
            the number of ranks does not divide dim 0; fsdp2 does not need it.

    Raises:
        TypeError, ValueError: see :meth:`WireFormatTensor.make`.

    Source: the all-gather hooks are those of PyTorch's FSDP2.
    """

    pad: bool
    _consumes_outputs: bool = False

    @checked()
    def __new__(cls, data: torch.Tensor, *, pad: bool = False) -> BFloat16AllGatherTensor:
        return cls.make(data, pad=pad)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[Tensors, None]:
        """The shard ``[rows, ...]`` in bfloat16."""
        self._consumes_outputs = (mp_policy.param_dtype or self.dtype) is not torch.bfloat16
        if not self.pad:
            return (self._data.to(torch.bfloat16),), None
        self.check_cut_along_rows(outer_size)
        padded = self._data.new_zeros((-(-outer_size[0] // mesh.size()), *outer_size[1:]), dtype=torch.bfloat16)
        padded[: self.size(0)].copy_(self._data)
        return (padded,), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: Tensors, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Tensors] | None:
        """The gathered tensor in ``param_dtype``: the gathered memory if ``param_dtype`` is bfloat16, else a copy."""
        (gathered,) = all_gather_outputs
        if out is None:
            converted = gathered.to(param_dtype)
            return converted, () if converted is gathered else (converted,)
        if out.data_ptr() != gathered.data_ptr():
            out.data.copy_(gathered[: out.size(0)])  # .data has its own version counter: autograd must not see a write
        return None

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        """Whether the post-hook copies the outputs. False before the first ``fsdp_pre_all_gather``."""
        return self._consumes_outputs
