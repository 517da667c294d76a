"""Processes are killed while they mirror, and a restarted job continues from the newest step that is whole."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.checkpoint import Mirror, mirrored
from tests.distributed.support import Stack, seeded, shard
from tests.docs.launch import torchrun
from tests.faults.ranks import World
from tests.harness.distributed import RankContext
from tests.harness.selection import long

NEVER = 10**9
_SYSTEM_CALLS = ("open", "os.rename", "os.remove")


def _job(ctx: RankContext, mesh: DeviceMesh, folder: Path, num_hosts: int) -> tuple[nn.Module, Mirror]:
    model = shard(ctx, seeded(Stack), mesh=mesh)
    host = folder / f"host_{ctx.rank % num_hosts}"
    host.mkdir(parents=True, exist_ok=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, mirrored(model, optimizer, every=1, job="job", folder=host)


@torch.no_grad()
def _fill(model: nn.Module, value: float) -> None:
    for param in model.parameters():
        param.fill_(value)


def _mirror_twice(
    ctx: RankContext, mesh: DeviceMesh, folder: Path, moment: int = NEVER, killed: tuple[int, ...] = (1,)
) -> int:
    """The ranks ``killed`` are killed at the moment of that number of the second step: before a system call on a file,
    or before a message. Returns how many moments there are."""
    model, mirror = _job(ctx, mesh, folder, num_hosts=2)
    mirror.restore()
    _fill(model, 1)
    mirror.after_step(1)
    mirror.wait()
    dist.barrier()
    count = 0
    lock = threading.Lock()

    def note() -> None:
        nonlocal count
        with lock:
            count += 1
            if count > moment and ctx.rank in killed:
                os.kill(os.getpid(), signal.SIGKILL)

    def note_system_call(event: str, arguments: tuple[object, ...]) -> None:
        if event in _SYSTEM_CALLS and re.search(r"unfinished|step\d", str(arguments[0])):
            note()

    def note_message(send: Any) -> Any:
        return lambda *args, **kwargs: (note(), send(*args, **kwargs))[1]

    sys.addaudithook(note_system_call)
    with (
        mock.patch.object(dist, "isend", note_message(dist.isend)),
        mock.patch.object(dist, "irecv", note_message(dist.irecv)),
        mock.patch("fsdp2.checkpoint.mirrored.any_of", note_message(any_of_mirrored())),
    ):
        _fill(model, 2)
        mirror.after_step(2)
        mirror.wait()
    return count


def any_of_mirrored() -> Any:
    return sys.modules["fsdp2.checkpoint.mirrored"].any_of  # the package has a function of the module's name


def _restored(ctx: RankContext, mesh: DeviceMesh, folder: Path, num_hosts: int = 2) -> int | None:
    """The step that is found, in whole; its files are removed."""
    model, mirror = _job(ctx, mesh, folder, num_hosts)
    found = mirror.restore()
    if found is not None:
        assert all(bool((param.to_local() == found.step).all()) for param in model.parameters())  # type: ignore[operator]
    mirror.close()
    return None if found is None else found.step


def _steps(folder: Path, num_ranks: int = 2) -> set[int | None]:
    ended = World(_restored, num_ranks, 60.0, folder=folder).join()
    assert [each.exit_code for each in ended] == [0] * num_ranks, ended
    return {each.value for each in ended}


@pytest.mark.parametrize("killed", [(1,), *long((0, 1))], ids=["one rank", "both ranks"])
@pytest.mark.ci
def test_a_kill_at_any_moment_leaves_a_whole_step(killed: tuple[int, ...], tmp_path: Path) -> None:
    """In the short suite: before the first file, before a message, and when the second step is almost complete."""
    first, second = World(_mirror_twice, 2, 60.0, folder=tmp_path / "counted").join()
    assert (first.exit_code, second.exit_code) == (0, 0), (first.trace, second.trace)
    assert _steps(tmp_path / "counted") == {2}
    count = min(first.value, second.value)
    assert count > 8
    found: set[int | None] = set()
    for moment in range(count) if len(killed) > 1 else (0, count // 2, count - 1):
        folder = tmp_path / str(moment)
        ended = World(_mirror_twice, 2, 60.0, folder=folder, moment=moment, killed=killed).join()
        assert all(ended[rank].exit_code == -signal.SIGKILL for rank in killed)
        (step,) = _steps(folder)
        found.add(step)
        assert not [path for path in folder.rglob("*") if path.is_file()]
    assert found == {1, 2}


@pytest.mark.in_turns
@pytest.mark.long
def test_other_ranks_and_two_lost_hosts_load_from_disk(tmp_path: Path) -> None:
    for name, num_ranks, lost in (("more", 3, ()), ("fewer", 1, ()), ("one host", 2, (0,)), ("both hosts", 2, (0, 1))):
        folder = tmp_path / name
        World(_mirror_twice, 2, 60.0, folder=folder).join()
        for host in lost:
            shutil.rmtree(folder / f"host_{host}")
        assert _steps(folder, num_ranks) == ({2} if name == "one host" else {None}), name


SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
import fsdp2
from torch import nn

store, rank, num_ranks = next(dist.rendezvous("env://"))
store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)  # hides addresses of ranks that have ended
dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
for layer in (*model, model):
    fsdp2.fully_shard(layer)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
torch.manual_seed(rank)
with fsdp2.checkpoint.mirrored(model, optimizer, every=2) as mirror:
    found = mirror.restore()
    start = 0
    if found is not None:
        start = found.step
        scheduler.load_state_dict(found.state["scheduler"])
        torch.set_rng_state(found.state["rng"])
    for step in range(start, 9):
        if step == 7 and found is None and rank == 1 and sys.argv[2] == "killed":
            mirror.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mirror.after_step(step + 1, {"scheduler": scheduler.state_dict(), "rng": torch.get_rng_state()})
whole = [param.full_tensor() for param in model.parameters()]
if rank == 0:
    torch.save([start, whole, scheduler.get_last_lr()], sys.argv[1])
dist.destroy_process_group()
"""


@pytest.mark.in_turns
@pytest.mark.long
def test_torchrun_restarts_a_job_that_continues_from_memory_bit_for_bit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = {}
    before = {*Path("/dev/shm").glob("fsdp2_mirror_*")}
    for how in ("killed", "uninterrupted"):
        ran = torchrun(script, [str(tmp_path / how), how], options=["--max-restarts", "1"])
        assert ran.returncode == 0, ran.stderr
        found[how] = torch.load(tmp_path / how, weights_only=True)
    (start, *resumed), (from_scratch, *expected) = found["killed"], found["uninterrupted"]
    assert (start, from_scratch) == (6, 0)
    assert all(map(torch.equal, resumed[0], expected[0]))
    assert resumed[1] == expected[1]
    assert {*Path("/dev/shm").glob("fsdp2_mirror_*")} == before
