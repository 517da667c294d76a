"""``HostAdamW`` computes what ``torch.optim.AdamW(fused=True)`` computes on the same shards, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp2
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Branches, PartlyUsed, Transformer, Uneven
from tests.harness.offload import shard_offloaded
from tests.harness.runtimes import subject
from tests.harness.selection import long
from tests.harness.training import (
    Case,
    OnShards,
    Step,
    accumulate,
    frozen_by_turns,
    one_backward,
    other_parameters_by_turns,
    other_units_by_turns,
    sharded,
    train,
)

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}


class Clipped(OnShards):
    """Clips, then steps: what ``max_norm`` stands for."""

    def __init__(self, parameters: Any, max_norm: float | None, **options: Any) -> None:
        super().__init__(parameters, partial(torch.optim.AdamW, fused=True, **options))
        self._max_norm = max_norm

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self._max_norm is not None:
            params = [param for group in self.param_groups for param in group["params"]]
            fsdp2.clip_grad_norm_(params, self._max_norm)
        super().step(closure)


def two_groups(parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Matrices, and the rest: with another rate and no decay."""
    parameters = list(parameters)
    matrices = [each for each in parameters if each.dim() > 1]
    return [{"params": matrices}, {"params": [p for p in parameters if p.dim() < 2], "lr": 3e-2, "weight_decay": 0.0}]


def accumulated_with_reductions(step: Step, model: Any) -> list[Tensor]:
    """Every backward reduces, and adds to ``.grad``. The last one is announced."""
    return accumulate(step, model, switch="set_is_last_backward")


def backwards_of_one_forward(step: Step, model: Any) -> list[Tensor]:
    """Reductions of the first backward are in flight when the second one begins."""
    loss = step.loss(model)
    step.control(model).set_is_last_backward(False)
    loss.backward(retain_graph=True)
    step.control(model).set_is_last_backward(True)
    loss.backward()
    return [loss]


def partial_sums(step: Step, model: Any) -> list[Tensor]:
    return accumulate(step, model, switch="set_requires_all_reduce")


def evaluated_before_the_step(step: Step, model: Any) -> list[Tensor]:
    """The gathers of the evaluation wait for what backward has begun."""
    losses = one_backward(step, model)
    with torch.no_grad():
        step.loss(model)
    for unit in (*model.units(), model):
        step.control(unit).reshard()
    return losses


def finalized_by_hand(step: Step, model: Any) -> list[Tensor]:
    root = step.control(model)
    root.set_manual_backward_finalization(True)
    losses = accumulate(step, model)
    root.finalize_backward()
    return losses


mixed = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
CASES: dict[str, Case] = {
    "plain": Case(Transformer),
    "uneven": Case(Uneven),
    "bf16 compute": Case(MLP, sharded(policy=mixed)),
    "kept after forward": Case(MLP, sharded(reshard_after_forward=False), step=evaluated_before_the_step),
    "accumulated without reductions": Case(MLP, step=accumulate),
    "accumulated with reductions": Case(MLP, step=accumulated_with_reductions),
    "several backwards": Case(MLP, step=backwards_of_one_forward),
    "finalized by hand": Case(MLP, step=finalized_by_hand),
    "offloaded": Case(MLP, shard_offloaded),
    "offloaded, accumulated": Case(MLP, shard_offloaded, step=accumulated_with_reductions),
    "frozen by turns": Case(MLP, step=frozen_by_turns, num_steps=4),
    "other units": Case(Branches, step=other_units_by_turns, num_steps=4),
    "other parameters": Case(PartlyUsed, step=other_parameters_by_turns, num_steps=4),
    "ranks may differ": Case(
        PartlyUsed, sharded(then=lambda m: m.set_ranks_may_differ(True)), step=other_parameters_by_turns, num_steps=4
    ),
}
OVERLAPPED = "clipped, forward overlaps"
FAST = ("plain", "accumulated with reductions", "several backwards", "offloaded", "frozen by turns")
CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what the reference is told, and what only we are
    "plain": ({}, {}),
    "forward overlaps": ({}, {"overlap_forward": True}),
    "clipped": ({"max_norm": 0.1}, {}),
    "clipped, forward overlaps": ({"max_norm": 0.1}, {"overlap_forward": True}),
    "not clipped": ({"max_norm": 1e6}, {}),
    "amsgrad": ({"amsgrad": True}, {}),
    "maximised": ({"maximize": True}, {}),
}


class _Read(fsdp2.HostAdamW):
    """Waits before the harness reads parameters."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.wait()
        super().zero_grad(set_to_none)


def assert_same(case: Case, mesh: Any, told: dict[str, Any], ours: dict[str, Any]) -> None:
    reference = {"max_norm": None, **OPTIONS, **told}
    expected = train(replace(case, optimizer=lambda p: Clipped(two_groups(p), **reference)), mesh, subject())
    found = train(replace(case, optimizer=lambda p: _Read(two_groups(p), **OPTIONS, **told, **ours)), mesh, subject())
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert all(map(torch.equal, a.losses, b.losses)), index
        for name, snapshot in b.parameters.items():
            assert torch.equal(a.parameters[name].local, snapshot.local), (index, name)


@pytest.mark.parametrize("name", [*FAST, *long(*(name for name in CASES if name not in FAST))])
@distributed(2, 4)
def test_steps_as_adamw_on_the_shards(ctx: RankContext, name: str) -> None:
    assert_same(CASES[name], ctx.mesh_1d(), {}, {})


@pytest.mark.parametrize("choice", [OVERLAPPED, *long(*(each for each in CHOICES if each != OVERLAPPED))])
@distributed(2)
def test_steps_as_adamw_with_its_options(ctx: RankContext, choice: str) -> None:
    for name in ("plain", "offloaded", "accumulated with reductions", "other parameters"):
        assert_same(CASES[name], ctx.mesh_1d(), *CHOICES[choice])


@pytest.mark.ci
@distributed(4)
def test_steps_as_adamw_on_replicas(ctx: RankContext) -> None:
    for step in (one_backward, accumulate, partial_sums):
        assert_same(Case(MLP, step=step), ctx.mesh_2d(2, 2), {"max_norm": 0.1}, {})


@distributed(2)
def test_steps_as_adamw_on_each_rank_alone(ctx: RankContext) -> None:
    """Nothing is gathered: compute reads the memory that the host steps."""
    assert_same(Case(MLP), ctx.mesh_of_one(), {}, {"overlap_forward": True})
