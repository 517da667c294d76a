"""Ranks that run other numbers of passes, or that make a call alone: each rank says how often every rank has run which
model, long before the timeout."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from tests.distributed.support import Stack, batch, seeded, shard, sharded, step
from tests.faults.ranks import World
from tests.harness.distributed import RankContext
from tests.harness.messages import Heard
from tests.harness.selection import in_ci, long

TIMEOUT_S = 16.0  # ranks compare after an eighth of it, and warn after a quarter
WAITS = "waiting for other ranks"
BATCHES = "loop with: for batch, is_real in fsdp2.joined(batches, model)"


def _evaluate(model: Any, num_batches: int) -> None:
    with torch.no_grad():
        for _ in range(num_batches):
            model(batch())


def _an_evaluation(model: Any, rank: int) -> None:
    _evaluate(model, 3 - rank)
    step(model)


def _an_evaluation_then_a_barrier(model: Any, rank: int) -> None:
    _evaluate(model, 3 - rank)
    dist.barrier()


def _a_step(model: Any, rank: int) -> None:
    if rank == 0:
        step(model)
    else:
        time.sleep(TIMEOUT_S)


def _a_backward(model: Any, rank: int) -> None:
    loss = model(batch()).sum()
    if rank == 0:
        loss.backward()
    fsdp2.clip_grad_norm_(model.parameters(), 1.0)


def _evaluates_where_others_train(model: Any, rank: int) -> None:
    if rank == 0:
        step(model)
    else:
        _evaluate(model, 2)


def _gathers_alone(model: Any, rank: int) -> None:
    if rank == 0:
        step(model)
    else:
        model.entry.weight.full_tensor()


def _state_dict_alone(model: Any, rank: int) -> None:
    if rank == 0:
        step(model)
    else:
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


# What a rank does, and then what is said of rank 0, and of rank 1. Before, both have trained one step.
CASES: list[tuple[Callable[[Any, int], None], str, str]] = [
    (
        _an_evaluation,
        rf"{WAITS}, in forward 5 of FSDPStack, after 1 backward\n",
        rf"{WAITS}, in backward 2 of FSDPStack, after 4 forwards\n",
    ),
    (
        _an_evaluation_then_a_barrier,
        rf"{WAITS}, in forward 4 of FSDPStack, after 1 backward\n",
        r"no event for \d+ s, after 3 forwards and 1 backward of FSDPStack; it runs dist.barrier\(\) in "
        r"_an_evaluation_then_a_barrier \(test_uneven_ranks.py:\d+\)\n",
    ),
    (
        _a_step,
        rf"{WAITS}, in forward 2 of FSDPStack, after 1 backward\n",
        r"no event for \d+ s, after 1 forward and 1 backward of FSDPStack; it runs time.sleep\(TIMEOUT_S\) in _a_step ",
    ),
    (
        _a_backward,
        rf"{WAITS}, in backward 2 of FSDPStack, after 2 forwards\n",
        rf"{WAITS}, after 2 forwards and 1 backward of FSDPStack\n",
    ),
    (
        _evaluates_where_others_train,
        rf"{WAITS}, in backward 2 of FSDPStack, after 2 forwards\n",
        rf"{WAITS}, in forward 3 of FSDPStack, after 1 backward\n",
    ),
    (
        _gathers_alone,
        rf"{WAITS}, in forward 2 of FSDPStack, after 1 backward\n",
        r"no event for \d+ s, after 1 forward and 1 backward of FSDPStack; it runs model.entry.weight.full_tensor\(\) "
        r".*, and all ranks must call full_tensor together\n",
    ),
    (
        _state_dict_alone,
        rf"{WAITS}, in forward 2 of FSDPStack, after 1 backward\n",
        r"no event for \d+ s, after 1 forward and 1 backward of FSDPStack; it runs get_model_state_dict\("
        r".*, and all ranks must call get_model_state_dict together\n",
    ),
]


def _differ(ctx: RankContext, mesh: DeviceMesh, number: int) -> tuple[str, float]:
    """What was logged first, and after how many seconds."""
    model = shard(ctx, seeded(Stack), mesh=mesh, reshard_after_forward=True)
    step(model)
    with Heard() as heard, suppress(Exception):
        CASES[number][0](model, ctx.rank)
    return heard.messages[0], heard.times[0]


@pytest.mark.ci
@pytest.mark.parametrize("number", [0, *in_ci(1), *long(*range(2, len(CASES)))])
def test_all_ranks_say_how_often_each_has_run_the_model(number: int) -> None:
    for rank, ended in enumerate(World(_differ, timeout_s=TIMEOUT_S, number=number).join()):
        assert ended.value, ended.trace
        said, after_s = ended.value
        assert after_s < TIMEOUT_S / 2
        assert said.startswith(f"rank {rank}: no progress for "), said
        assert BATCHES in said
        for other, expected in enumerate(CASES[number][1:]):
            assert re.search(rf"\n  rank {other}: {expected}", said), said


def _is_slow(ctx: RankContext, mesh: DeviceMesh) -> tuple[list[str], list[str]]:
    model = sharded(ctx, mesh=mesh)
    with Heard() as heard:
        for _ in range(2):
            step(model)
            if ctx.rank == 1:
                time.sleep(3 / 8 * TIMEOUT_S)
    return heard.levels, heard.messages


@pytest.mark.ci
def test_a_slow_rank_is_warned_of_once_and_comes() -> None:
    for rank, ended in enumerate(World(_is_slow, timeout_s=TIMEOUT_S).join()):
        assert ended.exit_code == 0, ended.trace
        levels, (said, *_) = ended.value
        assert levels == ["WARNING"], ended.value
        assert f"rank {rank}: no progress" in said
        assert "A rank that is only slow will come." in said
