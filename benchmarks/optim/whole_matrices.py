"""Claim: a step of ``fsdp2.optim.Muon`` takes at most 0.55 of the time of gathering every matrix on every rank on 2
gloo ranks, and 0.4 on 4; and its planner divides the work among ranks within 5% of the best possible.

The first table: optimizer steps alone, over sharded parameters with gradients, one thread per rank; all peers take
turns in the same processes. Gathering everywhere is what people write by hand: momentum on the shards,
``full_tensor()`` of the update in bf16, Newton-Schulz of each matrix on each rank, this rank's part of it. torch:
``torch.optim.Muon`` on DTensors. All have the same products, in bf16.

The second table: the planner alone. Largest share: the most that a rank computes, to the mean; a matrix cannot be
divided, so no assignment may come below the column behind it. Bytes: what a rank sends in a step, to twice the bytes of
its shards.

    python benchmarks/optim/whole_matrices.py [--ranks 2 4] [--width 384] [--blocks 4]
"""

from __future__ import annotations

import argparse
import math
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
import fsdp2
from benchmarks.common import Block, Table, publish
from fsdp2.optim.matrices.planner import PlannedTensor, plan_matrices
from fsdp2.optim.matrices.regions import AxisCut, Placed
from fsdp2.optim.matrices.run import DEFAULT_BUCKET_NBYTES
from fsdp2.optim.muon.update import adjusted_ratio, newton_schulz

WARM_UP, ROUNDS = 1, 5
LR, MOMENTUM, WEIGHT_DECAY = 1e-3, 0.95, 0.1
COEFFICIENTS, NS_STEPS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
Step = Callable[[], object]
Shape = tuple[int, ...]


class Everywhere:
    """Each rank gathers each update, and orthogonalises it."""

    def __init__(self, params: Iterable[DTensor]) -> None:
        self._params = list(params)
        self._buffers = [torch.zeros_like(param) for param in self._params]

    @torch.no_grad()
    def step(self) -> None:
        for param, buffer in zip(self._params, self._buffers, strict=True):
            assert param.grad is not None
            buffer.lerp_(param.grad, 1 - MOMENTUM)
            update: Any = param.grad.lerp(buffer, MOMENTUM)
            whole = newton_schulz(update.bfloat16().full_tensor(), COEFFICIENTS, NS_STEPS, EPS)
            part = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
            param.mul_(1 - LR * WEIGHT_DECAY)
            param.add_(part, alpha=-LR * adjusted_ratio(None, *param.shape))


def matrices(width: int, num_blocks: int) -> list[DTensor]:
    """The matrices of a sharded model, with gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(num_blocks)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in [*model, model]:
        fsdp2.fully_shard(block, mesh=mesh)
    found: list[Any] = [param for param in model.parameters() if param.ndim == 2]
    for param in found:
        param.grad = param.detach() * 0.1
    return found


def peers(width: int, num_blocks: int) -> dict[str, Step]:
    return {
        "everywhere": Everywhere(matrices(width, num_blocks)).step,
        "torch": torch.optim.Muon(matrices(width, num_blocks), lr=LR).step,
        "fsdp2": fsdp2.optim.Muon(matrices(width, num_blocks), lr=LR).step,
    }


def seconds_of(step: Step) -> float:
    """From when all ranks begin to when all have ended."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def run_rank(rank: int, store: str, num_ranks: int, width: int, num_blocks: int, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    steps = peers(width, num_blocks)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARM_UP + ROUNDS):
        for name, step in steps.items():
            seconds = seconds_of(step)
            if number >= WARM_UP:
                taken[name].append(seconds)
    if rank == 0:
        torch.save({name: statistics.median(each) for name, each in taken.items()}, results)
    dist.barrier()
    dist.destroy_process_group()


def step_row(num_ranks: int, width: int, num_blocks: int) -> list[object]:
    with tempfile.TemporaryDirectory() as folder:
        results = f"{folder}/results"
        arguments = (f"{folder}/store", num_ranks, width, num_blocks, results)
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=num_ranks)
        found = torch.load(results, weights_only=False)
    shown = [f"{seconds * 1e3:.0f}" for seconds in found.values()]
    return [f"{num_ranks} ranks", *shown, found["fsdp2"] / found["everywhere"], found["fsdp2"] / found["torch"]]


def llama(width: int, kv: int, mlp: int, num_layers: int) -> list[Shape]:
    attention = [(width, width), (kv, width), (kv, width), (width, width)]
    return [*attention, (mlp, width), (mlp, width), (width, mlp)] * num_layers


def experts(width: int, heads: int, kv: int, mlp: int, num_experts: int, num_layers: int) -> list[Shape]:
    attention = [(heads, width), (kv, width), (kv, width), (width, heads)]
    return [*attention, *[(num_experts, mlp, width)] * 2, (num_experts, width, mlp)] * num_layers


MODELS = {
    "Llama 8B": llama(4096, 1024, 14336, 32),
    "Llama 70B": llama(8192, 1024, 28672, 80),
    "128 experts, 235B": experts(4096, 8192, 512, 1536, 128, 94),
}
NUM_RANKS = (8, 64, 512)


def plan_row(name: str, num_ranks: int) -> list[object]:
    coordinates = tuple((rank,) for rank in range(num_ranks))
    tensors = {
        i: PlannedTensor(f"{i}", Placed(shape, (AxisCut(num_ranks, 0),), coordinates), 2, _rule(shape))
        for i, shape in enumerate(MODELS[name])
    }
    start = time.perf_counter()
    plan = plan_matrices(tensors, num_ranks, bucket_nbytes=DEFAULT_BUCKET_NBYTES)
    seconds = time.perf_counter() - start
    twice = 2 * sum(math.prod(shape) for shape in MODELS[name]) * 2 / num_ranks
    sent = plan.sent_nbytes
    return [
        f"{name}, {num_ranks} ranks",
        f"{plan.balance:.3f}",
        f"{plan.balance / plan.distance_from_best:.3f}",
        plan.distance_from_best,
        f"{sum(sent) / num_ranks / twice:.2f}",
        f"{max(sent) / twice:.2f}",
        f"{plan.temporary_nbytes / 2**20:.0f}",
        f"{seconds:.1f}",
    ]


def _rule(shape: Shape) -> fsdp2.optim.MatrixRule:
    return fsdp2.optim.MatrixRule.batch() if len(shape) == 3 else fsdp2.optim.MatrixRule.whole()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--blocks", type=int, default=4)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    steps = [step_row(number, options.width, options.blocks) for number in options.ranks]
    plans = [plan_row(name, number) for name in MODELS for number in NUM_RANKS]
    columns = ["", "everywhere ms", "torch.optim.Muon ms", "fsdp2 ms", "ratio", "ratio to torch"]
    plan_columns = ["", "largest share", "best possible", "ratio", "bytes", "most bytes", "MiB for a moment", "plan s"]
    tables = [
        Table("steps", "Median ms of an optimizer step", columns, steps, noise=0.3, note="ratio: to everywhere."),
        Table(
            "plans",
            "Shares and bytes by the planner alone",
            plan_columns,
            plans,
            noise=0.0,
            note="ratio: largest share to the best possible. bytes: mean over ranks, to twice the bytes of a shard.",
        ),
    ]
    publish("optim/whole_matrices", f"Muon over {options.blocks} blocks of width {options.width}, gloo", tables)


if __name__ == "__main__":
    main()
