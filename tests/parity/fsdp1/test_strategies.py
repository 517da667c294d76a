"""Over which ranks the class shards: by strategy, process groups and meshes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp2.fsdp1
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import Front, as_torchs, same, train
from tests.parity.fsdp1.test_training import FULL, GRAD_OP, NO_SHARD

HYBRID, HYBRID_ZERO2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 7), nn.ReLU(), nn.Linear(7, 4))


def by_policy(front: Front, **options) -> nn.Module:
    return front.wrap(mlp(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NO_SHARD])
@pytest.mark.parametrize("given", ["process_group", "device_mesh"])
@distributed(2, 4)
def test_one_group(ctx: RankContext, given, strategy) -> None:
    mesh = ctx.mesh_1d()
    options = {given: mesh if given == "device_mesh" else mesh.get_group()}

    def scenario(front: Front):
        model = by_policy(front, sharding_strategy=strategy, **options)
        assert model.process_group.size() == ctx.world_size
        return train(ctx, model)

    same(ctx, scenario, exact=ctx.world_size == 2)


@pytest.mark.ci
@distributed(4)
def test_a_group_of_some_ranks(ctx: RankContext) -> None:
    """Each half of the ranks trains a model of its own."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def scenario(front: Front):
        model = by_policy(front, process_group=halves[ctx.rank // 2])
        return [*train(ctx, model), model.rank, model.world_size]

    same(ctx, scenario)


@pytest.mark.parametrize("use_orig_params", [True, *long(False)])
@pytest.mark.parametrize("strategy", [HYBRID, *long(HYBRID_ZERO2)])
@pytest.mark.parametrize("given", ["device_mesh", *long("process_group")])
@distributed(4)
def test_hybrid(ctx: RankContext, given, strategy, use_orig_params) -> None:
    mesh = ctx.mesh_2d(2, 2)
    groups = (mesh.get_group(1), mesh.get_group(0))
    options = {given: mesh if given == "device_mesh" else groups, "use_orig_params": use_orig_params}

    def scenario(front: Front):
        model = by_policy(front, sharding_strategy=strategy, **options)
        assert model.process_group.size() == 2
        return train(ctx, model)

    same(ctx, scenario, exact=False)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@as_torchs(2)
def test_hybrid_over_one_rank_of_an_axis(front: Front, shape) -> Any:
    """With shards of one rank, torch's class forgets the replicas. Both shapes are a sum of two gradients."""
    options = {"sharding_strategy": HYBRID, "device_mesh": front.ctx.mesh_2d(*shape)} if front.is_ours else {}
    return train(front.ctx, by_policy(front, **options))


@distributed(2)
def test_hybrid_by_nodes(ctx: RankContext) -> None:
    """Torch's class takes each rank of the CPU for a node. Ours asks the launcher, and refuses to guess."""
    ours = Front(ctx, fsdp2.fsdp1)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LOCAL_WORLD_SIZE", "2")
        torch.manual_seed(0)
        found = train(ctx, by_policy(ours, sharding_strategy=HYBRID))
        torch.manual_seed(0)
        assert found == train(ctx, by_policy(ours, sharding_strategy=FULL))
        environment.delenv("LOCAL_WORLD_SIZE")
        with pytest.raises(ValueError, match=r"no LOCAL_WORLD_SIZE for 2 ranks\. Start the job with torchrun"):
            by_policy(ours, sharding_strategy=HYBRID)


@distributed(4)
def test_wrappers_of_one_model_replicate_over_the_same_ranks(ctx: RankContext) -> None:
    ours, model = Front(ctx, fsdp2.fsdp1), mlp()
    model[0] = ours.wrap(model[0], sharding_strategy=HYBRID, device_mesh=ctx.mesh_2d(2, 2))
    with pytest.raises(ValueError, match="expects the same process groups in all wrappers, but a Linear inside"):
        ours.wrap(model, sharding_strategy=HYBRID, device_mesh=ctx.mesh_2d(1, 4))
