"""A script that has done its work ends as it says, whatever gloo's threads still hold and whichever rank ends first."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.extras import alike, meetings
from tests.distributed.support import batch, sharded, step
from tests.faults.ranks import World
from tests.harness.distributed import RankContext
from tests.harness.selection import in_ci, long

ROOT = Path(__file__).parents[2]
# A thread holds the tensor of the last collective, as gloo's does, and lets go of it when Python is about to end.
SCRIPT = """
import threading, time, torch
import torch.distributed as dist
from fsdp2.core.comm import backends

def hold(tensor, *given, **options):
    held.append(tensor)
    return all_reduce(tensor, *given, **options)

def drop():
    time.sleep(0.5)
    held.clear()
    print("dropped", flush=True)

held, all_reduce, dist.all_reduce = [], dist.all_reduce, hold
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for work in backends.all_reduce(None, torch.ones(1)):
    work.wait()
assert len(held) == 1
threading.Thread(target=drop, daemon=True).start()
"""


@pytest.mark.ci
@pytest.mark.parametrize("end", ["", *long("dist.destroy_process_group()", "raise ValueError('of the script')")])
def test_python_ends_after_a_thread_has_dropped_the_last_collective(end: str) -> None:
    """It aborted: "terminate called without an active exception"."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run([sys.executable, "-c", SCRIPT + end], capture_output=True, text=True, timeout=200, env=env)
    assert (ran.returncode, ran.stdout) == (int("raise" in end), "dropped\n"), ran.stderr


# Ranks that end first. Rank 0 hosts the store

_sleep = time.sleep
SLOW_S = 1.0  # longer than the other process takes to end
WAITS, HAS_MET, BACKWARD, EXIT, NEXT = "waits for a claim", "has met", "in backward", "at its exit", "next forward"


def _await_all_and_sleep(*given: Any, _await_all: Any = meetings._await_all) -> Any:
    found = _await_all(*given)
    _sleep(SLOW_S)
    return found


def _sleep_long(_: float) -> None:
    _sleep(SLOW_S)


def _come_late(*given: Any, _await_claim: Any = meetings.await_claim) -> None:
    _sleep(0.2)
    _await_claim(*given)


def _train_and_end(ctx: RankContext, mesh: DeviceMesh, first: int, slow: str, destroys: bool) -> None:
    """Rank ``first`` ends after its last step, while the other rank is ``slow``."""
    model: Any = sharded(ctx, mesh=mesh)
    others: Any = nullcontext()
    if ctx.rank == first:
        others = mock.patch.object(alike, "await_claim", _come_late)
    elif slow == WAITS:
        others = mock.patch.object(time, "sleep", _sleep_long)
    elif slow == HAS_MET:
        others = mock.patch.object(meetings, "_await_all", _await_all_and_sleep)
    with others:
        step(model)
    if slow == BACKWARD:
        loss = model(torch.ones(4, 32)).sum()
        loss.register_hook(lambda _: None if ctx.rank == first else _sleep(SLOW_S))
        model.entry.weight.register_hook(lambda _: None if ctx.rank == first else _sleep(SLOW_S))
        loss.backward()
    if ctx.rank == first and destroys:
        dist.destroy_process_group()
    if ctx.rank != first and slow in (EXIT, NEXT):
        _sleep(SLOW_S)
    if ctx.rank != first and slow == NEXT:
        step(model)


@pytest.mark.parametrize("destroys", [False, *long(True)])
@pytest.mark.parametrize("slow", [*in_ci(WAITS, HAS_MET), BACKWARD, *long(EXIT)])
@pytest.mark.parametrize("first", [0, *long(1)])
def test_any_rank_may_end_first(first: int, slow: str, destroys: bool) -> None:
    """Others read in the store that all ranks agree, and then clean up there."""
    ended = World(_train_and_end, is_hosted=True, timeout_s=60, first=first, slow=slow, destroys=destroys).join()
    assert [each.exit_code for each in ended] == [0, 0], [each.trace for each in ended]


@pytest.mark.ci
@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_goes_on_alone_is_told_which_rank_has_ended(first: int) -> None:
    ended = World(_train_and_end, is_hosted=True, timeout_s=60, first=first, slow=NEXT, destroys=False).join()
    assert [each.exit_code for each in ended] == [int(rank != first) for rank in range(2)]
    text = ended[1 - first].error
    assert f"rank {first} has ended:\n" in text, text
    assert f"rank {1 - first}: waiting for other ranks, in forward 2 of FSDPStack, after 1 backward\n" in text
    assert f"rank {first}: ended, after 1 forward and 1 backward of FSDPStack\n" in text
    assert "fsdp2.joined(batches, model)" in text


def _clip_after_the_end(ctx: RankContext, mesh: DeviceMesh) -> None:
    model = sharded(ctx, mesh=mesh)
    step(model)
    dist.destroy_process_group()
    fsdp2.clip_grad_norm_(model.parameters(), 1.0)


def _backward_after_the_end(ctx: RankContext, mesh: DeviceMesh) -> None:
    loss = sharded(ctx, mesh=mesh)(batch()).sum()
    dist.barrier()
    dist.destroy_process_group()
    loss.backward()


@pytest.mark.long
def test_a_first_backward_after_the_process_group_was_destroyed_says_so() -> None:
    for each in World(_backward_after_the_end, is_hosted=True, timeout_s=60).join():
        assert each.error_type == "CommunicationError", each.trace
        assert each.error.startswith("the process group was destroyed"), each.trace


@pytest.mark.long
def test_clipping_after_the_process_group_was_destroyed_says_so() -> None:
    for each in World(_clip_after_the_end, is_hosted=True, timeout_s=60).join():
        assert "CommunicationError: clip_grad_norm_: the process group was destroyed" in each.trace, each.trace
