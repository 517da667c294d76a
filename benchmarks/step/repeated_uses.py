"""Claim: a head that a step uses in chunks, or a layer that it uses several times in a row, is gathered twice per step,
where torch's ``fully_shard`` gathers for every use.

Forward and backward of a Llama of Hugging Face's transformers with a large vocabulary, on 2 gloo ranks, one thread
each; both runtimes take turns in the same processes. Every layer and the head are units. The loss calls the head for
each chunk of the tokens, inside the forward of the root.

- gathers: those of the unit that is used several times, in a step after the first;
- MB: the unsharded bytes of all gathers of that step;
- peak MB: the most that the CPU allocator hands out in that step, beyond what is allocated at its beginning.

    python benchmarks/step/repeated_uses.py [--width 256] [--layers 4] [--tokens 512] [--vocabulary 16384] [--rounds 9]
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
import fsdp2
from benchmarks.common import Table, medians_in_turns, publish
from benchmarks.llama import MISSING, Llama
from benchmarks.memory.peak_memory import peak_of_step
from fsdp2.report import trace

NUM_RANKS = 2
MB = 1e6


@dataclass(frozen=True)
class Case:
    """``num_chunks``: of the loss. ``num_uses``: how often each layer runs before the next one."""

    name: str
    num_chunks: int = 1
    num_uses: int = 1
    checkpoints: bool = False


CASES = (
    Case("one chunk"),
    Case("8 chunks", num_chunks=8),
    Case("8 chunks, checkpointed", num_chunks=8, checkpoints=True),
    Case("each layer 4 times", num_uses=4),
)


class Repeated(nn.Module):
    """Runs the wrapped layer several times in a row."""

    def __init__(self, layer: nn.Module, num_uses: int) -> None:
        super().__init__()
        self.layer, self.num_uses = layer, num_uses

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        for _ in range(self.num_uses):
            x = self.layer(x, *args, **kwargs)
        return x


class WithLoss(nn.Module):
    """The mean loss of the next token, over chunks."""

    def __init__(self, llama: Any, case: Case) -> None:
        super().__init__()
        self.body, self.head, self._case = llama.model, llama.lm_head, case
        self.body.layers = nn.ModuleList(Repeated(layer, case.num_uses) for layer in self.body.layers)

    def units(self) -> list[nn.Module]:
        return [*(each.layer for each in self.body.layers), self.head]  # type: ignore[union-attr,misc]

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, targets = self.body(input_ids=tokens).last_hidden_state[0, :-1], tokens[0, 1:]
        loss = partial(checkpoint, self._loss, use_reentrant=False) if self._case.checkpoints else self._loss
        chunks = zip(hidden.chunk(self._case.num_chunks), targets.chunk(self._case.num_chunks), strict=True)
        return torch.stack([loss(*chunk) for chunk in chunks]).sum() / len(targets)

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.head(hidden), targets, reduction="sum")


@dataclass
class Gathers:
    """The sizes of the gathers of a step in bytes."""

    nbytes: Counter[int]

    @property
    def total_mb(self) -> float:
        return sum(size * count for size, count in self.nbytes.items()) / MB


class _OfFsdp2(fsdp2.core.Observer):
    def __init__(self) -> None:
        self.nbytes: Counter[int] = Counter()

    def on_action(self, action: str, unit: str, nbytes: int) -> None:
        if action in ("unshard", "prefetch"):
            self.nbytes[nbytes] += 1


class _OfTorch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.nbytes[args[0].nbytes] += 1
        return func(*args, **(kwargs or {}))


def gathers(model: nn.Module, step: Callable[[], object]) -> Gathers:
    if isinstance(model, fsdp2.FSDPModule):
        with trace.observe(model, observer := _OfFsdp2()):
            step()
        return Gathers(observer.nbytes)
    with _OfTorch() as mode:
        step()
    return Gathers(mode.nbytes)


@dataclass(frozen=True)
class Figures:
    gathers: int
    gathered_mb: float
    peak_mb: float
    ms: float


def measure(case: Case, options: argparse.Namespace) -> Mapping[str, Figures]:
    llama: Any = Llama(options.width, options.layers, options.tokens, head_width=64).model()
    llama.lm_head = nn.Linear(options.width, options.vocabulary, bias=False)
    tokens = torch.randint(512, (1, options.tokens), generator=torch.Generator().manual_seed(dist.get_rank()))
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    models, steps = {}, {}
    for name, runtime in {"fsdp2": fsdp2, "torch": torch_fsdp}.items():
        model = models[name] = WithLoss(copy.deepcopy(llama), case)
        for module in [*model.units(), model]:
            runtime.fully_shard(module, mesh=mesh)
        steps[name] = partial(_step, model, tokens)
        for _ in range(2):
            steps[name]()
    reused: Any = models["torch"].units()[0 if case.num_uses > 1 else -1]
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in reused.parameters())
    counted = {name: gathers(models[name], steps[name]) for name in models}
    num_alike = options.layers if case.num_uses > 1 else 1
    peaks = {name: peak_of_step(step) / MB for name, step in steps.items()}
    seconds = medians_in_turns({name: partial(_timed, step) for name, step in steps.items()}, options.rounds)
    return {
        name: Figures(its.nbytes[nbytes] // num_alike, its.total_mb, peaks[name], seconds[name] * 1e3)
        for name, its in counted.items()
    }


def _step(model: nn.Module, tokens: Tensor) -> None:
    model(tokens).backward()
    for parameter in model.parameters():
        parameter.grad = None


def _timed(step: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def run_rank(rank: int, store: str, options: argparse.Namespace, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    found = {case.name: measure(case, options) for case in CASES}
    if rank == 0:
        torch.save(found, results)
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"width": 256, "layers": 4, "tokens": 512, "vocabulary": 16384, "rounds": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if MISSING:
        sys.exit(MISSING)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", options, f"{folder}/results")
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=NUM_RANKS)
        found: Mapping[str, Mapping[str, Figures]] = torch.load(arguments[-1], weights_only=False)
    columns = ["", *(f"{what}{who}" for what in ("gathers", "MB", "peak MB", "ms") for who in ("", ", torch")), "ratio"]
    rows: list[list[object]] = []
    for name, by_runtime in found.items():
        ours, theirs = by_runtime["fsdp2"], by_runtime["torch"]
        memory = [f"{each:.1f}" for each in (ours.gathered_mb, theirs.gathered_mb, ours.peak_mb, theirs.peak_mb)]
        times = [f"{each.ms:.0f}" for each in (ours, theirs)]
        rows.append([name, ours.gathers, theirs.gathers, *memory, *times, ours.ms / theirs.ms])
    note = "gathers: of the unit that is used several times. ratio: of the times."
    shape = f"a Llama of width {options.width}, {options.layers} layers, {options.tokens} tokens"
    shape += f", a head of {options.vocabulary} rows"
    table = Table("main", "A step after the first", columns, rows, note=note, noise=0.15)
    publish("step/repeated_uses", f"Units used several times, 2 gloo ranks, {shape}", [table])


if __name__ == "__main__":
    main()
