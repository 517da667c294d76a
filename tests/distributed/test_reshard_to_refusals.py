"""What ``reshard_to`` refuses: all ranks raise the same error, and nothing has moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp2
from fsdp2 import DataParallelMeshDims, FullyShardedDataParallel, ParamPlacement, fully_shard, no_sync, reshard_to
from tests.distributed.support import DIM, Stack, batch, same_on_all_ranks, seeded, sharded, step
from tests.harness.distributed import RankContext
from tests.harness.messages import error_of

Case = tuple[Any, Any, Any]  # model, optimizer, mesh


def _new_mesh(ctx: RankContext) -> DeviceMesh:
    return DeviceMesh(ctx.device_type, [0, 1])


def _trained(ctx: RankContext, **options: Any) -> Case:
    model = sharded(ctx, **options)
    optimizer = optim.AdamW(model.parameters())
    step(model)
    optimizer.step()
    return model, optimizer, _new_mesh(ctx)


Maker = Callable[[RankContext], Iterator[Case]]
CASES: dict[str, Any] = {}


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
    model, optimizer, _ = _trained(ctx)
    meshes = [DeviceMesh(ctx.device_type, ranks) for ranks in ([0, 1], [0, 1, 2])]
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
    yield model, optim.AdamW(model.parameters()), _new_mesh(ctx)


@_case
def reshard_over_two(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, _ = _trained(ctx, reshard_after_forward=2)
    yield model, optimizer, DeviceMesh(ctx.device_type, [0, 1, 2])


@_case
def inner_unit(ctx: RankContext) -> Iterator[Case]:
    model, _, mesh = _trained(ctx)
    yield model.blocks[0], optim.AdamW(model.blocks[0].parameters()), mesh


@_case
def three_axes(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, _ = _trained(ctx)
    yield model, optimizer, DeviceMesh(ctx.device_type, [[[0, 1]]])


@_case
def unsorted_ranks(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, _ = _trained(ctx)
    yield model, optimizer, DeviceMesh(ctx.device_type, [1, 0])


@_case
def on_unsorted_ranks(ctx: RankContext) -> Iterator[Case]:
    model = fully_shard(Stack(), mesh=DeviceMesh(ctx.device_type, [[1, 3], [0, 2]]))
    yield model, optim.AdamW(model.parameters()), _new_mesh(ctx)


@_case
def no_mesh(ctx: RankContext) -> Iterator[Case]:
    model, optimizer, _ = _trained(ctx)
    yield model, optimizer, 2


@_case
def not_sharded(ctx: RankContext) -> Iterator[Case]:
    model = seeded(Stack)
    yield model, optim.AdamW(model.parameters()), _new_mesh(ctx)


@_case
def tensor_parallel(ctx: RankContext) -> Iterator[Case]:
    mesh, model = ctx.mesh(dp=2, tp=2), seeded(Stack)
    parallelize_module(model.exit, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    yield model, optim.AdamW(model.parameters()), _new_mesh(ctx)


@_case
def full_mesh(ctx: RankContext) -> Iterator[Case]:
    mesh, model = ctx.mesh(dp=2, tp=2), seeded(Stack)
    torch.distributed.tensor.distribute_module(model, mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    yield model, optim.AdamW(model.parameters()), _new_mesh(ctx)


@_case
def expert_mesh(ctx: RankContext) -> Iterator[Case]:
    model, experts = seeded(Stack), ctx.mesh_2d(2, 2)["shard"]
    own = model.exit.weight

    def place(param: nn.Parameter) -> Any:
        return ParamPlacement(Shard(0), experts) if param is own else None

    fully_shard(model, mesh=ctx.mesh_1d(), shard_placement_fn=place)
    yield model, optim.AdamW(model.parameters()), _new_mesh(ctx)


@_case
def wrapper_class(ctx: RankContext) -> Iterator[Case]:
    model = FullyShardedDataParallel(seeded(Stack), use_orig_params=True)
    yield model, optim.AdamW(model.parameters()), _new_mesh(ctx)


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


def _refusals(ctx: RankContext, cases: list[str]) -> str:
    return "\n\n".join(f"{case}:\n{_refused(ctx, case)}" for case in cases)


def refusals(*cases: str) -> str:
    __tracebackhide__ = True
    return same_on_all_ranks(_refusals, 4, cases=list(cases))


def test_what_is_in_flight_is_refused_by_name() -> None:
    cases = ("unsharded", "gathering", "lent", "unreduced", "partial", "not_finalized", "reducing")
    assert_expected_inline(
        refusals(*cases),
        """\
