"""Claim: with a core for the host's thread, a step with ``fsdp2.optim.HostAdamW`` takes at most 0.9 of the time of a
step with ``CPUOffloadPolicy`` and ``torch.optim.AdamW(fused=True)`` after backward; it takes no device memory for
states.

All on the CPU, over gloo: there are no copies to hide, only AdamW. The peers take turns in the same processes, with one
thread each for compute. "1 rank" leaves the other core to the host's thread; with "2 ranks" on two cores, it finds only
the gaps in which a rank waits for gloo. Small batches: AdamW takes a large part of the step, as it does where a large
model is offloaded. behind: clipping and AdamW, what could be hidden at most.

The second table counts the bytes of tensors per fp32 parameter of this rank, after a step: what lives where if the
mesh is one of devices. Peak: with the gradients of all shards.

The third table gives the device a budget of bytes. Today, all parameters are on the host, and AdamW runs behind
backward; ``fsdp2.memory.offload_by_budget`` leaves on the device what fits, for a ``HostAdamW`` and an AdamW. What is
"on the host" is copied to what plays the device and back, as on one; copies within one memory cost the cores that
compute. Values of both are equal, bit for bit, or the script fails.

    python benchmarks/optim/host_adamw.py [--ranks 1 2] [--width 768] [--blocks 4] [--tokens 16]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
import fsdp2
from benchmarks.common import Block, Table, publish
from fsdp2.core.comm.offload import StagedOffloadPolicy
from fsdp2.core.runtime.unit import unit_of
from fsdp2.core.runtime.unit_tree import tree_of
from fsdp2.memory.plan import peak_if_staged
from fsdp2.optim.host_adamw.memory import HostParam, host_nbytes_of, make_staging

STAGED = StagedOffloadPolicy()  # copies on the CPU, too

WARM_UP, ROUNDS = 2, 15
LR = 1e-4


class Peer:
    """A model and its optimizer. ``behind``: seconds that ``step`` took in the last round."""

    def __init__(self, width: int, num_blocks: int, make: Callable[[Iterable[Tensor]], optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block(width) for _ in range(num_blocks)))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in [*self.model, self.model]:
            fsdp2.fully_shard(unit, mesh=mesh, offload_policy=fsdp2.CPUOffloadPolicy())
        self.optimizer = make(self.model.parameters())
        self.behind = 0.0

    def step(self, x: Tensor) -> None:
        self.model(x).square().mean().backward()
        start = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.behind = time.perf_counter() - start


class Clipped(optim.AdamW):
    """Clips by the exact norm, then steps."""

    def step(self, closure: Any = None) -> Any:
        fsdp2.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 1.0)
        return super().step(closure)


TODAY, TODAY_CLIPPED = "today", "today, clipped"
PEERS: dict[str, Callable[[Iterable[Any]], optim.Optimizer]] = {
    TODAY: partial(optim.AdamW, lr=LR, fused=True),
    TODAY_CLIPPED: partial(Clipped, lr=LR, fused=True),
    "fsdp2": partial(fsdp2.optim.HostAdamW, lr=LR),
    "fsdp2, forward overlaps": partial(fsdp2.optim.HostAdamW, lr=LR, overlap_forward=True),
    "fsdp2, clipped": partial(fsdp2.optim.HostAdamW, lr=LR, max_norm=1.0),
    "fsdp2, clipped by the step before": partial(fsdp2.optim.HostAdamW, lr=LR, max_norm=1.0, clip_by="step before"),
}


def run_rank(rank: int, store: str, num_ranks: int, width: int, num_blocks: int, tokens: int, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    peers = {name: Peer(width, num_blocks, make) for name, make in PEERS.items()}
    x = torch.randn(tokens, width)
    taken: dict[str, list[float]] = {name: [] for name in peers}
    behind: dict[str, list[float]] = {TODAY: [], TODAY_CLIPPED: []}
    for number in range(WARM_UP + ROUNDS):
        for name, peer in peers.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(2):  # a forward that waits for the step before counts, too
                peer.step(x)
            if number >= WARM_UP:
                taken[name].append((time.perf_counter() - start) / 2)
                if name in behind:
                    behind[name].append(peer.behind)
            peer.model.unshard()  # waits for what goes on
            peer.model.reshard()
    if rank == 0:
        found = {name: statistics.median(each) for name, each in taken.items()}
        torch.save((found, {name: statistics.median(each) for name, each in behind.items()}), results)
    dist.barrier()
    dist.destroy_process_group()


def rows_of(num_ranks: int, width: int, num_blocks: int, tokens: int) -> list[list[object]]:
    with tempfile.TemporaryDirectory() as folder:
        results = f"{folder}/results"
        arguments = (f"{folder}/store", num_ranks, width, num_blocks, tokens, results)
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=num_ranks)
        found, behind = torch.load(results, weights_only=False)
    rows: list[list[object]] = []
    for name in PEERS:
        if name.startswith("fsdp2"):
            peer = TODAY_CLIPPED if "clipped" in name else TODAY
            shown = [f"{seconds * 1e3:.0f}" for seconds in (found[peer], behind[peer], found[name])]
            row = f"{num_ranks} rank{'s' * (num_ranks > 1)}{name.removeprefix('fsdp2')}"
            rows.append([row, *shown, found[name] / found[peer], f"{1 - behind[peer] / found[peer]:.2f}"])
    return rows


# The device's budget


class Budgeted:
    """The same model, on a device that holds ``share`` of its bytes. None: today's way, with all parameters on the
    host."""

    def __init__(self, width: int, num_blocks: int, share: float | None) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(*(Block(width) for _ in range(num_blocks)))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in [*self.model, self.model]:
            fsdp2.fully_shard(unit, mesh=mesh, offload_policy=STAGED if share is None else None)
        params = list(self.model.parameters())
        if share is None:
            tree = tree_of(unit_of(self.model))  # type: ignore[arg-type]
            self.device_nbytes = peak_if_staged(tree, [True] * len(tree.units))
            numel = sum(param.to_local().numel() for param in params)
            self.host_nbytes = numel * host_nbytes_of(torch.float32, is_on_host=True)
            self.parameters_on_host = num_blocks
            self.optimizers: list[optim.Optimizer] = [optim.AdamW(params, lr=LR, fused=True)]
            return
        everything = fsdp2.memory.offload_by_budget(self.model, 1 << 50, offload_policy=STAGED).nbytes
        choice = fsdp2.memory.offload_by_budget(self.model, int(share * everything), offload_policy=STAGED)
        self.device_nbytes, self.host_nbytes = choice.nbytes, choice.host_nbytes
        self.parameters_on_host = len(choice.params_on_host)
        self.optimizers = [fsdp2.optim.HostAdamW(choice.host_params, lr=LR)] if choice.host_params else []
        if choice.device_params:
            self.optimizers.append(optim.AdamW(choice.device_params, lr=LR, fused=True))

    def step(self, x: Tensor) -> None:
        self.model(x).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def shards(self) -> list[Tensor]:
        return [param.to_local().detach() for param in self.model.parameters()]


SHARES = (1.0, 0.8, 0.6, 0.5)


def run_budgets(rank: int, store: str, num_ranks: int, width: int, num_blocks: int, tokens: int, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    peers = {share: Budgeted(width, num_blocks, share) for share in (None, *SHARES)}
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(rank))
    taken: dict[float | None, list[float]] = {share: [] for share in peers}
    for number in range(WARM_UP + ROUNDS):
        for share, peer in peers.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(2):
                peer.step(x)
            if number >= WARM_UP:
                taken[share].append((time.perf_counter() - start) / 2)
    expected = peers[None].shards()
    for share, peer in peers.items():
        if not all(map(torch.equal, peer.shards(), expected)):
            raise RuntimeError(f"with {share} of the bytes, parameters differ from today's")
    if rank == 0:
        found = {
            share: (statistics.median(taken[share]), peer.device_nbytes, peer.host_nbytes, peer.parameters_on_host)
            for share, peer in peers.items()
        }
        torch.save(found, results)
    dist.barrier()
    dist.destroy_process_group()


def budget_rows(num_ranks: int, width: int, num_blocks: int, tokens: int) -> list[list[object]]:
    with tempfile.TemporaryDirectory() as folder:
        results = f"{folder}/results"
        arguments = (f"{folder}/store", num_ranks, width, num_blocks, tokens, results)
        torch.multiprocessing.spawn(run_budgets, arguments, nprocs=num_ranks)
        found = torch.load(results, weights_only=False)
    today, start = found[None][0], f"{num_ranks} rank{'s' * (num_ranks > 1)}, "
    rows: list[list[object]] = []
    for share, (seconds, device, host, number) in found.items():
        name = "today" if share is None else f"budget {share:.0%}"
        ratio = None if share is None else seconds / today
        row = [f"{seconds * 1e3:.0f}", ratio, f"{device / 1e6:.0f}", f"{host / 1e6:.0f}", f"{number} of {num_blocks}"]
        rows.append([start + name, *row])
    return rows


# Bytes


def bytes_rows(numel: int = 1 << 16) -> list[list[object]]:
    """Bytes per parameter: on the device, and on the host, of which pinned."""
    rows: list[list[object]] = []
    for name, dtype, offloaded in (
        ("AdamW on the device", torch.float32, None),
        ("CPUOffloadPolicy, AdamW or HostAdamW", torch.float32, True),
        ("HostAdamW", torch.float32, False),
        ("HostAdamW, shards in bf16", torch.bfloat16, False),
    ):
        shard = torch.empty(numel, dtype=dtype)
        gradient, states = shard.nbytes, 2 * 4 * numel
        if offloaded is None:
            device, host, pinned = shard.nbytes + gradient + states, 0, 0
        elif offloaded:
            device, host, pinned = 0, shard.nbytes + gradient + states, shard.nbytes + gradient
        else:
            pinned = _staging_nbytes(shard)
            masters = 0 if dtype is torch.float32 else 4 * numel
            device, host = shard.nbytes + gradient, pinned + states + masters
        rows.append([name, *(f"{nbytes / numel:g}" for nbytes in (device, max(device - gradient, 0), host, pinned))])
    return rows


class _Elsewhere(HostParam):
    """A shard that is not its own master, though this process has no device."""

    is_own_master = False

    def __init__(self, shard: Tensor) -> None:
        super().__init__(nn.Parameter(shard, requires_grad=False), "")

    @property
    def local(self) -> Tensor:
        return self.param.data


def _staging_nbytes(shard: Tensor) -> int:
    """What ``HostAdamW`` allocates for what is copied to and from ``shard``."""
    param = _Elsewhere(shard)
    make_staging([param], [torch.empty_like(shard)])
    return sum(each.nbytes for each in (param.gradient, param.staged) if each is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sizes = (options.width, options.blocks, options.tokens)
    rows = [row for number in options.ranks for row in rows_of(number, *sizes)]
    tables = [
        Table(
            "steps",
            "Median ms of a step",
            ["", "today ms", "behind ms", "fsdp2 ms", "ratio", "best possible"],
            rows,
            noise=0.15,
            note="today: CPUOffloadPolicy, then AdamW. behind: what follows backward. ratio: fsdp2 to today. best "
            "possible: the ratio if all of that were hidden. Clipped rows: today clips, too.",
        ),
        Table(
            "bytes",
            "Bytes per parameter of the rank, counted",
            ["", "device, peak", "device, between steps", "host", "pinned"],
            bytes_rows(),
            ratio=None,
            note="Without activations, unsharded parameters and whole gradients. Peak: with gradients of all shards.",
        ),
        Table(
            "budget",
            "Median ms of a step within a budget of device bytes",
            ["", "ms", "ratio", "device MB", "host MB", "blocks on the host"],
            [row for number in options.ranks for row in budget_rows(number, *sizes)],
            noise=0.15,
            note="today: all parameters on the host, AdamW behind backward. budget: of what shards, gradients, states "
            "and temporary memory take if all live on the device. ratio: to today. MB: the peak of this rank by plan, "
            "without activations. on the host: their parameters; of other blocks, states may be. Values are equal, "
            "bit for bit.",
        ),
    ]
    title = f"{options.blocks} blocks of width {options.width}, {options.tokens} tokens, gloo"
    publish("optim/host_adamw", title, tables)


if __name__ == "__main__":
    main()
