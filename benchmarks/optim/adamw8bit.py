"""Claim: ``fsdp2.optim.AdamW8bit`` holds at most 2.1 bytes of states per element of a quantised parameter. The other
tables show what that costs: errors, losses on real text, and time.

Bytes are those of the tensors in ``optimizer.state``, per element of the parameter, after a step. Peak: the most bytes
of tensors that a step makes and that live at one time, per element of a matrix of 4 million elements.

Errors are those of updates, against AdamW in fp64 that gets the same gradients: the root mean square of the difference,
divided by that of the updates, over every tenth step from the 50th to the 1500th. Gradients are normal, with a standard
deviation that differs between columns: by a factor of about 1.6 if they are "alike", of 7 if they are "wide"; from step
500 on, those that "fade" are a twentieth. "nearest": without dither, so that slow averages stop moving.

The model is that of ``docs/examples/train_lm.py``, and the text is Python's standard library. Steps are timed with one
thread, peers take turns, and each steps one matrix.

    python benchmarks/optim/adamw8bit.py [--steps 500] [--dim 128] [--torchao]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
from benchmarks.common import Table, publish
from docs.examples.lm_task import ModelConfig, Transformer, read_corpus, training_batch, validation_batch
from fsdp2.optim import AdamW8bit
from fsdp2.optim.adamw8bit import optimizer as its_module

Make = Callable[[list[nn.Parameter]], optim.Optimizer]
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix 1024 x 4096": (1024, 4096),
    "matrix 1024 x 1000": (1024, 1000),
    "experts 4 x 128 x 704": (4, 128, 704),
    "LoRA 4096 x 16": (4096, 16),
    "convolution 256 x 256 x 3 x 3": (256, 256, 3, 3),
    "vector 4096": (4096,),
}


def bitsandbytes() -> Make | None:
    try:
        from bitsandbytes.optim import AdamW8bit as Other  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    return partial(Other, weight_decay=0.0)


def torchao() -> Make | None:
    try:
        from torchao.optim import AdamW8bit as Other  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    return partial(Other, weight_decay=0.0)


# Bytes


class NewBytes(TorchDispatchMode):
    """``peak``: the most bytes of tensors that operations in the block have made and that lived at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        result = func(*args, **(kwargs or {}))
        for each in pytree.tree_leaves(result):
            if torch.is_tensor(each) and (key := each.untyped_storage()._cdata) not in given | self._seen:
                self._seen.add(key)
                self.now += each.untyped_storage().nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(each.untyped_storage(), self._forget, key, each.untyped_storage().nbytes())
        return result

    def _forget(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.now -= nbytes


def stepped(make: Make, shape: tuple[int, ...]) -> optim.Optimizer:
    param = nn.Parameter(torch.zeros(shape))
    param.grad = torch.ones(shape)
    optimizer = make([param])
    optimizer.step()
    return optimizer


def state_nbytes(make: Make, shape: tuple[int, ...]) -> str:
    optimizer = stepped(make, shape)
    states = [each for each in pytree.tree_leaves(dict(optimizer.state)) if torch.is_tensor(each) and each.numel() > 1]
    return f"{sum(each.nbytes for each in states) / torch.Size(shape).numel():.3f}"


def peak_nbytes(make: Make) -> str:
    optimizer = stepped(make, (1024, 4096))
    with NewBytes() as seen:
        optimizer.step()
    return f"{seen.peak / (1024 * 4096):.3f}"


def bytes_rows() -> list[list[object]]:
    makes: list[Make] = [optim.AdamW, AdamW8bit]
    rows: list[list[object]] = [
        [name, *(state_nbytes(make, shape) for make in makes)] for name, shape in SHAPES.items()
    ]
    return [*rows, ["made in a step, matrix 1024 x 4096", *map(peak_nbytes, makes)]]


# Errors


def nearest(params: list[nn.Parameter], **options: Any) -> optim.Optimizer:
    """``AdamW8bit`` that rounds to the nearest code."""
    made = AdamW8bit(params, **options)
    step = made.step

    def without_dither() -> Any:
        with mock.patch.object(its_module, "dithers_of", lambda size, *_: _Halves(size)):
            return step()

    made.step = without_dither  # type: ignore[assignment]
    return made


class _Halves(dict[Any, Tensor]):
    def __init__(self, size: int) -> None:
        super().__init__()
        self._half = torch.full((size, 1), 0.5)

    def __getitem__(self, _: Any) -> Tensor:
        return self._half

    def __bool__(self) -> bool:
        return True


def gradient(kind: str, step: int, shape: tuple[int, int] = (64, 256)) -> Tensor:
    own = torch.Generator().manual_seed(0)
    rows, columns = torch.randn(shape[0], 1, generator=own) * 0.5, torch.randn(1, shape[1], generator=own)
    fading = torch.rand(shape, generator=own) < 0.5
    noise = torch.Generator().manual_seed(step)
    scale = (rows + columns * (2.0 if kind == "wide" else 0.5)).exp() * 1e-3
    if kind == "fade" and step > 500:
        scale = torch.where(fading, scale / 20, scale)
    return scale * (torch.randn(shape, generator=noise) + 0.1) * (torch.rand(shape[0], 1, generator=noise) + 0.1)


def error(make: Make, kind: str, num_steps: int) -> str:
    """Of the updates, which show in a parameter that is 0 before each step. The exact one computes in fp64."""
    found, exact = (nn.Parameter(torch.zeros(64, 256, dtype=dtype)) for dtype in (torch.float32, torch.float64))
    its = make([found])
    expected = optim.AdamW([exact], lr=1.0, weight_decay=0.0)
    differences, updates = [], []
    for step in range(1, num_steps + 1):
        found.grad = gradient(kind, step)
        exact.grad = found.grad.double()
        with torch.no_grad():
            found.zero_()
            exact.zero_()
        its.step()
        expected.step()
        if step >= 50 and step % 10 == 0:
            differences.append((found.double() - exact).square().mean().item())
            updates.append(exact.square().mean().item())
    return f"{(sum(differences) / sum(updates)) ** 0.5:.2g}"


def error_rows(num_steps: int) -> list[list[object]]:
    options: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0}
    makes: dict[str, Make | None] = {
        "torch.optim.AdamW, fp32": partial(optim.AdamW, **options),
        "fsdp2 AdamW8bit": partial(AdamW8bit, **options),
        "fsdp2 AdamW8bit, nearest": partial(nearest, **options),
        "bitsandbytes AdamW8bit": None if (other := bitsandbytes()) is None else partial(other, lr=1.0),
    }
    kinds = ("alike", "wide", "fade")
    return [[name, *(make and error(make, kind, num_steps) for kind in kinds)] for name, make in makes.items()]


