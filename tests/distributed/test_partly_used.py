"""Checkpoints of models of which some units have never run: as the plain model, on other ranks, in a new model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import fsdp2
from fsdp2.checkpoint import optimizer_state_to_load
from tests.distributed.changes import whole
from tests.distributed.support import Stack, batch, seeded, shard
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of, one_line
from tests.harness.pool import shared_pool
from tests.harness.selection import long

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Experts(Stack):
    """Only runs some of its blocks."""

    used = (0,)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for number in self.used:
            x = self.blocks[number](x)
        return self.exit(x)


def _new(model: Any = None) -> tuple[Any, torch.optim.Optimizer]:
    model = model or seeded(Experts)
    groups = [{"params": [*model.entry.parameters(), *model.blocks.parameters()]}, {"params": model.exit.parameters()}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def _train(model: Any, optimizer: torch.optim.Optimizer, used: tuple[int, ...], steps: range) -> None:
    model.used = used
    for seed in steps:
        model(batch(seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _train_more(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    _train(model, optimizer, (0, 1, 2), range(2, 5))
    return whole(model)


def _plain() -> dict[str, Tensor]:
    model, optimizer = _new()
    _train(model, optimizer, (0, 2), range(2))
    other, other_optimizer = _new()
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return _train_more(other, other_optimizer)


def _write(model: Any, optimizer: Any, path: Path, *, key: str = "optimizer", options: Any = None) -> None:
    state = {"model": get_model_state_dict(model), key: get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save(state, checkpoint_id=path)


def _read(model: Any, optimizer: Any, path: Path, **how: Any) -> None:
    """``how``: the key and options that ``_write`` got, if any."""
    key = how.get("key", "optimizer")
    state = {"model": get_model_state_dict(model), key: optimizer_state_to_load(model, optimizer, path, **how)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state[key], options=how.get("options"))


def _save(ctx: RankContext, path: Path, options: StateDictOptions | None) -> None:
    model, optimizer = _new(shard(ctx, seeded(Experts)))
    _train(model, optimizer, (0, 2), range(2))
    _write(model, optimizer, path, key="optim", options=options)


def _load(ctx: RankContext, path: Path, options: StateDictOptions | None) -> dict[str, Tensor]:
    model, optimizer = _new(shard(ctx, seeded(Experts, 1)))
    _read(model, optimizer, path, key="optim", options=options)
    unused = model.blocks[1].linear.weight
    assert not optimizer.state.get(unused)
    return _train_more(model, optimizer)


@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flat"])
@pytest.mark.parametrize("ranks", [(1, 2), *long((2, 2), (2, 4), (4, 3))], ids=str)
def test_training_goes_on_as_that_of_the_plain_model(
    ranks: tuple[int, int], options: StateDictOptions | None, tmp_path: Path
) -> None:
    before, after = ranks
    shared_pool(before).run(_save, path=tmp_path / "saved", options=options)
    for found in shared_pool(after).run(_load, path=tmp_path / "saved", options=options):
        if after == 2:
            compare_values("trained", found, _plain())
        else:
            torch.testing.assert_close(found, _plain())


@distributed(2)
def test_what_cannot_be_loaded_is_refused_on_all_ranks(ctx: RankContext, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    _save(ctx, path, None)
    model, optimizer = _new(shard(ctx, seeded(Experts)))

    def refused(*args: Any, **kwargs: Any) -> str:
        return one_line(error_of(lambda: optimizer_state_to_load(model, optimizer, *args, **kwargs)))

    assert "which has the keys 'model', 'optim'. Pass key=" in refused(path)
    assert "On rank 0: " in refused(tmp_path / "nothing")
    assert "expected options of a sharded state dict" in refused(path, options=StateDictOptions(full_state_dict=True))
    model, optimizer = _new(shard(ctx, seeded(Experts)))
    _train(model, optimizer, (1,), range(1))
    error = refused(path, key="optim")
    assert "states of 'blocks.0.linear.weight', 'blocks.0.linear.bias'" in error
    assert "call optimizer.state.clear() first" in error
    optimizer.state.clear()
    optimizer_state_to_load(model, optimizer, path, key="optim")


def test_an_unsharded_model_loads_them_too(tmp_path: Path) -> None:
    shared_pool(2).run(_save, path=tmp_path / "saved", options=None)
    found = shared_pool(1).run(_load_plain, path=tmp_path / "saved")[0]
    compare_values("trained", found, _plain())


def _load_plain(ctx: RankContext, path: Path) -> dict[str, Tensor]:
    model, optimizer = _new()
    _read(model, optimizer, path, key="optim")
    return _train_more(model, optimizer)


OURS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "on the host": lambda model: fsdp2.optim.HostAdamW(model.parameters()),
    "Muon": lambda model: fsdp2.optim.Muon(fsdp2.optim.muon_groups(model, verbose=False)),
    "flat": lambda model: fsdp2.optim.flatten_optimizer(torch.optim.AdamW(model.parameters())),
}


@pytest.mark.parametrize("name", ["on the host", "flat", *long("Muon")])
@distributed(2)
def test_our_optimizers_go_on_as_without_the_checkpoint(ctx: RankContext, tmp_path: Path, name: str) -> None:
    model, other = shard(ctx, seeded(Experts)), shard(ctx, seeded(Experts, 1))
    optimizers = OURS[name](model), OURS[name](other)
    _train(model, optimizers[0], (0, 2), range(2))
    _write(model, optimizers[0], tmp_path / "saved")
    _read(other, optimizers[1], tmp_path / "saved")
    found = []
    for each, its in zip((model, other), optimizers, strict=True):
        _train(each, its, (0, 1, 2), range(2, 5))
        if isinstance(its, fsdp2.optim.HostAdamW):
            its.wait()
        found.append(whole(each))
    compare_values("trained", found[1], found[0])
