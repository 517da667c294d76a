"""What offloading to the host changes beside where things live: when gradients are there, what is copied, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import fully_shard
from fsdp2.core._torch import leaves
from fsdp2.core.comm.offload import StagedOffloadPolicy
from fsdp2.tensors import (
    BFloat16AllGatherTensor,
    Float8AllGatherTensor,
    Float8Scaling,
    Int8AllGatherTensor,
    NF4Tensor,
    TwoTensor,
    wrap_parameters,
)
from tests.distributed.changes import assert_gradients, assert_trains_as_stack, step_and_zero
from tests.distributed.extension_support import UNEVEN, Twins
from tests.distributed.support import (
    Faulty,
    InjectedError,
    Stack,
    batch,
    fail,
    fail_now,
    seeded,
    shard,
    shard_each,
    sharded,
    step,
)
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import Aliasing, Halved, Packed4, Ragged, Scaled, recorded
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of

STAGED = StagedOffloadPolicy()
UNPINNED = StagedOffloadPolicy(pin_memory=False)  # for shards of classes that support no pinned memory


# When


@distributed(2)
def test_gradients_are_handed_over_when_backward_ends(ctx: RankContext) -> None:
    """Until then, their values are on their way. Hooks on them find all of backward behind them."""
    model = sharded(ctx, offload_policy=STAGED)
    parameters = list(model.parameters())
    seen: list[str] = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append("none" if p.grad is None else "gradient"))
    x = batch().requires_grad_()
    x.register_hook(lambda _: seen.append(f"inputs, {sum(p.grad is not None for p in parameters)} there"))
    model(x).square().mean().backward()
    assert seen == ["inputs, 0 there", *["gradient"] * len(parameters)]
    reference = seeded(Stack)
    step(reference)
    assert_gradients(parameters, reference)


@distributed(2)
def test_gradients_that_are_finalized_by_hand_are_there_when_the_call_returns(ctx: RankContext) -> None:
    model, reference = sharded(ctx, offload_policy=STAGED), seeded(Stack)
    model.set_manual_backward_finalization(True)
    step(model)
    step(reference)
    model.finalize_backward()
    assert_gradients(model, reference)


# What


@distributed(2)
def test_on_one_rank_unsharded_parameters_are_copies_that_are_freed(ctx: RankContext) -> None:
    model = seeded(Stack)
    fully_shard(model, mesh=ctx.mesh_of_one(), offload_policy=STAGED)
    shard = model.entry.weight.to_local()
    model.unshard()
    unsharded = model.entry.weight
    assert unsharded.data_ptr() != shard.data_ptr()
    assert torch.equal(unsharded, shard)
    model.reshard()
    assert unsharded.untyped_storage().nbytes() == 0
    assert shard.untyped_storage().nbytes() > 0


@distributed(2)
def test_units_may_be_offloaded_one_by_one(ctx: RankContext) -> None:
    model = seeded(Stack)
    fully_shard(model.blocks[1], mesh=ctx.mesh_1d(), offload_policy=STAGED)
    assert_trains_as_stack(shard_each(model.blocks[0], model.blocks[2], model, mesh=ctx.mesh_1d()))


# Exceptions


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("warm", [True, False])
@distributed(2)
def test_gradients_on_their_way_are_dropped_when_backward_raises(ctx: RankContext, warm: bool, reset: bool) -> None:
    """The units behind the fault have been reduced by then."""
    model = shard(ctx, seeded(Faulty), offload_policy=STAGED)
    parameters = list(model.parameters())  # they need not be bound after an exception
    if warm:
        step_and_zero(model)
    fail(model, "backward")
    if reset:
        model.reset_iter_state()
        assert all(parameter.grad is None for parameter in parameters)
    assert_trains_as_stack(model)


@distributed(2)
def test_gradients_on_their_way_are_dropped_when_a_hook_on_a_gradient_raises(ctx: RankContext) -> None:
    model = sharded(ctx, offload_policy=STAGED)
    handle = model.exit.weight.register_post_accumulate_grad_hook(fail_now)
    with pytest.raises(InjectedError):
        step(model, seed=5)
    handle.remove()
    model.zero_grad()
    assert_trains_as_stack(model)


# Tensor subclasses


@pytest.mark.parametrize("make", [Halved, Scaled, Packed4, Ragged, Aliasing])
@distributed(2)
def test_hooks_send_what_they_make_of_a_copy_of_the_shard(ctx: RankContext, make: Any) -> None:
    twins = Twins(make, ctx.mesh_1d(), ctx.rank, dim=UNEVEN, offload_policy=UNPINNED)
    shards = [parameter._local_tensor for parameter in twins.parameters.values()]
    with recorded() as calls:
        twins.train(3)
    copies = [call.on for call in calls if call.hook == "pre"]
    assert copies
    assert all(type(copy) is make and all(copy is not shard for shard in shards) for copy in copies)


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": BFloat16AllGatherTensor,
    "int8": Int8AllGatherTensor,
    "float8": lambda weight: Float8AllGatherTensor(weight, scaling=Float8Scaling.PER_ROW),
    "float8 per tensor": Float8AllGatherTensor,
    "nf4": lambda weight: NF4Tensor.quantise(weight, block_size=16),
    "two": lambda weight: TwoTensor(weight, weight.clone()),
}


@pytest.mark.parametrize("name", list(FORMATS))
@distributed(2)
def test_wire_formats_compute_the_same_offloaded(ctx: RankContext, name: str) -> None:
    found = []
    for policy in ({"offload_policy": STAGED}, {}):
        model = seeded(Stack)
        for parameter in model.parameters():
            parameter.requires_grad_(name != "nf4" or parameter.dim() == 1)
        wrap_parameters(model, FORMATS[name], select=lambda _, p: p.dim() > 1 or name == "two")
        shard(ctx, model, **policy)
        parameters = list(model.parameters())
        losses = [step(model, seed) for seed in (1, 2)]
        found.append([losses, [None if p.grad is None else list(leaves(p.grad.to_local())) for p in parameters]])
    compare_values("offloaded", *found)


class _Unmovable(Halved):
    """Copies of it are plain tensors."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        return made.plain if func is torch.ops.aten._to_copy.default else made


@golden_on_ranks()
def test_subclass_that_is_lost_on_its_way_to_the_device_is_refused(ctx: RankContext) -> str:
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(_Unmovable(torch.randn(4, 4)))
    fully_shard(model, mesh=ctx.mesh_1d(), offload_policy=STAGED)
    return error_of(lambda: model(torch.ones(1, 4)))
