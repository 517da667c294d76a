"""Ranks that are slow, whose clocks differ, or that run other software."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.runtime import rank_checks
from fsdp2.types import Observer
from tests.distributed.support import batch, same_on_all_ranks, sharded, step
from tests.faults.ranks import World
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import Heard, error_of
from tests.harness.selection import long

_A_DAY_S = 86400.0


def _trained(ctx: RankContext, observer: Observer) -> list[torch.Tensor]:
    model = sharded(ctx)
    optimizer = torch.optim.AdamW(model.parameters())
    with fsdp2.trace.observe(model, observer):
        for seed in range(3):
            step(model, seed)
            fsdp2.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.to_local().clone() for parameter in model.parameters()]


class _Slow(Observer):
    """Sleeps at one moment in ten."""

    def __init__(self, rank: int) -> None:
        self._random = random.Random(rank)

    def on_event(self, event: str, unit: str) -> None:
        if self._random.random() < 0.1:
            time.sleep(0.02)

    def on_action(self, action: str, unit: str, nbytes: int) -> None:
        self.on_event(action, unit)


@pytest.mark.ci
@distributed(2, 4)
def test_slow_ranks_train_to_the_same_bits(ctx: RankContext) -> None:
    for found, expected in zip(_trained(ctx, _Slow(ctx.rank)), _trained(ctx, Observer()), strict=True):
        assert torch.equal(found, expected)


@distributed(2)
def test_clocks_of_ranks_may_differ(ctx: RankContext) -> None:
    expected = _trained(ctx, Observer())
    clocks = {name: getattr(time, name) for name in ("time", "monotonic", "perf_counter")}
    shifted = {name: lambda clock=clock: clock() + ctx.rank * _A_DAY_S for name, clock in clocks.items()}
    with mock.patch.multiple(time, **shifted):
        found = _trained(ctx, Observer())
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


def _with_software(ctx: RankContext, other: str) -> str:
    mine = other if ctx.rank else "torch 2.11.0, fsdp2 with source a"
    with mock.patch.object(rank_checks, "software", return_value=mine):
        return error_of(lambda: step(sharded(ctx)))


@pytest.mark.parametrize("other", ["torch 2.12.0, fsdp2 with source a", "torch 2.11.0, fsdp2 with source b"])
def test_ranks_that_run_other_software_are_named_before_the_first_step(other: str) -> None:
    found = same_on_all_ranks(_with_software, other=other)
    assert found.split("\n") == [
        "ScheduleError: the ranks do not run the same software:",
        "  rank 0: torch 2.11.0, fsdp2 with source a",
        f"  rank 1: {other}",
        "Install the same torch and the same fsdp2 on all ranks.",
    ]


def test_software_names_torch_and_the_source_of_the_package() -> None:
    found = rank_checks.software()
    assert found.startswith(f"torch {torch.__version__}, fsdp2 with source ")
    with mock.patch("pathlib.Path.read_bytes", return_value=b""):
        rank_checks.software.cache_clear()
        assert rank_checks.software() != found
    rank_checks.software.cache_clear()


def _freezes_on_one_rank(ctx: RankContext, mesh: DeviceMesh, after_forward: bool) -> tuple[list[str], str]:
    model = sharded(ctx, mesh=mesh)
    step(model)
    goes_on: Callable[[], object] = model(batch()).sum().backward if after_forward else lambda: step(model)
    model.blocks[1].linear.weight.requires_grad_(ctx.rank == 0)
    with Heard() as heard:
        raised = error_of(goes_on)
    return heard.messages, raised


@pytest.mark.ci
@pytest.mark.parametrize("after_forward", [False, *long(True)])
def test_flag_that_differs_is_named_on_all_ranks_before_the_timeout(after_forward: bool) -> None:
    for rank, ended in enumerate(World(_freezes_on_one_rank, timeout_s=20, after_forward=after_forward).join()):
        assert ended.value, ended.trace
        (said,), raised = ended.value
        assert re.match(rf"rank {rank}: no progress for \d+ s. All ranks wait for each other, because", said), said
        assert "  parameter 'blocks.1.linear.weight' requires a gradient on rank 0, not on rank 1\n" in said
        assert said.count("Last events on rank") == 2
        if rank == 1:  # it has not communicated, and rank 0 waits for it
            assert raised == (
                "ScheduleError: requires_grad differs between ranks:\n"
                "  parameter 'blocks.1.linear.weight' requires a gradient on rank 0, not on rank 1\n"
                "Call requires_grad_() alike on all ranks, before the same forward or backward."
            )
