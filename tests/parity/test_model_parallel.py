"""Parameters that are DTensors already: tensor parallelism with FSDP and HSDP, on meshes in any order."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from fsdp2.tensors import wrap_parameters
from tests.harness.compare import Cases, compare, each_compared
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import Travelling
from tests.harness.models import MLP, ParityModel
from tests.harness.runtimes import Runtime, beyond_torch
from tests.harness.selection import long
from tests.harness.training import Case, Step, accumulate, one_backward, sgd, shard_units_and_root


def tensor_parallel(model: MLP, mesh: DeviceMesh) -> None:
    """``up`` is cut on dim 0, ``down`` on dim 1, its bias is whole; entry and exit stay plain."""
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shard(
    runtime: Runtime, model: MLP, mesh: DeviceMesh, data_parallel: str | tuple[str, ...] = "dp", **kwargs: Any
) -> None:
    tensor_parallel(model, mesh["tp"])
    shard_units_and_root(runtime, model, mesh[data_parallel], **kwargs)


def by_data(case: Case, mesh: DeviceMesh, oracle_case: Case | None = None) -> None:
    """``compare``, with the same data for all ranks that differ on model axes only."""
    rank = 0
    for axis in mesh.mesh_dim_names or ():
        if axis not in ("tp", "pp"):
            rank = rank * mesh[axis].size() + mesh.get_local_rank(axis)

    def with_data(given: Case) -> Case:
        return replace(given, step=lambda step, model: given.step(replace(step, rank=rank), model))

    compare(with_data(case), mesh, oracle_case and with_data(oracle_case))


def on(*cases: Case, **sizes: int) -> Any:
    """A row of ``each_compared``: ``cases`` on a mesh of these sizes."""
    return (lambda ctx: ctx.mesh(**sizes), *cases)


MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


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


_tp = partial(Case, MLP, shard)
_mixed = partial(Case, MLP, partial(shard, policy=MIXED), unsharded=None)
_clip = partial(_tp, optimizer=sgd, unsharded=None)
_last_dim = partial(shard, shard_placement_fn=lambda param: Shard(param.ndim - 1))
_kept = partial(shard, reshard_after_forward=False)
HSDP = Case(MLP, partial(shard, data_parallel=("replicate", "shard")))
ON_FOUR: dict[str, Any] = {
    # ``down`` is cut on dim 1 by both, ``up`` on dim 0 by one and dim 1 by the other.
    "the dim that tensor parallelism has cut": on(Case(MLP, _last_dim), dp=2, tp=2),
    "uneven shards": on(Case(Odd, shard, unsharded=None), dp=2, tp=2),
    "accumulated": on(_tp(step=accumulate), dp=2, tp=2),
    "whole parameters": on(_tp(gather_full=True), dp=2, tp=2),
    "on hsdp without shards": on(HSDP, replicate=2, shard=1, tp=2),
    "on hsdp without replicas": on(HSDP, replicate=1, shard=2, tp=2),
    "the other order": on(_tp(gather_full=True), tp=2, dp=2),
    "kept": on(Case(MLP, _kept, gather_full=True), dp=2, tp=2),
    "kept, the other order": on(Case(MLP, _kept, gather_full=True), tp=2, dp=2),
    "mixed precision": on(_mixed(), dp=2, tp=2),
    "accumulated in mixed precision": on(_mixed(step=accumulate), dp=2, tp=2),
    "clipped by 2": on(_clip(step=partial(_clipped, norm_type=2.0)), dp=2, tp=2),
    "clipped by inf": on(_clip(step=partial(_clipped, norm_type=float("inf"))), dp=2, tp=2),
}


@each_compared(2, by=by_data, ci=("tp",))
def test_tensor_parallel_on_two_ranks() -> Cases:
    return {"dp": on(_tp(), dp=2, tp=1), "tp": on(_tp(), dp=1, tp=2)}


@each_compared(4, by=by_data, ci=[*ON_FOUR][1:5], long=[*ON_FOUR][5:])
def test_tensor_parallel() -> Cases:
    return ON_FOUR


@pytest.mark.long
@each_compared(8, by=by_data)
def test_tensor_parallel_with_hsdp_on_eight_ranks() -> Cases:
    return {"hsdp": on(HSDP, replicate=2, shard=2, tp=2)}


class Normed(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(self.exit.in_features)
        self.exit = nn.Sequential(self.norm, self.exit)  # type: ignore[assignment]


def two_forwards(step: Step, model: ParityModel) -> list[Tensor]:
    loss = step.loss(model, 0) + step.loss(model, 1)
    loss.backward()
    return [loss]


def _norm_in_mixed_precision(runtime: Runtime, model: Normed, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tp"], {"norm": SequenceParallel(sequence_dim=0, use_local_output=True)})
    runtime.fully_shard(model, mesh=mesh["dp"], mp_policy=runtime.MixedPrecisionPolicy(**MIXED))


@each_compared(2, mesh=lambda ctx: ctx.mesh(dp=1, tp=2), ci=("two forwards",))
def test_sums_that_are_pending_on_the_model_axis_accumulate_in_reduce_dtype() -> Cases:
    """The gradients of a norm, whose input is cut along the sequence. Each rank has its own part of that."""
    normed = partial(Case, Normed, _norm_in_mixed_precision, unsharded=None)
    return {"accumulated": normed(accumulate), "two forwards": normed(two_forwards)}


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


def _full(shards: Any = None, replicates: Any = None, **sizes: int) -> Any:
    """Named axes of a mesh of these sizes."""
    flattened = [math.prod(sizes[name] for name in names) for names in (shards, replicates) if isinstance(names, tuple)]
    small = partial(MLP, num_blocks=1)  # DTensor takes long to dispatch
    shard = partial(full_mesh, shards=shards, replicates=replicates)
    num_steps = 2 if math.prod(sizes.values()) <= 4 else 1
    return on(Case(small, shard, num_steps=num_steps, longest_axis=max([2, *flattened])), **sizes)


@each_compared(2, by=by_data, ci=("replicated",))
def test_full_mesh_with_named_axes_on_two_ranks() -> Cases:
    return {"sharded": _full("dp", dp=2), "replicated": _full(None, "dp", dp=2)}


FULL_MESHES = {
    "tp": _full("dp", dp=2, tp=2),
    "tp first": _full("dp", tp=2, dp=2),
    "tp, replicated": _full(None, "dp", dp=2, tp=2),
    "cp": _full(("dp", "cp"), dp=2, cp=2),
    "hsdp": _full("dp", "replicate", replicate=2, dp=2),
    "two axes replicated": _full(None, ("replicate", "dp"), replicate=2, dp=2),
}


@each_compared(4, by=by_data, ci=("tp",), long=[*FULL_MESHES][1:])
def test_full_mesh_with_named_axes_on_four_ranks() -> Cases:
    return FULL_MESHES


@pytest.mark.long
@each_compared(8, by=by_data)
def test_full_mesh_with_named_axes_on_8_ranks() -> Cases:
    return {
        "hsdp and tp": _full("dp", "replicate", replicate=2, dp=2, tp=2),
        "cp and tp": _full(("dp", "cp"), dp=2, cp=2, tp=2),
        "hsdp and cp": _full(("dp", "cp"), "replicate", replicate=2, dp=2, cp=2),
    }


@pytest.mark.long
@beyond_torch("hangs: not all ranks of the world make the smaller mesh alike")
@distributed(8)
def test_part_of_the_world_rests_on_a_smaller_mesh(ctx: RankContext) -> None:
    """Pipeline stages, for example, each with a data-parallel mesh of their own."""

    def plain(reshard: bool | int) -> Any:
        return lambda *args: shard_units_and_root(*args[:2], args[2]["dp"], reshard_after_forward=reshard)

    by_data(Case(MLP, plain(2)), ctx.mesh(pp=2, dp=4), Case(MLP, plain(True)))


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
@each_compared(4, by=by_data)
def test_hooks_decide_what_travels_under_tensor_parallelism() -> Cases:
    return {"sent": on(Case(MLP, partial(hooked, make=Sent)), dp=2, tp=2)}


@pytest.mark.ci
@beyond_torch("refuses an int with DTensor parameters, and has no such subclasses")
@pytest.mark.parametrize("way", [shard, *long(partial(hooked, make=Sent))], ids=["plain", "with hooks"])
@distributed(4, 8)
def test_tensor_parallel_rests_on_a_smaller_mesh(ctx: RankContext, way: Any) -> None:
    mesh = ctx.mesh(dp=4, tp=ctx.world_size // 4)
    by_data(Case(MLP, partial(way, reshard_after_forward=2)), mesh, Case(MLP, way))
