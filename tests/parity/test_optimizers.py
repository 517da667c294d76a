"""Optimizers on the shards: each of torch's, gradient scalers, and ``HostAdamW``: the same values as torch's."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer, lr_scheduler

import fsdp2
from tests.distributed.compile_support import start_compiling
from tests.harness.compare import Cases, as_torchs, compare, compare_values, each_compared
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Branches, Transformer, Uneven
from tests.harness.offload import shard_offloaded
from tests.harness.runtimes import Runtime, beyond_torch, oracle, subject
from tests.harness.selection import in_ci, long
from tests.harness.training import (
    BY_TURNS,
    Case,
    OnShards,
    Step,
    Tolerance,
    accumulate,
    dtensor_adamw,
    one_backward,
    sgd,
    sharded,
    train,
)
from tests.parity.setups import SETUPS, Setup, setups, train_steps, whole

# eps is well above the rounding noise of a gradient, so that noise stays noise in the update
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.02, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 1e-2, "eps": 1e-3, "amsgrad": True},
    "Adagrad": {"lr": 1e-2, "eps": 1e-3},
    "ASGD": {"lr": 0.02},
    "RMSprop": {"lr": 1e-3, "eps": 1e-3, "momentum": 0.9, "centered": True},
    "Adadelta": {"lr": 0.5, "eps": 1e-3},
    **{name: {"lr": 1e-2, "eps": 1e-3} for name in ("AdamW", "NAdam", "RAdam", "Adamax")},
}


def _optimizer(name: str, **options: Any) -> Any:
    return partial(getattr(torch.optim, name), **OPTIMIZERS[name], **options)


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "for_loop"])
@pytest.mark.parametrize("name", [*[*OPTIMIZERS][:4], *long(*[*OPTIMIZERS][4:])])
@distributed(2)
def test_optimizer_trains(ctx: RankContext, name: str, foreach: bool) -> None:
    compare(Case(Uneven, optimizer=_optimizer(name, foreach=foreach)), ctx.mesh_1d())


def _muon(parameters: Any) -> Optimizer:
    """It orthogonalises whole matrices."""
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.02)


def _scheduled(parameters: Any) -> Optimizer:
    optimizer = dtensor_adamw(parameters)
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
    decay = lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    schedule = lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[2])
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def two_groups(parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Matrices, and the rest: with another rate and no decay."""
    parameters = list(parameters)
    matrices = [each for each in parameters if each.dim() > 1]
    return [{"params": matrices}, {"params": [p for p in parameters if p.dim() < 2], "lr": 3e-2, "weight_decay": 0.0}]


@each_compared(2, 4, ci=("Muon",))
def test_optimizers_and_what_is_around_them() -> Cases:
    """DTensor has no rule for the fused kernels of SGD and Adagrad. Programs have AdamW in each form."""
    return {
        "fused Adam": Case(Uneven, optimizer=_optimizer("Adam", fused=True)),
        "Muon": Case(MLP, optimizer=_muon, unsharded=Tolerance(rtol=5e-2, atol=1e-2)),  # it works in bfloat16
        "schedule of learning rates": Case(MLP, optimizer=_scheduled, num_steps=5),
        "groups with options of their own": Case(
            MLP, optimizer=lambda parameters: dtensor_adamw(two_groups(parameters))
        ),
    }


# Optimizers that step in backward


