"""What hooks are called with, and from when on: also those that a class or a tensor was given after ``fully_shard``."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.distributed.extension_support import EVEN, MIXED, UNEVEN, Twins, built, dtensor_adam, linear, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.extension_reference import ON_LONGER_AXES, plain
from tests.harness.extensions import Halved, Scaled, Travelling, recorded

# Arguments


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MIXED])
@pytest.mark.parametrize("rows", [EVEN, UNEVEN, 1])
@distributed(2, 4)
def test_hooks_get_the_shard_mesh_the_outer_sizes_the_module_and_the_policy(
    ctx: RankContext, rows: int, policy: MixedPrecisionPolicy
) -> None:
    model, mesh = linear(Halved, rows), ctx.mesh_1d()
    fully_shard(model, mesh=mesh, mp_policy=policy)
    with recorded() as calls:
        model.unshard()
        model.reshard()
        model.unshard()
    assert [call.hook for call in calls] == ["pre", "post", "pre", "fill"]
    assert {type(call.on) for call in calls} == {Halved}
    given = calls[0].given
    assert given["mesh"].get_group() is mesh.get_group()
    assert (given["mesh"].ndim, given["mesh"].size()) == (1, ctx.world_size)
    assert (given["outer_size"], given["outer_stride"]) == (torch.Size((rows, 6)), (6, 1))
    assert isinstance(given["outer_size"], torch.Size)
    assert given["module"] is model
    assert given["mp_policy"] is policy
    for prepared, call in zip(calls[::2], calls[1::2], strict=True):
        assert call.given["param_dtype"] is (policy.param_dtype or torch.float32)
        assert call.given["metadata"] is prepared.given["metadata"]
        assert call.given["outputs"][0].shape == (rows, 6)
        assert call.given["outputs"][0].dtype is torch.bfloat16
    assert calls[3].given["out"] is model.weight


@distributed(4)
def test_mesh_of_the_hooks_is_the_shard_axis_of_hsdp(ctx: RankContext) -> None:
    mesh, model = ctx.mesh_2d(2, 2), linear(Halved)
    fully_shard(model, mesh=mesh)
    with recorded() as calls:
        model.unshard()
    found = calls[0].given["mesh"]
    assert (found.ndim, found.size(), found.get_local_rank()) == (1, 2, ctx.rank % 2)
    assert found.get_group() is mesh["shard"].get_group()


@distributed(2)
def test_module_of_the_hooks_is_the_one_that_holds_the_parameter(ctx: RankContext) -> None:
    model = sharded(built(Halved), ctx.mesh_1d())
    with recorded() as calls:
        step(model, ctx)
    modules = {call.given["module"] for call in calls if call.hook == "pre"}
    assert modules == {model.entry, *(m for block in model.blocks for m in (block.up, block.down))}


@distributed(2, 4)
def test_self_of_the_hooks_is_the_local_tensor_without_padding(ctx: RankContext) -> None:
    model = linear(Scaled, UNEVEN)
    fully_shard(model, mesh=ctx.mesh_1d())
    local = model.weight._local_tensor
    with recorded() as calls:
        model.unshard()
    assert all(call.on is local for call in calls)
    chunk = -(-UNEVEN // ctx.world_size)
    assert local.shape == (min(chunk, max(UNEVEN - ctx.rank * chunk, 0)), 6)


@distributed(2, 4)
def test_sharded_dim_that_the_payload_lacks_is_joined_along_the_first(ctx: RankContext) -> None:
    class Flat(Travelling):
        @classmethod
        def encode(cls, shard: Tensor, rank: int, size: torch.Size, num_ranks: int) -> tuple[Tensor, ...]:
            return (shard.flatten(), torch.full((), float(rank)))

        @classmethod
        def decode(cls, outputs: tuple[Tensor, ...], size: torch.Size, num_ranks: int, dtype: torch.dtype) -> Tensor:
            assert outputs[1].tolist() == list(range(num_ranks))
            widths = [chunk.size(1) for chunk in torch.empty(size).chunk(num_ranks, 1)]
            parts = outputs[0].split([size[0] * width for width in widths])
            return torch.cat([part.view(size[0], -1) for part in parts], 1)

    model, expected = linear(Flat), linear(None).weight
    fully_shard(model, mesh=ctx.mesh_1d(), shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
    model.unshard()
    assert torch.equal(model.weight, expected)


# Patched after fully_shard


def _pre_short(self: Tensor, mesh: Any) -> Any:
    return (plain(self).to(torch.bfloat16),), ("short", mesh.size())


def _pre_long(self: Tensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    assert outer_size == module.weight.shape
    return _pre_short(self, mesh)


def _post(self: Tensor, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    assert metadata[0] == "short"
    if out is not None:
        out.copy_(outputs[0])
        return None
    made = outputs[0].to(param_dtype, copy=True)
    return made, (made,)


@pytest.mark.parametrize("pre", [_pre_short, _pre_long])
@pytest.mark.parametrize("rows", [EVEN, UNEVEN])
@distributed(2, 4)
def test_instances_can_be_given_hooks_before_the_first_forward(ctx: RankContext, rows: int, pre: Any) -> None:
    """Plain shards of fully_shard; the bias and the other weights stay plain."""
    twins = Twins(Halved, ctx.mesh_1d(), ctx.rank, dim=rows, shard=lambda *args, **kwargs: None)
    model = sharded(built(None, rows), ctx.mesh_1d())
    for module in model.modules():
        if isinstance(module, nn.Linear):
            local = module.weight._local_tensor
            assert type(local) is Tensor
            local.fsdp_pre_all_gather = types.MethodType(pre, local)
            local.fsdp_post_all_gather = types.MethodType(_post, local)
    twins.model, twins.parameters = model, dict(model.named_parameters())
    twins.optimizer = dtensor_adam(model.parameters())
    twins.train(3)
    state, expected = twins.optimizer.state_dict()["state"], twins.reference.optimizer.state_dict()["state"]
    tolerance = {"rtol": 0.0, "atol": 0.0} if twins.exact else ON_LONGER_AXES
    for (name, value), moments, others in zip(
        model.state_dict().items(), state.values(), expected.values(), strict=True
    ):
        torch.testing.assert_close(value.to_local(), twins.reference.shards[name], **tolerance)
        torch.testing.assert_close(moments["exp_avg"].to_local(), others["exp_avg"], **tolerance)
        assert type(moments["exp_avg"]) is DTensor
        assert moments["exp_avg"].to_local().shape == value.to_local().shape


@pytest.mark.parametrize("pre", [_pre_short, _pre_long])
@distributed(2, 4)
def test_class_can_be_given_hooks_before_the_first_forward(ctx: RankContext, pre: Any) -> None:
    class Bare(Travelling):
        """No hook of its own: see below."""

    hidden = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
    hooks = {name: Travelling.__dict__[name] for name in hidden}
    for name in hidden:
        delattr(Travelling, name)
    try:
        model = linear(Bare, UNEVEN)
        fully_shard(model, mesh=ctx.mesh_1d())
        Bare.fsdp_pre_all_gather = pre
        Bare.fsdp_post_all_gather = _post
        for _ in range(2):
            model.unshard()
            assert torch.equal(model.weight, linear(None, UNEVEN).weight.bfloat16().float())
            model.reshard()
    finally:
        for name, hook in hooks.items():
            setattr(Travelling, name, hook)


@distributed(2)
def test_hooks_given_to_one_of_two_instances_leave_the_other_plain(ctx: RankContext) -> None:
    model = fully_shard(nn.Sequential(linear(None), nn.Linear(EVEN, 6)), mesh=ctx.mesh_1d())
    exact = model[1].weight.full_tensor()
    local = model[0].weight._local_tensor
    local.fsdp_pre_all_gather = types.MethodType(_pre_short, local)
    local.fsdp_post_all_gather = types.MethodType(_post, local)
    model.unshard()
    assert torch.equal(model[0].weight, linear(None).weight.bfloat16().float())
    assert torch.equal(model[1].weight, exact)
