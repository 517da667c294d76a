"""``HostAdamW`` beside its values: when it steps, where things lie, checkpoints, and what it refuses."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim

import fsdp2
from fsdp2 import HostAdamW
from fsdp2.tools.host_adamw import jobs
from tests.distributed.support import (
    DIM,
    InjectedError,
    RaiseInBackward,
    Stack,
    batch,
    seeded,
    shard,
    sharded,
    step,
)
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import Halved, wrap
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of
from tests.harness.models import MLP
from tests.harness.offload import shard_offloaded
from tests.harness.runtimes import subject
from tests.harness.training import Step
from tests.parity.setups import load_states, states_of

OPTIONS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}
BF16 = fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float32)


def shards(model: nn.Module) -> list[Tensor]:
    return [param.to_local().detach().cpu().clone() for param in model.parameters()]  # type: ignore[operator]


def train(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> list[Tensor]:
    for seed in steps:
        step(model, seed)
        optimizer.step()
    return shards(model)


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


# When


@distributed(2)
def test_last_unit_is_stepped_while_backward_goes_on(ctx: RankContext) -> None:
    model = sharded(ctx)
    optimizer = HostAdamW(model.parameters(), **OPTIONS)
    weight = model.blocks[2].linear.weight
    before = weight.to_local().clone()
    seen = []

    def in_backward(_: Tensor) -> None:
        assert torch._C._current_graph_task_id() != -1
        optimizer._unit_of[weight].wait()
        seen.append((weight.grad, torch.equal(weight._local_tensor, before)))

    x = batch().requires_grad_()
    x.register_hook(in_backward)
    model(x).square().mean().backward()
    assert seen == [(None, False)]
    optimizer.step()


@distributed(2)
def test_what_no_backward_has_announced_is_stepped_by_step(ctx: RankContext) -> None:
    """Gradients that the user sets; and after ``remove``, all."""
    models = [sharded(ctx), sharded(ctx)]
    host = HostAdamW(models[0].parameters(), **OPTIONS)
    plain = optim.AdamW(models[1].parameters(), fused=True, **OPTIONS)
    for model in models:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
    host.step()
    plain.step()
    plain.zero_grad()
    host.remove()
    step(models[0])
    assert all(param.grad is not None for param in models[0].parameters())
    step(models[1])
    host.step()
    plain.step()
    assert all(param.grad is None for param in models[0].parameters())
    for found, expected in zip(shards(models[0]), shards(models[1]), strict=True):
        torch.testing.assert_close(found, expected)


@distributed(2)
def test_steps_go_on_after_a_backward_that_raised(ctx: RankContext) -> None:
    """What has been stepped stays stepped, once."""
    model = sharded(ctx)
    optimizer = HostAdamW(model.parameters(), **OPTIONS)
    with pytest.raises(InjectedError):
        model(RaiseInBackward.apply(batch().requires_grad_())).square().mean().backward()
    optimizer.zero_grad()
    train(model, optimizer, range(2))
    counts = {float(state["step"]) for state in optimizer.state.values()}
    assert counts <= {2.0, 3.0}, counts


@distributed(2)
def test_step_before_clips_by_the_norm_of_the_step_before(ctx: RankContext) -> None:
    model, other = sharded(ctx), sharded(ctx)
    optimizer = HostAdamW(model.parameters(), max_norm=0.1, clip_by="step before", **OPTIONS)
    plain = optim.AdamW(other.parameters(), **OPTIONS)
    norms: list[Tensor] = []
    for seed in range(3):
        step(model, seed)
        optimizer.step()
        step(other, seed)
        norms.append(fsdp2.clip_grad_norm_(other.parameters(), float("inf")).double())
        factor = (0.1 / (norms[max(seed - 1, 0)] + 1e-6)).clamp(max=1.0)
        for param in other.parameters():
            param.grad.to_local().mul_(factor)
        plain.step()
        plain.zero_grad()
        torch.testing.assert_close(optimizer.grad_norm, norms[-1])
    for found, expected in zip(shards(model), shards(other), strict=True):
        torch.testing.assert_close(found, expected)


# Masters


@distributed(2)
def test_shards_in_bf16_have_masters_in_fp32(ctx: RankContext) -> None:
    """Steps that bf16 rounds away add up in the master. A write by others is taken over; digits it agrees with stay."""
    model = shard(ctx, seeded(Stack).bfloat16(), mp_policy=BF16)
    optimizer = HostAdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    weight = model.blocks[0].linear.weight
    before = weight.to_local().cpu().float().clone()
    for seed in range(8):
        model(batch(seed).bfloat16()).square().mean().backward()
        optimizer.step()
    master = optimizer.state_dict()["state"][_position(model, weight)]["master"].to_local()
    assert master.dtype is torch.float32
    assert torch.equal(master.bfloat16(), weight.to_local().cpu())
    moved = (master - before).abs()
    assert moved.min() > 0 or (moved == 0).float().mean() < 0.1
    with torch.no_grad():
        weight.mul_(2.0)
        model.exit.weight.add_(0.0)  # a write that changes nothing
    exact = optimizer._homes[model.exit.weight].wide_master.clone()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    master = optimizer._homes[weight].wide_master
    assert torch.equal(master, weight.to_local().cpu().float())
    assert torch.equal(optimizer._homes[model.exit.weight].wide_master, exact)


def _position(model: nn.Module, param: Tensor) -> int:
    return next(i for i, each in enumerate(model.parameters()) if each is param)


# Checkpoints


def _sharded(ctx: RankContext, kind: str, seed: int = 0) -> Any:
    model = seeded(lambda: MLP(), seed)
    if kind == "offloaded":
        shard_offloaded(subject(), model, ctx.mesh_1d())
    elif kind == "bf16":
        for unit in (*model.bfloat16().units(), model):
            fsdp2.fully_shard(unit, mesh=ctx.mesh_1d(), mp_policy=BF16)
    else:
        for unit in (*model.units(), model):
            fsdp2.fully_shard(unit, mesh=ctx.mesh_1d())
    return model


def _steps(ctx: RankContext, model: Any, optimizer: optim.Optimizer, steps: range) -> list[Tensor]:
    dtype = next(model.parameters()).dtype
    for index in steps:
        one = Step(index, ctx.rank, None)
        inputs, *rest = one.batch(model)
        model.loss(model(inputs.to(dtype), *rest), (inputs.to(dtype), *rest)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return shards(model)


@pytest.mark.parametrize("loader", ["host", "host, offloaded", "plain"])
@pytest.mark.parametrize("saver", ["host", "plain"])
@distributed(2)
def test_checkpoints_go_from_and_to_any_adamw(ctx: RankContext, saver: str, loader: str, tmp_path: Path) -> None:
    made = {"host": HostAdamW, "plain": optim.AdamW}
    model = _sharded(ctx, "plain")
    optimizer = made[saver](model.parameters(), **OPTIONS)
    _steps(ctx, model, optimizer, range(2))
    dcp.save(states_of(model, optimizer), checkpoint_id=tmp_path)
    expected = _steps(ctx, model, optimizer, range(2, 4))
    kind, _, where = loader.partition(", ")
    model = _sharded(ctx, where or "plain", seed=1)
    optimizer = made[kind](model.parameters(), **OPTIONS)
    _steps(ctx, model, optimizer, range(1))
    load_states(model, optimizer, tmp_path)
    for a, b in zip(_steps(ctx, model, optimizer, range(2, 4)), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["plain", "bf16"])
@distributed(2)
def test_run_that_is_resumed_goes_on_with_the_same_bits(ctx: RankContext, kind: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "max_norm": 0.1, "clip_by": "step before"}
    model = _sharded(ctx, kind)
    optimizer = HostAdamW(model.parameters(), **options)
    _steps(ctx, model, optimizer, range(2))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"{ctx.rank}.pt")
    expected = _steps(ctx, model, optimizer, range(2, 4))
    model = _sharded(ctx, kind, seed=1)
    optimizer = HostAdamW(model.parameters(), **options)
    states = torch.load(tmp_path / f"{ctx.rank}.pt", weights_only=False)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    assert same(_steps(ctx, model, optimizer, range(2, 4)), expected)


# What is refused


def _failing(*_: Any, **__: Any) -> None:
    raise InjectedError("the kernel has failed")


@pytest.mark.ci
@golden_on_ranks()
def test_failed_step_of_the_host_is_raised_by_step(ctx: RankContext) -> str:
    model = sharded(ctx)
    optimizer = HostAdamW(model.parameters(), **OPTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "adamw", _failing)
        step(model)
        found = error_of(optimizer.step)
    train(model, optimizer, range(1))  # nothing is left behind
    return found


@golden_on_ranks()
def test_failed_step_of_the_host_is_raised_by_the_next_forward(ctx: RankContext) -> str:
    model = sharded(ctx)
    optimizer = HostAdamW(model.parameters(), overlap_forward=True, **OPTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "adamw", _failing)
        step(model)
        optimizer.step()
        return error_of(lambda: model(batch()))


@golden_on_ranks()
def test_second_gradient_before_the_step_is_refused(ctx: RankContext) -> str:
    model = sharded(ctx)
    optimizer = HostAdamW(model.parameters(), **OPTIONS)
    step(model)
    found = error_of(lambda: step(model))
    optimizer.zero_grad()
    train(model, optimizer, range(1))
    return found


@golden_on_ranks()
def test_step_inside_backward_is_refused(ctx: RankContext) -> str:
    model = sharded(ctx)
    optimizer = HostAdamW(model.parameters(), **OPTIONS)
    found: list[str] = []
    x = batch().requires_grad_()
    x.register_hook(lambda _: found.append(error_of(optimizer.step)))
    model(x).square().mean().backward()
    optimizer.step()
    return found[0]


def _plain_parameter(ctx: RankContext) -> None:
    HostAdamW(nn.Linear(DIM, 4).named_parameters())


def _originals(ctx: RankContext) -> None:
    model = seeded(Stack)
    params = list(model.parameters())
    shard(ctx, model)
    HostAdamW(params)


def _subclass(ctx: RankContext) -> None:
    HostAdamW(shard(ctx, wrap(seeded(Stack), Halved)).parameters())


def _another(ctx: RankContext) -> None:
    model = sharded(ctx)
    _keep = HostAdamW(model.parameters())
    HostAdamW(model.parameters())


def _in_between(ctx: RankContext) -> None:
    model = sharded(ctx)
    optimizer = HostAdamW(model.exit.parameters())
    step(model)
    optimizer.add_param_group({"params": list(model.entry.parameters())})


def _state(ctx: RankContext, **changes: Any) -> None:
    model = sharded(ctx)
    optimizer = HostAdamW(model.parameters(), **OPTIONS)
    before = train(model, optimizer, range(1))
    state = optimizer.state_dict()
    state["state"][0] = {**state["state"][0], **changes}
    try:
        optimizer.load_state_dict(state)
    finally:
        assert same(shards(model), before)


REFUSED: dict[str, Any] = {
    "plain parameter": _plain_parameter,
    "originals": _originals,
    "tensor subclass": _subclass,
    "another HostAdamW": _another,
    "group in the midst of a step": _in_between,
    "negative rate": lambda ctx: HostAdamW(sharded(ctx).parameters(), lr=-1.0),
    "max_norm of 0": lambda ctx: HostAdamW(sharded(ctx).parameters(), max_norm=0.0),
    "max_norm as text": lambda ctx: HostAdamW(sharded(ctx).parameters(), max_norm="1"),  # type: ignore[arg-type]
    "unknown clip_by": lambda ctx: HostAdamW(sharded(ctx).parameters(), clip_by="now"),  # type: ignore[arg-type]
    "clip_by alone": lambda ctx: HostAdamW(sharded(ctx).parameters(), clip_by="step before"),
    "state of another shape": lambda ctx: _state(ctx, exp_avg=torch.ones(3)),
    "state of another optimizer": lambda ctx: _state(ctx, momentum_buffer=torch.ones(3)),
}


@pytest.mark.parametrize("name", REFUSED)
@golden_on_ranks()
def test_refused(ctx: RankContext, name: str) -> str:
    return error_of(lambda: REFUSED[name](ctx))


@distributed(2)
def test_optimizer_that_is_dropped_leaves_the_model(ctx: RankContext) -> None:
    model = sharded(ctx)
    optimizer = HostAdamW(model.parameters(), **OPTIONS)
    train(model, optimizer, range(1))
    dropped = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert dropped() is None
    step(model)
    assert all(param.grad is not None for param in model.parameters())
    HostAdamW(model.parameters(), **OPTIONS).step()
