"""A flattened optimizer steps, keeps and saves what it would as torch made it, bit for bit, in a few long tensors."""

from __future__ import annotations

import copy
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from fsdp2.shards import flat_buffers
from tests.distributed.flat_optimizer_support import OPTIMIZERS, Seen, Twins, records, seen_steps, sharded
from tests.distributed.support import Stack, batch, seeded
from tests.distributed.support import step as stack_step
from tests.harness.comms import direct_from
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import DIM, MLP, ParityModel, PartlyUsed, Transformer, Uneven, freeze
from tests.harness.offload import shard_offloaded
from tests.harness.runtimes import Runtime
from tests.harness.training import shard_units_and_root

adamw = functools.partial(optim.AdamW, lr=0.01)


class Mixed(PartlyUsed):
    """Blocks with a path that may go unused, a frozen parameter between others, uneven and empty shards."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.scale = nn.Parameter(torch.ones(1))
            block.register_forward_hook(lambda block, args, output: output * block.scale)
        self.exit = nn.Linear(DIM, 7)
        freeze(self, "blocks.1.main.bias")

    def forward(self, x: Tensor, use_side: bool = True) -> Tensor:
        return self.exit(super().forward(x, use_side=use_side))


@distributed(2)
def test_every_known_optimizer_makes_the_same_values_and_states(ctx: RankContext) -> None:
    """With foreach; the loops, which are the default on the CPU, are what other tests run."""
    for name, make in OPTIMIZERS.items():
        twins = Twins(ctx, Mixed, functools.partial(make, foreach=True))
        scheduler = [optim.lr_scheduler.ExponentialLR(optimizer, 0.7) for _, optimizer in twins.both]
        try:
            twins.step()
            twins.step(use_side=False)  # from here on, states of neighbours differ
            twins.backward()
            twins.backward(micro=1)
            for model, _ in twins.both:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            twins.update()
            for each in scheduler:
                each.step()
            twins.step()
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@distributed(2)
def test_rprop_which_torch_cannot_step_dtensors_with(ctx: RankContext, foreach: bool) -> None:
    model = sharded(ctx, Mixed)
    copies = [param.to_local().detach().clone() for param in model.parameters()]
    flat = fsdp2.flatten_optimizer(optim.Rprop(model.parameters(), foreach=foreach))
    plain = optim.Rprop(copies, foreach=foreach)
    for index in range(3):
        model(torch.randn(3, DIM)).square().mean().backward()
        for param, copied in zip(model.parameters(), copies, strict=True):
            copied.grad = param.grad.to_local().clone() if param.grad is not None else None
        flat.step()
        plain.step()
        flat.zero_grad()
        for param, copied in zip(model.parameters(), copies, strict=True):
            assert torch.equal(param.to_local(), copied), index
            for name, value in plain.state[copied].items() if copied in plain.state else ():
                mine = flat.state[param][name]
                assert torch.equal(mine.to_local() if isinstance(mine, DTensor) else mine, value), name


def _shard_mixed_precision(runtime: Runtime, model: ParityModel, mesh: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_units_and_root(runtime, model, mesh, mp_policy=policy)


def _shard_last_dims(runtime: Runtime, model: ParityModel, mesh: Any) -> None:
    shard_units_and_root(runtime, model, mesh, shard_placement_fn=lambda param: Shard(param.dim() - 1))


def _shard_with_other_gradients(runtime: Runtime, model: ParityModel, mesh: Any) -> None:
    for parameter in model.to(torch.bfloat16).parameters():
        parameter.grad_dtype = torch.float32
    shard_units_and_root(runtime, model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


SHARDED: dict[str, Any] = {
    "usual": shard_units_and_root,
    "mixed precision": _shard_mixed_precision,
    "along last dims": _shard_last_dims,
    "gradients of another dtype": _shard_with_other_gradients,
    "offloaded": shard_offloaded,
    "ignored": lambda runtime, model, mesh: shard_units_and_root(
        runtime, model, mesh, ignored_params={model.blocks[0].up.weight, model.exit.bias}
    ),
}


@pytest.mark.parametrize("name", list(SHARDED))
@distributed(2)
def test_same_values_however_the_model_is_sharded(ctx: RankContext, name: str) -> None:
    with direct_from(512):
        make = OPTIMIZERS["SGD with momentum"] if name == "gradients of another dtype" else adamw  # or torch raises
        twins = Twins(ctx, MLP, make, SHARDED[name])
        for _ in range(3):
            twins.step()


@distributed(4)
def test_same_values_on_four_ranks(ctx: RankContext) -> None:
    mesh = ctx.mesh_2d(2, 2)
    cases: list[tuple[Any, Any]] = [
        (Uneven, shard_units_and_root),
        (Transformer, lambda runtime, model, _: shard_units_and_root(runtime, model, mesh)),
        (MLP, lambda runtime, model, _: shard_units_and_root(runtime, model, ctx.mesh_of_one())),
    ]
    for build, shard in cases:
        twins = Twins(ctx, build, adamw, shard)
        for _ in range(3):
            twins.step()


@distributed(2)
def test_fused_on_the_cpu_makes_the_same_values_to_rounding(ctx: RankContext) -> None:
    plain, flat = sharded(ctx, MLP), sharded(ctx, MLP)
    optimizers = [optim.Adam(model.parameters(), lr=0.01, fused=True) for model in (plain, flat)]
    fsdp2.flatten_optimizer(optimizers[1])
    for _ in range(3):
        for model, optimizer in zip((plain, flat), optimizers, strict=True):
            model(torch.ones(2, DIM)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(flat.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.to_local(), theirs.to_local(), rtol=1e-5, atol=1e-6)


@distributed(2)
def test_a_group_is_stepped_as_one_tensor(ctx: RankContext) -> None:
    model = seeded(Stack)
    for block in model.blocks:
        fsdp2.fully_shard(block, mesh=ctx.mesh_1d())
    fsdp2.fully_shard(model, mesh=ctx.mesh_1d())
    optimizer = seen_steps(model)
    stack_step(model)
    optimizer.step()
    block = (32 * 32 + 32) // 2
    assert sorted(optimizer.numels) == [block, block, block, 2 * block]
    states = [optimizer.state[param]["sum"] for param in model.blocks[0].parameters()]
    assert all(torch.equal(state.to_local(), param.grad.to_local()) for param, state in optimizer_states(optimizer))
    assert [type(state) for state in states] == [DTensor, DTensor]
    assert states[0].to_local().data_ptr() + states[0].to_local().nbytes == states[1].to_local().data_ptr()


def optimizer_states(optimizer: optim.Optimizer) -> list[tuple[Any, Any]]:
    return [(param, entry["sum"]) for param, entry in optimizer.state.items()]


@distributed(2)
def test_runs_follow_the_gradients_there_are(ctx: RankContext) -> None:
    """One run per group; parts of it around a missing gradient; one again when it is there. States are not copied."""
    model = sharded(ctx, MLP, lambda runtime, model, mesh: runtime.fully_shard(model, mesh=mesh))
    optimizer = seen_steps(model)
    parameters = list(model.parameters())
    whole = sum(param.to_local().numel() for param in parameters)
    missing = model.blocks[1].up.weight
    sums = {param: torch.zeros_like(param) for param in parameters}

    def numels_of_step(change: Callable[[], object] = lambda: None) -> list[int]:
        model(torch.ones(2, DIM)).sum().backward()
        change()
        optimizer.step()
        for param in parameters:
            if param.grad is not None:
                sums[param] += param.grad
            assert torch.equal(optimizer.state[param]["sum"].to_local(), sums[param].to_local())
        optimizer.zero_grad()
        return optimizer.numels

    assert numels_of_step() == [whole]
    memory = [optimizer.state[param]["sum"].to_local().data_ptr() for param in parameters]
    parts = numels_of_step(lambda: setattr(missing, "grad", None))
    assert (len(parts), sum(parts)) == (2, whole - missing.to_local().numel())
    assert numels_of_step() == [whole]
    assert numels_of_step(lambda: setattr(missing, "grad", missing.grad * 2)) == [whole]
    assert [optimizer.state[param]["sum"].to_local().data_ptr() for param in parameters] == memory
    optimizer.state.clear()
    for value in sums.values():
        value.zero_()
    assert numels_of_step() == [whole]


@distributed(2)
def test_large_gradients_that_lie_apart_are_not_copied(ctx: RankContext) -> None:
    with direct_from(512 * 1024):  # the biases lie between the weights
        model = fsdp2.fully_shard(
            seeded(lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))), mesh=ctx.mesh_1d()
        )
    optimizer = seen_steps(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert sorted(optimizer.numels) == 3 * [128] + 3 * [256 * 128]


@distributed(4)
def test_padding_between_shards_stays_zero(ctx: RankContext) -> None:
    before = {id(flat) for flat in flat_buffers()}
    with direct_from(16):
        model = sharded(ctx, Uneven)
        optimizer = seen_steps(model)
        for _ in range(2):
            model.loss(model(torch.ones(2, 5)), ()).backward()
            optimizer.step()
    flats = [flat for flat in flat_buffers() if id(flat) not in before]
    assert sum(flat.numel() for flat in flats) > sum(param.to_local().numel() for param in model.parameters())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert not any(flat.any() for flat in flats)


@pytest.mark.parametrize("make", [adamw, OPTIMIZERS["SGD with momentum"], OPTIMIZERS["Adagrad"]])
@distributed(2)
def test_state_dicts_load_into_each_other(ctx: RankContext, make: Any) -> None:
    twins = Twins(ctx, Mixed, make)
    twins.step()
    twins.step(use_side=False)
    for source, target in ((0, 1), (1, 0), (1, 1)):  # into the flat one, out of it, back into itself
        (_, saved), (_, loaded) = twins.both[source], twins.both[target]
        state = copy.deepcopy(saved.state_dict())
        twins.step()
        for _, optimizer in twins.both:
            optimizer.load_state_dict(copy.deepcopy(state))
        assert loaded.state
        twins.step()
        twins.step()


@distributed(2)
def test_gradients_are_kept_from_step_to_step_as_without(ctx: RankContext) -> None:
    model = sharded(ctx, MLP)
    optimizer = fsdp2.flatten_optimizer(adamw(model.parameters()))
    before: list[weakref.ref[Tensor]] = []
    for _ in range(3):
        model(torch.ones(2, DIM)).sum().backward()
        optimizer.step()
        grads = [weakref.ref(param.grad) for param in model.parameters()]
        optimizer.zero_grad()
        assert not before or all(a() is b() is not None for a, b in zip(grads, before, strict=True))
        before = grads


@distributed(2)
def test_loading_frees_the_states_that_there_were(ctx: RankContext) -> None:
    model = sharded(ctx, MLP)
    optimizer = fsdp2.flatten_optimizer(adamw(model.parameters()))
    model(torch.ones(2, DIM)).sum().backward()
    optimizer.step()
    replaced = [weakref.ref(entry["exp_avg"].to_local()) for entry in optimizer.state.values()]
    replaced += [weakref.ref(entry["exp_avg"]) for entry in optimizer.state.values()]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    gc.collect()
    assert not any(ref() is not None for ref in replaced)


@distributed(2)
def test_distributed_checkpoints_hold_the_same_and_load_before_the_first_step(ctx: RankContext) -> None:
    twins = Twins(ctx, Mixed, adamw)
    twins.step(use_side=False)
    twins.step()
    saved = [get_optimizer_state_dict(model, optimizer) for model, optimizer in twins.both]
    compare_values("checkpoint", records(saved[1]), records(saved[0]))
    fresh = Twins(ctx, Mixed, adamw)
    for (model, optimizer), state in zip(fresh.both, reversed(saved), strict=True):
        _, empty = get_state_dict(model, optimizer)  # as loaders do, to know what to read
        assert empty["state"]
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(state))
    fresh.compare()
    fresh.index = twins.index
    fresh.step()
    fresh.step(use_side=False)


def _moved(model: nn.Module) -> None:
    state = copy.deepcopy(model.state_dict())
    model.to_empty(device="cpu")
    model.load_state_dict(state)


@distributed(2)
def test_states_follow_parameters_that_move(ctx: RankContext) -> None:
    twins = Twins(ctx, MLP, adamw)
    twins.step()
    for model, _ in twins.both:
        _moved(model)
    memory = [entry["exp_avg"].to_local().data_ptr() for entry in twins.flat_optimizer.state.values()]
    twins.step()
    twins.step()
    after = [entry["exp_avg"].to_local().data_ptr() for entry in twins.flat_optimizer.state.values()]
    assert after == memory  # nothing was copied


def _give_hooks(param: nn.Parameter) -> None:
    """Hooks that send the shard as it is."""

    def pre(self: Tensor, mesh: Any) -> Any:
        return (self.detach(),), None

    def post(self: Tensor, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)

    local = param._local_tensor
    local.fsdp_pre_all_gather = types.MethodType(pre, local)
    local.fsdp_post_all_gather = types.MethodType(post, local)


@distributed(2)
def test_single_parameters_may_be_swapped_or_given_hooks(ctx: RankContext) -> None:
    twins = Twins(ctx, MLP, adamw)
    twins.step()
    twins.backward()
    for model, _ in twins.both:
        swapped = model.blocks[1].down.weight
        grad, swapped.grad = swapped.grad, None
        torch.utils.swap_tensors(swapped, nn.Parameter(swapped.detach() * 2))
        swapped.grad = grad
    twins.update()
    for model, _ in twins.both:
        _moved(model)
    twins.step()
    for model, _ in twins.both:
        for param in model.blocks[0].parameters():
            _give_hooks(param)
        model.load_state_dict(copy.deepcopy(model.state_dict()))  # after which hooks are looked for
    twins.step()


@distributed(2)
def test_param_groups_keep_their_own_hyperparameters(ctx: RankContext) -> None:
    def make(parameters: Any) -> optim.Optimizer:
        parameters = list(parameters)
        decayed = [param for param in parameters[:-2] if param.dim() > 1]
        others = [param for param in parameters[:-2] if param.dim() <= 1]
        return optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 0.1}], lr=0.01)

    twins = Twins(ctx, MLP, make)
    twins.step()
    for _, optimizer in twins.both:
        optimizer.param_groups[1]["betas"] = (0.5, 0.6)
        optimizer.param_groups[0]["lr"] = 0.2
    twins.step()
    for model, optimizer in twins.both:
        optimizer.add_param_group({"params": list(model.parameters())[-2:], "lr": 0.05})
    twins.step()


def _count_on(entry: dict[str, Any]) -> None:
    entry["step"] += 3


def _replace(entry: dict[str, Any]) -> None:
    entry["exp_avg"] = entry["exp_avg"] * 2


CHANGES: list[Callable[[dict[str, Any]], object]] = [
    _count_on,
    _replace,
    lambda entry: entry["exp_avg_sq"].mul_(4),
    lambda entry: entry.clear(),
]


@distributed(2)
def test_states_that_the_user_changes_are_used(ctx: RankContext) -> None:
    twins = Twins(ctx, MLP, adamw)
    twins.step()
    for change in CHANGES:
        for model, optimizer in twins.both:
            change(optimizer.state[model.blocks[1].up.weight])
        twins.step()
        for _, optimizer in twins.both:  # so that states are alike again
            for entry in optimizer.state.values():
                entry["step"].fill_(9)
        twins.step()


@distributed(4)
def test_gradients_of_other_kinds_are_stepped_as_torch_does(ctx: RankContext) -> None:
    """One on no axis of the parameter's, one that is a pending sum, one elsewhere, one transposed in memory."""
    mesh = ctx.mesh_2d(2, 2)
    twins = Twins(ctx, MLP, adamw, lambda runtime, model, _: shard_units_and_root(runtime, model, mesh))
    for _ in range(2):
        twins.backward()
        for model, _ in twins.both:
            first, second, third, fourth, *_ = (param for param in model.parameters() if param.dim() == 2)
            first.grad = first.grad.redistribute(placements=[Replicate(), Replicate()])
            second.grad = DTensor.from_local(second.grad.to_local(), mesh, [Partial(), Shard(0)])
            third.grad = third.grad.clone()
            transposed = fourth.grad.to_local().t().contiguous().t()
            fourth.grad = DTensor.from_local(transposed, mesh, fourth.placements)
        twins.update()


