"""Communication of the user's own, for both runtimes: it counts its messages, and sends them as the backend would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fsdp2


class _Buffers:
    """New memory for every message, or the same for all of one size and dtype.

    ``is_sync``: waits for each message itself, and returns no work, whatever is asked for.
    """

    def __init__(self, *, persistent: bool = False, is_sync: bool = False) -> None:
        self._persistent, self._is_sync = persistent, is_sync
        self._kept: dict[tuple[Any, ...], Tensor] = {}
        self.messages: list[tuple[Any, ...]] = []  # dtype, and sizes of input and output
        self.groups: list[dist.ProcessGroup] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self._persistent:
            return torch.empty(*size, dtype=dtype, device=device)
        key = (*size, dtype)
        if key not in self._kept:
            self._kept[key] = torch.empty(*size, dtype=dtype, device=device)
        return self._kept[key]

    def take(self) -> list[tuple[Any, ...]]:
        """The messages since the last call, sorted: runtimes prefetch at different times."""
        messages, self.messages = self.messages, []
        return sorted(messages, key=repr)

    def _note(self, output: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
        self.messages.append((str(mine.dtype), mine.numel(), output.numel()))
        self.groups.append(group)


class CountingAllGather(_Buffers, fsdp2.AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._note(output_tensor, input_tensor, group)
        is_async = async_op and not self._is_sync
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=is_async)


class CountingReduceScatter(_Buffers, fsdp2.ReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._note(output_tensor, input_tensor, group)
        is_async = async_op and not self._is_sync
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=is_async)
