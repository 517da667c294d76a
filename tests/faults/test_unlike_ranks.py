"""Ranks that are slow, whose clocks differ, or that run other software."""

from __future__ import annotations

import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.core.types import Observer
from fsdp2.extras import alike, meetings, rank_checks
from tests.distributed.support import DIM, Block, Stack, batch, seeded, shard, shard_each, sharded, step
from tests.faults.ranks import World
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import same_on_all_ranks, texts_beside
from tests.harness.messages import Heard, error_of, wrapped
from tests.harness.selection import in_ci

TEXTS = texts_beside(__file__)
SOFTWARE = ["torch 2.12.0, fsdp2 0.1.0", "torch 2.11.0, fsdp2 0.2.0"]
_A_DAY_S = 86400.0


def _trained(ctx: RankContext, observer: Observer) -> list[torch.Tensor]:
    model = sharded(ctx)
    optimizer = torch.optim.AdamW(model.parameters())
    with fsdp2.report.trace.observe(model, observer):
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

    def on_event(self, *_: object) -> None:
        if self._random.random() < 0.1:
            time.sleep(0.02)

    on_action = on_event


@pytest.mark.ci
@distributed(2, 4)
def test_slow_ranks_train_to_the_same_bits(ctx: RankContext) -> None:
    assert all(map(torch.equal, _trained(ctx, _Slow(ctx.rank)), _trained(ctx, Observer())))


@distributed(2)
def test_clocks_of_ranks_may_differ(ctx: RankContext) -> None:
    expected = _trained(ctx, Observer())
    clocks = {name: getattr(time, name) for name in ("time", "monotonic", "perf_counter")}
    shifted = {name: lambda clock=clock: clock() + ctx.rank * _A_DAY_S for name, clock in clocks.items()}
    with mock.patch.multiple(time, **shifted):
        assert all(map(torch.equal, _trained(ctx, Observer()), expected))


def _with_software(ctx: RankContext, other: str) -> str:
    mine = other if ctx.rank else "torch 2.11.0, fsdp2 0.1.0"
    with mock.patch.object(rank_checks, "software", return_value=mine):
        return error_of(lambda: step(sharded(ctx)))


@pytest.mark.parametrize("other", [SOFTWARE[0], *in_ci(SOFTWARE[1])])
def test_ranks_that_run_other_software_are_named_before_the_first_step(other: str) -> None:
    TEXTS.check(other, same_on_all_ranks(_with_software, other=other), among=[*SOFTWARE, "flag", "gate", "expert"])


def test_software_names_torch_and_the_package() -> None:
    """Not a hash of the source: a comment that is edited on one node must not stop a job."""
    own = r"fsdp2 (\d+\.\S+|not installed)"
    assert re.fullmatch(f"torch {re.escape(torch.__version__)}, {own}", rank_checks.software())


def _freezes_on_one_rank(ctx: RankContext, mesh: DeviceMesh, after_forward: bool) -> tuple[list[str], str]:
    model = sharded(ctx, mesh=mesh)
    step(model)
    goes_on: Callable[[], object] = model(batch()).sum().backward if after_forward else lambda: step(model)
    model.blocks[1].linear.weight.requires_grad_(ctx.rank == 0)
    with Heard() as heard:
        raised = error_of(goes_on)
    return heard.messages, raised


@pytest.mark.ci
@pytest.mark.every_case
@pytest.mark.parametrize("after_forward", [False, True])
def test_flag_that_differs_is_named_on_all_ranks_before_the_timeout(after_forward: bool) -> None:
    for rank, ended in enumerate(World(_freezes_on_one_rank, timeout_s=20, after_forward=after_forward).join()):
        assert ended.value, ended.trace
        (said,), raised = ended.value
        assert re.match(rf"rank {rank}: no progress for \d+ s. All ranks wait for each other, because", said), said
        assert "  parameter 'blocks.1.linear.weight' requires a gradient on rank 0, not on rank 1\n" in said
        assert said.count("Last events on rank") == 2
        if rank == 1:  # it has not communicated, and rank 0 waits for it
            TEXTS.check("flag", wrapped(raised))


