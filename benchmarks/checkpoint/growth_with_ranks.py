"""Claim: what rank 0 sends and receives besides values to save and load is the same on 8 and on 4,096 ranks, but for
what DCP collects for its format; and a whole tensor in one file, or on one rank, takes one message from each rank.

Counted, not measured: this process is rank 0 of ranks that are not there. Its process group answers each collective as
if all others had sent what it sent itself, and counts: a collective is one message, whose bytes are what rank 0 has to
send or to receive, for a gather or scatter with all ranks W - 1 times its part. Values are shards, states and tensors;
all else is besides. Groups for the host, which are gloo elsewhere, are this one, too. Requests to the store are those
of one rank; the store serves them for each rank.

    python benchmarks/checkpoint/growth_with_ranks.py
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
import fsdp2
from benchmarks.common import Table, publish
from benchmarks.null_group import NullGroup
from fsdp2.checkpoint import stream_gate
from fsdp2.checkpoint.mirror_files import HEADER_NBYTES, Header
from fsdp2.core import Axis

NUM_RANKS = (8, 64, 512, 4096)
NUM_LAYERS, WIDTH = 4, 4096
_OTHERS = 1 << 40  # how often other ranks have been everywhere


@dataclass
class Count:
    """Messages, their bytes besides values, the bytes of values, and requests to the store."""

    messages: int = 0
    nbytes: int = 0
    values_nbytes: int = 0
    requests: int = 0


class CountingGroup(NullGroup):
    """Counts what rank 0 sends and receives, and answers as if all other ranks were in its place."""

    count = Count()

    def getBackendName(self) -> str:  # noqa: N802
        return "counting"

    def _count(self, tensors: Sequence[torch.Tensor], *, times: int = 1, are_values: bool = False) -> dist.Work:
        nbytes = times * sum(each.nbytes for each in tensors)
        self.count.messages += 1
        self.count.nbytes += 0 if are_values else nbytes
        self.count.values_nbytes += nbytes if are_values else 0
        return self._work

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], *args: Any) -> dist.Work:
        super().allgather(outputs, inputs, *args)
        return self._count(inputs, times=self.size())

    def allreduce(self, tensors: list[torch.Tensor], *_: Any) -> dist.Work:  # type: ignore[override]
        for each in tensors:
            if each.dim() == 2:  # what a mirror asks: the other ranks have their shards
                each[1:] = each[0]
        return self._count(tensors)

    def broadcast(self, tensors: list[torch.Tensor], *_: Any) -> dist.Work:  # type: ignore[override]
        return self._count(tensors)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], *_: Any) -> dist.Work:
        for received, mine in zip(outputs, inputs, strict=True):
            for each in received:
                each.copy_(mine)
        return self._count(inputs, times=self.size() - 1)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], *_: Any) -> dist.Work:
        for received, mine in zip(outputs, inputs, strict=True):
            received.copy_(mine[0])
        return self._count([each for mine in inputs for each in mine[1:]])

    def _gathered(self, outputs: Any, inputs: Any, *_: Any) -> dist.Work:
        given = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        return self._count(given, are_values=True)

    all_gather_single = _allgather_base = _gathered
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _gathered

    def send(self, tensors: list[torch.Tensor], *_: Any) -> dist.Work:
        self._sent = tensors
        return self._count(tensors, are_values=tensors[0].nbytes != HEADER_NBYTES)

    def recv(self, tensors: list[torch.Tensor], *_: Any) -> dist.Work:
        if tensors[0].nbytes == HEADER_NBYTES:  # of the neighbour of a mirror
            header = Header.of(bytes(self._sent[0].tolist()))
            assert header is not None
            packed = bytearray(header._replace(owner=self.size() - 1).packed())
            tensors[0].copy_(torch.frombuffer(packed, dtype=torch.uint8))
        elif getattr(self, "_sent", None) and tensors[0].shape == self._sent[0].shape:
            tensors[0].copy_(self._sent[0])
        return self._count(tensors, are_values=tensors[0].nbytes != HEADER_NBYTES)


class CountingStore:
    """Other ranks have always done their part."""

    def add(self, key: str, amount: int) -> int:
        CountingGroup.count.requests += 1
        return _OTHERS if amount == 0 else 1

    def check(self, keys: list[str]) -> bool:
        CountingGroup.count.requests += 1
        return False

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        CountingGroup.count.requests += 1
        return desired.encode()

    def delete_key(self, key: str) -> bool:
        return True


def _of_each_rank(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans that ranks would have sent, made of those of rank 0: shard r begins r shards later along dim 0."""

    def moved(item: WriteItem, rank: int) -> WriteItem:
        chunk = item.tensor_data.chunk if item.tensor_data is not None else None
        if rank == 0 or chunk is None or item.tensor_data is None:
            return item
        start = torch.Size([rank * chunk.sizes[0], *chunk.offsets[1:]])
        data = replace(item.tensor_data, chunk=replace(chunk, offsets=start))
        return replace(item, index=replace(item.index, offset=start, index=rank), tensor_data=data)

    return [replace(plan, items=[moved(item, rank) for item in plan.items]) for rank, plan in enumerate(plans)]


