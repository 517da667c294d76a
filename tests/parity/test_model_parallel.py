"""Parameters that are DTensors already: tensor parallelism with FSDP and HSDP, on meshes in any order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from fsdp2.tensors import wrap_parameters
from tests.harness.compare import compare
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import Travelling
from tests.harness.models import MLP, ParityModel
from tests.harness.runtimes import Runtime, beyond_torch
from tests.harness.selection import in_ci, long
from tests.harness.training import Case, Step, accumulate, one_backward, sgd, shard_units_and_root


def tensor_parallel(model: MLP, mesh: DeviceMesh) -> None:
    """``up`` is cut on dim 0, ``down`` on dim 1, its bias is whole; entry and exit stay plain."""
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shard(
    runtime: Runtime,
    model: MLP,
    mesh: DeviceMesh,
    data_parallel: str | tuple[str, ...] = "dp",
    **kwargs: Any,
) -> None:
    tensor_parallel(model, mesh["tp"])
    shard_units_and_root(runtime, model, mesh[data_parallel], **kwargs)


def with_data_of(axes: tuple[str, ...], mesh: DeviceMesh, step: Callable[..., list[Tensor]]) -> Any:
    """``step`` with the same data for all ranks that differ on model axes only."""
    rank = 0
    for axis in axes:
        rank = rank * mesh[axis].size() + mesh.get_local_rank(axis)

    def stepped(given: Step, model: ParityModel) -> list[Tensor]:
        return step(replace(given, rank=rank), model)

    return stepped


def case(mesh: DeviceMesh, axes: tuple[str, ...] = ("dp",), **kwargs: Any) -> Case:
    step = with_data_of(axes, mesh, kwargs.pop("step", one_backward))
    return replace(Case(MLP, shard=shard, step=step), **kwargs)


MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
EITHER_ORDER = [{"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}]
HSDP = ("replicate", "shard")


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}], ids=str)
@distributed(2)
def test_tensor_parallel_on_two_ranks(ctx: RankContext, sizes: dict[str, int]) -> None:
    mesh = ctx.mesh(**sizes)
    compare(case(mesh), mesh)


@pytest.mark.ci
@pytest.mark.parametrize("sizes", [EITHER_ORDER[0], *long(EITHER_ORDER[1])], ids=str)
@pytest.mark.parametrize("reshard", [True, *long(False)])
@distributed(4)
def test_tensor_parallel_with_the_axes_in_either_order(ctx: RankContext, sizes: dict[str, int], reshard: bool) -> None:
    mesh = ctx.mesh(**sizes)
    compare(case(mesh, shard=functools.partial(shard, reshard_after_forward=reshard), gather_full=True), mesh)


@pytest.mark.ci
@pytest.mark.parametrize(
    "sizes", [{"replicate": 2, "shard": 1, "tp": 2}, *long({"replicate": 1, "shard": 2, "tp": 2})], ids=str
)
@distributed(4)
def test_tensor_parallel_with_hsdp(ctx: RankContext, sizes: dict[str, int]) -> None:
    mesh = ctx.mesh(**sizes)
    compare(case(mesh, HSDP, shard=functools.partial(shard, data_parallel=HSDP)), mesh)


@pytest.mark.long
@distributed(8)
def test_tensor_parallel_with_hsdp_on_eight_ranks(ctx: RankContext) -> None:
    mesh = ctx.mesh(replicate=2, shard=2, tp=2)
    compare(case(mesh, HSDP, shard=functools.partial(shard, data_parallel=HSDP)), mesh)


class Odd(MLP):
    """No size is a multiple of the number of ranks on any axis, but for what tensor parallelism cuts."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2, dim=5)
        self.exit = nn.Linear(5, 3)


def _clipped(step: Step, model: Any, norm_type: float) -> list[Tensor]:
    losses = one_backward(step, model)
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for param in model.parameters():
        by_mesh.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
    for params in by_mesh.values():
        norm = nn.utils.clip_grad_norm_(params, 0.1, norm_type=norm_type)
        losses.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return losses


