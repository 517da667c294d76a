"""Claim: gradients that travel in bfloat16 take half of float32's bytes, and those in int8 a quarter. They are summed
in float32, so the sum of bfloat16 gradients has no error to speak of, and int8 with error feedback trains like float32.

**Errors** need no process group: the gradients of 2 to 64 ranks are drawn, sent and summed in one process, and
compared with the sum in float64. ``alike`` means that all ranks' gradients have a part in common; else they are noise.
Where ranks compute in bfloat16, nothing is lost on the way; where they compute in float32, each gradient is rounded
once. A bf16 sum is what NCCL does with bfloat16: a rounding after each addition, one rank after another.

**Steps** are those of the model and the data of ``make train``, scaled down. Formats take turns in one run. Bytes are
those that a rank gives to gloo for others, counted in a backward whose parameters need no all-gather. Peak: the most
that the CPU's allocator hands out in a step, beyond shards, states, and what error feedback keeps. **Losses** are
means over the last tenth of the steps, and differences are those from the float32 run. Two rows are there to compare
with: parameters that are gathered in MXFP8, and a second float32 run with another seed of the batches.

    python benchmarks/tensors/gradient_wires.py [--steps 500] [--turns 8] [--ranks 2 4]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))
from lm_task import ModelConfig, Transformer, read_corpus, training_batch

from benchmarks.common import Table, medians_in_turns, publish
from benchmarks.memory.peak_memory import peak_of_step
from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.extras.gradient_wires import CastWire, total_of, with_feedback
from fsdp2.tensors import GradientWire, Int8Wire, MXFP8AllGatherTensor, wrap_parameters

SIZES = (2, 4, 8, 16, 32, 64)
NUMEL = 1 << 14
MODEL = ModelConfig(dim=96, num_layers=2, num_heads=3, hidden_dim=256, sequence_length=64, tie_embedding=True)
BATCH_SIZE, LEARNING_RATE, WARMUP_STEPS = 4, 2e-3, 20
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Format:
    """How a row's gradients travel. ``nbytes``: per element, on their way; None: a row of the loss curves only.
    ``gathered``: what matrices become, to be gathered."""

    name: str
    wire: Any
    nbytes: float | None
    seed: int = 0
    gathered: Callable[[Tensor], Tensor] | None = None


INT8 = Int8Wire()
INT8_NBYTES = 1 + 4 / INT8.block_size
FORMATS = [
    Format("fp32", None, 4),
    Format("bf16, summed in fp32", BF16, 2),
    Format("int8, error feedback", INT8, INT8_NBYTES),
    Format("int8, without", Int8Wire(error_feedback=False), INT8_NBYTES),
    Format("fp32, parameters gathered in mxfp8", None, None, gathered=MXFP8AllGatherTensor),
    Format("fp32, other batches", None, None, seed=1),
]


# Errors


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def summed_by(wire: GradientWire, grads: Tensor) -> Tensor:
    sent = [wire.fsdp_pre_reduce_scatter(grad.unsqueeze(0)) for grad in grads]
    return total_of(wire, tuple(torch.cat(parts) for parts in zip(*sent, strict=True)), FP32)


def summed_in_bf16(grads: Tensor) -> Tensor:
    first, *others = grads.to(BF16)
    total = first.clone()
    for other in others:
        total += other
    return total


def mean_of_reductions(grads: Tensor, count: int = 32) -> Tensor:
    """The mean of ``count`` int8 reductions of the same gradients with error feedback."""
    residuals = torch.zeros_like(grads, dtype=BF16)
    total = torch.zeros(grads.size(1), dtype=torch.float64)
    for _ in range(count):
        arrived = []
        for rank, grad in enumerate(grads):
            sent, lost = with_feedback(INT8, grad.to(FP32).unsqueeze(0), residuals[rank : rank + 1])
            residuals[rank] = lost.to(BF16)
            arrived.append(sent)
        total += total_of(INT8, tuple(torch.cat(parts) for parts in zip(*arrived, strict=True)), FP32)
    return total / count


def errors() -> Table:
    columns = ["", "bf16 wire", "bf16 sum", "ratio", "int8", "mean of 32 int8"]
    rows = []
    for compute in (BF16, FP32):
        for alike in (0.0, 1.0):
            for size in SIZES:
                generator = torch.Generator().manual_seed(size)
                grads = (torch.randn(size, NUMEL, generator=generator) + alike).to(compute)
                exact = grads.double().sum(0)
                wire, in_bf16 = (
                    relative(summed_by(CastWire(BF16), grads), exact),
                    relative(summed_in_bf16(grads), exact),
                )
                int8 = relative(summed_by(INT8, grads.to(FP32)), exact)
                mean = relative(mean_of_reductions(grads), exact)
                name = f"computed in {str(compute)[6:]}, {'alike' if alike else 'noise'}, {size} ranks"
                rows.append([name, f"{wire:.1e}", f"{in_bf16:.1e}", wire / in_bf16, f"{int8:.1e}", f"{mean:.1e}"])
    return Table("errors", "Errors of a sum, relative to that in fp64", columns, rows, noise=0.02)


# Steps


class SentBytes(TorchDispatchMode):
    """Bytes that this rank gives to gloo for others."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.send.default:
            self.nbytes += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