@distributed(2)
def test_closures_hooks_and_returned_losses_are_torchs(ctx: RankContext) -> None:
    model = sharded(ctx, MLP)
    optimizer = fsdp2.flatten_optimizer(adamw(model.parameters()))
    parameters = list(model.parameters())
    events: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: events.append("pre"))
    optimizer.register_step_post_hook(lambda found, *_: events.append(found.param_groups[0]["params"] == parameters))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, DIM)).square().mean()
        loss.backward()
        events.append("closure")
        return loss

    losses = [optimizer.step(closure) for _ in range(3)]
    assert events == ["pre", "closure", True] * 3
    assert len({loss.item() for loss in losses}) == 3


@distributed(2)
def test_a_step_that_raises_leaves_the_parameters_in_place(ctx: RankContext) -> None:
    class Failing(Seen):
        fails = False

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            if self.fails:
                raise RuntimeError("on purpose")

    model = sharded(ctx, MLP)
    optimizer = fsdp2.flatten_optimizer(Failing(model.parameters()), is_elementwise=True)
    parameters = list(model.parameters())
    for fails in (False, True, False):
        model(torch.ones(2, DIM)).sum().backward()
        optimizer.fails = fails
        if fails:
            with pytest.raises(RuntimeError, match="on purpose"):
                optimizer.step()
        else:
            optimizer.step()
        assert all(map(lambda a, b: a is b, optimizer.param_groups[0]["params"], parameters))
        assert set(optimizer.state) == set(parameters)
        optimizer.zero_grad()


@pytest.mark.parametrize("kept", [None, False, 2])
@distributed(4)
def test_forward_after_a_flat_step_uses_what_it_wrote(ctx: RankContext, kept: bool | int | None) -> None:
    from tests.distributed.support import sharded as sharded_stack

    model, reference = sharded_stack(ctx, reshard_after_forward=kept), seeded(Stack)
    for each in (model, reference):
        optimizer = optim.Adam(each.parameters(), lr=0.1)
        if each is model:
            fsdp2.flatten_optimizer(optimizer)
        stack_step(each)
        with torch.no_grad():
            each(batch())  # gathers again what backward has resharded
        optimizer.step()
    assert torch.allclose(model(batch()), reference(batch()), atol=1e-4)
