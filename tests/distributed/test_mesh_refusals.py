"""Meshes and DTensor parameters that ``fsdp2.fully_shard`` refuses: errors as text, and that nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor

from fsdp2 import DataParallelMeshDims, ParamPlacement, fully_shard
from tests.distributed.refusals import Case, refused
from tests.distributed.support import Stack, seeded
from tests.harness.alone import on_one_rank
from tests.harness.distributed import RankContext

DP = DataParallelMeshDims(shard="dp")


def _place_exit(model: Stack, mesh: DeviceMesh, placements: list[Any]) -> None:
    local = model.exit.weight.detach()
    model.exit.weight = nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False))


def _with_arguments(ctx: RankContext, **kwargs: Any) -> Case:
    """A plain model, and arguments that do not suit it."""
    model = seeded(Stack)
    return Case(model, lambda: fully_shard(model, **{"mesh": ctx.mesh(dp=2), **kwargs}))


def _unnamed_mesh(ctx: RankContext) -> Case:
    return _with_arguments(ctx, mesh=init_device_mesh("cpu", (2,)), dp_mesh_dims=DP)


def _unknown_axis(ctx: RankContext) -> Case:
    return _with_arguments(ctx, dp_mesh_dims=DataParallelMeshDims(shard="data"))


def _axis_named_twice(ctx: RankContext) -> Case:
    return _with_arguments(ctx, dp_mesh_dims=DataParallelMeshDims(shard="dp", replicate="dp"))


def _dims_as_text(ctx: RankContext) -> Case:
    return _with_arguments(ctx, dp_mesh_dims="dp")


def _plain_on_full_mesh(ctx: RankContext) -> Case:
    return _with_arguments(ctx, dp_mesh_dims=DP)


def _sharded_by_the_user(ctx: RankContext) -> Case:
    model, mesh = seeded(Stack), ctx.mesh(dp=2)
    sharded = distribute_tensor(model.exit.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    distribute_module(model, mesh)
    model.exit.weight = nn.Parameter(sharded)
    return Case(model, lambda: fully_shard(model, mesh=mesh, dp_mesh_dims=DP), runs=False)


def _other_mesh(ctx: RankContext) -> Case:
    model = seeded(Stack)
    distribute_module(model, ctx.mesh(other=2))
    return Case(model, lambda: fully_shard(model, mesh=ctx.mesh(dp=2), dp_mesh_dims=DP), runs=False)


def _pending_sum(ctx: RankContext) -> Case:
    model, mesh = seeded(Stack), ctx.mesh(dp=1, tp=2)
    _place_exit(model, mesh["tp"], [Partial()])
    return Case(model, lambda: fully_shard(model, mesh=mesh["dp"]), runs=False)


def _model_mesh_without_names(ctx: RankContext) -> Case:
    model = seeded(Stack)
    _place_exit(model, init_device_mesh("cpu", (2,)), [Replicate()])
    return Case(model, lambda: fully_shard(model, mesh=ctx.mesh(dp=1, tp=2)["dp"]), runs=False)


def _same_axis(ctx: RankContext) -> Case:
    model, mesh = seeded(Stack), ctx.mesh(dp=2)
    _place_exit(model, mesh, [Replicate()])
    return Case(model, lambda: fully_shard(model, mesh=mesh), runs=False)


def _placement_that_is_text(ctx: RankContext) -> Case:
    return _with_arguments(ctx, shard_placement_fn=lambda param: "experts")


def _placement_on_text(ctx: RankContext) -> Case:
    return _with_arguments(ctx, shard_placement_fn=lambda param: ParamPlacement(Shard(0), "ep"))  # type: ignore[arg-type]


def _refused(ctx: RankContext, case: str) -> str:
    return refused(globals()[case](ctx))


def refusal(case: Callable[[RankContext], Case]) -> str:
    __tracebackhide__ = True
    return on_one_rank(_refused, case=case.__name__)


def test_unnamed_mesh() -> None:
    assert_expected_inline(
        refusal(_unnamed_mesh),
        """\
ValueError: fully_shard: dp_mesh_dims names axes of the mesh, but this mesh has no names. Build the
mesh with init_device_mesh(..., mesh_dim_names=(...)).""",
    )


def test_unknown_axis() -> None:
    assert_expected_inline(
        refusal(_unknown_axis),
        """\
