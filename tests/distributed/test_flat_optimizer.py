"""A flattened optimizer steps as torch made it, bit for bit: optimizers, ways to shard, gradients, closures."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from tests.distributed.flat_optimizer_support import OPTIMIZERS, Mixed, Seen, Twins, adamw, sharded
from tests.distributed.support import Stack, batch, seeded, shard, step as stack_step
from tests.harness.comms import direct_from
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import DIM, MLP, ParityModel, Transformer, Uneven
from tests.harness.offload import shard_offloaded
from tests.harness.runtimes import Runtime
from tests.harness.selection import long
from tests.harness.training import shard_units_and_root


@pytest.mark.ci
@pytest.mark.parametrize(
    "names",
    [("SGD with momentum", "AdamW with amsgrad", "Adagrad", "ASGD"), *long(tuple(OPTIMIZERS))],
    ids=["some", "all"],
)
@distributed(2)
def test_every_known_optimizer_makes_the_same_values_and_states(ctx: RankContext, names: tuple[str, ...]) -> None:
    """With foreach; the loops, which are the default on the CPU, are what other tests run."""
    for name in names:
        make = OPTIMIZERS[name]
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


@pytest.mark.long
@distributed(4)
def test_same_values_on_four_ranks(ctx: RankContext) -> None:
    mesh = ctx.mesh_2d(2, 2)
    cases: list[tuple[Any, Any]] = [
        (Uneven, shard_units_and_root),
        (Transformer, lambda runtime, model, _: shard_units_and_root(runtime, model, mesh)),
        (MLP, lambda runtime, model, _: shard_units_and_root(runtime, model, ctx.mesh_of_one())),
    ]
    for build, how in cases:
        twins = Twins(ctx, build, adamw, how)
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


@pytest.mark.ci
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
    model, reference = shard(ctx, seeded(Stack), reshard_after_forward=kept), seeded(Stack)
    for each in (model, reference):
        optimizer = optim.Adam(each.parameters(), lr=0.1)
        if each is model:
            fsdp2.flatten_optimizer(optimizer)
        stack_step(each)
        with torch.no_grad():
            each(batch())  # gathers again what backward has resharded
        optimizer.step()
    assert torch.allclose(model(batch()), reference(batch()), atol=1e-4)