class _Routed(nn.Module):
    """Two alike experts, each a unit, and two alike gates, which are parameters of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.experts = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor, gate: int, expert: int) -> torch.Tensor:
        return self.experts[expert](torch.tanh(self.gates[gate](x)))  # type: ignore[no-any-return]


def _parts_in_the_second_step(ctx: RankContext, mesh: DeviceMesh, what: str) -> tuple[list[str], str]:
    """All messages have the same size on both ranks, so no backend notices anything. Other roots run before, as the
    references of a policy do."""
    others = [fsdp2.fully_shard(nn.Linear(DIM, DIM), mesh=mesh) for _ in range(3)]
    model = seeded(_Routed)
    shard_each(*model.experts, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh, reshard_after_forward=True)

    def train() -> None:
        for number in range(3):
            other = ctx.rank if number else 0
            way = {"gate": 0, "expert": 0, what: other}
            with torch.no_grad():
                for each in others:
                    each(batch(number))
            model(batch(number), **way).square().mean().backward()

    with Heard() as heard:
        raised = error_of(train)
    return heard.messages, raised


@pytest.mark.ci
@pytest.mark.parametrize("what", ["gate", "expert"])
def test_ranks_that_part_are_told_what_differs_and_what_helps(what: str) -> None:
    """They would train on wrong values, and say nothing."""
    for rank, ended in enumerate(World(_parts_in_the_second_step, timeout_s=20, what=what).join()):
        assert ended.value, ended.trace
        said, raised = ended.value
        assert TEXTS.of(what).partition("\n")[2] in wrapped(said[0])
        if rank == 1 and what == "gate":  # it has found out that it does something else than before
            TEXTS.check(what, raised)
        else:  # it waits in a collective
            assert raised.startswith("CommunicationError")


def _waits_of_steps(ctx: RankContext) -> list[list[int]]:
    """How often ranks wait for each other's claims, and how many all-reduces each of three alike steps has, then each
    of two that use another part."""
    model = seeded(_Routed)
    shard_each(*model.experts, model, mesh=ctx.mesh_1d())
    found = []
    for number in range(5):
        other = int(number >= 3)
        waits = mock.Mock(wraps=meetings.await_claim)
        reduces = mock.Mock(wraps=dist.all_reduce)
        with mock.patch.object(alike, "await_claim", waits), mock.patch.object(dist, "all_reduce", reduces):
            model(batch(number), gate=other, expert=other).square().mean().backward()
        found.append([waits.call_count, reduces.call_count])
    return found


def test_steps_that_are_like_the_last_one_cost_nothing() -> None:
    """The first one compares the models. Ranks that change what they do alike wait for each other, by the store."""
    assert same_on_all_ranks(_waits_of_steps) == [[2, 2], [0, 0], [0, 0], [2, 0], [0, 0]]


@distributed(2)
def test_a_rank_that_has_run_more_roots_before_is_waited_for(ctx: RankContext) -> None:
    """A process of a pool may have had other worlds before. Roots are told apart by what all ranks agree on."""
    start = 10**9  # no other test of the pool comes to these numbers: the store has their keys
    numbers: Any = defaultdict(lambda: start + 3 * ctx.rank)
    with mock.patch.object(alike, "_next_number", numbers):
        for _ in range(2):
            model = sharded(ctx)
            step(model)
            (number,) = numbers.values()
            (its,) = (each for each in model._unit().tree.checks if isinstance(each, alike.Alike))
            assert its.identity.endswith(f"/{number - 1}")
        assert number == start + 5


# What torch runs, though ranks do not do the same


class _Experts(nn.Module):
    """A root on all ranks, with this rank's experts ``names``."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.entry = nn.Linear(DIM, DIM)
        self.experts = nn.ModuleDict({name: nn.Linear(DIM, DIM) for name in names})

    def forward(self, x: torch.Tensor, used: Sequence[str]) -> torch.Tensor:
        x = self.entry(x)
        for name in used:
            x = self.experts[name](x)
        return x


def _experts_on(ctx: RankContext, mesh: DeviceMesh, names: Sequence[str]) -> Any:
    model = _Experts(names)
    shard_each(*model.experts.values(), mesh=mesh)
    return fsdp2.fully_shard(model, mesh=ctx.mesh_1d())


@distributed(2)
def test_a_rank_chooses_among_experts_that_it_has_alone(ctx: RankContext) -> None:
    model = _experts_on(ctx, ctx.mesh_of_one(), ["expert0", "expert1"])
    for number in range(4):
        used = ["expert0"] if ctx.rank == 0 or number < 2 else ["expert1", "expert0"]
        model(batch(number), used).square().mean().backward()
        if number == 2:
            model.entry.weight.requires_grad_(False)


@distributed(4)
def test_pairs_of_ranks_have_and_choose_experts_of_their_own(ctx: RankContext) -> None:
    """Expert parallelism: what other pairs have and use is not compared."""
    first = 2 * (ctx.rank // 2)
    names = [f"expert{first}", f"expert{first + 1}"]
    model = _experts_on(ctx, ctx.mesh(pairs=2, experts=2)["experts"], names)
    for number in range(4):
        used = names[: 1 + (first == 0 and number > 1)]
        model(batch(number), used).square().mean().backward()
        model.entry.weight.requires_grad_(number % 2 == 0)


@distributed(4)
def test_a_replica_evaluates_alone_and_grad_modes_differ(ctx: RankContext) -> None:
    model = shard(ctx, seeded(Stack), mesh=ctx.mesh_2d(2, 2))
    for number in range(2):
        step(model, number)
        with torch.set_grad_enabled(ctx.rank % 2 == 0):  # messages are the same
            if number or ctx.rank < 2:
                model(batch(number))
        if ctx.rank < 2:
            with torch.no_grad():
                model(batch(number))


@distributed(2)
def test_what_one_rank_alone_asks_of_another_root_delays_nobody(ctx: RankContext) -> None:
    first, second = sharded(ctx), sharded(ctx)
    if ctx.rank == 0:
        fsdp2.memory.memory_plan(second)
        second.set_is_last_backward(True)
    for model in (first, second, first):
        step(model)


@distributed(2)
def test_a_claim_that_was_interrupted_is_made_again(ctx: RankContext) -> None:
    """A signal ends a rank's wait; the others come for what it had claimed. Then it goes on as they do."""
    model = sharded(ctx)
    met = meetings._await_all

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    wait, ends = (interrupted, pytest.raises(KeyboardInterrupt)) if ctx.rank == 0 else (met, nullcontext())
    with torch.no_grad(), mock.patch.object(meetings, "_await_all", wait), ends:
        model(batch())
    for number in range(3):
        step(model, number)
        model.blocks[0].linear.weight.requires_grad_(number % 2 == 1)
