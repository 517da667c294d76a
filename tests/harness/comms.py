"""What carries the bytes: communication of the user's own, for both runtimes, and that of fsdp2 on gloo.

The user's own counts its messages, and sends them as the backend would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp2
from fsdp2.core.comm.backends import CollectiveComm
from fsdp2.extras.peers import PeerComm


@contextmanager
def direct_from(nbytes: int) -> Iterator[None]:
    """In models that are sharded meanwhile, shards of at least ``nbytes`` travel on their own."""
    with pytest.MonkeyPatch.context() as patch:
        for comm in (PeerComm, CollectiveComm):
            patch.setattr(comm, "routing", replace(comm.routing, direct_min_nbytes=nbytes))
        yield


def _dtypes(tensors: list[Tensor]) -> list[str]:
    return sorted(str(tensor.dtype) for tensor in tensors)


@contextmanager
def reductions_noted() -> Iterator[list[list[str]]]:
    """The dtypes of the tensors of each reduce-scatter that is launched meanwhile, sorted."""
    noted: list[list[str]] = []
    launch = PeerComm.reduce

    def noting(self: PeerComm, outputs: list[Tensor], inputs: list[Tensor]) -> Any:
        noted.append(_dtypes(inputs))
        return launch(self, outputs, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeerComm, "reduce", noting)
        yield noted


@contextmanager
def gathers_noted() -> Iterator[list[list[str]]]:
    """The dtypes of the tensors of each all-gather that is first launched meanwhile, sorted."""
    noted: list[list[str]] = []

    def noting(prepare: Any) -> Any:
        def prepare_noting(comm: Any, outputs: list[Tensor], inputs: list[Tensor]) -> Any:
            launch = prepare(comm, outputs, inputs)
            return lambda: (noted.append(_dtypes(inputs)), launch())[1]

        return prepare_noting

    with pytest.MonkeyPatch.context() as patch:
        for comm in (PeerComm, CollectiveComm):
            patch.setattr(comm, "all_gather", noting(comm.all_gather))
        yield noted


class _Buffers:
    """New memory for every message, or the same for all of one size and dtype.

    ``is_async``: returns a work for each message, although none is asked for.
    """

    def __init__(self, *, persistent: bool = False, is_async: bool = False) -> None:
        self._persistent, self._is_async = persistent, is_async
        self._kept: dict[tuple[Any, ...], Tensor] = {}
        self.messages: list[tuple[Any, ...]] = []  # dtype, and sizes of input and output
        self.groups: list[dist.ProcessGroup] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        kept = self._kept if self._persistent else {}
        key = (*size, dtype)
        if key not in kept:
            kept[key] = torch.empty(*size, dtype=dtype, device=device)
        return kept[key]

    def take(self) -> list[tuple[Any, ...]]:
        """The messages since the last call, sorted: runtimes prefetch at different times."""
        messages, self.messages = self.messages, []
        return sorted(messages, key=repr)

    def _note(self, output: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
        self.messages.append((str(mine.dtype), mine.numel(), output.numel()))
        self.groups.append(group)


class CountingAllGather(_Buffers, fsdp2.core.comms.AllGather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self._note(output_tensor, input_tensor, group)
        is_async = async_op or self._is_async
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=is_async)


class CountingReduceScatter(_Buffers, fsdp2.core.comms.ReduceScatter):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self._note(output_tensor, input_tensor, group)
        is_async = async_op or self._is_async
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=is_async)