ValueError: fully_shard: dp_mesh_dims names the axis 'data', but the mesh has the axes ('dp',). Pass
names of these axes.""",
    )


def test_axis_named_twice() -> None:
    assert_expected_inline(
        refusal(_axis_named_twice),
        """\
ValueError: fully_shard: dp_mesh_dims names an axis twice: DataParallelMeshDims(shard='dp',
replicate='dp'). Name each axis once.""",
    )


def test_dims_as_text() -> None:
    assert_expected_inline(
        refusal(_dims_as_text),
        """\
TypeError: fully_shard: dp_mesh_dims must be an fsdp2.DataParallelMeshDims, not builtins.str. Pass
DataParallelMeshDims(shard="dp"), with the names of the data-parallel axes of the mesh.""",
    )


def test_plain_on_full_mesh() -> None:
    assert_expected_inline(
        refusal(_plain_on_full_mesh),
        """\
ValueError: fully_shard: parameter 'entry.weight' is a plain Parameter, but with dp_mesh_dims every
parameter must be a DTensor on the full mesh. Call
torch.distributed.tensor.distribute_module(module, mesh) first.""",
    )


def test_sharded_by_the_user() -> None:
    assert_expected_inline(
        refusal(_sharded_by_the_user),
        """\
ValueError: fully_shard: parameter 'exit.weight' is placed S(0) on the data-parallel axis 'dp',
expected Replicate(). fully_shard itself shards over this axis. Redistribute the parameter to
Replicate() on this axis first.""",
    )


def test_other_mesh() -> None:
    assert_expected_inline(
        refusal(_other_mesh),
        """\
ValueError: fully_shard: parameter 'entry.weight' is a DTensor on DeviceMesh((other=2), 'cpu',
stride=(1,)), but the mesh given with dp_mesh_dims is DeviceMesh((dp=2), 'cpu', stride=(1,)).
Distribute the module over the mesh given to fully_shard.""",
    )


def test_pending_sum() -> None:
    assert_expected_inline(
        refusal(_pending_sum),
        """\
ValueError: fully_shard: parameter 'exit.weight' has placements (Partial(sum),). A sum that is still
pending cannot be sharded. Redistribute the parameter to Replicate() or Shard(dim) first.""",
    )


def test_model_mesh_without_names() -> None:
    assert_expected_inline(
        refusal(_model_mesh_without_names),
        """\
ValueError: fully_shard: parameter 'exit.weight' is a DTensor on the mesh DeviceMesh((2,), 'cpu',
stride=(1,)). This mesh cannot be joined with the mesh DeviceMesh((dp=1), 'cpu', stride=((),)) given
to fully_shard: Invariant encountered: value was None when it should not be. Use parts of one mesh
with names, without a common axis: mesh = init_device_mesh(..., mesh_dim_names=("dp", "tp")), then
mesh["dp"] and mesh["tp"].""",
    )


def test_same_axis() -> None:
    assert_expected_inline(
        refusal(_same_axis),
        """\
ValueError: fully_shard: parameter 'exit.weight' is a DTensor on the mesh DeviceMesh((dp=2), 'cpu',
stride=(1,)). This mesh cannot be joined with the mesh DeviceMesh((dp=2), 'cpu', stride=(1,)) given
to fully_shard: Cannot concatenate overlapping meshes: [DeviceMesh((dp=2), 'cpu', stride=(1,)),
DeviceMesh((dp=2), 'cpu', stride=(1,))]. Use parts of one mesh with names, without a common axis:
mesh = init_device_mesh(..., mesh_dim_names=("dp", "tp")), then mesh["dp"] and mesh["tp"].""",
    )


def test_placement_that_is_text() -> None:
    assert_expected_inline(
        refusal(_placement_that_is_text),
        """\
TypeError: fully_shard: shard_placement_fn returned 'experts' for parameter 'entry.weight', expected
Shard(dim), ParamPlacement(Shard(dim), mesh) or None.""",
    )


def test_placement_on_text() -> None:
    assert_expected_inline(
        refusal(_placement_on_text),
        """\
TypeError: fully_shard: shard_placement_fn returned ParamPlacement(placement=Shard(dim=0),
mesh='ep') for parameter 'entry.weight', expected Shard(dim), ParamPlacement(Shard(dim), mesh) or
None.""",
    )
