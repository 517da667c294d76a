"""Claim: ``set_ranks_may_differ(True)`` costs little where all ranks use all units; where they do not, a skipped unit
costs its communication.

Forward and backward of transformer blocks on 2 gloo ranks, one thread each; all peers take turns in the same processes.
Where ranks use different blocks, torch's ``fully_shard`` waits for ever, so the peer there is DDP, which searches the
graph for what was not used.

    python benchmarks/step/divergent_use.py [--width 512] [--blocks 8] [--tokens 64] [--rounds 25]
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
import fsdp2
from benchmarks.common import Bars, Table, medians_in_turns, publish
from benchmarks.step.gloo_peers import Block

NUM_RANKS = 2


class Blocks(nn.Module):
    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x: Tensor, used: Collection[int]) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index in used:
                x = block(x)
        return x


def _fully_sharded(fully_shard: Callable[..., object], model: Blocks) -> nn.Module:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh)
    return model


def alike(model: Blocks) -> nn.Module:
    return _fully_sharded(fsdp2.fully_shard, model)


def may_differ(model: Blocks) -> nn.Module:
    sharded = _fully_sharded(fsdp2.fully_shard, model)
    assert isinstance(sharded, fsdp2.FSDPModule)
    sharded.set_ranks_may_differ(True)
    return sharded


def torch_fsdp2(model: Blocks) -> nn.Module:
    return _fully_sharded(torch_fsdp.fully_shard, model)


def ddp(model: Blocks) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


PEERS: dict[str, Callable[[Blocks], nn.Module]] = {
    "fsdp2": alike,
    "ranks may differ": may_differ,
    "torch FSDP2": torch_fsdp2,
    "DDP": ddp,
}


def cases(num_blocks: int) -> dict[str, list[Collection[int]]]:
    """Which blocks each rank uses."""
    every = range(num_blocks)
    first, second = (
        [block for block in every if block % 4 != 1],
        [block for block in every if block % 4 != 2],
    )
    return {
        "all blocks": [every, every],
        "three quarters, the same": [first, first],
        "three quarters, others on each rank": [first, second],
    }


def timed(model: nn.Module, x: Tensor, used: Collection[int]) -> float:
    dist.barrier()
    start = time.perf_counter()
    model(x, used).sum().backward()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return seconds


def run_rank(rank: int, store: str, options: argparse.Namespace, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    torch.manual_seed(0)
    blocks = Blocks(options.width, options.blocks)
    x = torch.randn(1, options.tokens, options.width)
    models = {name: prepare(copy.deepcopy(blocks)) for name, prepare in PEERS.items()}
    found = {}
    for case, by_rank in cases(options.blocks).items():
        parts = by_rank[0] != by_rank[1]
        able = {name: model for name, model in models.items() if name in ("ranks may differ", "DDP") or not parts}
        steps = {name: lambda model=model, used=by_rank[rank]: timed(model, x, used) for name, model in able.items()}
        for step in steps.values():
            step()
        found[case] = medians_in_turns(steps, options.rounds)
    if rank == 0:
        torch.save(found, results)
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", options, f"{folder}/results")
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=NUM_RANKS)
        found = torch.load(arguments[-1])
    rows = []
    for case, seconds in found.items():
        shown = [f"{seconds[name] * 1e3:.1f}" if name in seconds else None for name in PEERS]
        differing, alike = seconds["ranks may differ"], seconds.get("fsdp2")
        cost = None if alike is None else differing / alike
        ratio = None if alike is None else alike / seconds["torch FSDP2"]
        rows.append([case, *shown, cost, ratio, (differing if alike is None else alike) / seconds["DDP"]])
    columns = ["used of the blocks", *PEERS, "cost", "ratio", "of DDP"]
    note = (
        "cost: set_ranks_may_differ(True), of fsdp2. ratio: fsdp2 of torch FSDP2. Where ranks part, torch waits for "
        "ever, and fsdp2 without that call says so. DDP: find_unused_parameters=True; it holds all parameters on every "
        "rank."
    )
    table = Table("main", "Median ms per step", columns, rows, note=note, plot=Bars(list(PEERS), unit="ms"))
    shape = f"{options.blocks} blocks of width {options.width}, {options.tokens} tokens"
    publish("step/divergent_use", f"Ranks that use other units, 2 gloo ranks, {shape}", [table])


if __name__ == "__main__":
    main()
