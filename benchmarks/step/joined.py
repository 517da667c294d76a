"""Claim: ``fsdp2.joined`` costs one message per loop if lengths are known, else one per step that overlaps with it, and
a pass for each repeated batch. The table shows what these cost.

Forward and backward of transformer blocks on 2 gloo ranks, one thread each; all loops take turns in the same processes,
and each round runs one loop of ``--batches`` steps.

    python benchmarks/step/joined.py [--width 512] [--blocks 8] [--tokens 64] [--batches 8] [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
import fsdp2
from benchmarks.common import Table, medians_in_turns, publish
from benchmarks.step.divergent_use import Blocks

NUM_RANKS = 2
Batches = Iterator[tuple[Tensor, bool]]


def run_rank(rank: int, store: str, options: argparse.Namespace, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    torch.manual_seed(0)
    model: nn.Module = Blocks(options.width, options.blocks)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for module in [*model.blocks, model]:  # type: ignore[misc]
        fsdp2.fully_shard(module, mesh=mesh)
    batches = [torch.randn(1, options.tokens, options.width) for _ in range(options.batches)]
    fewer = batches[: len(batches) // 2] if rank else batches
    loops: dict[str, Callable[[], Batches]] = {
        "without joined": lambda: ((batch, True) for batch in batches),
        "joined, lengths known": lambda: fsdp2.joined(batches, model),
        "joined, lengths unknown": lambda: fsdp2.joined(iter(batches), model),
        "joined, rank 1 has half of the batches": lambda: fsdp2.joined(iter(fewer), model),
    }

    def timed(loop: Callable[[], Batches]) -> float:
        dist.barrier()
        start = time.perf_counter()
        for batch, _ in loop():
            model(batch, range(options.blocks)).sum().backward()
        return (time.perf_counter() - start) / options.batches

    steps = {name: lambda loop=loop: timed(loop) for name, loop in loops.items()}
    for step in steps.values():
        step()
    found = medians_in_turns(steps, options.rounds)
    if rank == 0:
        torch.save(found, results)
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"width": 512, "blocks": 8, "tokens": 64, "batches": 8, "rounds": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", options, f"{folder}/results")
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=NUM_RANKS)
        found: dict[str, float] = torch.load(arguments[-1])
    without = found["without joined"]
    rows = [
        [name, f"{took * 1e3:.2f}", took / without if name in list(found)[1:] else None] for name, took in found.items()
    ]
    table = Table("main", "Median ms per step", ["", "ms", "ratio"], rows, note="ratio: of the loop without joined.")
    shape = f"{options.blocks} blocks of width {options.width}, {options.tokens} tokens, {options.batches} batches"
    publish("step/joined", f"Ranks with other numbers of batches, 2 gloo ranks, {shape}", [table])


if __name__ == "__main__":
    main()
