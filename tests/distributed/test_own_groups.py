"""Process groups that fsdp2 makes: when one is made follows from ranks alone, never from what a rank has freed."""

from __future__ import annotations

import gc
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp2.core.plan.mesh import parallel_mesh, replicated
from fsdp2.extras import own_groups
from fsdp2.extras.own_groups import post_forward_mesh, separate_axis
from tests.distributed.support import same_on_all_ranks, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long

WORLD_SIZE = 4


class _Recorded:
    """Stands in for ``dist.new_group``: counts, and makes one group for each set of ranks, so that a rank that calls it
    alone does not hang."""

    made: ClassVar[dict[tuple[int, ...], Any]] = {}

    def __init__(self) -> None:
        self.calls, self._new_group = list[list[int]](), dist.new_group

    def __call__(self, ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        if len(ranks) == 1:  # made for the count alone: other tests may have left other counts on other ranks
            return self._new_group(ranks, *args, **kwargs)
        self.calls.append(ranks)
        if tuple(ranks) not in self.made:
            self.made[tuple(ranks)] = self._new_group(ranks, *args, **kwargs)
        return self.made[tuple(ranks)]


def _resting(ctx: RankContext) -> object:
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    return mesh, post_forward_mesh(parallel_mesh(mesh), 2)


def _scalars(ctx: RankContext) -> object:
    mesh = init_device_mesh("cpu", (2, ctx.world_size // 2))
    return mesh, replicated(parallel_mesh(mesh))


def _model(ctx: RankContext) -> object:
    model = sharded(ctx, mesh=init_device_mesh("cpu", (ctx.world_size,)), reshard_after_forward=2)
    model.set_separate_reduce_scatter_group()
    step(model)
    return model


def _num_calls(ctx: RankContext, make: str) -> list[int]:
    """Calls that a first and a second ``make`` need, on equal meshes. Rank 0 frees what it has made before the second.
    Models stay alive on that rank, too, as long as DTensor's caches refer to their mesh."""
    num_calls, kept = [], []
    for _ in range(2):
        with mock.patch.object(dist, "new_group", _Recorded()) as recorded:
            made = globals()[make](ctx)
        num_calls.append(len(recorded.calls))
        if ctx.rank > 0:
            kept.append(made)
        del made
        gc.collect()
    return num_calls


@pytest.mark.ci
@pytest.mark.parametrize("make", [_model, *long(_scalars, _resting)])
def test_ranks_make_groups_alike_whatever_one_of_them_has_freed(make: Any) -> None:
    first, second = same_on_all_ranks(_num_calls, WORLD_SIZE, make=make.__name__)
    assert second == 0, f"{first} calls for the first, {second} for the second"


@distributed(4)
def test_ranks_of_a_part_make_their_groups_alone_though_the_world_has_a_device(ctx: RankContext) -> None:
    """With ``init_process_group(device_id=...)``, torch splits new groups off the world's communicator, which takes all
    ranks of the world. A pipeline stage is not all ranks."""
    world: Any = dist.group.WORLD
    seen: list[object] = []

    def new_group(*args: Any, **kwargs: Any) -> Any:
        seen.append(world.bound_device_id)
        if len(seen) == 3:
            raise RuntimeError("no group")
        return made(*args, **kwargs)

    made, device = dist.new_group, torch.device("cpu", 0)
    mesh = ctx.mesh(pp=2, dp=2)["dp"]
    world.bound_device_id = device
    try:
        with mock.patch.object(dist, "new_group", new_group), mock.patch.object(own_groups, "_own_groups", {}):
            separate_axis(parallel_mesh(mesh).shard, torch.device("cpu"))
            post_forward_mesh(parallel_mesh(mesh), 1)
    except RuntimeError:
        pass
    finally:
        after, world.bound_device_id = world.bound_device_id, None
    assert (seen, after) == ([None] * 3, device)


@distributed(4)
def test_ranks_that_were_in_different_meshes_before_find_each_other(ctx: RankContext) -> None:
    """torch counts the groups of a rank in the name of a group that only some ranks make; since 2.14, in all names."""
    mesh = parallel_mesh(init_device_mesh("cpu", (2, 2)))
    if ctx.rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True, group_desc="earlier")
    with mock.patch.object(own_groups, "_own_groups", {}):
        joint, separate = replicated(mesh).replicate, separate_axis(mesh.shard, mesh.device)
        resting = post_forward_mesh(parallel_mesh(ctx.mesh_1d()), 2)
    for axis in (joint, separate, resting.shard, resting.replicate):
        ones = torch.ones(1)
        dist.all_reduce(ones, group=axis.group)
        assert ones.item() == axis.size