unsharded:
ScheduleError: reshard_to: unit '(root)' is UNSHARDED. Call reshard() on its module before
reshard_to.

gathering:
ScheduleError: reshard_to: unit 'blocks.1' has a gather in flight. Call reshard() on its module
before reshard_to.

lent:
ScheduleError: reshard_to: an fsdp2.unsharded(...) block holds the parameters of unit 'blocks.0'.
Leave that block first.

unreduced:
ScheduleError: reshard_to: unit '(root)' has gradients that are UNREDUCED: earlier backwards ran
without set_requires_gradient_sync(True) or set_requires_all_reduce(True). Run a backward that
reduces, or call reset_iter_state(), before reshard_to.

partial:
ScheduleError: reshard_to: unit '(root)' has gradients that are PARTIAL: earlier backwards ran
without set_requires_gradient_sync(True) or set_requires_all_reduce(True). Run a backward that
reduces, or call reset_iter_state(), before reshard_to.

not_finalized:
ScheduleError: reshard_to: a backward of FSDPStack waits to be finalized. Call finalize_backward(),
and wait() on its handle, before reshard_to.

reducing:
ScheduleError: reshard_to: gradient reductions of FSDPStack are in flight. Call reshard_to after a
backward with set_is_last_backward(True).""",
    )


def test_what_ranks_disagree_on_is_refused_on_all_ranks() -> None:
    cases = ["one_rank_differs", "another_mesh", "other_states", "one_rank_alone_is_unsharded"]
    cases.append("no_optimizer_on_one_rank")
    assert_expected_inline(
        refusals(*cases),
        """\
one_rank_differs:
ValueError: reshard_to: ranks differ. Nothing has moved.
  ranks 0, 1, 3: parameter 'exit.bias': Tensor torch.float32 (32,), dim 0, trainable
  rank 2: parameter 'exit.bias': Tensor torch.float32 (32,), dim 0, frozen
Build the same model, optimizers and meshes on all ranks, with the same calls of fully_shard.

another_mesh:
ValueError: reshard_to: ranks differ. Nothing has moved.
  ranks 0, 2: the new mesh has the ranks ((0, 1),) on cpu
  ranks 1, 3: the new mesh has the ranks ((0, 1, 2),) on cpu
Build the same model, optimizers and meshes on all ranks, with the same calls of fully_shard.

other_states:
ValueError: reshard_to: ranks differ. Nothing has moved.
  ranks 0, 1, 2: parameter 'exit.bias' has a gradient, 'step' (one value), 'exp_avg'
(torch.float32), 'exp_avg_sq' (torch.float32)
  rank 3: parameter 'exit.bias' has a gradient
Give all ranks of the mesh the same gradients and optimizer states.

one_rank_alone_is_unsharded:
ScheduleError: On rank 1: reshard_to: unit '(root)' is UNSHARDED. Call reshard() on its module
before reshard_to.

