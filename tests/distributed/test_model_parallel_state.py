"""Checkpoints, meta initialisation, checkpointing and compilation of models that tensor parallelism has cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from fsdp2 import _torch
from tests.distributed.support import shard_units
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP
from tests.harness.pool import shared_pool
from tests.harness.selection import long
from tests.parity.test_model_parallel import tensor_parallel

# How a model of ``world_size`` ranks is cut: name, sizes of the mesh.
PLACES: dict[str, tuple[int, dict[str, int]]] = {
    "tp on 2": (2, {"dp": 1, "tp": 2}),
    "fsdp on 2": (2, {"dp": 2, "tp": 1}),
    "tp inside": (4, {"dp": 2, "tp": 2}),
    "tp outside": (4, {"tp": 2, "dp": 2}),
    "fsdp on 4": (4, {"dp": 4, "tp": 1}),
}


def _sharded(mesh: DeviceMesh, seed: int = 0, device: str = "cpu") -> Any:
    torch.manual_seed(seed)
    with torch.device(device):
        model = MLP()
    if mesh["tp"].size() > 1:
        tensor_parallel(model, mesh["tp"])
    return shard_units(model, mesh=mesh["dp"])


def _trained(model: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _loss(model: nn.Module, step: int) -> Tensor:
    batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))  # the same on all ranks
    return (model(batch) - 0.5).square().mean()


def _full(model: nn.Module) -> dict[str, Tensor]:
    return {name: _whole(value).detach().clone() for name, value in model.state_dict().items()}


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _save(ctx: RankContext, place: str, folder: str) -> dict[str, Tensor]:
    model = _sharded(ctx.mesh(**PLACES[place][1]))
    optimizer = _trained(model)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder)
    _loss(model, 7).backward()
    optimizer.step()
    return _full(model)


def _load(ctx: RankContext, place: str, folder: str) -> dict[str, Tensor]:
    model = _sharded(ctx.mesh(**PLACES[place][1]), seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    _loss(model, 7).backward()
    optimizer.step()
    return _full(model)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("tp inside", "fsdp on 2"),
        pytest.param("fsdp on 4", "tp on 2", marks=pytest.mark.long),
        pytest.param("tp inside", "tp outside", marks=pytest.mark.long),
        pytest.param("tp outside", "fsdp on 4", marks=pytest.mark.long),
        pytest.param("fsdp on 2", "tp inside", marks=pytest.mark.long),
    ],
)
def test_training_resumes_on_another_mesh(saved: str, loaded: str, tmp_path: Path) -> None:
    """Model and optimizer, one more step included."""
    folder = str(tmp_path / "checkpoint")
    expected = shared_pool(PLACES[saved][0]).run(_save, place=saved, folder=folder)[0]
    for found in shared_pool(PLACES[loaded][0]).run(_load, place=loaded, folder=folder):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@distributed(4)
def test_full_state_dict_is_that_of_the_unsharded_model_and_loads_from_rank_0(ctx: RankContext) -> None:
    mesh = ctx.mesh(dp=2, tp=2)
    torch.manual_seed(0)
    unsharded = MLP().state_dict()
    model = _sharded(mesh)
    torch.testing.assert_close(_full(model), unsharded, rtol=0, atol=0)
    other = _sharded(mesh, seed=1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, dict(unsharded) if ctx.rank == 0 else {}, options=options)
    torch.testing.assert_close(_full(other), unsharded, rtol=0, atol=0)


@pytest.mark.ci
@distributed(4)
def test_meta_model_is_materialised_and_trains(ctx: RankContext) -> None:
    mesh = ctx.mesh(dp=2, tp=2)
    expected = _sharded(mesh)
    model = _sharded(mesh, device="meta")
    model.to_empty(device=mesh.device_type)
    model.load_state_dict(expected.state_dict())
    _trained(expected)
    _trained(model)
    torch.testing.assert_close(_full(model), _full(expected), rtol=0, atol=0)


@pytest.mark.ci
@pytest.mark.parametrize("use_reentrant", [False, *long(True)])
@distributed(4)
def test_checkpointed_blocks_train_alike(ctx: RankContext, use_reentrant: bool) -> None:
    mesh = ctx.mesh(dp=2, tp=2)
    expected, model = _sharded(mesh), _sharded(mesh)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, run=forward: checkpoint(run, x, use_reentrant=use_reentrant)
    _trained(expected)
    _trained(model)
    torch.testing.assert_close(_full(model), _full(expected), rtol=0, atol=0)


@distributed(4)
def test_parameters_unsharded_by_hand_are_dtensors_of_the_model_axis(ctx: RankContext) -> None:
    mesh = ctx.mesh(dp=2, tp=2)
    model = _sharded(mesh)
    torch.manual_seed(0)
    whole = MLP()
    block = model.blocks[0]
    block.unshard()
    weight = block.up.weight
    assert isinstance(weight, DTensor)
    assert weight.device_mesh == mesh["tp"]
    torch.testing.assert_close(weight.full_tensor(), whole.blocks[0].up.weight, rtol=0, atol=0)
    block.reshard()
    assert block.up.weight.device_mesh.mesh_dim_names == ("dp", "tp")


@pytest.mark.ci
@distributed(4)
def test_parameter_is_frozen_and_cast_between_steps(ctx: RankContext) -> None:
    model = _sharded(ctx.mesh(dp=2, tp=2))
    model.blocks[1].up.weight.requires_grad_(False)
    frozen = model.blocks[1].up.weight.full_tensor().clone()
    _trained(model)
    assert torch.equal(model.blocks[1].up.weight.full_tensor(), frozen)
    model.to(torch.float64)
    batch = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model(batch).sum().backward()
    assert model.blocks[0].down.weight.grad.dtype is torch.float64
    assert model.blocks[1].up.weight.grad is None


@distributed(2)
def test_gradient_whose_collective_is_pending_is_waited_for(ctx: RankContext) -> None:
    mesh = ctx.mesh_1d()
    grad = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    _torch.set_local(grad, collectives.all_reduce(torch.ones(2), "sum", (mesh, 0)))
    found = _torch.arrived_local(grad)
    assert type(found) is Tensor
    assert found.tolist() == [2.0, 2.0]