_mixed = functools.partial(shard, policy=MIXED)
_last_dim = functools.partial(shard, shard_placement_fn=lambda param: Shard(param.ndim - 1))
WAYS: dict[str, dict[str, Any]] = {
    # ``down`` is cut on dim 1 by both, ``up`` on dim 0 by one and dim 1 by the other.
    "the dim that tensor parallelism has cut": {"shard": _last_dim},
    "uneven shards": {"model": Odd, "unsharded": None},
    "accumulated": {"step": accumulate},
    "mixed precision": {"shard": _mixed, "unsharded": None},
    "accumulated in mixed precision": {"shard": _mixed, "step": accumulate, "unsharded": None},
}
for _norm_type in (2.0, float("inf")):
    _step = functools.partial(_clipped, norm_type=_norm_type)
    WAYS[f"clipped by {_norm_type}"] = {"step": _step, "optimizer": sgd, "unsharded": None}


@pytest.mark.every_case
@pytest.mark.parametrize("name", [*[*WAYS][:2], *in_ci("accumulated"), *long(*[*WAYS][3:])])
@distributed(4)
def test_tensor_parallel(ctx: RankContext, name: str) -> None:
    mesh = ctx.mesh(dp=2, tp=2)
    compare(case(mesh, **WAYS[name]), mesh)


class Normed(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(self.exit.in_features)
        self.exit = nn.Sequential(self.norm, self.exit)  # type: ignore[assignment]


def two_forwards(step: Step, model: ParityModel) -> list[Tensor]:
    loss = step.loss(model, 0) + step.loss(model, 1)
    loss.backward()
    return [loss]


@pytest.mark.parametrize("step", [accumulate, two_forwards])
@distributed(2)
def test_sums_that_are_pending_on_the_model_axis_accumulate_in_reduce_dtype(
    ctx: RankContext, step: Callable[[Step, Any], list[Tensor]]
) -> None:
    """The gradients of a norm, whose input is cut along the sequence. Each rank has its own part of that."""

    def mixed(runtime: Runtime, model: Normed, mesh: DeviceMesh) -> None:
        parallelize_module(model, mesh["tp"], {"norm": SequenceParallel(sequence_dim=0, use_local_output=True)})
        runtime.fully_shard(model, mesh=mesh["dp"], mp_policy=runtime.MixedPrecisionPolicy(**MIXED))

    mesh = ctx.mesh(dp=1, tp=2)
    compare(Case(Normed, shard=mixed, step=step, unsharded=None), mesh)


# A full mesh, of which axes are named


def full_mesh(
    runtime: Runtime,
    model: MLP,
    mesh: DeviceMesh,
    shards: str | tuple[str, ...] | None = None,
    replicates: str | tuple[str, ...] | None = None,
    **kwargs: Any,
) -> None:
    """Every parameter is a DTensor on all axes. Activations are sharded over the data-parallel axes, whole on "tp"."""
    names = mesh.mesh_dim_names
    assert names is not None
    cut = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}

    def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for leaf, param in module.named_parameters(recurse=False):
            on_tp = next((p for suffix, p in cut.items() if f"{name}.{leaf}".endswith(suffix)), Replicate())
            placements = [on_tp if axis == "tp" else Replicate() for axis in names]
            module.register_parameter(leaf, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))

    on_data = [Replicate() if axis == "tp" else Shard(0) for axis in names]
    distribute_module(
        model,
        mesh,
        place,
        lambda _, inputs, mesh: tuple(DTensor.from_local(x, mesh, on_data, run_check=False) for x in inputs),
        lambda _, output, mesh: output.redistribute(placements=on_data).to_local().clone(),  # torch warns of views
    )
    dims = runtime.DataParallelMeshDims(shard=shards, replicate=replicates)
    shard_units_and_root(runtime, model, mesh, dp_mesh_dims=dims, **kwargs)


FULL_MESHES: list[tuple[int, dict[str, int], dict[str, Any]]] = [
    (2, {"dp": 2}, {"shards": "dp"}),
    (2, {"dp": 2}, {"replicates": "dp"}),
    (4, {"dp": 2, "tp": 2}, {"shards": "dp"}),
    (4, {"tp": 2, "dp": 2}, {"shards": "dp"}),
    (4, {"dp": 2, "tp": 2}, {"replicates": "dp"}),
    (4, {"dp": 2, "cp": 2}, {"shards": ("dp", "cp")}),
    (4, {"replicate": 2, "dp": 2}, {"shards": "dp", "replicates": "replicate"}),
    (4, {"replicate": 2, "dp": 2}, {"replicates": ("replicate", "dp")}),
    (8, {"replicate": 2, "dp": 2, "tp": 2}, {"shards": "dp", "replicates": "replicate"}),
    (8, {"dp": 2, "cp": 2, "tp": 2}, {"shards": ("dp", "cp")}),
    (8, {"replicate": 2, "dp": 2, "cp": 2}, {"shards": ("dp", "cp"), "replicates": "replicate"}),
]


