"""Claim: on 2 gloo ranks, a step takes at most 0.75 of the time it takes under torch's ``fully_shard``.

Forward and backward of blocks of nine parameters, one thread per rank. Beside torch's FSDP2: FSDP1, DDP, and the
unsharded model, which each rank runs for itself without communication. All take turns in the same processes.

    python benchmarks/gloo_step.py [--case WIDTH BLOCKS BATCH] [--direct-min-nbytes N] [--no-block-pool] [--ours-only]
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer
import torch.multiprocessing
from common import Bars, Block, Table, publish
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fsdp2
from fsdp2.buffers import BlockPool
from fsdp2.comm import PeerComm

NUM_RANKS = 2


@dataclass(frozen=True)
class Case:
    width: int
    num_blocks: int
    batch_size: int
    rounds: int


CASES = (Case(1024, 6, 256, 5), Case(256, 8, 64, 25))


def by_fully_shard(runtime: object) -> Callable[[nn.Sequential], nn.Module]:
    def wrap(model: nn.Sequential) -> nn.Module:
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for module in [*model, model]:
            runtime.fully_shard(module, mesh=mesh)  # type: ignore[attr-defined]
        return model

    return wrap


def by_fsdp1(model: nn.Sequential) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that FSDP2 supersedes it
        return peer.FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu")
        )


WRAPPERS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "unsharded": lambda model: model,
    "DDP": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "FSDP1": by_fsdp1,
    "torch FSDP2": by_fully_shard(peer),
    "fsdp2": by_fully_shard(fsdp2),
}


def stepper(wrap: Callable[[nn.Sequential], nn.Module], model: nn.Sequential, x: Tensor) -> Callable[[], float]:
    wrapped = wrap(copy.deepcopy(model))
    parameters = list(wrapped.parameters())

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        wrapped(x).sum().backward()
        for parameter in parameters:
            parameter.grad = None
        return time.perf_counter() - start

    return step


def run_rank(rank: int, store: str, case: Case, options: argparse.Namespace, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    if options.direct_min_nbytes is not None:
        PeerComm.direct_min_nbytes = options.direct_min_nbytes
    if options.no_block_pool:
        BlockPool.fill = lambda self, storage, nbytes: storage.resize_(nbytes)  # type: ignore[assignment, method-assign]
        BlockPool.drain = lambda self, storage: storage.resize_(0)  # type: ignore[assignment, method-assign]
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(case.width) for _ in range(case.num_blocks)))
    x = torch.randn(case.batch_size, case.width, generator=torch.Generator().manual_seed(rank))
    names = ["unsharded", "fsdp2"] if options.ours_only else list(WRAPPERS)
    steps = {name: stepper(WRAPPERS[name], model, x) for name in names}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(case.rounds + 2):
        for name, step in steps.items():
            seconds = [step() for _ in range(2)][1]  # the first one after another peer finds cold memory
            if round_ >= 2:
                taken[name].append(seconds)
    if rank == 0:
        torch.save({name: statistics.median(values) for name, values in taken.items()}, results)
    dist.barrier()
    dist.destroy_process_group()


def measure(case: Case, options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", case, options, f"{folder}/results")
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=NUM_RANKS)
        return torch.load(arguments[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", type=int, nargs=3, metavar=("WIDTH", "BLOCKS", "BATCH"), help="instead of the usual two"
    )
    parser.add_argument("--direct-min-nbytes", type=int, help="from which size of a shard on it travels without a copy")
    parser.add_argument("--no-block-pool", action="store_true", help="let the allocator free and map memory each time")
    parser.add_argument("--ours-only", action="store_true", help="leave the peers out, to compare settings of ours")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    for case in [Case(*options.case, rounds=7)] if options.case else CASES:
        seconds = measure(case, options)
        figures = [f"{seconds[name] * 1e3:.1f}" for name in seconds]
        ratio = seconds["fsdp2"] / seconds.get("torch FSDP2", float("nan"))
        rows.append([f"width {case.width} x {case.num_blocks} blocks, batch {case.batch_size}", *figures, ratio])
    plot = None if options.ours_only else Bars(list(WRAPPERS)[1:], unit="ms", base="unsharded")
    steps = Table("main", "Median ms per step", ["", *seconds, "ratio"], rows, plot=plot)
    publish("gloo_step", f"Forward and backward, {NUM_RANKS} gloo ranks, one thread each", [steps])


if __name__ == "__main__":
    main()
