"""A process group whose collectives do nothing, so that what a step takes is the runtime's own time.

torch's fake group copies the input of an all-gather once per rank, one after the other: at 512 ranks that is most of
what a step takes, under any runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore


class NullGroup(dist.ProcessGroup):
    """Says of every collective that it is done. torch 2.13 has new names for some of them; both are here."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        done: Future[None] = Future()
        done.set_result(None)
        self._work = _create_work_from_future(done)
        self._name = ""

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    def getBackendName(self) -> str:  # noqa: N802
        return "null"

    def _do_nothing(self, *_: Any) -> dist.Work:
        return self._work

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], *_: Any) -> dist.Work:
        """How ranks exchange objects, when they set up: all say what this one says."""
        for received, mine in zip(outputs, inputs, strict=True):
            for each in received:
                each.copy_(mine)
        return self._work

    allreduce = barrier = broadcast = reduce_scatter = _do_nothing
    all_gather_single = _allgather_base = _do_nothing
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _do_nothing
    reduce_scatter_single = _reduce_scatter_base = _do_nothing
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _do_nothing


@contextmanager
def null_process_group(world_size: int) -> Iterator[None]:
    """Be rank 0 of ``world_size`` ranks that are not there."""
    if not hasattr(dist.Backend, "NULL"):
        dist.Backend.register_backend("null", lambda _, rank, size, __: NullGroup(rank, size), devices=["cpu"])
    dist.init_process_group("null", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