class Subject:
    """A model whose gradients travel in one format, trained step by step."""

    def __init__(self, format: Format, corpus: Tensor, num_steps: int) -> None:
        torch.manual_seed(0)
        self.model: Any = Transformer(MODEL)
        if format.gathered is not None:
            wrap_parameters(self.model, format.gathered)
        policy = MixedPrecisionPolicy(reduce_dtype=FP32, reduce_wire=format.wire)
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mp_policy=policy)
        self._format, self._corpus, self._num_steps = format, corpus, num_steps
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
        self.losses: list[Tensor] = []

    def step(self) -> float:
        started, index = time.perf_counter(), len(self.losses)
        left = max(0.1, 1 - index / self._num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (index + 1) / WARMUP_STEPS, left)
        loss = self._loss()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.detach())
        return time.perf_counter() - started

    def reduced_nbytes(self) -> int:
        """What a rank sends in a backward whose parameters are all unsharded."""
        self.model.unshard()
        for block in self.model.blocks:
            block.unshard()
            block.set_reshard_after_forward(False)
        loss = self._loss()
        with SentBytes() as sent:
            loss.backward()
        self._optimizer.zero_grad()
        for block in self.model.blocks:
            block.set_reshard_after_forward(True)
        return sent.nbytes

    def _loss(self) -> Tensor:
        tokens, targets = training_batch(
            self._corpus,
            seed=self._format.seed,
            step=len(self.losses),
            rank=dist.get_rank(),
            num_ranks=dist.get_world_size(),
            batch_size=BATCH_SIZE,
            sequence_length=MODEL.sequence_length,
        )
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())


def run_rank(rank: int, size: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store_{size}", rank=rank, world_size=size)
    corpus = read_corpus().train
    trained = size == options.ranks[0]
    subjects = {format.name: Subject(format, corpus, options.steps) for format in FORMATS}
    for subject in subjects.values():
        subject.step()  # the first one makes plans, and allocates
    steps: dict[str, Callable[[], float]] = {name: subject.step for name, subject in subjects.items()}
    seconds = medians_in_turns(steps, options.turns)
    peaks = {name: peak_of_step(subject.step) for name, subject in subjects.items()}
    nbytes = {name: subject.reduced_nbytes() for name, subject in subjects.items()}
    losses = {}
    for name, subject in subjects.items():
        while trained and len(subject.losses) < options.steps:
            subject.step()
        curve = torch.stack(subject.losses)
        dist.all_reduce(curve, dist.ReduceOp.SUM)
        losses[name] = (curve / size).tolist()
    if rank == 0:
        Path(folder, str(size)).write_text(
            json.dumps({"seconds": seconds, "peaks": peaks, "nbytes": nbytes, "losses": losses})
        )
    dist.barrier()
    dist.destroy_process_group()


def steps(results: dict[int, dict[str, Any]]) -> Table:
    columns = ["", "KB sent", "of fp32", "bytes per element", "peak KB", "ms", "ratio"]
    rows: list[list[object]] = []
    for size, result in results.items():
        for format in (each for each in FORMATS if each.nbytes is not None):
            nbytes, seconds = result["nbytes"][format.name], result["seconds"][format.name]
            of_fp32 = [nbytes / result["nbytes"]["fp32"], seconds / result["seconds"]["fp32"]]
            cells = [
                f"{nbytes / 1e3:.1f}",
                of_fp32[0],
                f"{format.nbytes:.3f}",
                f"{result['peaks'][format.name] / 1e3:.0f}",
                f"{seconds * 1e3:.1f}",
                of_fp32[1],
            ]
            rows.append([f"{size} ranks, {format.name}", *cells])
    return Table("steps", "A backward's gradients, and a training step", columns, rows, noise=0.2)


def losses(result: dict[str, Any]) -> Table:
    curves = {name: curve[-max(1, len(curve) // 10) :] for name, curve in result["losses"].items()}
    base = curves["fp32"]
    rows = []
    for name, curve in curves.items():
        difference = statistics.fmean(mine - other for mine, other in zip(curve, base, strict=True))
        rows.append([name, f"{statistics.fmean(curve):.4f}", f"{difference:+.4f}"])
    title = f"Losses after {len(result['losses']['fp32'])} steps"
    return Table("losses", title, ["", "loss", "difference"], rows, ratio=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="of the loss curves")
    parser.add_argument("--turns", type=int, default=8, help="of the steps, how many the formats take in turns")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="the first trains the loss curves")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    results: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in options.ranks:
            torch.multiprocessing.spawn(run_rank, (size, options, folder), nprocs=size)
            results[size] = json.loads(Path(folder, str(size)).read_text())
    tables = [errors(), steps(results), losses(results[options.ranks[0]])]
    publish("tensors/gradient_wires", "Gradients on the wire, gloo ranks, one thread each", tables)


if __name__ == "__main__":
    main()
