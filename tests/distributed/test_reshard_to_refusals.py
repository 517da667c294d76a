"""What ``reshard_to`` refuses: all ranks raise the same error, and nothing has moved.

The words are in ``golden/reshard_to_refusals.txt``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp2
from fsdp2 import DataParallelMeshDims, FullyShardedDataParallel, ParamPlacement, fully_shard
from fsdp2.checkpoint import reshard_to
from tests.distributed.changes import evaluate
from tests.distributed.refusals import Case, refused
from tests.distributed.support import DIM, Stack, same_on_all_ranks, seeded, shard, sharded, step
from tests.harness.distributed import RankContext
from tests.harness.golden import texts_beside

TEXTS = texts_beside(__file__)


@dataclass
class Job:
    """What is moved, and in ``stack`` what cleans up."""

    ctx: RankContext
    stack: ExitStack
    model: Any
    optimizer: Any
    mesh: Any


Make = Callable[[RankContext, ExitStack], Job]


def _untrained(build: Callable[[RankContext], Any], to: Any = (0, 1)) -> Make:
    """``to``: the ranks of the new mesh."""

    def make(ctx: RankContext, stack: ExitStack) -> Job:
        model = build(ctx)
        return Job(ctx, stack, model, optim.AdamW(model.parameters()), DeviceMesh(ctx.device_type, to))

    return make


def _trained(
    change: Callable[[Job], object] = lambda job: None,
    to: Any = (0, 1),
    mesh: Any = RankContext.mesh_1d,
    **options: Any,
) -> Make:
    """For a step, and then changed."""

    def make(ctx: RankContext, stack: ExitStack) -> Job:
        job = _untrained(lambda ctx: sharded(ctx, mesh=mesh(ctx), **options), to)(ctx, stack)
        step(job.model)
        job.optimizer.step()
        change(job)
        return job

    return make


def _given(**others: Callable[[Job], Any]) -> Make:
    """Other arguments, one behind the other."""

    def change(job: Job) -> None:
        for name, make in others.items():
            setattr(job, name, make(job))

    return _trained(change)


def _stepped_with(method: str, value: Callable[[Job], bool] = lambda job: False) -> Callable[[Job], None]:
    """One more step, with that setting."""

    def change(job: Job) -> None:
        getattr(job.model, method)(value(job))
        step(job.model)

    return change


def _gathering(job: Job) -> None:
    handle = job.model.blocks[1].unshard(async_op=True)
    job.stack.callback(job.model.blocks[1].reshard)
    job.stack.callback(handle.wait)


def _not_finalized(job: Job) -> None:
    job.model.set_manual_backward_finalization(True)
    step(job.model)
    job.stack.callback(job.model.finalize_backward)


def _differing(job: Job) -> None:
    job.model.exit.bias.requires_grad_(job.ctx.rank != 2)
    job.optimizer = optim.AdamW(job.model.parameters())


def _without_a_state(job: Job) -> None:
    if job.ctx.rank == 3:
        del job.optimizer.state[job.model.exit.bias]


def _begun_by_muon(job: Job) -> None:
    job.model.zero_grad()
    job.optimizer = fsdp2.optim.Muon([each.linear.weight for each in job.model.blocks])
    with job.optimizer.overlap_backward():
        step(job.model)
    job.stack.callback(job.optimizer.step)


def _tensor_parallel(ctx: RankContext) -> Any:
    mesh, model = ctx.mesh(dp=2, tp=2), seeded(Stack)
    parallelize_module(model.exit, mesh["tp"], ColwiseParallel())
    return fully_shard(model, mesh=mesh["dp"])


def _full_mesh(ctx: RankContext) -> Any:
    mesh, model = ctx.mesh(dp=2, tp=2), seeded(Stack)
    torch.distributed.tensor.distribute_module(model, mesh)
    return fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def _expert_mesh(ctx: RankContext) -> Any:
    model = seeded(Stack)
    placed = {model.exit.weight: ParamPlacement(Shard(0), ctx.mesh_2d(2, 2)["shard"])}
    return fully_shard(model, mesh=ctx.mesh_1d(), shard_placement_fn=placed.get)


def _another_mesh(job: Job) -> DeviceMesh:
    return [job.mesh, DeviceMesh(job.ctx.device_type, [0, 1, 2])][job.ctx.rank % 2]  # all ranks build both


CASES = {
    "unsharded": _trained(lambda job: evaluate(job.model)),
    "gathering": _trained(_gathering),
    "lent": _trained(lambda job: job.stack.enter_context(fsdp2.unsharded(job.model.blocks[0]))),
    "unreduced": _trained(_stepped_with("set_requires_gradient_sync")),
    "partial": _trained(_stepped_with("set_requires_all_reduce"), mesh=lambda ctx: ctx.mesh_2d(2, 2)),
    "not_finalized": _trained(_not_finalized),
    "reducing": _trained(_stepped_with("set_is_last_backward")),
    "one_rank_differs": _trained(_differing),
    "another_mesh": _given(mesh=_another_mesh),
    "other_states": _trained(_without_a_state),
    "one_rank_alone_is_unsharded": _trained(
        _stepped_with("set_reshard_after_backward", lambda job: job.ctx.rank != 1), mesh=RankContext.mesh_of_one
    ),
    "no_optimizer_on_one_rank": _given(optimizer=lambda job: None if job.ctx.rank == 1 else job.optimizer),
    "foreign_parameter": _given(
        optimizer=lambda job: optim.SGD([*job.model.parameters(), nn.Parameter(torch.zeros(3))])
    ),
    "host_adamw": _given(optimizer=lambda job: fsdp2.optim.HostAdamW(job.model.parameters())),
    "stepped_by_a_host_adamw": _trained(
        lambda job: job.stack.callback(fsdp2.optim.HostAdamW(job.model.parameters()).remove)
    ),
    "begun_by_muon": _trained(_begun_by_muon),
    "strange_state": _trained(lambda job: job.optimizer.state[job.model.exit.weight].update(row=torch.zeros(DIM))),
    "wrapped_optimizer": _given(optimizer=lambda job: optim.lr_scheduler.StepLR(job.optimizer, 1)),
    "on_meta": _untrained(lambda ctx: shard(ctx, Stack().to("meta"))),
    "reshard_over_two": _trained(to=[0, 1, 2], reshard_after_forward=2),
    "inner_unit": _given(
        model=lambda job: job.model.blocks[0], optimizer=lambda job: optim.AdamW(job.model.parameters())
    ),
    "three_axes": _trained(to=[[[0, 1]]]),
    "unsorted_ranks": _trained(to=[1, 0]),
    "on_unsorted_ranks": _untrained(
        lambda ctx: fully_shard(Stack(), mesh=DeviceMesh(ctx.device_type, [[1, 3], [0, 2]]))
    ),
    "no_mesh": _given(mesh=lambda job: 2),
    "not_sharded": _untrained(lambda ctx: seeded(Stack)),
    "tensor_parallel": _untrained(_tensor_parallel),
    "full_mesh": _untrained(_full_mesh),
    "expert_mesh": _untrained(_expert_mesh),
    "wrapper_class": _untrained(lambda ctx: FullyShardedDataParallel(seeded(Stack), use_orig_params=True)),
}


def _refused(ctx: RankContext, case: str) -> str:
    with ExitStack() as stack:
        job = CASES[case](ctx, stack)
        params = list(job.model.parameters())
        meshes = [getattr(param, "device_mesh", None) for param in params]
        text = refused(Case(job.model, lambda: reshard_to(job.model, job.optimizer, job.mesh), runs=False))
        dist.barrier()
        assert [getattr(param, "device_mesh", None) for param in params] == meshes
    return text


@pytest.mark.parametrize("case", CASES)
def test_move_is_refused_on_all_ranks_and_nothing_has_moved(case: str) -> None:
    TEXTS.check(case, same_on_all_ranks(_refused, 4, case=case), among=CASES)
