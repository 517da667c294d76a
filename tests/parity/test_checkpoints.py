"""Distributed checkpoints: saved under one number of ranks, mesh and setting, loaded under another, and trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.pool import shared_pool
from tests.harness.runtimes import subject
from tests.harness.selection import long
from tests.harness.training import dtensor_adamw
from tests.parity.setups import SETUPS, evaluate, load_states, setups, states_of, train_steps, whole

Saved = tuple[dict[str, Any], list[Tensor]]  # what a run held when it was saved, and the losses of the steps after


def _trained(ctx: RankContext, setup: str) -> tuple[Any, Any]:
    """All ranks see the same data, so that any number of them computes the same."""
    model = SETUPS[setup].sharded(subject(), ctx)
    optimizer = dtensor_adamw(model.parameters())
    train_steps(ctx, model, optimizer, range(2), alike=True)
    evaluate(ctx, model)  # leaves the root unsharded
    return model, optimizer


def _save(ctx: RankContext, setup: str, path: Path) -> Saved:
    model, optimizer = _trained(ctx, setup)
    states = states_of(model, optimizer)
    dcp.save(states, checkpoint_id=path)
    return whole(states), train_steps(ctx, model, optimizer, range(2, 4), alike=True)


def _load(ctx: RankContext, setup: str, path: Path) -> Saved:
    """Into a model of other values, which has gathered them for a forward already."""
    model = SETUPS[setup].sharded(subject(), ctx, seed=1)
    optimizer = dtensor_adamw(model.parameters())
    train_steps(ctx, model, optimizer, [7])
    evaluate(ctx, model)
    model.reshard()
    load_states(model, optimizer, path)
    found = whole(states_of(model, optimizer))
    return found, train_steps(ctx, model, optimizer, range(2, 4), alike=True)


def _check(saved: Saved, loaded: list[Saved]) -> None:
    for states, losses in loaded:
        compare_values("states", states, saved[0])
        torch.testing.assert_close(losses, saved[1], rtol=1e-4, atol=1e-5)


ELSEWHERE = {"from HSDP": ("hsdp", 4, "uneven", 2)}
MORE_ELSEWHERE = {
    "onto tensor parallelism": ("kept", 2, "tp", 4),
    "more ranks, tied": ("tied", 2, "tied", 4),
    "from a smaller mesh between passes": ("resting", 4, "kept", 4),
    "more ranks": ("uneven", 2, "uneven", 4),
    "fewer ranks": ("uneven", 4, "uneven", 2),
    "fewer ranks, tied": ("tied", 4, "tied", 2),
    "onto HSDP": ("uneven", 2, "hsdp", 4),
    "from HSDP onto FSDP of the same ranks": ("hsdp", 4, "uneven", 4),
    "onto a smaller mesh between passes": ("kept", 2, "resting", 4),
    "from tensor parallelism": ("tp", 4, "kept", 2),
}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("saver", "savers", "loader", "loaders"),
    [*ELSEWHERE.values(), *(pytest.param(*case, marks=pytest.mark.long) for case in MORE_ELSEWHERE.values())],
    ids=[*ELSEWHERE, *MORE_ELSEWHERE],
)
def test_checkpoint_is_loaded_elsewhere(saver: str, savers: int, loader: str, loaders: int, tmp_path: Path) -> None:
    saved = shared_pool(savers).run(_save, setup=saver, path=tmp_path)
    _check(saved[0], shared_pool(loaders).run(_load, setup=loader, path=tmp_path))


def _save_asynchronously(ctx: RankContext, setup: str, path: Path) -> Saved:
    """Training goes on while the checkpoint is written."""
    model, optimizer = _trained(ctx, setup)
    states = states_of(model, optimizer)
    expected = whole(states)
    group = dist.new_group(backend="gloo")  # the writing thread's, beside the training's collectives
    future = dcp.async_save(states, checkpoint_id=path, process_group=group)
    losses = train_steps(ctx, model, optimizer, range(2, 4), alike=True)
    future.result()
    dist.destroy_process_group(group)
    return expected, losses


@pytest.mark.ci
@pytest.mark.parametrize("setup", ["hsdp", *long("uneven", "resting", "tied")])
def test_asynchronous_save_writes_what_was_there_when_it_was_called(setup: str, tmp_path: Path) -> None:
    saved = shared_pool(4).run(_save_asynchronously, setup=setup, path=tmp_path)
    _check(saved[0], shared_pool(2).run(_load, setup=setup, path=tmp_path))


@distributed(2, 4)
def test_checkpoint_is_as_large_as_what_it_holds(ctx: RankContext, tmp_path: Path) -> None:
    """Shards share their storage with others; it is not written once for each of them."""
    path = tmp_path / "checkpoint"
    model = SETUPS["fsdp"].sharded(subject(), ctx)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    if ctx.rank == 0:
        held = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        num_tensors = sum(1 for _ in model.parameters())
        on_disk = sum(file.stat().st_size for file in path.glob("*.distcp"))
        overhead_nbytes = 2048 * num_tensors * ctx.world_size  # an archive's header for each shard
        assert held <= on_disk <= held + overhead_nbytes
    dist.barrier()


@setups("uneven", "tied")
@distributed(2)
def test_shards_of_each_rank_are_saved_and_loaded_by_torch_save(ctx: RankContext, setup: str, tmp_path: Path) -> None:
    model, optimizer = _trained(ctx, setup)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    file = tmp_path / f"rank{ctx.rank}.pt"
    torch.save(saved, file)
    other = SETUPS[setup].sharded(subject(), ctx, seed=1)
    other_optimizer = dtensor_adamw(other.parameters())
    loaded = torch.load(file, weights_only=False)
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    compare_values("model", whole(other.state_dict()), whole(model.state_dict()))
    expected, found = (train_steps(ctx, m, o, range(2, 4)) for m, o in ((model, optimizer), (other, other_optimizer)))
    compare_values("losses", found, expected)


@setups("uneven", "kept")
@distributed(2)
def test_checkpoint_loaded_into_the_shards_in_place_is_computed_with(
    ctx: RankContext, setup: str, tmp_path: Path
) -> None:
    """``dcp.load`` writes the shards of ``state_dict()``; nothing is called on the model afterwards."""
    model, _ = _trained(ctx, setup)
    expected = evaluate(ctx, model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "checkpoint")
    other = SETUPS[setup].sharded(subject(), ctx, seed=1)
    evaluate(ctx, other)  # the root is unsharded when the state dict is taken
    dcp.load({"model": other.state_dict()}, checkpoint_id=tmp_path / "checkpoint")
    compare_values("loss", evaluate(ctx, other), expected)
