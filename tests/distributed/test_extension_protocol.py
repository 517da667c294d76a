"""What hooks are called with, and from when on: also those that a class or a tensor was given after ``fully_shard``."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.distributed.extension_support import EVEN, MIXED, UNEVEN, built, linear, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.extension_reference import plain
from tests.harness.extensions import Halved, Travelling, recorded

# Arguments


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MIXED])
@pytest.mark.parametrize("rows", [EVEN, UNEVEN, 1])
@distributed(2, 4)
def test_hooks_get_the_shard_mesh_the_outer_sizes_the_module_and_the_policy(
    ctx: RankContext, rows: int, policy: MixedPrecisionPolicy
) -> None:
    model, mesh = linear(Halved, rows), ctx.mesh_1d()
    fully_shard(model, mesh=mesh, mp_policy=policy)
    local = model.weight._local_tensor
    chunk = -(-rows // ctx.world_size)
    assert local.shape == (min(chunk, max(rows - ctx.rank * chunk, 0)), 6)  # without padding
    with recorded() as calls:
        model.unshard()
        model.reshard()
        model.unshard()
    assert [call.hook for call in calls] == ["pre", "post", "pre", "fill"]
    assert all(call.on is local for call in calls)
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
def test_hooks_get_the_shard_axis_of_hsdp_and_the_module_that_holds_the_parameter(ctx: RankContext) -> None:
    mesh = ctx.mesh_2d(2, 2)
    model = sharded(built(Halved), mesh)
    with recorded() as calls:
        step(model, ctx)
    given = [call.given for call in calls if call.hook == "pre"]
    found = given[0]["mesh"]
    assert (found.ndim, found.size(), found.get_local_rank()) == (1, 2, ctx.rank % 2)
    assert found.get_group() is mesh["shard"].get_group()
    holders = {model.entry, *(linear for block in model.blocks for linear in (block.up, block.down))}
    assert {each["module"] for each in given} == holders


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


@distributed(2, 4)
def test_hooks_given_to_one_of_two_instances_leave_the_other_plain(ctx: RankContext) -> None:
    model = fully_shard(nn.Sequential(linear(None, UNEVEN), nn.Linear(UNEVEN, 6)), mesh=ctx.mesh_1d())
    exact = model[1].weight.full_tensor()
    local = model[0].weight._local_tensor
    local.fsdp_pre_all_gather = types.MethodType(_pre_short, local)
    local.fsdp_post_all_gather = types.MethodType(_post, local)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
        model.unshard()
        assert torch.equal(model[0].weight, linear(None, UNEVEN).weight.bfloat16().float())
        assert torch.equal(model[1].weight, exact)
        model.reshard()
    assert type(model[0].weight.grad.to_local()) is Tensor
    assert model[0].weight.grad.to_local().shape == local.shape
