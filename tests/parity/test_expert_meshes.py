"""Parameters of one unit that are sharded over different ranks: experts next to what every rank has."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_common as names_of_torch
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp2 import ParamPlacement, fully_shard
from fsdp2.runtime.unit import unit_of
from tests.harness.compare import as_torchs, compare
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP
from tests.harness.runtimes import SUBJECT_IS_TORCH, Runtime, subject
from tests.harness.selection import long
from tests.harness.training import Case, Snapshot, Step, one_backward, shard_units_and_root, snapshot

# ``down`` plays the experts: sharded over one axis of the mesh, or replicated over it.


def with_experts(runtime: Runtime, model: MLP, mesh: Any, *, kind: str, by_torch: bool = True, **options: Any) -> None:
    """A program written for torch names a mesh through torch's own, private classes; ``ParamPlacement`` has a
    DeviceMesh."""
    if by_torch or runtime.name != "fsdp2":
        infos: dict[str, Any] = {
            "shard": names_of_torch.FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0),
            "hsdp": names_of_torch.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0),
        }
        placement: Any = names_of_torch.ShardPlacementResult(Shard(1), infos[kind])
    else:
        placement = ParamPlacement(Shard(1), mesh if kind == "hsdp" else mesh[kind])
    experts = {block.down.weight: placement for block in model.blocks}
    shard_units_and_root(runtime, model, mesh._flatten("everybody"), shard_placement_fn=experts.get, **options)


def same_data_for_all(step: Step, model: MLP) -> list[Tensor]:
    """Experts are averaged over their own ranks only: with the same data everywhere, that is the global average."""
    step.rank = 0
    return one_backward(step, model)


def _case(**options: Any) -> Case:
    return Case(MLP, functools.partial(with_experts, **options), same_data_for_all, longest_axis=4)


@pytest.mark.parametrize("by_torch", [True, False])
@pytest.mark.parametrize("kind", ["shard", "hsdp"])
@pytest.mark.parametrize("reshard", [True, *long(False)])
@distributed(4)
def test_experts_are_sharded_over_a_mesh_of_their_own(ctx: RankContext, by_torch: bool, kind: str, reshard) -> None:
    compare(_case(kind=kind, by_torch=by_torch, reshard_after_forward=reshard), ctx.mesh_2d(2, 2))


@pytest.mark.long
@distributed(4)
def test_experts_rest_on_the_ranks_they_have(ctx: RankContext) -> None:
    """An int that suits the dense parameters: the experts' two ranks are no more than it asks for."""
    compare(_case(kind="shard", reshard_after_forward=2), ctx.mesh_2d(2, 2))


@pytest.mark.skipif(SUBJECT_IS_TORCH, reason="looks at fsdp2's own groups")
@distributed(4)
def test_experts_are_one_group_and_the_rest_another(ctx: RankContext) -> None:
    mesh = ctx.mesh_2d(2, 2)
    torch.manual_seed(0)
    model = MLP()
    with_experts(subject(), model, mesh, kind="shard", by_torch=False)
    unit = unit_of(model.blocks[0])
    assert unit is not None
    names = [[param.name for param in group.params] for group in unit.groups]
    assert names == [["up.weight", "up.bias", "down.bias"], ["down.weight"]]


@as_torchs(4)
def test_experts_may_lie_on_a_full_mesh_of_their_own(ctx: RankContext, runtime: Runtime) -> dict[str, Snapshot]:
    """As torchtitan's experts do: DTensors on a mesh with all axes, of which torch's classes name one to shard over."""
    dense, sparse = ctx.mesh(dp=2, tp=2), ctx.mesh(experts_dp=2, ep=2)
    model = nn.Linear(6, 8)
    experts = nn.Parameter(distribute_tensor(model.weight.detach(), sparse, [Replicate(), Shard(0)]))
    model.weight = experts
    model.bias = nn.Parameter(distribute_tensor(model.bias.detach(), dense, [Replicate(), Shard(0)]))
    infos: Any = _get_mesh_info(sparse, runtime.DataParallelMeshDims(shard="experts_dp"))

    def place(param: nn.Parameter) -> Any:
        return names_of_torch.ShardPlacementResult(Shard(1), infos) if param is experts else None

    dims = runtime.DataParallelMeshDims(shard="dp")
    runtime.fully_shard(model, mesh=dense, dp_mesh_dims=dims, shard_placement_fn=place)
    return {name: snapshot(param, with_full=True) for name, param in model.named_parameters()}


@distributed(2)
def test_a_dtensor_keeps_the_mesh_that_was_given_for_it(ctx: RankContext) -> None:
    """Another mesh has the same ranks, as with one rank per expert, and cannot be joined with that of the DTensor."""
    mesh = ctx.mesh(expert=1, dp=2)
    for everybody in (None, mesh["expert", "dp"]._flatten("everybody")):
        linear = nn.Linear(4, 4)
        original = linear.weight.detach()
        linear.weight = nn.Parameter(distribute_tensor(original, mesh["expert"], [Shard(0)]))
        placed = {linear.weight: ParamPlacement(Shard(0), mesh["dp"])}
        fully_shard(linear, mesh=everybody, shard_placement_fn=placed.get)
        weight = linear.weight
        assert isinstance(weight, DTensor)
        assert weight.device_mesh.mesh_dim_names == ("dp", "expert")
        assert weight.to_local().shape == (2, 4)
        assert torch.equal(weight.full_tensor(), original)
