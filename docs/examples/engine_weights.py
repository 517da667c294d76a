"""Weights from a trainer to an inference engine, as in reinforcement learning: 2 ranks train, 2 ranks are the engine.

    torchrun --nproc-per-node 4 docs/examples/engine_weights.py                 # over a process group
    torchrun --nproc-per-node 4 docs/examples/engine_weights.py --over memory   # over shared memory of one machine

The engine is a stand-in with the two things that matter here: ``load_weights``, which takes names and whole tensors as
vLLM's models do, and ranks that keep a part of each tensor and use collectives of their own. No real engine runs here.

One update: trainer rank 0 announces the manifest, so that the engine can make room, and hands on one bucket after
another. Meanwhile trainer rank 1 sends its shards when rank 0 asks for them, and waits otherwise.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.checkpoint.stream_plan import BucketManifest

TRAINERS, ENGINES = [0, 1], [2, 3]
SENDER = 0
WIDTH, NUM_LAYERS, BUCKET = 64, 4, "40KiB"


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


class Engine:
    """The same model in bf16; each rank has the same rows of all layers. ``group``: its ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.weights: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Keep this rank's part of whole tensors."""
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        for name, tensor in weights:
            self.weights[name] = tensor.chunk(size)[rank].clone()

    def generate(self, x: Tensor) -> Tensor:
        for layer in range(NUM_LAYERS):
            mine = F.linear(x, self.weights[f"{layer}.weight"], self.weights[f"{layer}.bias"])
            parts = [torch.empty_like(mine) for _ in ENGINES]
            dist.all_gather(parts, mine, group=self.group)
            x = torch.cat(parts, -1)
        return x


# How a bucket comes to the engine


class Channel(Protocol):
    """Between the trainer rank that sends and all ranks of the engine."""

    def send(self, flat: Tensor) -> None: ...

    def receive(self, nbytes: int) -> Tensor:
        """The bytes of a bucket, valid until the next call."""
        ...


class OverGroup:
    """One broadcast for each bucket of at most ``nbytes``. ``group``: the sender and the engine's ranks. With
    accelerators, use NCCL."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int) -> None:
        self._group = group
        self._received = torch.empty(0 if dist.get_rank() == SENDER else nbytes, dtype=torch.uint8)

    def send(self, flat: Tensor) -> None:
        dist.broadcast(flat, SENDER, self._group)

    def receive(self, nbytes: int) -> Tensor:
        dist.broadcast(self._received[:nbytes], SENDER, self._group)
        return self._received[:nbytes]


class OverMemory:
    """One copy for each bucket, into memory of ``nbytes`` that all these processes of one machine have mapped."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int) -> None:
        self._group = group
        is_sender = dist.get_rank() == SENDER
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None  # else on a disk
        name = [""]
        if is_sender:
            handle, name[0] = tempfile.mkstemp(dir=folder)
            os.truncate(handle, nbytes)
            os.close(handle)
        dist.broadcast_object_list(name, SENDER, group)
        self._memory = torch.from_file(name[0], shared=True, size=nbytes, dtype=torch.uint8)
        dist.barrier(group)  # all have mapped it: it needs no name any more, and goes away with the last of them
        if is_sender:
            os.unlink(name[0])

    def send(self, flat: Tensor) -> None:
        dist.barrier(self._group)  # the engine has read the bucket before
        self._memory[: flat.numel()].copy_(flat)
        dist.barrier(self._group)

    def receive(self, nbytes: int) -> Tensor:
        dist.barrier(self._group)
        dist.barrier(self._group)
        return self._memory[:nbytes]


def channel(over: str, group: dist.ProcessGroup, manifest: Sequence[BucketManifest]) -> Channel:
    kind = OverGroup if over == "group" else OverMemory
    return kind(group, max(each.nbytes for each in manifest))


# Both sides


def update_from_trainer(model: nn.Module, over: str, group: dist.ProcessGroup | None) -> None:
    """On all trainer ranks; ``group`` is there on the sender."""
    stream = fsdp2.checkpoint.stream_full_params(model, dtype=torch.bfloat16, bucket_nbytes=BUCKET, to_rank=SENDER)
    if group is None:
        for _ in stream.buckets():
            raise AssertionError("only the sender gets buckets")
        return
    dist.broadcast_object_list([stream.manifest], SENDER, group)
    to_engine = channel(over, group, stream.manifest)
    for bucket in stream.buckets():
        to_engine.send(bucket.flat)


def update_engine(engine: Engine, over: str, group: dist.ProcessGroup) -> None:
    """On all engine ranks."""
    found: list[Sequence[BucketManifest]] = [()]
    dist.broadcast_object_list(found, SENDER, group)
    from_trainer = channel(over, group, found[0])
    for manifest in found[0]:
        engine.load_weights(manifest.cut(from_trainer.receive(manifest.nbytes)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_output(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad(), fsdp2.unsharded(model):
        return model(x.float())


def run(over: str, num_steps: int = 3) -> list[float]:
    """On all four ranks. For the trainers: how far the engine's outputs are from those of the trainer's weights after
    each update, as a part of what the step has changed."""
    rank = dist.get_rank()
    trainers, engines = dist.new_group(TRAINERS), dist.new_group(ENGINES)
    transfer = dist.new_group([SENDER, *ENGINES])
    x, far = torch.ones(1, WIDTH, dtype=torch.bfloat16), []
    if rank in TRAINERS:
        model = build()
        mesh = DeviceMesh.from_group(trainers, "cpu")
        for layer in [*model, model]:
            fsdp2.fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    else:
        engine = Engine(engines)
    for step in range(num_steps):
        if rank in TRAINERS:
            before = whole_output(model, x)
            train(model, optimizer, step)
            update_from_trainer(model, over, transfer if rank == SENDER else None)
            after = whole_output(model, x)
        else:
            update_engine(engine, over, transfer)
        output = engine.generate(x) if rank in ENGINES else torch.empty_like(x)
        dist.broadcast(output, ENGINES[0])
        if rank in TRAINERS:
            far.append(((output - after).abs().max() / (after - before).abs().max()).item())
    return far


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--over", choices=["group", "memory"], default="group", help="how buckets come to the engine")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    far = run(options.over)
    if dist.get_rank() == SENDER:
        for step, each in enumerate(far):
            print(f"step {step}: the engine, in bf16, is off by {each:.1%} of what the step has changed", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
