"""Over which ranks the class shards: by strategy, process groups and meshes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import (
    FULL_SHARD,
    GRAD_OP,
    HYBRID,
    NO_SHARD,
    ON_TWO_RANKS,
    Front,
    as_torchs,
    same,
    with_ours,
)

HYBRID_ZERO2 = ShardingStrategy._HYBRID_SHARD_ZERO2


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 7), nn.ReLU(), nn.Linear(7, 4))


def by_policy(front: Front, **options) -> nn.Module:
    return front.wrap(mlp(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)


def trained(front: Front, num_ranks: int, **options: Any) -> Any:
    model = by_policy(front, **options)
    assert model.process_group.size() == num_ranks
    return [*front.train(model), model.rank, model.world_size]


@pytest.mark.parametrize("strategy", [FULL_SHARD, GRAD_OP, NO_SHARD])
@pytest.mark.parametrize("given", ["process_group", "device_mesh"])
@as_torchs(2, 4, exact=ON_TWO_RANKS)
def test_one_group(front: Front, given: str, strategy: Any) -> Any:
    mesh = front.mesh()
    options = {given: mesh if given == "device_mesh" else mesh.get_group()}
    return trained(front, front.ctx.world_size, sharding_strategy=strategy, **options)


@pytest.mark.ci
@distributed(4)
def test_a_group_of_some_ranks(ctx: RankContext) -> None:
    """Each half of the ranks trains a model of its own."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    same(ctx, lambda front: trained(front, 2, process_group=halves[ctx.rank // 2]))


@pytest.mark.parametrize("use_orig_params", [True, *long(False)])
@pytest.mark.parametrize("strategy", [HYBRID, *long(HYBRID_ZERO2)])
@pytest.mark.parametrize("given", ["device_mesh", *long("process_group")])
@as_torchs(4, exact=False)
def test_hybrid(front: Front, given: str, strategy: Any, use_orig_params: bool) -> Any:
    mesh = front.ctx.mesh_2d(2, 2)
    options = {given: mesh if given == "device_mesh" else (mesh.get_group(1), mesh.get_group(0))}
    return trained(front, 2, sharding_strategy=strategy, use_orig_params=use_orig_params, **options)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@as_torchs(2)
def test_hybrid_over_one_rank_of_an_axis(front: Front, shape) -> Any:
    """With shards of one rank, torch's class forgets the replicas. Both shapes are a sum of two gradients."""
    options = {"sharding_strategy": HYBRID, "device_mesh": front.ctx.mesh_2d(*shape)} if front.is_ours else {}
    return front.train(by_policy(front, **options))


@with_ours(2)
def test_hybrid_by_nodes(front: Front) -> None:
    """Torch's class takes each rank of the CPU for a node. Ours asks the launcher, and refuses to guess."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LOCAL_WORLD_SIZE", "2")
        found = []
        for strategy in (HYBRID, FULL_SHARD):
            torch.manual_seed(0)
            found.append(front.train(by_policy(front, sharding_strategy=strategy)))
        assert found[0] == found[1]
        environment.delenv("LOCAL_WORLD_SIZE")
        with pytest.raises(ValueError, match=r"no LOCAL_WORLD_SIZE for 2 ranks\. Start the job with torchrun"):
            by_policy(front, sharding_strategy=HYBRID)


@with_ours(4)
def test_wrappers_of_one_model_replicate_over_the_same_ranks(front: Front) -> None:
    model = mlp()
    model[0] = front.wrap(model[0], sharding_strategy=HYBRID, device_mesh=front.ctx.mesh_2d(2, 2))
    with pytest.raises(ValueError, match="expects the same process groups in all wrappers, but a Linear inside"):
        front.wrap(model, sharding_strategy=HYBRID, device_mesh=front.ctx.mesh_2d(1, 4))
