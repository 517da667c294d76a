"""``HostAdamW`` beside its values: when it steps, where things lie, checkpoints, and what it refuses."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim.adamw import adamw

import fsdp2
from fsdp2.core.comm.offload import StagedOffloadPolicy
from fsdp2.optim import HostAdamW
from fsdp2.optim.host_adamw import jobs
from tests.distributed.support import InjectedError, Stack, batch, fail_now, seeded, shard, sharded, shards, step, train
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import Halved, wrap
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of
from tests.harness.selection import in_ci, long
from tests.parity.setups import load_states, states_of, whole

OPTIONS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}
STAGED = StagedOffloadPolicy()
BF16 = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _made(ctx: RankContext, kind: str = "plain", seed: int = 0, **options: Any) -> tuple[Any, HostAdamW]:
    if kind == "bf16":
        model = shard(ctx, seeded(Stack, seed).bfloat16(), mp_policy=BF16)
    else:
        policy = STAGED if kind == "offloaded" else fsdp2.OffloadPolicy()
        model = shard(ctx, seeded(Stack, seed), offload_policy=policy)
    if kind == "budget":  # parameters of one unit on the host, states of some, and the rest on the device
        most = fsdp2.memory.offload_by_budget(model, 1 << 30).nbytes
        whole_nbytes = sum(param.nbytes for param in model.parameters())
        choice = fsdp2.memory.offload_by_budget(model, most - whole_nbytes - 64, offload_policy=STAGED)
        assert choice.params_on_host
        assert choice.on_device
    return model, HostAdamW(model.parameters(), **{**OPTIONS, **options})


def _slow_adamw(*args: Any, **options: Any) -> None:
    time.sleep(0.05)
    adamw(*args, **options)


# When


@distributed(2)
def test_last_unit_is_stepped_while_backward_goes_on(ctx: RankContext) -> None:
    model, optimizer = _made(ctx)
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


@pytest.mark.parametrize("overlaps", [False, True])
@distributed(2)
def test_what_no_backward_has_announced_is_stepped_by_step(ctx: RankContext, overlaps: bool) -> None:
    """Gradients that the user sets; and after ``remove``, all, at once."""
    model, host = _made(ctx, overlap_forward=overlaps)
    other = sharded(ctx)
    plain = optim.AdamW(other.parameters(), fused=True, **OPTIONS)
    for param in (*model.parameters(), *other.parameters()):
        param.grad = torch.ones_like(param)
    host.step()
    plain.step()
    plain.zero_grad()
    host.remove()
    step(model)
    step(other)
    assert all(param.grad is not None for param in model.parameters())
    with mock.patch.object(jobs, "adamw", _slow_adamw):
        host.step()
    plain.step()
    assert all(param.grad is None for param in model.parameters())
    torch.testing.assert_close(shards(model), shards(other))


@distributed(2)
def test_steps_go_on_after_a_backward_that_raised(ctx: RankContext) -> None:
    """What has been stepped stays stepped, once."""
    model, optimizer = _made(ctx)
    x = batch().requires_grad_()
    x.register_hook(fail_now)
    with pytest.raises(InjectedError):
        model(x).square().mean().backward()
    optimizer.zero_grad()
    train(model, optimizer, steps=range(2))
    counts = {float(state["step"]) for state in optimizer.state.values()}
    assert counts <= {2.0, 3.0}, counts


@distributed(2)
def test_step_before_clips_by_the_norm_of_the_step_before(ctx: RankContext) -> None:
    model, optimizer = _made(ctx, max_norm=0.1, clip_by="step before")
    other = sharded(ctx)
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
    torch.testing.assert_close(shards(model), shards(other))


@distributed(2)
def test_a_limit_of_infinity_only_measures(ctx: RankContext) -> None:
    for optimizer in [_made(ctx, max_norm=limit)[1] for limit in (None, float("inf"))]:
        params = optimizer.param_groups[0]["params"]
        for param in params:
            param.grad = torch.ones_like(param)
        params[0].grad.to_local().fill_(float("inf"))
        optimizer.step()
        assert all(param.to_local().isfinite().all() for param in params[1:])
    assert optimizer.grad_norm is not None
    assert optimizer.grad_norm.isinf()


@pytest.mark.parametrize("by_budget", [False, True])
@distributed(2)
def test_parameters_that_loading_has_assigned_are_stepped_before_any_forward(ctx: RankContext, by_budget: bool) -> None:
    other, model = sharded(ctx), shard(ctx, Stack().to("meta"))
    model.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=True)
    if by_budget:
        optimizer: optim.Optimizer = optim.AdamW(
            fsdp2.memory.offload_by_budget(model, 1 << 30).device_params, **OPTIONS
        )
    else:
        optimizer = HostAdamW(model.parameters(), **OPTIONS)
    plain = optim.AdamW(other.parameters(), **OPTIONS)
    torch.testing.assert_close(train(model, optimizer, steps=range(2)), train(other, plain, steps=range(2)))


# Masters


@distributed(2)
def test_shards_in_bf16_have_masters_in_fp32(ctx: RankContext) -> None:
    """Steps that bf16 rounds away add up in the master. A write by others is taken over; digits it agrees with stay."""
    model, optimizer = _made(ctx, "bf16", lr=1e-4, weight_decay=0.0)
    weight = list(model.parameters())[2]  # of the first block
    before = weight.to_local().cpu().float().clone()
    train(model, optimizer, steps=range(8))
    master = optimizer.state_dict()["state"][2]["master"].to_local()
    assert master.dtype is torch.float32
    assert torch.equal(master.bfloat16(), weight.to_local().cpu())
    moved = (master - before).abs()
    assert moved.min() > 0 or (moved == 0).float().mean() < 0.1
    with torch.no_grad():
        weight.mul_(2.0)
        model.exit.weight.add_(0.0)  # a write that changes nothing
    exact = optimizer.state[model.exit.weight]["master"].to_local().clone()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    masters = [optimizer.state[each]["master"].to_local() for each in (weight, model.exit.weight)]
    assert torch.equal(masters[0], weight.to_local().cpu().float())
    assert torch.equal(masters[1], exact)


# Checkpoints


@pytest.mark.parametrize("loader", ["plain", "host", "host, offloaded", "host, budget"])
@pytest.mark.parametrize("saver", ["host, budget", "host", "plain"])
@distributed(2)
def test_checkpoints_go_from_and_to_any_adamw(ctx: RankContext, saver: str, loader: str, tmp_path: Path) -> None:
    def made(kind: str, seed: int) -> tuple[Any, optim.Optimizer]:
        if kind.startswith("host"):
            return _made(ctx, kind.partition(", ")[2], seed)
        model = shard(ctx, seeded(Stack, seed))
        return model, optim.AdamW(model.parameters(), **OPTIONS)

    model, optimizer = made(saver, 0)
    train(model, optimizer, steps=range(2))
    dcp.save(states_of(model, optimizer), checkpoint_id=tmp_path)
    expected = train(model, optimizer, steps=range(2, 4))
    model, optimizer = made(loader, 1)
    train(model, optimizer, steps=range(1))
    load_states(model, optimizer, tmp_path)
    torch.testing.assert_close(train(model, optimizer, steps=range(2, 4)), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("overlaps", [False, True])
@distributed(2)
def test_state_dicts_of_the_model_wait_for_the_host(ctx: RankContext, overlaps: bool) -> None:
    """In backward and after ``step``: else a save has the values before, and what is loaded is stepped."""
    full = StateDictOptions(full_state_dict=True)
    model, optimizer = _made(ctx, overlap_forward=overlaps)
    train(model, optimizer, steps=range(1))
    loaded = {name: value.clone() for name, value in model.state_dict().items()}
    with mock.patch.object(jobs, "adamw", _slow_adamw):
        step(model)
        if overlaps:
            optimizer.step()
        saved = get_model_state_dict(model, options=full)
        compare_values("saved", saved, whole(model.state_dict()))
        optimizer.step()
        step(model)
        if overlaps:
            optimizer.step()
        model.load_state_dict(loaded)
        optimizer.wait()
    compare_values("loaded", whole(model.state_dict()), whole(loaded))


@distributed(2)
def test_unsharded_waits_for_the_host(ctx: RankContext) -> None:
    """Else the block has the values before, and writes them over those of the step."""
    model, optimizer = _made(ctx, overlap_forward=True)
    with mock.patch.object(jobs, "adamw", _slow_adamw):
        step(model)
        optimizer.step()
        with fsdp2.unsharded(model):
            read = {name: param.detach().clone() for name, param in model.named_parameters()}
        optimizer.wait()
    compare_values("read", read, whole(model.state_dict()))
    assert all(state["step"] == 1 for state in optimizer.state.values())


@distributed(2)
def test_hooks_change_what_is_loaded_and_see_what_was(ctx: RankContext) -> None:
    model, optimizer = _made(ctx, "bf16")
    train(model, optimizer, steps=range(1))
    saved = optimizer.state_dict()
    seen: list[float] = []
    optimizer.register_load_state_dict_pre_hook(
        lambda _, given: {**given, "state": {0: {**given["state"][0], "step": torch.tensor(7.0)}}}
    )
    optimizer.register_load_state_dict_post_hook(
        lambda each: seen.extend(float(s["step"]) for s in each.state.values())
    )
    optimizer.load_state_dict(saved)
    assert seen == [7.0]


@distributed(2)
def test_norm_of_a_step_long_ago_clips_nothing(ctx: RankContext) -> None:
    """It was loaded and saved by an optimizer that does not measure."""
    model, optimizer = _made(ctx, max_norm=0.1, clip_by="step before")
    train(model, optimizer, steps=range(1))
    for options in ({}, {"max_norm": 0.1, "clip_by": "step before"}):
        saved = optimizer.state_dict()
        model, optimizer = _made(ctx, **options)
        optimizer.load_state_dict(saved)
    assert [group["last_norm"] for group in optimizer.param_groups] == [None]


# What is refused


@pytest.mark.parametrize("overlaps", [*in_ci(False), True])
@golden_on_ranks()
def test_failed_step_of_the_host_is_raised_by_step_or_the_next_forward(ctx: RankContext, overlaps: bool) -> str:
    model, optimizer = _made(ctx, overlap_forward=overlaps)
    with mock.patch.object(jobs, "adamw", side_effect=InjectedError("the kernel has failed")):
        step(model)
        if overlaps:
            optimizer.step()
            return error_of(lambda: model(batch()))
        found = error_of(optimizer.step)
    train(model, optimizer, steps=range(1))  # nothing is left behind
    return found


@pytest.mark.parametrize("method", ["step", "state_dict", *long("load_state_dict")])
@golden_on_ranks()
def test_method_inside_backward_is_refused(ctx: RankContext, method: str) -> str:
    model, optimizer = _made(ctx)
    found: list[str] = []
    x = batch().requires_grad_()
    call = partial(getattr(optimizer, method), *([optimizer.state_dict()] if method == "load_state_dict" else []))
    x.register_hook(lambda _: found.append(error_of(call)))
    model(x).square().mean().backward()
    optimizer.step()
    return found[0]


def _second_gradient(ctx: RankContext) -> None:
    model, optimizer = _made(ctx)
    step(model)
    try:
        step(model)
    finally:
        optimizer.zero_grad()
        train(model, optimizer, steps=range(1))


def _term_on_parameters(ctx: RankContext) -> None:
    model, optimizer = _made(ctx)
    term = model.blocks[2].linear.weight.square().sum().full_tensor()
    (model(batch()).square().mean() + term).backward()
    try:
        optimizer.step()
    finally:
        optimizer.zero_grad()
        train(model, optimizer, steps=range(1))


def _originals(ctx: RankContext) -> None:
    model = seeded(Stack)
    params = list(model.parameters())
    shard(ctx, model)
    HostAdamW(params)


def _in_between(ctx: RankContext) -> None:
    model = sharded(ctx)
    optimizer = HostAdamW(model.exit.parameters())
    step(model)
    optimizer.add_param_group({"params": list(model.entry.parameters())})


def _half(ctx: RankContext) -> None:
    """The error holds what was made of the first optimizer, as a notebook does."""
    model = sharded(ctx)
    try:
        HostAdamW([{"params": list(each.parameters())} for each in (model, nn.Linear(2, 2))])
    except ValueError:
        HostAdamW(model.parameters()).step()
        raise


def _unsharded(ctx: RankContext) -> None:
    model = sharded(ctx)
    model.unshard()
    HostAdamW(model.parameters())


def _state(ctx: RankContext, **changes: Any) -> None:
    model, optimizer = _made(ctx)
    before = train(model, optimizer, steps=range(1))
    state = optimizer.state_dict()
    state["state"][0] = {**state["state"][0], **changes}
    try:
        optimizer.load_state_dict(state)
    finally:
        compare_values("refused", shards(model), before)


def _of(model: nn.Module, **options: Any) -> None:
    """The caller holds the model: parameters of a model that is gone are managed by nobody."""
    HostAdamW(model.parameters(), **options)


def _two(ctx: RankContext) -> None:
    model = sharded(ctx)
    first = HostAdamW(model.parameters())
    _of(model)
    del first


REFUSED: dict[str, Any] = {
    "second gradient before the step": _second_gradient,
    "term on the parameters before the forward": _term_on_parameters,
    "plain parameter": lambda ctx: HostAdamW(nn.Linear(32, 4).named_parameters()),
    "originals": _originals,
    "a plain one in the second group": _half,
    "unsharded": _unsharded,
    "copied": lambda ctx: copy.deepcopy(_made(ctx)[1]),
    "tensor subclass": lambda ctx: _of(shard(ctx, wrap(seeded(Stack), Halved))),
    "another HostAdamW": _two,
    "group in the midst of a step": _in_between,
    "negative rate": lambda ctx: _of(sharded(ctx), lr=-1.0),
    "max_norm of 0": lambda ctx: _of(sharded(ctx), max_norm=0.0),
    "max_norm as text": lambda ctx: _of(sharded(ctx), max_norm="1"),
    "unknown clip_by": lambda ctx: _of(sharded(ctx), clip_by="now"),
    "clip_by alone": lambda ctx: _of(sharded(ctx), clip_by="step before"),
    "state of another shape": lambda ctx: _state(ctx, exp_avg=torch.ones(3)),
    "state of another optimizer": lambda ctx: _state(ctx, momentum_buffer=torch.ones(3)),
}


@pytest.mark.parametrize("name", REFUSED)
@golden_on_ranks()
def test_refused(ctx: RankContext, name: str) -> str:
    return error_of(lambda: REFUSED[name](ctx))


@distributed(2)
def test_optimizer_that_is_dropped_leaves_the_model(ctx: RankContext) -> None:
    model, optimizer = _made(ctx)
    train(model, optimizer, steps=range(1))
    dropped = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert dropped() is None
    step(model)
    assert all(param.grad is not None for param in model.parameters())
    HostAdamW(model.parameters(), **OPTIONS).step()