@contextlib.contextmanager
def counting_world(num_ranks: int) -> Iterator[None]:
    """Be rank 0 of ``num_ranks`` ranks that are not there."""
    if not hasattr(dist.Backend, "COUNTING"):
        make: Callable[..., CountingGroup] = lambda _, rank, size, __: CountingGroup(rank, size)  # noqa: E731
        dist.Backend.register_backend("counting", make, devices=["cpu"])
    dist.init_process_group("counting", rank=0, world_size=num_ranks, store=FakeStore())
    world = Axis(dist.group.WORLD, num_ranks, 0)
    try:
        with contextlib.ExitStack() as stack:
            for name in ("background_save", "mirrored"):
                module = sys.modules[f"fsdp2.checkpoint.{name}"]
                stack.enter_context(mock.patch.object(module, "host_axis", return_value=world))
            stack.enter_context(mock.patch.object(stream_gate.torch_names, "default_store", CountingStore))
            make_global_plan = DefaultSavePlanner.create_global_plan
            of_all = lambda self, plans: make_global_plan(self, _of_each_rank(plans))  # noqa: E731
            stack.enter_context(mock.patch.object(DefaultSavePlanner, "create_global_plan", of_all))
            stack.enter_context(mock.patch.object(dist, "PrefixStore", lambda _, store: store))
            yield
    finally:
        dist.destroy_process_group()


class Subject:
    """A sharded model, whose parameters all ranks have a part of, and its optimizer."""

    def __init__(self) -> None:
        layers = [nn.Linear(8, WIDTH) for _ in range(NUM_LAYERS)]
        self.model = nn.Sequential(*layers)
        assert dist.group.WORLD is not None
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        for each in (*layers, self.model):
            fsdp2.fully_shard(each, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for param in self.model.parameters():
            param.grad = torch.zeros_like(param)
        self.optimizer.step()
        self.state = {"model": self.model.state_dict()}


def _mirrored(subject: Subject, folder: Path) -> fsdp2.checkpoint.Mirror:
    mirror = fsdp2.checkpoint.mirrored(subject.model, subject.optimizer, every=1, job="growth", folder=folder)
    mirror.restore()
    return mirror


def operations(subject: Subject, folder: Path) -> dict[str, Callable[[], object]]:
    """What is counted, in this order: a load follows the save of its files."""
    model, mirror = subject.model, _mirrored(subject, folder)

    def mirror_once() -> None:
        mirror.after_step(1)
        mirror.wait()

    return {
        "save_safetensors": lambda: fsdp2.checkpoint.save_safetensors(model, folder / "safetensors"),
        "load_safetensors": lambda: fsdp2.checkpoint.load_safetensors(model, folder / "safetensors"),
        "stream to rank 0": lambda: [None for _ in fsdp2.checkpoint.stream_full_params(model, to_rank=0).buckets()],
        "stream to all": lambda: [None for _ in fsdp2.checkpoint.stream_full_params(model).buckets()],
        "mirrored: after_step": mirror_once,
        "mirrored: restart": lambda: _mirrored(subject, folder),
        "async_save, by DCP": lambda: fsdp2.checkpoint.async_save(subject.state, folder / "async").result(),
        "DCP: save": lambda: dcp.save(subject.state, checkpoint_id=str(folder / "dcp")),
        "DCP: load": lambda: dcp.load(subject.state, checkpoint_id=str(folder / "dcp")),
    }


def counted(num_ranks: int, names: Collection[str] = ()) -> dict[str, Count]:
    """What rank 0 of ``num_ranks`` sends and receives in each of the operations, or those of ``names``."""
    found = {}
    with counting_world(num_ranks), tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject = Subject()
        for name, operation in operations(subject, Path(folder)).items():
            if names and name not in names:
                continue
            CountingGroup.count = found[name] = Count()
            operation()
    CountingGroup.count = Count()  # what follows is of no operation
    return found


def _thousands(nbytes: int) -> str:
    return f"{nbytes / 1000:,.1f}"


def main() -> None:
    found = {num_ranks: counted(num_ranks) for num_ranks in NUM_RANKS}
    columns = ["", *(f"{num_ranks:,} ranks" for num_ranks in NUM_RANKS)]
    kinds: dict[str, tuple[str, Callable[[Count], object]]] = {
        "messages": ("Messages of rank 0", lambda count: count.messages),
        "besides": ("KB besides values", lambda count: _thousands(count.nbytes)),
        "values": ("KB of values", lambda count: _thousands(count.values_nbytes)),
        "requests": ("Requests of a rank to the store", lambda count: count.requests),
    }
    tables = [
        Table(
            key,
            title,
            columns,
            [[name, *(show(found[num_ranks][name]) for num_ranks in NUM_RANKS)] for name in found[NUM_RANKS[0]]],
            ratio=None,
        )
        for key, (title, show) in kinds.items()
    ]
    publish("checkpoint/growth_with_ranks", "What rank 0 sends and receives to save and load, counted", tables)


if __name__ == "__main__":
    main()
