"""One rank of the pool: joins the process group, then runs functions by name until its pipe closes."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2.extras import torch_names
from tests.memory_errors.allocator import watch_memory

READY = "ready"

# Warnings are errors in the ranks, except these, which torch raises by itself.
EXPECTED_WARNINGS = (
    # torch.distributed.checkpoint and DTensor still use names that torch itself deprecates.
    r".*TypedStorage is deprecated.*",
    r".*`torch\.distributed\..*` is deprecated.*",
    # Forward-mode AD
    r"`torch\.jit\.script` is deprecated.*",
    # Random initialisation of DTensors on CPU: each rank draws for its own shard, which is all that the tests need.
    r".*DTensor random operators may not have complete support on cpu.*",
    # set_model_state_dict, when it fills a model on the meta device
    r"`_get_pg_default_device` will be deprecated.*",
    r"Multiple backends are registered with this ProcessGroup.*",
    # gloo's tensors in torch.distributed.checkpoint's planner
    r".*torch\.distributed\.distributed_c10d.*_all_gather_base.*",
)


@dataclass(frozen=True)
class Call:
    module: str
    qualname: str
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Success:
    value: Any


@dataclass(frozen=True)
class Failure:
    traceback: str


@dataclass
class RankContext:
    """What a test body knows about its rank; device meshes are built once per pool and shape."""

    rank: int
    world_size: int
    device_type: str = "cpu"
    _meshes: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMesh] = field(default_factory=dict)

    def mesh_1d(self) -> DeviceMesh:
        """All ranks on one shard axis (FSDP)."""
        return self._mesh((self.world_size,), ("shard",))

    def mesh_2d(self, replicate: int, shard: int) -> DeviceMesh:
        """A replicate axis and a shard axis (HSDP)."""
        return self._mesh((replicate, shard), ("replicate", "shard"))

    def mesh(self, **sizes: int) -> DeviceMesh:
        """Axes by name, outermost first: ``mesh(dp=2, tp=2)``."""
        return self._mesh(tuple(sizes.values()), tuple(sizes))

    def mesh_of_one(self) -> DeviceMesh:
        """A shard axis that holds nothing but this rank."""
        return self.mesh_2d(self.world_size, 1)["shard"]

    def _mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        key = (shape, names)
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(self.device_type, shape, mesh_dim_names=names)
        return self._meshes[key]


def main(rank: int, world_size: int, connection: Connection, store: str, stacks: str, device_type: str) -> None:
    """Entry point of a worker process."""
    with open(stacks, "w") as stacks_file:
        faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
        faulthandler.enable(stacks_file, all_threads=True)
        watch_memory(stacks_file.fileno())
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")  # torch 2.15 cannot record groups written in Python
        torch.set_num_threads(1)
        backend = "gloo"
        if device_type == "cpu":
            # torch's own notes a stack trace for each kind of device that is not there: 3 ms, ten times a test.
            torch.manual_seed = torch.default_generator.manual_seed  # type: ignore[assignment]
        if device_type == "cuda":
            torch.cuda.set_device(rank)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
        context = RankContext(rank, world_size, device_type)
        connection.send_bytes(pickle.dumps(READY))
        try:
            while True:
                call = pickle.loads(connection.recv_bytes())
                connection.send_bytes(_answer(context, call))
        except (EOFError, ConnectionError):
            pass  # the parent closed its end: the session is over
    os._exit(0)  # skip gloo's orderly shutdown, which waits for ranks that may be gone


def _answer(context: RankContext, call: Call) -> bytes:
    try:
        _make_as_many_groups_as_other_ranks()
        random.seed(0)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            # What drivers and kernel libraries warn of differs between GPU machines.
            warnings.simplefilter("error" if context.device_type == "cpu" else "default")
            for message in EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            return pickle.dumps(Success(_resolve(call)(context, **call.kwargs)))
    except Exception:
        return pickle.dumps(Failure(traceback.format_exc()))


def _make_as_many_groups_as_other_ranks() -> None:
    """torch counts the groups of a rank in the name of a group that only some ranks make. Tests before this one may
    have made more on one rank than on another, and then torch's own runtime waits for a group of another name."""
    count = torch.tensor(torch_names.num_groups())
    dist.all_reduce(count, dist.ReduceOp.MAX)
    for _ in range(int(count) - torch_names.num_groups()):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _resolve(call: Call) -> Callable[..., Any]:
    found: Any = importlib.import_module(call.module)
    for name in call.qualname.split("."):
        found = getattr(found, name)
    return getattr(found, "body", found)