def _step_in_backward(model: Any) -> dict[Any, Optimizer]:
    """One optimizer per parameter, which steps as soon as its gradient is there and drops it."""
    optimizers = {parameter: dtensor_adamw([parameter]) for parameter in model.parameters()}

    def step(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return optimizers


def _trained_in_backward(
    setup: Setup, runtime: Runtime, ctx: RankContext, *, keep: bool = False, last: Sequence[int] = range(3)
) -> Any:
    """``last``: the backwards that are said to be the last of a step."""
    model = setup.sharded(runtime, ctx)
    model.set_reshard_after_backward(not keep)
    optimizers = _step_in_backward(model)
    losses = []
    for index in range(3):
        model.set_is_last_backward(index in last)
        losses += one_backward(Step(index, ctx.rank, runtime), model)
        assert index not in last or all(parameter.grad is None for parameter in optimizers)
    return whole([[loss.detach() for loss in losses], list(optimizers)])


def _trained_as_usual(setup: Setup, ctx: RankContext) -> Any:
    model = setup.sharded(subject(), ctx)
    parameters = list(model.parameters())
    losses = train_steps(ctx, model, dtensor_adamw(parameters), range(3))
    return whole([losses, parameters])


IN_BACKWARD = {**SETUPS, "used three times": Setup(partial(Branches, (0, 0, 0)))}


@pytest.mark.every_case
@pytest.mark.parametrize("setup", ["hsdp", "used three times", *in_ci("kept"), *long("uneven", "resting", "tied")])
@distributed(2)
def test_optimizer_that_steps_in_backward(ctx: RankContext, setup: str) -> None:
    """A unit that runs several times is reduced after each of its backwards; the gradient is there after the last."""
    where = IN_BACKWARD[setup]
    found = _trained_in_backward(where, subject(), ctx)
    compare_values("against stepping after backward", found, _trained_as_usual(where, ctx))
    compare_values("against torch", found, _trained_in_backward(where, oracle(), ctx))


@setups("kept", long=("uneven", "hsdp"))
@as_torchs(2)
def test_optimizer_that_steps_in_backward_has_stepped_before_the_next_forward(
    ctx: RankContext, runtime: Runtime, setup: str
) -> Any:
    """Also where the backward is not the last one of a step, so that nobody waits for its reductions."""
    return _trained_in_backward(SETUPS[setup], runtime, ctx, last=[2])


@beyond_torch("computes with the parameters that were gathered before the optimizer wrote the shards")
@setups("uneven", "kept", "resting")
@distributed(2)
def test_optimizer_that_steps_in_backward_outdates_parameters_kept_after_it(ctx: RankContext, setup: str) -> None:
    found = _trained_in_backward(SETUPS[setup], subject(), ctx, keep=True)
    compare_values("against stepping after backward", found, _trained_as_usual(SETUPS[setup], ctx))


NUM_STEPS = 4
OVERFLOWS_AT = 1


def _scaler(sharded: bool) -> Any:
    if sharded:
        return ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=2, process_group=dist.group.WORLD)
    return GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def _overflow_in_one_shard(model: Any) -> None:
    """The other ranks have nothing but finite gradients. Replicas agree, as after a reduction."""
    grad = model.exit.weight.grad
    if grad.device_mesh.get_local_rank(grad.device_mesh.ndim - 1) == 0:
        grad.to_local()[0, 0] = float("inf")


def _train(
    ctx: RankContext, runtime: Runtime, setup: Setup, sharded: bool, where: str, clip: bool = False, fused: bool = False
) -> list[Any]:
    """Per step: the scale, and the parameters. In step 1 the loss of one rank overflows, or one shard's gradient."""
    model = setup.sharded(runtime, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) if fused else sgd(model.parameters())
    parameters, scaler = list(model.parameters()), _scaler(sharded)
    records = []
    for index in range(NUM_STEPS):
        overflows = index == OVERFLOWS_AT
        scale = float("inf") if overflows and where == "loss" and ctx.rank == ctx.world_size - 1 else 1.0
        scaler.scale(Step(index, ctx.rank, runtime).loss(model) * scale).backward()
        if overflows and where == "shard":
            _overflow_in_one_shard(model)
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, 0.1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Found a non-scalar tensor")  # ShardedGradScaler's own flag
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        records.append([scaler.get_scale(), whole(parameters)])
    return records


def _check_skips(records: list[Any]) -> None:
    before, skipped, after = records[OVERFLOWS_AT - 1 : OVERFLOWS_AT + 2]
    assert skipped[0] == before[0] / 2
    compare_values("parameters of the step that overflowed", skipped[1], before[1])
    assert not any(torch.equal(a, b) for a, b in zip(after[1], skipped[1], strict=True))


def _check(ctx: RankContext, *args: Any, **options: Any) -> None:
    found = _train(ctx, subject(), *args, **options)
    _check_skips(found)
    if ctx.world_size == 2:
        compare_values("against torch", found, _train(ctx, oracle(), *args, **options))


@pytest.mark.parametrize("where", ["loss", "shard"])
@pytest.mark.parametrize("sharded", [False, True], ids=["GradScaler", "ShardedGradScaler"])
@setups("uneven", "hsdp")
@distributed(2, 4)
def test_overflow_on_one_rank_skips_the_step_on_all(ctx: RankContext, setup: str, sharded: bool, where: str) -> None:
    _check(ctx, SETUPS[setup], sharded, where)


