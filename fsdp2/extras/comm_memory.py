"""Collectives in memory that is faster for the backend: its own, or memory at addresses that all ranks know.

Two setters of ``FSDPModule`` load this file. Each gives the groups of a unit an ``AllGather`` and a ``ReduceScatter``
that call the backend's own collectives in such memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from fsdp2.core import ParamGroup, Unit, _torch, comms, expect
from fsdp2.extras import torch_names


class BackendMemory:
    """Memory from the backend's own allocator, if it has one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        backend = _torch.backend_of(self._group, device)
        if not backend.supports_tensor_alloc(device):
            return torch.empty(size, dtype=dtype, device=device)
        return cast(torch.Tensor, backend.allocate_tensor(math.prod(size), dtype=dtype, device=device))

    def prepare(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Nothing to do: the backend already knows its own memory."""


class SymmetricMemory:
    """Memory at addresses that all ranks know. Untested so far, since it needs several GPUs."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        torch_names.symmetric_memory.set_backend(cast(Any, backend))
        dist.barrier(group=group)  # creates the communicator that the memory needs

    def allocate(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        pool = torch_names.symmetric_memory.get_mem_pool(device)  # avoids most exchanges of addresses
        with torch.cuda.use_mem_pool(pool):
            return torch.empty(size, dtype=dtype, device=device)

    def prepare(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        torch_names.symmetric_memory.rendezvous(tensor, group.group_name)


class _InMemory(comms.Comm):
    """The backend's own collective, with buffers that come from the chosen ``memory``."""

    def __init__(self, memory: BackendMemory | SymmetricMemory) -> None:
        self.memory = memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.memory.allocate(size, dtype, device)


class BackendAllGather(_InMemory, comms.AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.memory.prepare(output_tensor, group)  # the input is a part of it
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class BackendReduceScatter(_InMemory, comms.ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.memory.prepare(input_tensor, group)
        self.memory.prepare(output_tensor, group)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def in_memory(memory: BackendMemory | SymmetricMemory) -> dict[str, Any]:
    """The options of a group that communicates in ``memory``."""
    return {
        "gathers_by": comms.GathersBy(BackendAllGather(memory)),
        "reduces_by": comms.ReducesBy(BackendReduceScatter(memory)),
    }


def has_memory(group: ParamGroup, kind: type) -> bool:
    """Whether ``group`` gathers in memory of ``kind``."""
    by = group.options.gathers_by
    return isinstance(by, comms.GathersBy) and _is_in(by.interface, kind)


def _is_in(comm: comms.Comm, kind: type) -> bool:
    return isinstance(getattr(comm, "memory", None), kind)


def communicate_in_memory(caller: str, unit: Unit, asked: Any) -> None:
    """Let ``unit`` communicate in the memory that the setter ``caller`` of its module asks for."""
    if caller == "set_symm_mem_for_comm":
        _use_symmetric_memory(caller, unit, asked)
        return
    _check_no_other_comm(caller, unit, BackendMemory)
    for group in unit.groups:
        shard = group.mesh.shard.group
        none = {"gathers_by": None, "reduces_by": None}
        group.configure(**(none if not asked or shard is None else in_memory(BackendMemory(shard))))


def _use_symmetric_memory(caller: str, unit: Unit, backend: Any) -> None:
    _check_no_other_comm(caller, unit, SymmetricMemory)
    expect(backend == "NCCL", f"{caller}: backend", backend, "'NCCL'", "No other is supported.", by_value=True)
    device = unit.mesh.device
    if device.type != "cuda":
        raise ValueError(
            f"{caller}: the mesh of unit '{unit.name}' is on {device.type}, expected cuda. Only CUDA has symmetric "
            f"memory here. Do not call {caller} on other devices."
        )
    for group in unit.groups:
        shard = group.mesh.shard.group
        if shard is not None:
            options = in_memory(SymmetricMemory(shard, backend))
            group.configure(**(options if group.options.divides_behind_hook else options | {"reduces_by": None}))


def _check_no_other_comm(caller: str, unit: Unit, kind: type) -> None:
    """Refuse a unit with a comm that ``caller`` did not set; comms that it sets have memory of ``kind``."""
    made = [by for group in unit.groups for by in (group.options.gathers_by, group.options.reduces_by)]
    for comm in (by.interface for by in made if isinstance(by, (comms.GathersBy, comms.ReducesBy))):
        if not _is_in(comm, kind):
            raise ValueError(
                f"{caller}: unit '{unit.name}' already communicates by a {type(comm).__name__}, which allocates its "
                "own memory. For each unit, call only one of: set_custom_all_gather and set_custom_reduce_scatter; "
                "set_allocate_memory_from_process_group_for_comm; set_symm_mem_for_comm."
            )
