"""Claim: beyond its shards, a step holds less memory than under torch's ``fully_shard``, and two groups at most.

Counts what the CPU allocator hands out (torch's profiler reports each allocation): unsharded parameters, buffers that
are sent and received, gradients before and after reduction, memory kept for reuse. One step's peak, after two steps of
warm-up, minus the shards. Activations are a row of 256 numbers per layer. A fake process group stands for the ranks, so
the figures are exact and the same on every run; ``--gloo`` counts on real ranks.

    python benchmarks/peak_memory.py
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import multiprocessing
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from common import Block, Ratios, Table, publish
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp2.tensors
from fsdp2.tensors import wrap_parameters

NUM_BLOCKS = 8


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """``mesh``: (shard,) or (replicate, shard). ``microbatches``: all but the last run without communication.
    ``hooks``: the class in ``fsdp2.tensors`` that matrices become."""

    name: str
    mesh: tuple[int, ...] = (8,)
    width: int = 256
    mixed: bool = False
    microbatches: int = 1
    hooks: str = ""
    options: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("plain"),
    Case("plain, 2 ranks", mesh=(2,)),
    Case("bf16 parameters, fp32 reduction", mixed=True),
    Case("reshard_after_forward=False", options={"reshard_after_forward": False}),
    Case("2 microbatches, one reduction", microbatches=2),
    Case("2 microbatches, mixed", microbatches=2, mixed=True),
    Case("uneven: width 250", width=250),
    Case("small: width 64, all in buckets", width=64),
    Case("HSDP 2 x 4", mesh=(2, 4)),
    Case("HSDP 2 x 4, mixed", mesh=(2, 4), mixed=True),
    Case("hooks: bf16, mixed", mixed=True, hooks="BFloat16AllGatherTensor"),
    Case("hooks: int8", hooks="Int8AllGatherTensor"),
    Case("hooks: int8, mixed", mixed=True, hooks="Int8AllGatherTensor"),
    Case("hooks: fp8, mixed", mixed=True, hooks="Float8AllGatherTensor"),
)


def sharded(model: Model, runtime: Any, case: Case) -> Any:
    mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=("replicate", "shard")[-len(case.mesh) :])
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if case.mixed else {}
    policy = runtime.MixedPrecisionPolicy(**dtypes)
    for module in model.blocks:
        runtime.fully_shard(module, mesh=mesh, mp_policy=policy, **case.options)
    return runtime.fully_shard(model, mesh=mesh, mp_policy=policy)


def stepper(model: Any, case: Case) -> Callable[[], None]:
    x = torch.randn(1, case.width)
    parameters = list(model.parameters())

    def step() -> None:
        for index in range(case.microbatches):
            model.set_requires_gradient_sync(index == case.microbatches - 1)
            model(x).float().sum().backward()
        for parameter in parameters:
            parameter.grad = None

    return step


def peak_nbytes(runtime_name: str, case: Case) -> int:
    """Peak of a step beyond the shards; run in a process of its own. Counts from before the model is built, so that
    what was allocated earlier and is still held, such as memory kept for reuse, counts, too."""
    runtime = importlib.import_module(runtime_name)
    dist.init_process_group("fake", rank=0, world_size=math.prod(case.mesh), store=FakeStore())
    torch.manual_seed(0)
    with warnings.catch_warnings(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        warnings.simplefilter("ignore")
        model = Model(case.width)
        if case.hooks:
            wrap_parameters(model, getattr(fsdp2.tensors, case.hooks))
        model = sharded(model, runtime, case)
        shards_nbytes = sum(parameter.to_local().nbytes for parameter in model.parameters())
        step = stepper(model, case)
        for _ in range(2):
            step()
        gc.collect()
        with torch.profiler.record_function("measured"):
            step()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())  # type: ignore[union-attr]
    measured = next(event for event in events if event.name() == "measured")
    live, peak = 0, 0
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            if measured.start_ns() <= event.start_ns() <= measured.end_ns():
                peak = max(peak, live)
    return peak - shards_nbytes


def row(case: Case) -> list[object]:
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        names = [("fsdp2", case), ("torch.distributed.fsdp", case)]
        ours, theirs = pool.starmap(peak_nbytes, names, chunksize=1)
    itemsize = 2 if case.mixed else 4
    group = sum(parameter.numel() for parameter in Block(case.width).parameters()) * itemsize
    return [case.name, *(f"{nbytes / 1024:.0f}" for nbytes in (group, ours, theirs)), ours / theirs]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    columns = ["", "one group", "fsdp2", "torch", "ratio"]
    peaks = Table("main", "KiB at the peak", columns, [row(case) for case in CASES], noise=0, plot=Ratios())
    publish("peak_memory", "Peak of one step beyond the shards", [peaks])


if __name__ == "__main__":
    main()
