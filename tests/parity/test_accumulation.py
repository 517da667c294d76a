"""Gradient accumulation: with and without communication, and what else may wait for the last micro-batch."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from fsdp2._torch import torch_is_at_least
from tests.harness.compare import compare, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Branches, ParityModel, SharedModules, Transformer, Uneven
from tests.harness.runtimes import oracle, subject
from tests.harness.training import Case, Step, one_backward, sgd, shard_units_and_root, snapshot, train
from tests.parity.test_mixed_precision import BF16, BFLOAT16_ARITHMETIC, FP32, shard_with_policy

NUM_MICRO = 3


def _gradients(model: nn.Module) -> dict[str, object]:
    return {
        name: None if parameter.grad is None else snapshot(parameter.grad)
        for name, parameter in model.named_parameters()
    }


def _accumulate(step: Step, model: ParityModel, before_backward) -> list[Tensor]:
    """``NUM_MICRO`` forwards and backwards; ``before_backward(control, is_last)`` comes first in each."""
    losses = []
    for micro in range(NUM_MICRO):
        before_backward(step.control(model), micro == NUM_MICRO - 1)
        losses.append(step.loss(model, micro))
        losses[-1].backward()
        if step.runtime is not None:
            step.note(f"gradients after micro-batch {micro}", _gradients(model))
    return losses


def _no_sync(step: Step, model: ParityModel) -> list[Tensor]:
    return _accumulate(step, model, lambda control, is_last: control.set_requires_gradient_sync(is_last))


@pytest.mark.parametrize("model", [MLP, Uneven, Transformer])
@distributed(2, 4)
def test_without_gradient_sync_until_the_last_micro_batch(ctx: RankContext, model) -> None:
    compare(Case(model, step=_no_sync), ctx.mesh_1d())


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_without_gradient_sync_under_reshard_after_forward(ctx: RankContext, reshard: bool) -> None:
    shard = functools.partial(shard_units_and_root, reshard_after_forward=reshard)
    compare(Case(MLP, shard=shard, step=_no_sync), ctx.mesh_1d())


@pytest.mark.parametrize(
    "policy", [{"param_dtype": BF16, "reduce_dtype": FP32}, {"param_dtype": BF16}, {"reduce_dtype": BF16}]
)
@distributed(2, 4)
def test_without_gradient_sync_accumulates_in_reduce_dtype(ctx: RankContext, policy) -> None:
    shard = functools.partial(shard_with_policy, **policy)
    case = Case(MLP, shard, _no_sync, sgd, reduce_dtype=BF16, unsharded=BFLOAT16_ARITHMETIC)
    compare(case, ctx.mesh_1d())


_ADDS_IN_FP32 = pytest.mark.skipif(
    torch_is_at_least(2, 15),
    reason="torch 2.15 adds up the uses of a block in fp32 where nothing is reduced, and in bf16 otherwise",
)


@pytest.mark.parametrize(
    "policy",
    [
        {},
        pytest.param({"param_dtype": BF16, "reduce_dtype": FP32}, marks=_ADDS_IN_FP32),
        pytest.param({"param_dtype": BF16}, marks=_ADDS_IN_FP32),
        {"reduce_dtype": BF16},
    ],
)
@distributed(2)
def test_without_gradient_sync_of_a_block_that_is_used_twice(ctx: RankContext, policy) -> None:
    shard = functools.partial(shard_with_policy, **policy)
    compare(Case(SharedModules, shard, _no_sync, sgd, unsharded=None), ctx.mesh_1d())


@distributed(2)
def test_what_is_frozen_before_its_gradient_is_reduced(ctx: RankContext) -> None:
    """The gradient of the first micro-batch is reduced, and nothing of it is left for later steps."""

    def step(step: Step, model: MLP) -> list[Tensor]:
        losses = []
        for micro in range(2):
            step.control(model).set_requires_gradient_sync(micro == 1)
            model.blocks[0].requires_grad_(micro == 0)
            model.blocks[1].up.requires_grad_(micro == 0)
            losses.append(step.loss(model, micro))
            losses[-1].backward()
        return losses

    compare(Case(MLP, step=step), ctx.mesh_1d())
    compare(Case(MLP, functools.partial(shard_with_policy, param_dtype=BF16), step, unsharded=None), ctx.mesh_1d())


@distributed(2)
def test_what_is_unfrozen_while_it_is_unsharded(ctx: RankContext) -> None:
    """After an evaluation, the root is unsharded: the user meets the parameters that compute reads. In torch, the
    shards keep their flags."""

    def step(step: Step, model: MLP) -> list[Tensor]:
        for part in (model.exit, model.entry):
            part.requires_grad_(step.index == 0)
            with torch.no_grad():
                step.loss(model)
            part.requires_grad_(part is model.exit)
        return one_backward(step, model)

    case, mesh = Case(MLP, step=step), ctx.mesh_1d()
    for mine, theirs in zip(train(case, mesh, subject()), train(case, mesh, oracle()), strict=True):
        for name, expected in theirs.gradients.items():
            found = mine.gradients[name]
            assert (found is None) is (expected is None), name
            if found is not None and expected is not None:
                assert torch.equal(found.local, expected.local), name
        assert mine.gradients["exit.weight"] is not None


@pytest.mark.xfail(
    reason="after the backward of the second use, when no gradient is there yet, torch 2.15 reduces zeros and the "
    "partial sum of the earlier micro-batches: the same sum, rounded in another order",
    condition=torch_is_at_least(2, 15),
    strict=False,
)
@trains_alike(2, model=SharedModules, mesh=lambda ctx: ctx.mesh_2d(2, 1))
def test_without_all_reduce_of_a_block_that_is_used_twice(step: Step, model: ParityModel) -> list[Tensor]:
    return _accumulate(step, model, lambda control, is_last: control.set_requires_all_reduce(is_last))


@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(2, 4)
def test_with_communication_in_every_backward(ctx: RankContext, set_to_none: bool) -> None:
    def step(step: Step, model: ParityModel) -> list[Tensor]:
        return _accumulate(step, model, lambda control, is_last: None)

    compare(Case(MLP, step=step, set_to_none=set_to_none), ctx.mesh_1d())


@trains_alike(2, 4, model=MLP)
def test_gradient_sync_switched_off_in_one_unit_only(step: Step, model: MLP) -> list[Tensor]:
    def switch(control, is_last: bool) -> None:
        step.control(model.blocks[0]).set_requires_gradient_sync(is_last)
        step.control(model).set_requires_gradient_sync(is_last, recurse=False)

    return _accumulate(step, model, switch)


@trains_alike(2, 4, model=Branches)
def test_gradients_of_unsynced_micro_batches_are_reduced_though_the_last_has_none(
    step: Step, model: Branches
) -> list[Tensor]:
    losses = []
    for micro, active in enumerate([(0, 1, 2), (1,), (0, 1)]):
        step.control(model).set_requires_gradient_sync(micro == 2)
        losses.append(step.loss(model, micro, active=active))
        losses[-1].backward()
    return losses


def _shapes_on_hsdp(ctx: RankContext):
    return [ctx.mesh_2d(2, 1), ctx.mesh_2d(1, 2)] if ctx.world_size == 2 else [ctx.mesh_2d(2, 2)]


@distributed(2, 4)
def test_hsdp_without_all_reduce_until_the_last_micro_batch(ctx: RankContext) -> None:
    def step(step: Step, model: ParityModel) -> list[Tensor]:
        return _accumulate(step, model, lambda control, is_last: control.set_requires_all_reduce(is_last))

    for mesh in _shapes_on_hsdp(ctx):
        compare(Case(MLP, step=step), mesh)
        compare(Case(Uneven, step=step), mesh)


@distributed(2, 4)
def test_hsdp_without_gradient_sync_until_the_last_micro_batch(ctx: RankContext) -> None:
    for mesh in _shapes_on_hsdp(ctx):
        compare(Case(MLP, step=_no_sync), mesh)


@pytest.mark.long
@trains_alike(4, model=MLP, mesh=lambda ctx: ctx.mesh_2d(2, 2))
def test_hsdp_mixes_no_sync_and_no_all_reduce(step: Step, model: ParityModel) -> list[Tensor]:
    losses = []
    for micro, (sync, all_reduce) in enumerate([(False, False), (True, False), (True, False), (True, True)]):
        step.control(model).set_requires_gradient_sync(sync)
        step.control(model).set_requires_all_reduce(all_reduce)
        losses.append(step.loss(model, micro))
        losses[-1].backward()
    return losses


@pytest.mark.parametrize("sync", [True, False])
@distributed(2, 4)
def test_parameters_stay_unsharded_between_micro_batches_when_told_so(ctx: RankContext, sync: bool) -> None:
    def step(step: Step, model: ParityModel) -> list[Tensor]:
        def switch(control, is_last: bool) -> None:
            control.set_reshard_after_backward(is_last)
            control.set_requires_gradient_sync(sync or is_last)

        losses = _accumulate_without_notes(step, model, switch)
        step.note("parameters", [snapshot(parameter) for parameter in model.parameters()])
        return losses

    compare(Case(MLP, step=step), ctx.mesh_1d())


def _accumulate_without_notes(step: Step, model: ParityModel, before_backward) -> list[Tensor]:
    losses = []
    for micro in range(NUM_MICRO):
        before_backward(step.control(model), micro == NUM_MICRO - 1)
        losses.append(step.loss(model, micro))
        losses[-1].backward()
        kinds = [type(parameter).__name__ for parameter in model.parameters()]
        step.note(f"registered after micro-batch {micro}", kinds)
    return losses


@trains_alike(2, 4, model=MLP)
def test_is_last_backward_defers_the_end_of_backward(step: Step, model: ParityModel) -> list[Tensor]:
    def switch(control, is_last: bool) -> None:
        control.set_is_last_backward(is_last)

    return _accumulate_without_notes(step, model, switch)


@distributed(2, 4)
def test_everything_together_as_in_a_pipeline_schedule(ctx: RankContext) -> None:
    def step(step: Step, model: ParityModel) -> list[Tensor]:
        losses = [step.loss(model, micro) for micro in range(NUM_MICRO)]
        for micro, loss in enumerate(losses):
            is_last = micro == NUM_MICRO - 1
            step.control(model).set_is_last_backward(is_last)
            step.control(model).set_reshard_after_backward(is_last)
            step.control(model).set_requires_gradient_sync(is_last)
            loss.backward()
        return losses

    shard = functools.partial(shard_units_and_root, reshard_after_forward=False)
    compare(Case(MLP, shard=shard, step=step), ctx.mesh_1d())


@trains_alike(2, model=MLP, unsharded=None)
def test_an_unsynced_backward_alone_leaves_no_gradient_on_the_shards(step: Step, model: ParityModel) -> list[Tensor]:
    step.control(model).set_requires_gradient_sync(step.index == 2)
    loss = step.loss(model)
    loss.backward()
    return [loss]
