"""What ``reshard_to`` refuses: all ranks raise the same error, and nothing has moved.

The words are in ``golden/reshard_to_refusals.txt``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp2
from fsdp2 import DataParallelMeshDims, FullyShardedDataParallel, ParamPlacement, fully_shard, no_sync, reshard_to
from tests.distributed.support import DIM, Stack, batch, same_on_all_ranks, seeded, sharded, step
from tests.harness.distributed import RankContext
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of

Case = tuple[Any, Any, Any]  # model, optimizer, mesh


def _trained(ctx: RankContext, to: Any = None, **options: Any) -> Case:
    """``to``: the ranks of the new mesh; default: the first two."""
    model = sharded(ctx, **options)
    optimizer = optim.AdamW(model.parameters())
    step(model)
    optimizer.step()
    return model, optimizer, DeviceMesh(ctx.device_type, to or [0, 1])


def _untrained(ctx: RankContext, model: Any) -> Case:
    return model, optim.AdamW(model.parameters()), DeviceMesh(ctx.device_type, [0, 1])


Maker = Callable[[RankContext], Iterator[Case]]
CASES: dict[str, Any] = {}
TEXTS = texts_beside(__file__)


def _case(make: Maker) -> Any:
    """A generator of one case; what follows its ``yield`` cleans up."""
    CASES[make.__name__] = contextmanager(make)
    return make


@_case
def unsharded(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, mesh = _trained(ctx)
    with torch.no_grad():
        model(batch())
    yield model, optimizer, mesh


@_case
def gathering(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, mesh = _trained(ctx)
    handle = model.blocks[1].unshard(async_op=True)
    yield model, optimizer, mesh
    handle.wait()
    model.blocks[1].reshard()


@_case
def lent(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, mesh = _trained(ctx)
    with fsdp2.unsharded(model.blocks[0]):
        yield model, optimizer, mesh


@_case
def unreduced(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, mesh = _trained(ctx)
    with no_sync(model):
        step(model)
    yield model, optimizer, mesh


@_case
def partial(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, mesh = _trained(ctx, mesh=ctx.mesh_2d(2, 2))
    model.set_requires_all_reduce(False)
    step(model)
    yield model, optimizer, mesh


@_case
def not_finalized(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, mesh = _trained(ctx)
    model.set_manual_backward_finalization(True)
    step(model)
    yield model, optimizer, mesh
    model.finalize_backward()


@_case
def reducing(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, mesh = _trained(ctx)
    model.set_is_last_backward(False)
    step(model)
    yield model, optimizer, mesh


@_case
def one_rank_differs(ctx: RankContext) -> Iterator[Case]:
    model, _, mesh = _trained(ctx)
    model.exit.bias.requires_grad_(ctx.rank != 2)
    yield model, optim.AdamW(model.parameters()), mesh


@_case
def another_mesh(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, mesh = _trained(ctx)
    meshes = [mesh, DeviceMesh(ctx.device_type, [0, 1, 2])]  # all ranks build both
    yield model, optimizer, meshes[ctx.rank % 2]


@_case
def other_states(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, mesh = _trained(ctx)
    if ctx.rank == 3:
        del optimizer.state[model.exit.bias]
    yield model, optimizer, mesh


@_case
def one_rank_alone_is_unsharded(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, mesh = _trained(ctx, mesh=ctx.mesh_of_one())
    model.set_reshard_after_backward(ctx.rank != 1)
    step(model)
    yield model, optimizer, mesh


@_case
def foreign_parameter(ctx: RankContext) -> Iterator[Case]:
    model, _, mesh = _trained(ctx)
    yield model, optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))]), mesh


@_case
def strange_state(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, mesh = _trained(ctx)
    optimizer.state[model.exit.weight]["row"] = torch.zeros(DIM)
    yield model, optimizer, mesh


@_case
def wrapped_optimizer(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, mesh = _trained(ctx)
    yield model, optim.lr_scheduler.StepLR(optimizer, 1), mesh


@_case
def no_optimizer_on_one_rank(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, mesh = _trained(ctx)
    yield model, None if ctx.rank == 1 else optimizer, mesh


@_case
def on_meta(ctx: RankContext) -> Iterator[Case]:
    with torch.device("meta"):
        model = sharded(ctx)
    yield _untrained(ctx, model)


@_case
def reshard_over_two(ctx: RankContext) -> Iterator[Case]:
    yield _trained(ctx, to=[0, 1, 2], reshard_after_forward=2)


@_case
def inner_unit(ctx: RankContext) -> Iterator[Case]:
    model, _, mesh = _trained(ctx)
    yield model.blocks[0], optim.AdamW(model.blocks[0].parameters()), mesh


@_case
def three_axes(ctx: RankContext) -> Iterator[Case]:
    yield _trained(ctx, to=[[[0, 1]]])


@_case
def unsorted_ranks(ctx: RankContext) -> Iterator[Case]:
    yield _trained(ctx, to=[1, 0])


@_case
def on_unsorted_ranks(ctx: RankContext) -> Iterator[Case]:
    model = fully_shard(Stack(), mesh=DeviceMesh(ctx.device_type, [[1, 3], [0, 2]]))
    yield _untrained(ctx, model)


@_case
def no_mesh(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, _ = _trained(ctx)
    yield model, optimizer, 2


@_case
def not_sharded(ctx: RankContext) -> Iterator[Case]:
    model = seeded(Stack)
    yield _untrained(ctx, model)


@_case
def tensor_parallel(ctx: RankContext) -> Iterator[Case]:
    mesh, model = ctx.mesh(dp=2, tp=2), seeded(Stack)
    parallelize_module(model.exit, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    yield _untrained(ctx, model)


@_case
def full_mesh(ctx: RankContext) -> Iterator[Case]:
    mesh, model = ctx.mesh(dp=2, tp=2), seeded(Stack)
    torch.distributed.tensor.distribute_module(model, mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    yield _untrained(ctx, model)


@_case
def expert_mesh(ctx: RankContext) -> Iterator[Case]:
    model, experts = seeded(Stack), ctx.mesh_2d(2, 2)["shard"]
    own = model.exit.weight

    def place(param: nn.Parameter) -> Any:
        return ParamPlacement(Shard(0), experts) if param is own else None

    fully_shard(model, mesh=ctx.mesh_1d(), shard_placement_fn=place)
    yield _untrained(ctx, model)


@_case
def wrapper_class(ctx: RankContext) -> Iterator[Case]:
    model = FullyShardedDataParallel(seeded(Stack), use_orig_params=True)
    yield _untrained(ctx, model)


def _refused(ctx: RankContext, case: str) -> str:
    with CASES[case](ctx) as (model, optimizer, mesh):
        params = list(model.parameters())
        values = [_local(param).clone() for param in params]
        meshes = [getattr(param, "device_mesh", None) for param in params]
        text = error_of(lambda: reshard_to(model, optimizer, mesh))
        dist.barrier()
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        assert [getattr(param, "device_mesh", None) for param in params] == meshes
        if not params[0].is_meta:
            assert all(map(torch.equal, map(_local, params), values))
    return text


def _local(param: torch.Tensor) -> torch.Tensor:
    return (param.to_local() if isinstance(param, DTensor) else param).detach()


@pytest.mark.parametrize("case", CASES)
def test_move_is_refused_on_all_ranks_and_nothing_has_moved(case: str) -> None:
    TEXTS.check(case, same_on_all_ranks(_refused, 4, case=case))


def test_every_text_has_a_case() -> None:
    TEXTS.check_names(CASES)
