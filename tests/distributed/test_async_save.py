"""``async_save``: training continues, and a rank that fails makes all ranks raise."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fsdp2.checkpoint import async_save
from fsdp2.core import CommunicationError
from tests.distributed.changes import whole
from tests.distributed.support import sharded, train
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of, one_line


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _state(model: nn.Module) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "step": [1]}


def _fails(rank: int, failing: int, name: str) -> AbstractContextManager[Any]:
    """In the block, the function ``name`` raises on the rank ``failing``."""
    return mock.patch(name, side_effect=OSError("disk full")) if rank == failing else nullcontext()


WRITE = "torch.distributed.checkpoint.FileSystemWriter.write_data"
RENAME = "os.rename"


@distributed(2, 4)
def test_a_checkpoint_has_the_values_of_the_call(ctx: RankContext, tmp_path: Path) -> None:
    model = sharded(ctx)
    optimizer = torch.optim.AdamW(model.parameters())
    expected, state = whole(model), _state(model)
    save = async_save(state, tmp_path / "step_1")
    state["step"][0] = 2
    train(model, optimizer, steps=range(2))
    asked = 0
    while not save.done():  # as often on all ranks
        asked += 1
        dist.barrier()
        time.sleep(0.01)
    counts: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(counts, asked)
    assert counts == [asked] * ctx.world_size
    assert save.result() == tmp_path / "step_1"
    dist.barrier()
    assert _names(tmp_path) == ["step_1"]
    loaded = _state(sharded(ctx, num_blocks=3))
    dcp.load(loaded, checkpoint_id=tmp_path / "step_1")
    compare_values("saved", {name: each.full_tensor() for name, each in loaded["model"].items()}, expected)
    assert loaded["step"] == [1]


@pytest.mark.parametrize(("what", "failing"), [(WRITE, 1), (RENAME, 0)], ids=["write", "rename"])
@distributed(2, 4)
def test_a_rank_that_cannot_write_makes_all_raise(ctx: RankContext, tmp_path: Path, what: str, failing: int) -> None:
    model = sharded(ctx)
    async_save(_state(model), tmp_path / "step_1").result()
    with _fails(ctx.rank, failing, what):
        save = async_save(_state(model), tmp_path / "step_2")
        error = one_line(error_of(save.result))
    assert error.endswith(f"step_2 was not saved. rank {failing}: OSError: disk full"), error
    assert save.done()
    dist.barrier()
    assert _names(tmp_path) == ["step_1"]
    async_save(_state(model), tmp_path / "step_2").result()
    dist.barrier()
    assert _names(tmp_path) == ["step_1", "step_2"]


@pytest.mark.parametrize("asking", [(), (1,)], ids=["nobody", "one rank"])
@distributed(2, 3)
def test_an_error_that_nobody_has_seen_is_raised_by_the_next_save(
    ctx: RankContext, tmp_path: Path, asking: tuple[int, ...]
) -> None:
    model = sharded(ctx)
    with _fails(ctx.rank, 1, WRITE):
        save = async_save(_state(model), tmp_path / "step_1")
        while not save.done():
            time.sleep(0.01)
    if ctx.rank in asking:
        with suppress(RuntimeError):
            save.result()
    error = one_line(error_of(lambda: async_save(_state(model), tmp_path / "step_2")))
    assert "step_1 was not saved. rank 1: OSError: disk full" in error
    async_save(_state(model), tmp_path / "step_3").result()
    dist.barrier()
    assert _names(tmp_path) == ["step_3"]


@distributed(2)
def test_after_a_rank_is_lost_nothing_more_is_sent(ctx: RankContext, tmp_path: Path) -> None:
    """Others may be in the middle of the save, and wait for this rank until it ends."""
    lost = RuntimeError("Connection closed by peer")  # as gloo says it
    with mock.patch.object(dcp, "save", side_effect=lost), mock.patch.object(dist, "all_gather_object") as sent:
        save = async_save({"step": 1}, tmp_path / "step_1")
        with suppress(CommunicationError):
            save.result()
    with pytest.raises(CommunicationError, match=r"step_1 was not saved\. Connection closed by peer"):
        save.result()
    assert not sent.called


class _Part:
    """A part of a state dict that a rank may fail to make."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise ValueError("no state")
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@distributed(2)
def test_what_fails_before_the_save_is_raised_at_once(ctx: RankContext, tmp_path: Path) -> None:
    model = sharded(ctx)
    state = {**_state(model), "part": _Part(fails=ctx.rank == 1)}
    assert "On rank 1: no state" in error_of(lambda: async_save(state, tmp_path / "step_1"))
    (tmp_path / "step_2").mkdir(exist_ok=True)
    dist.barrier()
    assert "step_2 exists. Save each" in one_line(error_of(lambda: async_save(_state(model), tmp_path / "step_2")))
    assert "expected a folder" in one_line(error_of(lambda: async_save(_state(model), "s3://bucket/step_3")))
    assert _names(tmp_path) == ["step_2"]
    async_save(_state(model), tmp_path / "step_1").result()
