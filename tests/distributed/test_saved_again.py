"""What an optimizer has loaded is what it saves again, at any moment and in any format, and what it trains on with: the
same bits. A run that is never interrupted is the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import fsdp2
from fsdp2.optim import AdamW8bit, HostAdamW, Muon, flatten_optimizer
from tests.distributed.support import shard_units
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import DIM, PartlyUsed, freeze
from tests.harness.selection import long
from tests.parity.setups import load_states, recorded, states_of

FULL = StateDictOptions(full_state_dict=True)
BF16 = torch.bfloat16


def _host(model: nn.Module, **options: Any) -> optim.Optimizer:
    return HostAdamW(model.parameters(), lr=0.01, **options)


def _muon(model: nn.Module, **options: Any) -> optim.Optimizer:
    return Muon(fsdp2.optim.muon_groups(model, verbose=False), ns_dtype=torch.float32, **options)


OPTIMIZERS: dict[str, tuple[torch.dtype, Callable[[nn.Module], optim.Optimizer]]] = {
    "HostAdamW": (BF16, _host),
    "HostAdamW, overlapping": (BF16, lambda model: _host(model, overlap_forward=True, amsgrad=True)),
    "HostAdamW, clipped": (BF16, lambda model: _host(model, max_norm=0.1)),
    "HostAdamW, clipped by the step before": (BF16, lambda model: _host(model, max_norm=0.1, clip_by="step before")),
    "flat AdamW": (torch.float32, lambda model: flatten_optimizer(optim.AdamW(model.parameters(), amsgrad=True))),
    "AdamW8bit": (BF16, lambda model: AdamW8bit(model.parameters(), lr=0.01, block_size=16)),
    "Muon": (BF16, _muon),
    "Muon, in backward": (torch.float32, lambda model: _muon(model, last_first=True)),
}


class _Run:
    """A model with a parameter that is frozen, and paths that may go unused, and its optimizer."""

    def __init__(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.dtype, make = OPTIMIZERS[name]
        self.model: Any = PartlyUsed().to(self.dtype)
        freeze(self.model, "blocks.1.main.weight")
        shard_units(self.model)
        self.optimizer = make(self.model)
        self._is_early = name == "Muon, in backward"

    def forward(self, seed: int, **how: Any) -> torch.Tensor:
        x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(seed))
        loss: torch.Tensor = self.model(x.to(self.dtype), **how).float().square().mean()
        return loss

    def backward(self, seed: int, **how: Any) -> None:
        optimizer: Any = self.optimizer
        with optimizer.overlap_backward() if self._is_early else nullcontext():
            self.forward(seed, **how).backward()

    def train(self, seeds: Iterable[int], **how: Any) -> None:
        for seed in seeds:
            self.backward(seed, **how)
            self.optimizer.step()
            self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.forward(9)

    def record(self) -> Any:
        saved = self.optimizer.state_dict()  # HostAdamW waits for the host
        return recorded({"parameters": dict(self.model.named_parameters()), "optimizer": saved})


def _save_own(run: _Run, path: Path) -> None:
    saved = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    torch.save(saved, path / f"{dist.get_rank()}.pt")


def _load_own(run: _Run, path: Path) -> None:
    saved = torch.load(path / f"{dist.get_rank()}.pt")
    run.model.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])


def _save_full(run: _Run, path: Path) -> None:
    saved = get_state_dict(run.model, run.optimizer, options=FULL)
    if dist.get_rank() == 0:
        torch.save(saved, path / "full.pt")
    dist.barrier()


def _load_full(run: _Run, path: Path) -> None:
    model, optimizer = torch.load(path / "full.pt")
    set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=FULL)


Save = Callable[[_Run, Path], object]
FORMATS: tuple[tuple[Save, Save], ...] = (
    (
        lambda run, path: dcp.save(states_of(run.model, run.optimizer), checkpoint_id=path / "dcp"),
        lambda run, path: load_states(run.model, run.optimizer, path / "dcp"),
    ),
    (_save_full, _load_full),
    (_save_own, _load_own),
)

AT_FIRST = "before any step"
MOMENTS: dict[str, Callable[[_Run], object]] = {
    "after a step in which parameters had no gradient": lambda run: run.train([2], use_side=False),
    "after a forward": _Run.evaluate,
    "between backward and step": lambda run: run.backward(2),
}


@pytest.mark.parametrize("moment", [*list(MOMENTS)[:1], *long(AT_FIRST, *list(MOMENTS)[1:])])
@pytest.mark.parametrize("name", [*list(OPTIMIZERS)[:1], *long(*list(OPTIMIZERS)[1:])])
@distributed(2)
def test_what_was_loaded_is_what_is_saved_again(ctx: RankContext, name: str, moment: str, tmp_path: Path) -> None:
    """In one format after the other: in each, a run of other values that has trained loads, evaluates and saves."""
    runs = [_Run(name, seed=0)]
    if moment != AT_FIRST:
        runs[0].train(range(2))
        MOMENTS[moment](runs[0])
    expected: Any = None
    for seed, (save, load) in enumerate(FORMATS, 1):
        save(runs[-1], tmp_path)
        expected = expected or runs[0].record()
        runs.append(_Run(name, seed))
        runs[-1].train([seed])
        load(runs[-1], tmp_path)
        compare_values(f"loaded by format {seed}", runs[-1].record(), expected)
        runs[-1].evaluate()
    runs[0].optimizer.zero_grad()  # gradients are not saved
    for run in runs:
        run.train([10], use_side=False)
        run.train([11])
    for number, run in enumerate(runs[1:], 1):
        compare_values(f"resumed from format {number}", run.record(), runs[0].record())
