"""``mirrored``: a new model continues from what others have kept in memory, bit for bit, or is told to load from disk.

Hosts are folders here, with two ranks each; a host is lost when its folder is. A second ``Mirror`` in the same
processes is what a restarted job makes; ``tests/faults/test_mirrored.py`` kills processes.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.checkpoint import Mirror, mirrored
from fsdp2.core import find_tensors
from tests.distributed.support import DIM, Stack, seeded, shard, train
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of, one_line
from tests.harness.selection import long

JOB = "job"


class Counting(Stack):
    """With a buffer that each forward changes, and that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x + self.mean)


def _low_precision_adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Its states have another dtype than the parameters, to which torch would cast them."""
    optimizer = torch.optim.AdamW(params, lr=0.1)

    def narrow(*_: object) -> None:
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].bfloat16()

    def widen(*_: object) -> None:
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].float()

    optimizer.register_step_post_hook(narrow)
    optimizer.register_step_pre_hook(widen)
    return optimizer


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "states in bf16": lambda model: _low_precision_adamw(model.parameters()),
    "Muon": lambda model: fsdp2.optim.Muon(fsdp2.optim.muon_groups(model), lr=0.1),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "HostAdamW": lambda model: fsdp2.optim.HostAdamW(model.parameters(), lr=0.1),
    "AdamW8bit": lambda model: fsdp2.optim.AdamW8bit(model.parameters(), lr=0.1),
}


class Job:
    """One rank of a job, from its start to its end or restart."""

    def __init__(self, ctx: RankContext, folder: Path, name: str, num_replicas: int, seed: int, **options: Any) -> None:
        mesh = ctx.mesh_1d() if num_replicas == 1 else ctx.mesh_2d(num_replicas, ctx.world_size // num_replicas)
        self.model = shard(ctx, seeded(Counting, seed).to(ctx.device_type), mesh=mesh)
        self.optimizer = OPTIMIZERS[name](self.model)
        self.mirror = mirror_of(ctx, self.model, self.optimizer, folder, **options)

    def train(self, steps: range) -> None:
        for number in steps:
            train(self.model, self.optimizer, steps=range(number, number + 1))
            self.mirror.after_step(number + 1, {"next": number + 1})

    def bits(self) -> list[Tensor]:
        """All that this rank has."""
        held = [*self.model.parameters(), *self.model.buffers(), *find_tensors(self.optimizer.state_dict(), [])]
        return [each.to_local() if isinstance(each, DTensor) else each.detach() for each in held]


def mirror_of(
    ctx: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, every: int = 2, job: str = JOB
) -> Mirror:
    host = folder / f"host_{ctx.rank // 2}"
    host.mkdir(parents=True, exist_ok=True)
    return mirrored(model, optimizer, every=every, job=job, folder=host)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def lose(folder: Path, *hosts: int) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for host in hosts:
            shutil.rmtree(folder / f"host_{host}")
    dist.barrier()


@pytest.mark.parametrize("lost", [(), (1,)], ids=["all hosts are there", "a host is lost"])
@pytest.mark.parametrize("num_replicas", [1, 2], ids=["FSDP", "HSDP"])
@pytest.mark.parametrize("name", ["AdamW", "Muon", *long(*list(OPTIMIZERS)[1:2], *list(OPTIMIZERS)[3:])])
@distributed(4, 3)
def test_a_restarted_job_continues_bit_for_bit(
    ctx: RankContext, tmp_path: Path, name: str, num_replicas: int, lost: tuple[int, ...]
) -> None:
    if ctx.world_size % num_replicas:
        return
    first = Job(ctx, tmp_path, name, num_replicas, seed=0)
    assert first.mirror.restore() is None
    first.train(range(5))
    first.mirror.wait()
    first.train(range(5, 7))
    first.mirror.wait()
    lose(tmp_path, *lost)
    second = Job(ctx, tmp_path, name, num_replicas, seed=1)
    found = second.mirror.restore(newer_than=5)
    assert found == (6, {"next": 6})
    first.train(range(7, 9))
    second.train(range(6, 9))
    for mine, expected in zip(second.bits(), first.bits(), strict=True):
        assert mine.dtype is expected.dtype
        assert torch.equal(mine, expected)
    second.mirror.close()
    dist.barrier()
    assert files(tmp_path) == []


@distributed(4)
def test_without_both_copies_all_ranks_are_told_to_load_from_disk(ctx: RankContext, tmp_path: Path) -> None:
    Job(ctx, tmp_path, "SGD", 1, seed=0).mirror.restore()
    for damage in ("lost", "truncated", "overwritten", "another model", "too old"):
        job = Job(ctx, tmp_path, "SGD", 1, seed=0)
        job.mirror.restore()
        job.train(range(2))
        job.mirror.wait()
        dist.barrier()
        if damage == "lost":
            lose(tmp_path, 0, 1)
        if ctx.rank == 0 and damage in ("truncated", "overwritten"):
            for path in tmp_path.rglob("step2_of3_at*"):
                with path.open("r+b") as file:
                    file.truncate(4096) if damage == "truncated" else file.write(b"\xff" * 5000)
        dist.barrier()
        job = Job(ctx, tmp_path, "SGD" if damage != "another model" else "AdamW", 1, seed=1)
        before = [each.clone() for each in job.bits()]
        assert job.mirror.restore(newer_than=2 if damage == "too old" else -1) is None, damage
        assert all(map(torch.equal, job.bits(), before))
        dist.barrier()
        assert files(tmp_path) == []


@distributed(4)
def test_one_damaged_copy_is_replaced_by_the_other(ctx: RankContext, tmp_path: Path) -> None:
    job = Job(ctx, tmp_path, "SGD", 1, seed=0)
    job.mirror.restore()
    job.train(range(2))
    job.mirror.wait()
    dist.barrier()
    if ctx.rank == 0:
        (damaged,) = tmp_path.rglob("step2_of3_at3")
        with damaged.open("r+b") as file:
            file.seek(300)
            file.write(b"\xff")
    dist.barrier()
    other = Job(ctx, tmp_path, "SGD", 1, seed=1)
    assert other.mirror.restore() == (2, {"next": 2})
    assert all(map(torch.equal, other.bits(), job.bits()))
    # One copy is not enough, so the next step is mirrored although none is due.
    assert other.mirror.after_step(3)
    other.mirror.close()


@pytest.mark.parametrize("where", ["for its own shards", "for those of its neighbour"])
@distributed(4)
def test_a_rank_without_room_makes_all_raise_and_the_step_before_stays(
    ctx: RankContext, tmp_path: Path, where: str
) -> None:
    job = Job(ctx, tmp_path, "SGD", 1, seed=0)
    job.mirror.restore()
    job.train(range(2))
    job.mirror.wait()
    is_own, folder = where == "for its own shards", job.mirror._folder
    folder.trim()  # the rooms of an earlier step
    calls = iter([1, 2])
    allocate = os.posix_fallocate

    def full(*args: Any) -> None:
        if ctx.rank == 1 and (is_own or next(calls) == 2):
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(*args)

    with mock.patch.object(os, "posix_fallocate", full):
        error = one_line(error_of(lambda: job.mirror.after_step(4) and job.mirror.wait()))
    assert re.search(r"(On rank 1: |rank 1: OSError: )mirrored: .* has no room for 65536 bytes", error), error
    assert is_own or "step 4 is not in memory, the one before it still is" in error
    dist.barrier()
    assert [name for name in files(tmp_path) if "step4" in name] == []
    assert job.mirror.after_step(6, "later")
    job.mirror.wait()
    other = Job(ctx, tmp_path, "SGD", 1, seed=1)
    assert other.mirror.restore() == (6, "later")
    other.mirror.close()


@distributed(2)
def test_wrong_arguments_and_ranks_that_differ_raise_on_all_ranks(ctx: RankContext, tmp_path: Path) -> None:
    model = shard(ctx, seeded(Stack).to(ctx.device_type))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    no_room = tmp_path / "file"
    no_room.touch()

    def refused(expected: str, *args: Any, **options: Any) -> None:
        given = {"every": 2, "job": JOB, "folder": tmp_path, **options}
        error = one_line(error_of(lambda: mirrored(*(args or (model, optimizer)), **given)))
        assert expected in error, error

    refused("mirrored: model is None", None, optimizer)
    refused("mirrored: optimizer is 1", model, [1])
    refused("mirrored: every is 0, expected an int of at least 1", every=0)
    refused("mirrored: every is 1.5", every=1.5)
    refused("mirrored: job is '../x', expected 1 to 100 letters", job="../x")
    refused("mirrored: job is None, and torchrun has no run id", job=None)
    refused("mirrored: folder is 1", folder=1)
    refused("file/fsdp2_mirror", folder=no_room)
    refused("On rank 1: mirrored: every is 0", every=1 - ctx.rank)
    refused("every or job differs between ranks", every=1 + ctx.rank)
    mirror = mirrored(model, optimizer, every=2, job=JOB, folder=tmp_path)
    assert "after_step was called before restore" in one_line(error_of(lambda: mirror.after_step(2)))
    assert "newer_than differs between ranks: 0 on rank 0, 1 on rank 1" in one_line(
        error_of(lambda: mirror.restore(newer_than=ctx.rank))
    )
    mirror.restore()
    assert not mirror.after_step(1)
    assert "step is -2, expected an int of at least 0" in one_line(error_of(lambda: mirror.after_step(-2)))
    assert "step differs between ranks" in one_line(error_of(lambda: mirror.after_step(2 + 2 * ctx.rank)))
    assert "the state has something other than numbers" in one_line(error_of(lambda: mirror.after_step(2, object())))
    assert mirror.after_step(2, ctx.rank)
    assert "step is 2, but step 2 is in memory" in one_line(error_of(lambda: mirror.after_step(2)))
    mirror.wait()
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert mirror.nbytes == 2 * 65536
    mirror.close()
    assert "after_step was called after close" in one_line(error_of(lambda: mirror.after_step(4)))
    if ctx.rank == 0:
        folder.mkdir(mode=0o755)
    dist.barrier()
    refused("mirrored: other users can use ")