# Training


class Trained:
    """A model with its optimizer, and its losses by step."""

    def __init__(self, make: Make, config: ModelConfig) -> None:
        torch.manual_seed(0)
        self.model, self.losses = Transformer(config), dict[int, str]()
        self.optimizer = make(list(self.model.parameters()))

    def step(self, inputs: Tensor, targets: Tensor, lr: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.loss(inputs, targets)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())


def training_rows(num_steps: int, dim: int) -> list[list[object]]:
    config = ModelConfig(dim, 2, 4, dim * 3, 64, tie_embedding=False)
    corpus, sizes = read_corpus(), {"batch_size": 8, "sequence_length": 64}
    options: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    peers = [Trained(partial(make, **options), config) for make in (optim.AdamW, AdamW8bit)]
    rows: list[list[object]] = []
    recent: list[list[float]] = [[], []]
    for step in range(num_steps):
        batch = training_batch(corpus.train, seed=0, step=step, rank=0, num_ranks=1, **sizes)
        lr = 2e-3 * min(1.0, (step + 1) / 50) * (1 - 0.9 * step / num_steps)
        for peer, losses in zip(peers, recent, strict=True):
            losses.append(peer.step(*batch, lr))
        if (step + 1) % (num_steps // 10) == 0:
            means = [statistics.mean(losses) for losses in recent]
            rows.append([f"{step + 1 - len(recent[0]) + 1} to {step + 1}", *(f"{mean:.4f}" for mean in means)])
            recent = [[], []]
    with torch.no_grad():
        batches = [validation_batch(corpus.validation, index=i, num_batches=64, **sizes) for i in range(64)]
        found = [statistics.mean(peer.loss(*batch).item() for batch in batches) for peer in peers]
    return [*rows, ["validation", *(f"{loss:.4f}" for loss in found)]]


# Time


def time_rows(with_torchao: bool, rounds: int = 9) -> list[list[object]]:
    makes: dict[str, Make | None] = {
        "torch.optim.AdamW": optim.AdamW,
        "torch.optim.AdamW(fused=True)": partial(optim.AdamW, fused=True),
        "fsdp2 AdamW8bit": AdamW8bit,
        "bitsandbytes AdamW8bit": bitsandbytes(),
        "torchao AdamW8bit, compiled": torchao() if with_torchao else None,
    }
    taken: dict[str, list[float]] = {name: [] for name in makes}
    optimizers = {name: stepped(make, (1024, 4096)) for name, make in makes.items() if make is not None}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            start = time.process_time()  # of this process: others may use its core
            optimizer.step()
            taken[name].append(time.process_time() - start)
    medians = {name: statistics.median(each) for name, each in taken.items() if each}
    base = medians["torch.optim.AdamW"]
    return [
        [name, f"{medians[name] / (1024 * 4096) * 1e9:.1f}", medians[name] / base]
        if name in medians
        else [name, "-", None]
        for name in makes
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="of training; errors take three times as many")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--torchao", action="store_true", help="time torchao, too, which compiles for minutes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    both = ["", "torch.optim.AdamW", "fsdp2 AdamW8bit"]
    tables = [
        Table("bytes", "Bytes per element", both, bytes_rows(), ratio=None, note="States, and what a step makes."),
        Table(
            "errors",
            "Relative error of updates against fp64",
            ["", "alike", "wide", "fade"],
            error_rows(3 * options.steps),
            ratio=None,
            note="Gradients of columns are alike, or differ widely; or half of all gradients fade to a twentieth.",
        ),
        Table(
            "training",
            "Mean loss over steps",
            both,
            training_rows(options.steps, options.dim),
            ratio=None,
            note="Both get the same batches of the standard library's source.",
        ),
        Table(
            "time",
            "CPU time of a step, ns per element",
            ["", "ns", "ratio"],
            time_rows(options.torchao),
            noise=0.3,
            note="One matrix 1024 x 4096, one thread. ratio: to torch.optim.AdamW.",
        ),
    ]
    publish("optim/adamw8bit", f"A byte-level language model of width {options.dim}, one rank", tables)


if __name__ == "__main__":
    main()