def _full_meshes(num_ranks: int, num_short: int = 99) -> pytest.MarkDecorator:
    """All but the first ones are long."""
    found = [entry[1:] for entry in FULL_MESHES if entry[0] == num_ranks]
    marked = [pytest.param(*case, marks=[pytest.mark.long] if i >= num_short else []) for i, case in enumerate(found)]
    return pytest.mark.parametrize(("sizes", "dims"), marked, ids=str)


def _full_mesh_trains(ctx: RankContext, sizes: dict[str, int], dims: dict[str, Any]) -> None:
    mesh = ctx.mesh(**sizes)
    axes = tuple(name for name in sizes if name != "tp")
    flattened = [mesh[names].size() for names in dims.values() if isinstance(names, tuple)]
    compare(
        case(
            mesh,
            axes,
            model=functools.partial(MLP, num_blocks=1),  # DTensor takes long to dispatch
            shard=functools.partial(full_mesh, **dims),
            longest_axis=max([2, *flattened]),
            num_steps=2 if mesh.size() <= 4 else 1,
        ),
        mesh,
    )


@_full_meshes(2)
@distributed(2)
def test_full_mesh_with_named_axes_on_two_ranks(ctx: RankContext, sizes: dict[str, int], dims: dict[str, Any]) -> None:
    _full_mesh_trains(ctx, sizes, dims)


@pytest.mark.ci
@_full_meshes(4, num_short=1)
@distributed(4)
def test_full_mesh_with_named_axes_on_four_ranks(ctx: RankContext, sizes: dict[str, int], dims: dict[str, Any]) -> None:
    _full_mesh_trains(ctx, sizes, dims)


@_full_meshes(8)
@pytest.mark.long
@distributed(8)
def test_full_mesh_with_named_axes_on_8_ranks(ctx: RankContext, sizes: dict[str, int], dims: dict[str, Any]) -> None:
    _full_mesh_trains(ctx, sizes, dims)


@pytest.mark.long
@beyond_torch("hangs: not all ranks of the world make the smaller mesh alike")
@distributed(8)
def test_part_of_the_world_rests_on_a_smaller_mesh(ctx: RankContext) -> None:
    """Pipeline stages, for example, each with a data-parallel mesh of their own."""

    def plain(reshard: bool | int) -> Any:
        return lambda *args: shard_units_and_root(*args[:2], args[2]["dp"], reshard_after_forward=reshard)

    mesh = ctx.mesh(pp=2, dp=4)
    compare(case(mesh, shard=plain(2)), mesh, oracle_case=case(mesh, shard=plain(True)))


# Tensor subclasses with all-gather hooks


class Sent(Travelling):
    """Sends its values as they are, and computes on what arrives."""

    releases_outputs = False


def hooked(runtime: Runtime, model: MLP, mesh: DeviceMesh, make: Any, **kwargs: Any) -> None:
    """Weights of blocks travel as their hooks say; the oracle has the plain weights."""
    tensor_parallel(model, mesh["tp"])
    if runtime.name == "fsdp2":
        for block in model.blocks:
            assert wrap_parameters(block, make) == ["up.weight", "down.weight"]
    shard_units_and_root(runtime, model, mesh["dp"], **kwargs)


@pytest.mark.ci
@beyond_torch("has no such subclasses")
@distributed(4)
def test_hooks_decide_what_travels_under_tensor_parallelism(ctx: RankContext) -> None:
    mesh = ctx.mesh(dp=2, tp=2)
    compare(case(mesh, shard=functools.partial(hooked, make=Sent)), mesh)


@pytest.mark.ci
@beyond_torch("refuses an int with DTensor parameters, and has no such subclasses")
@pytest.mark.parametrize("way", [shard, *long(functools.partial(hooked, make=Sent))], ids=["plain", "with hooks"])
@distributed(4, 8)
def test_tensor_parallel_rests_on_a_smaller_mesh(ctx: RankContext, way: Any) -> None:
    mesh = ctx.mesh(dp=4, tp=ctx.world_size // 4)
    resting = case(mesh, shard=functools.partial(way, reshard_after_forward=2))
    compare(resting, mesh, oracle_case=case(mesh, shard=way))