FP16 = {"param_dtype": torch.float16, "reduce_dtype": torch.float32}
WAYS: dict[str, tuple[Setup, bool, str, dict[str, bool]]] = {
    "unscaled before they are clipped": (SETUPS["uneven"], False, "shard", {"clip": True}),
    "fused, which unscales by itself": (SETUPS["uneven"], False, "shard", {"fused": True}),
    "in float16": (Setup(MLP, shard=sharded(policy=FP16)), False, "loss", {}),
}


@pytest.mark.every_case
@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_scaled_gradients_are_unscaled(ctx: RankContext, way: str) -> None:
    *args, options = WAYS[way]
    _check(ctx, *args, **options)


@as_torchs(2)
def test_gradients_lie_in_their_memory_as_under_torch(ctx: RankContext, runtime: Runtime) -> Any:
    """A compiled step of an optimizer makes fake tensors of them."""
    model = Setup(MLP).sharded(runtime, ctx)
    one_backward(Step(0, ctx.rank, runtime), model)
    fakes: list[Any] = [FakeTensorMode().from_tensor(parameter.grad) for parameter in model.parameters()]
    return [(fake.storage_offset(), fake._local_tensor.storage_offset(), fake.stride()) for fake in fakes]


@pytest.mark.in_turns
@pytest.mark.long
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "AdamW, foreach", "SGD, foreach", "AdamW, fused"])
@distributed(2)
def test_compiled_step_of_an_optimizer_is_that_of_torch(ctx: RankContext, name: str) -> None:
    start_compiling()
    name, _, kind = name.partition(", ")

    def compiled(parameters: Any) -> torch.optim.Optimizer:
        torch.compiler.reset()
        optimizer = _optimizer(name, **({kind: True} if kind else {}))(parameters)
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")  # type: ignore[method-assign]
        return optimizer

    compare(Case(Uneven, optimizer=compiled, num_steps=4), ctx.mesh_1d())


HOST_OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}


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


# Every backward reduces, and adds to ``.grad``. The last one is announced.
accumulated_with_reductions = partial(accumulate, switch="set_is_last_backward")
partial_sums = partial(accumulate, switch="set_requires_all_reduce")


def backwards_of_one_forward(step: Step, model: Any) -> list[Tensor]:
    """Reductions of the first backward are in flight when the second one begins."""
    loss = step.loss(model)
    step.control(model).set_is_last_backward(False)
    loss.backward(retain_graph=True)
    step.control(model).set_is_last_backward(True)
    loss.backward()
    return [loss]


mixed = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
other_parameters = BY_TURNS["other parameters"]
# Bit for bit. Programs compare with the plain model: uneven sizes, units that are kept or skipped, and more.
CASES: dict[str, Case] = {
    "plain": Case(Transformer),
    "bf16 compute": Case(MLP, sharded(policy=mixed)),
    "accumulated with reductions": Case(MLP, step=accumulated_with_reductions),
    "several backwards": Case(MLP, step=backwards_of_one_forward),
    "offloaded": Case(MLP, shard_offloaded),
    "frozen by turns": BY_TURNS["frozen by turns"](),
    "other parameters": other_parameters(),
    "ranks may differ": other_parameters(sharded(then=lambda m: m.set_ranks_may_differ(True))),
}
OVERLAPPED = "clipped, forward overlaps"
FAST = ("plain", "accumulated with reductions", "several backwards", "offloaded", "frozen by turns")
CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what the reference is told, and what only we are
    "plain": ({}, {}),
    "clipped": ({"max_norm": 0.1}, {}),
    "clipped, forward overlaps": ({"max_norm": 0.1}, {"overlap_forward": True}),
    "not clipped": ({"max_norm": 1e6}, {}),
    "amsgrad": ({"amsgrad": True}, {}),
    "maximised": ({"maximize": True}, {}),
}


class _Read(fsdp2.optim.HostAdamW):
    """Waits before the harness reads parameters."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.wait()
        super().zero_grad(set_to_none)


def assert_same(case: Case, mesh: Any, told: dict[str, Any], ours: dict[str, Any]) -> None:
    reference = {"max_norm": None, **HOST_OPTIONS, **told}
    expected = train(replace(case, optimizer=lambda p: Clipped(two_groups(p), **reference)), mesh, subject())
    found = train(
        replace(case, optimizer=lambda p: _Read(two_groups(p), **HOST_OPTIONS, **told, **ours)), mesh, subject()
    )
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