no_optimizer_on_one_rank:
TypeError: On rank 1: reshard_to: expected a torch.optim.Optimizer or a sequence of them, got a
NoneType. If the object wraps an optimizer, pass that optimizer.""",
    )


def test_what_does_not_fit_is_refused_by_name() -> None:
    cases = ("foreign_parameter", "strange_state", "wrapped_optimizer", "on_meta", "reshard_over_two", "inner_unit")
    assert_expected_inline(
        refusals(*cases, "three_axes", "unsorted_ranks", "on_unsorted_ranks", "no_mesh", "not_sharded"),
        """\
foreign_parameter:
ValueError: reshard_to: param group 0 of SGD has a parameter of shape (3,) that is not in the model.
Pass the model that has all parameters of the optimizer, and build the optimizer after fully_shard.

strange_state:
ValueError: reshard_to: parameter 'exit.weight': AdamW has the state 'row', a Tensor of shape (32,).
reshard_to moves numbers, tensors of one element, and tensors that are cut like their parameter.
Save the model through torch.distributed.checkpoint, and load it into a newly sharded model.

wrapped_optimizer:
TypeError: reshard_to: expected a torch.optim.Optimizer or a sequence of them, got a StepLR. If the
object wraps an optimizer, pass that optimizer.

on_meta:
RuntimeError: parameter 'entry.weight' is still on the meta device. Before the first forward, call
model.to_empty(device=...). Then initialise the values, for example with reset_parameters() of each
module.

reshard_over_two:
ValueError: reshard_to: unit '(root)' has reshard_after_forward=2, which does not divide the 3 ranks
of the new shard axis. Call set_reshard_after_forward(True) or (False) before reshard_to.

inner_unit:
ValueError: reshard_to: the given module is inside of FSDPStack, which is the root of unit '(root)'.
Pass that root: all units under one root must be on one mesh.

three_axes:
ValueError: reshard_to: new_mesh has 3 axes (1, 1, 2), expected 1 (shard) or 2 (replicate, shard).

unsorted_ranks:
ValueError: reshard_to: new_mesh has the ranks [1, 0], expected ascending ranks along each axis:
process groups sort them, so a rank's place in its group would not be its place in the mesh. Build
the mesh with sorted ranks.

on_unsorted_ranks:
ValueError: reshard_to: the model is on the ranks [[1, 3], [0, 2]], expected ascending ranks along
each axis: process groups sort them, so a rank's place in its group would not be its place in the
mesh. Build the mesh with sorted ranks.

no_mesh:
TypeError: reshard_to: new_mesh must be a torch.distributed.device_mesh.DeviceMesh, not int. Build
it on all ranks, for example by DeviceMesh(device_type, [0, 1]).

not_sharded:
ValueError: reshard_to: this Stack was not given to fully_shard. Pass the root of the sharded model.""",
    )


def test_models_on_several_meshes_are_refused_by_name() -> None:
    assert_expected_inline(
        refusals("tensor_parallel", "full_mesh", "expert_mesh", "wrapper_class"),
        """\
tensor_parallel:
ValueError: reshard_to: parameter 'exit.weight' is also cut by tensor parallelism. reshard_to moves
only parameters without model axes. Save the model through torch.distributed.checkpoint, and load it
into a newly sharded model.

full_mesh:
ValueError: reshard_to: unit '(root)' was sharded with dp_mesh_dims, on a mesh that has model axes,
too. reshard_to moves only parameters without model axes. Save the model through
torch.distributed.checkpoint, and load it into a newly sharded model.

expert_mesh:
ValueError: reshard_to: unit '(root)' has parameters on DeviceMesh((shard=2), 'cpu', stride=(1,)),
where shard_placement_fn has put them, besides those on DeviceMesh((shard=4), 'cpu', stride=(1,)).
reshard_to moves units that are on one mesh. Save the model through torch.distributed.checkpoint,
and load it into a newly sharded model.

wrapper_class:
ValueError: reshard_to: unit '(root)' was made by FullyShardedDataParallel, which reshard_to does
not move. Shard with fully_shard. Or: Save the model through torch.distributed.checkpoint, and load
it into a newly sharded model.""",
    )
