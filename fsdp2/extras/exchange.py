"""One-time exchanges between ranks. They are slow, and the CPU waits; a step without agreements never runs them."""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.comm.backends import all_reduce
from fsdp2.comm.streams import launched, wait_for, waiting
from fsdp2.plan.mesh import Axis


def exchange(axis: Axis, value: object) -> list[Any]:
    """The ``value`` of every rank on ``axis``, in rank order."""
    if axis.group is None or axis.size == 1:
        return [value]
    if _torch.backend_name(axis.group, torch.device("cpu")) == "gloo":
        return launched(_exchange_by_sums, axis, value)
    values: list[Any] = [None] * axis.size
    with waiting():
        launched(dist.all_gather_object, values, value, group=axis.group)
    return values


def _exchange_by_sums(axis: Axis, value: object) -> list[Any]:
    """Like ``dist.all_gather_object``, but with tensors that ``comm.backends`` knows: see ``_lent`` there."""
    assert axis.group is not None
    mine, rank = pickle.dumps(value), axis.group.rank()
    sizes = torch.zeros(axis.size, dtype=torch.int64, device="cpu")  # whatever the user's default device is
    sizes[rank] = len(mine)
    lengths = _summed(axis, sizes).tolist()
    whole = torch.zeros(sum(lengths), dtype=torch.uint8, device="cpu")
    parts = whole.split(lengths)
    parts[rank].copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    _summed(axis, whole)
    return [pickle.loads(ctypes.string_at(part.data_ptr(), part.numel())) for part in parts]


def _summed(axis: Axis, tensor: torch.Tensor) -> torch.Tensor:
    wait_for(all_reduce(axis.group, tensor))
    return tensor
