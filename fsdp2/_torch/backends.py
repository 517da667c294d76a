"""Process groups: collectives without the Python around them, and memory of the backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that serves ``device`` in ``group``; the public name covers all devices in one string. Groups written
    in Python, such as torch's threaded one for tests, are their own backend."""
    try:
        return group._get_backend(device).name()
    except RuntimeError:
        return group.name()


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long an operation of ``group`` may take on ``device``, if its backend has a limit. Users set it when they
    make the group; no public name tells what they set."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # it is written in Python, such as torch's for threads
        return None


def all_gather(
    group: dist.ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, on_stream: bool
) -> Callable[[], dist.Work | None]:
    """What gathers each input into its output in one launch; ``on_stream`` uses the current stream of the call.

    NCCL's group then returns no work: the collective is ordered on the stream. Other backends return one.

    The public ``all_gather_into_tensor`` takes one tensor and costs 5 us more of Python per call.
    """
    options = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = not on_stream
    if len(outputs) == 1:
        return partial(_method(group, "all_gather_single", "_allgather_base"), outputs[0], inputs[0], options)
    coalesced = _method(group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    return partial(coalesced, outputs, inputs, options)


def reduce_scatter(
    group: dist.ProcessGroup, op: Any, *, on_stream: bool
) -> Callable[[list[torch.Tensor], list[torch.Tensor]], dist.Work | None]:
    """What reduce-scatters each input into its output in one launch, (outputs, inputs); ``on_stream`` as for
    ``all_gather``. The public ``reduce_scatter_tensor`` is in Python, as is making the options."""
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = not on_stream
    single = _method(group, "reduce_scatter_single", "_reduce_scatter_base")
    coalesced = _method(group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")

    def launch(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> dist.Work | None:
        if len(outputs) == 1:
            return single(outputs[0], inputs[0], options)
        return coalesced(outputs, inputs, options)

    return launch


def allocate_by_backend(
    group: dist.ProcessGroup, size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Memory that the backend of ``group`` transfers without copies of its own, such as NCCL's registered memory; else
    ordinary memory. The backend behind a group has no public name."""
    backend = group._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        return torch.empty(size, dtype=dtype, device=device)
    return backend.allocate_tensor(math.prod(size), dtype=dtype, device=device)


def use_symmetric_memory(group: dist.ProcessGroup, backend: str) -> None:
    """Allocate symmetric memory by ``backend`` from now on. Its exchange of addresses needs a communicator, which the
    barrier makes. The whole module is private."""
    _symmetric_memory.set_backend(cast(Any, backend))
    dist.barrier(group=group)


def allocate_symmetric(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Symmetric memory out of a pool, which spares most of its allocations and exchanges of addresses."""
    with torch.cuda.use_mem_pool(_symmetric_memory.get_mem_pool(device)):
        return torch.empty(size, dtype=dtype, device=device)


def exchange_addresses(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Tell the ranks of ``group`` where their symmetric ``tensor`` lies; cheap for memory that is known already."""
    _symmetric_memory.rendezvous(tensor, group.group_name)


def _method(group: dist.ProcessGroup, name: str, older_name: str) -> Callable[..., dist.Work | None]:
    """torch 2.13 renamed these methods; groups written in Python have one of the names only."""
    return cast(Callable[..., dist.Work | None], getattr(group, name, None) or getattr(group, older_name))
