"""Claim: an inference engine has all weights of a trainer in a third of the time of ``full_tensor()`` in a loop, with
one message for each parameter, if parameters are many and small; where bytes alone count, in about half.

Two Llamas in bf16, one of many small parameters and one of fewer large ones, on 2 trainer ranks and 2 engine ranks of
one host, over gloo. The engine is a stand-in: each of its ranks copies what comes into tensors of its own. One message
per parameter is what trainers of reinforcement learning do by hand: all trainer ranks call ``full_tensor()``, the first
one broadcasts to the engine. ``stream_full_params`` gathers buckets on that rank alone, which hands each on as one
broadcast, or as one copy into memory that all processes share. All ways take turns in the same processes; from when all
ranks begin to when all have ended; what has come is compared.

On the CPU, a bucket should stay below 32 MiB: the C library returns larger memory to the system each time, and pages of
new memory cost more than the copy.

    python benchmarks/checkpoint/weights_to_engine.py [--width 256 1024] [--layers 48 16] [--bucket 24MiB]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
import fsdp2
from benchmarks.common import Table, publish
from benchmarks.llama import MISSING, Llama, units
from docs.examples.engine_weights import ENGINES, SENDER, TRAINERS, channel

WARM_UP, ROUNDS = 1, 7
WAYS = ("full_tensor, a message each", "stream, over a group", "stream, over a group, ahead=1", "stream, over memory")

Weights = list[tuple[str, Tensor]]


class Trainer:
    """A trainer rank. ``transfer``: the sender and the engine; None on other ranks."""

    def __init__(self, model: Any, transfer: dist.ProcessGroup | None, bucket: str) -> None:
        self.model, self._transfer, self._bucket = model, transfer, bucket
        self._channels: dict[str, Any] = {}

    def one_by_one(self) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                whole = param.full_tensor()
                if self._transfer is not None:
                    dist.broadcast(whole, SENDER, self._transfer)

    def streamed(self, over: str, ahead: int = 0) -> None:
        stream = fsdp2.checkpoint.stream_full_params(
            self.model, bucket_nbytes=self._bucket, to_rank=SENDER, ahead=ahead
        )
        if self._transfer is not None:
            dist.broadcast_object_list([stream.manifest], SENDER, self._transfer)
            if over not in self._channels:
                self._channels[over] = channel(over, self._transfer, stream.manifest)
        for bucket in stream.buckets():
            self._channels[over].send(bucket.flat)


class Engine:
    """An engine rank, with whole tensors."""

    def __init__(self, model: Any, transfer: dist.ProcessGroup) -> None:
        self.weights = {name: torch.empty_like(param) for name, param in model.named_parameters()}
        self._transfer = transfer
        self._channels: dict[str, Any] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.weights[name].copy_(tensor)

    @torch.no_grad()
    def one_by_one(self) -> None:
        for name, weight in self.weights.items():
            come = torch.empty_like(weight)
            dist.broadcast(come, SENDER, self._transfer)
            self.load_weights([(name, come)])

    @torch.no_grad()
    def streamed(self, over: str, ahead: int = 0) -> None:
        found: list[Any] = [None]
        dist.broadcast_object_list(found, SENDER, self._transfer)
        if over not in self._channels:
            self._channels[over] = channel(over, self._transfer, found[0])
        for manifest in found[0]:
            self.load_weights(manifest.cut(self._channels[over].receive(manifest.nbytes)))


def seconds_of(update: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    update()
    dist.barrier()
    return time.perf_counter() - start


def run_rank(rank: int, store: str, llama: Llama, bucket: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(TRAINERS + ENGINES))
    trainers, transfer = dist.new_group(TRAINERS), dist.new_group([SENDER, *ENGINES])
    model = llama.model().bfloat16()
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    if rank in TRAINERS:
        mesh = DeviceMesh.from_group(trainers, "cpu")
        for unit in units(model):
            fsdp2.fully_shard(unit, mesh=mesh)
        side: Any = Trainer(model, transfer if rank == SENDER else None, bucket)
    else:
        side = Engine(model, transfer)
    updates: dict[str, Callable[[], None]] = {
        WAYS[0]: side.one_by_one,
        WAYS[1]: lambda: side.streamed("group"),
        WAYS[2]: lambda: side.streamed("group", ahead=1),
        WAYS[3]: lambda: side.streamed("memory"),
    }
    taken: dict[str, list[float]] = {name: [] for name in updates}
    for number in range(WARM_UP + ROUNDS):
        for name, update in updates.items():
            if rank in ENGINES:
                for weight in side.weights.values():
                    weight.zero_()
            seconds = seconds_of(update)
            if number >= WARM_UP:
                taken[name].append(seconds)
            if rank in ENGINES and number == 0:
                assert all(torch.equal(side.weights[key], value) for key, value in expected.items()), name
    if rank == 0:
        nbytes, num = sum(value.nbytes for value in expected.values()), len(expected)
        torch.save({"nbytes": nbytes, "num": num, "taken": taken}, results)
    dist.barrier()
    dist.destroy_process_group()


def rows_of(llama: Llama, bucket: str) -> list[list[object]]:
    with tempfile.TemporaryDirectory() as folder:
        results = f"{folder}/results"
        arguments = (f"{folder}/store", llama, bucket, results)
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=len(TRAINERS + ENGINES))
        found = torch.load(results, weights_only=False)
    model, taken = f"{found['num']} parameters, {found['nbytes'] / 1e6:.0f} MB", found["taken"]
    today = statistics.median(taken[WAYS[0]])
    rows: list[list[object]] = []
    for name, seconds in taken.items():
        median = statistics.median(seconds)
        ratio = None if name == WAYS[0] else median / today
        rows.append([f"{model}: {name}", f"{min(seconds) * 1e3:.0f}", f"{median * 1e3:.0f}", ratio])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--layers", type=int, nargs="+", default=[48, 16])
    parser.add_argument("--bucket", default="24MiB")
    options = parser.parse_args()
    if MISSING:
        raise SystemExit(MISSING)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rows: list[list[object]] = []
    for width, num_layers in zip(options.width, options.layers, strict=True):
        rows += rows_of(Llama(width, num_layers, num_tokens=8), options.bucket)
    title = f"One update of the engine, in buckets of {options.bucket}"
    note = f"Median and minimum of {ROUNDS} rounds. Four processes, one thread each, share the cores of one machine."
    table = Table("update", title, ["", "min ms", "ms", "ratio"], rows, noise=0.3, note=note)
    publish("checkpoint/weights_to_engine", "Weights of a Llama to an engine, 2 + 2 gloo ranks", [table])


if __name__ == "__main__":
    main()
