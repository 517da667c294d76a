"""An accelerator that is not there: fsdp2 runs on the CPU as on a GPU, and every operation is put on its stream.

``simulated_accelerator()`` puts clocks in the place of streams (see ``races``), a process group that notes what it
reads and writes in the place of NCCL, and watches all operations, those of autograd and of optimizers included. Values
are those of a world in which every rank holds the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2.core.comm import offload, streams as streams_module
from fsdp2.core.comm.streams import AcceleratorStreams
from fsdp2.core.group import shards
from tests.harness.comms import direct_from
from tests.harness.races import Races, SimulatedDevice, SimulatedStream, caller

aten = torch.ops.aten

# What touches no memory, though its signature says so.
_ONLY_METADATA = {"set_", "resize_", "record_stream", "is_pinned", "_version"}
# What makes the CPU wait for the value.
_SYNCS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select"}


class Simulation(TorchDispatchMode):
    """See the module's text.

    Attributes:
        races: what nothing orders.
        syncs: operations for which the CPU waited, with where they came from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = SimulatedDevice()
        self.races = Races(self.device)
        self.syncs: list[str] = []
        self._backend = itertools.cycle(SimulatedStream(self.device, f"backend {i}") for i in range(8))
        self._is_paused = False
        self._allocates_on_host = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(_is_wrapper(each) for each in types):
            return NotImplemented  # what it is made of comes here in its turn
        if self._is_paused or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def collective(
        self, name: str, outputs: list[Tensor], inputs: list[Tensor], run: Callable[[], None], *, is_async: bool
    ) -> _Work | None:
        """``run``, beside the current stream from here on, or on it. As NCCL's group does, returns a work only if
        ``is_async``."""
        stream = next(self._backend) if is_async else self.device.current_stream()
        stream.wait_stream(self.device.current_stream())
        with self._paused():
            run()
        number, what = stream.tick(), name + caller()
        for tensor in inputs:
            self.races.access(tensor, stream, number, what, writes=False)
        for tensor in outputs:
            self.races.access(tensor, stream, number, what, writes=True)
        return _Work(self.device, stream) if is_async else None

    def resize(self, storage: torch.UntypedStorage, nbytes: int, resize: Callable[[int], Any]) -> Any:
        """``storage.resize_(nbytes)``"""
        self.races.sweep()
        if storage.nbytes() > 0:
            self.races.free(storage)
        result = resize(nbytes)
        self.races.allocate(storage, self.device.current_stream(), "resize_" + caller())
        return result

    def on_host(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, but the memory that it allocates is the host's."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._allocates_on_host = True
            try:
                return function(*args, **kwargs)
            finally:
                self._allocates_on_host = False

        return run

    def _stream_of(self, tensors: list[Tensor]) -> SimulatedStream:
        """Where an operation on ``tensors`` runs: on the CPU, if all of them are there."""
        placed = [tensor for tensor in tensors if tensor.numel() > 0 and tensor.dim() > 0]
        is_hosts = all(map(self.races.is_on_host, placed)) if placed else self._allocates_on_host
        return self.device.host if is_hosts else self.device.current_stream()

    def _blocks_cpu(self, tensors: list[Tensor], non_blocking: Any, kwargs: Any) -> bool:
        """Whether a copy is one from or to the host that the CPU waits for."""
        is_across = len({self.races.is_on_host(tensor) for tensor in tensors}) > 1
        return is_across and not (any(non_blocking) or kwargs.get("non_blocking"))

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        schema = func._schema
        name = schema.name.partition("::")[2]
        if name in _ONLY_METADATA or _is_view(schema):
            return
        self.races.sweep()
        read, written = _arguments(schema, args, kwargs)
        makes_like = name.startswith("new_") or name.endswith("_like")
        stream = self._stream_of(read + written)
        what = name + caller()
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.races.allocate(tensor.untyped_storage(), stream, what)
        number = stream.tick()
        for tensor in () if makes_like else read:
            self.races.access(tensor, stream, number, what, writes=False)
        for tensor in written:
            self.races.access(tensor, stream, number, what, writes=True)
        if name in _SYNCS or (name == "copy_" and self._blocks_cpu(read + written, args[2:], kwargs)):
            self.syncs.append(what)
            stream.record_event().synchronize()


def _is_wrapper(kind: type) -> bool:
    return kind not in (Tensor, torch.nn.Parameter) and hasattr(kind, "__tensor_flatten__")


def _is_view(schema: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in schema.arguments)


def _arguments(schema: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those that it writes. What it writes in place it may read, too."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        into = written if argument.alias_info is not None and argument.alias_info.is_write else read
        into += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return read, written


class _Work:
    """A collective in flight, on a stream of the backend's."""

    def __init__(self, device: SimulatedDevice, stream: SimulatedStream) -> None:
        self._device, self._stream = device, stream

    def wait(self, timeout: Any = None) -> bool:
        self._device.current_stream().wait_stream(self._stream)
        return True


class SimulatedGroup(dist.ProcessGroup):
    """Every rank is like this one: it gathers copies of its own part, and sums are its own part times the size.

    Its contract is NCCL's: without ``asyncOp``, a collective is ordered on the current stream, and there is no work.
    """

    simulation: Simulation | None = None

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._size = size

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "simulated"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        def run() -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                output.view(self._size, -1).copy_(mine.clone().view(1, -1).expand(self._size, -1))

        return self._run("all-gather", outputs, inputs, run, opts)

    def _allgather_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([output], [mine], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        def run() -> None:
            for output, values in zip(outputs, inputs, strict=True):
                output.copy_(values.view(self._size, -1)[self.rank()]).mul_(self._size)

        return self._run("reduce-scatter", outputs, inputs, run, opts)

    def _reduce_scatter_base(self, output: Tensor, values: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_tensor_coalesced([output], [values], opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        def run() -> None:
            if getattr(opts, "reduceOp", dist.ReduceOp.SUM) == dist.ReduceOp.SUM:
                for tensor in tensors:
                    tensor.mul_(self._size)

        return self._run("all-reduce", tensors, tensors, run, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        def run() -> None:
            for per_rank, mine in zip(outputs, inputs, strict=True):
                for output in per_rank:
                    output.copy_(mine)

        return self._run("all-gather", [tensor for per_rank in outputs for tensor in per_rank], inputs, run, opts)

    def barrier(self, opts: Any = None) -> Any:
        return self._run("barrier", [], [], lambda: None, opts)

    # The names of torch 2.13
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced

    def _run(self, name: str, outputs: list[Tensor], inputs: list[Tensor], run: Callable[[], None], opts: Any) -> Any:
        assert SimulatedGroup.simulation is not None
        is_async = getattr(opts, "asyncOp", True)
        return SimulatedGroup.simulation.collective(name, outputs, inputs, run, is_async=is_async)


@contextmanager
def simulated_accelerator(world_size: int = 4, *, shards_on_host: bool = False) -> Iterator[Simulation]:
    """Inside, this process is rank 0 of ``world_size`` ranks, each with an accelerator. Meshes are on ``"cpu"``.

    ``shards_on_host``: all shards are offloaded, by ``StagedOffloadPolicy``.
    """
    if not hasattr(dist.Backend, "SIMULATED"):
        dist.Backend.register_backend(
            "simulated", lambda store, rank, size, timeout: SimulatedGroup(rank, size), devices=["cpu"]
        )
    simulation = SimulatedGroup.simulation = Simulation()
    patch = pytest.MonkeyPatch()
    try:
        patch.setattr(torch, "get_device_module", lambda device: simulation.device)
        streams = AcceleratorStreams(torch.device("cpu"))
        patch.undo()
        patch.setitem(streams_module._streams, torch.device("cpu"), streams)
        resize = torch.UntypedStorage.resize_
        patch.setattr(
            torch.UntypedStorage, "resize_", lambda storage, n: simulation.resize(storage, n, partial(resize, storage))
        )
        if shards_on_host:
            patch.setattr(offload, "_copied_to", simulation.on_host(offload._copied_to))
            patch.setattr(shards, "flat_shards", simulation.on_host(shards.flat_shards))
        dist.init_process_group("simulated", rank=0, world_size=world_size, store=dist.HashStore())
        with simulation, direct_from(16 * 1024):  # models are small
            yield simulation
    finally:
        patch.undo()
        SimulatedGroup.simulation = None
        if dist.is_initialized():
            dist.destroy_process_group()
