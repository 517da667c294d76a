"""Checkpoints, meta initialisation and casts of models that tensor parallelism has cut.

``tests/parity/test_state.py`` has more places, the mesh with "tp" inside among them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate

from fsdp2.core import _torch
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP
from tests.harness.pool import shared_pool
from tests.harness.runtimes import subject
from tests.harness.selection import long
from tests.harness.training import dtensor_adamw
from tests.parity.setups import SETUPS, Setup, load_states, states_of, train_steps, whole
from tests.parity.test_model_parallel import shard

TP = SETUPS["tp"]  # inside, on two axes of any size
PLACES: dict[str, tuple[int, Setup]] = {
    "tp on 2": (2, TP),
    "fsdp on 2": (2, Setup(MLP)),
    "tp inside": (4, TP),
    "tp outside": (4, Setup(MLP, lambda ctx: ctx.mesh(tp=2, dp=2), shard)),
    "fsdp on 4": (4, Setup(MLP)),
}


def _sharded(ctx: RankContext, seed: int = 0) -> Any:
    return TP.sharded(subject(), ctx, seed)


def _train(ctx: RankContext, model: Any, optimizer: Any = None) -> dict[str, Tensor]:
    """All ranks see the same data. Returns the whole parameters."""
    train_steps(ctx, model, optimizer or dtensor_adamw(model.parameters()), range(2), alike=True)
    return whole(model.state_dict())


def _save(ctx: RankContext, place: str, path: Path) -> dict[str, Tensor]:
    model = PLACES[place][1].sharded(subject(), ctx)
    optimizer = dtensor_adamw(model.parameters())
    _train(ctx, model, optimizer)
    dcp.save(states_of(model, optimizer), checkpoint_id=path)
    return _train(ctx, model, optimizer)


def _load(ctx: RankContext, place: str, path: Path) -> dict[str, Tensor]:
    model = PLACES[place][1].sharded(subject(), ctx, seed=1)
    optimizer = dtensor_adamw(model.parameters())
    load_states(model, optimizer, path)
    return _train(ctx, model, optimizer)


WAYS = [("fsdp on 4", "tp on 2"), ("tp inside", "tp outside"), ("tp outside", "fsdp on 4")]


@pytest.mark.ci
@pytest.mark.parametrize("way", [("tp inside", "fsdp on 2"), *long(*WAYS)], ids=" to ".join)
def test_training_resumes_on_another_mesh(way: tuple[str, str], tmp_path: Path) -> None:
    saved, loaded = way
    expected = shared_pool(PLACES[saved][0]).run(_save, place=saved, path=tmp_path)[0]
    for found in shared_pool(PLACES[loaded][0]).run(_load, place=loaded, path=tmp_path):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@distributed(4)
def test_full_state_dict_is_that_of_the_unsharded_model_and_loads_from_rank_0(ctx: RankContext) -> None:
    torch.manual_seed(0)
    unsharded = MLP().state_dict()
    compare_values("whole", whole(_sharded(ctx).state_dict()), dict(unsharded))
    other = _sharded(ctx, seed=1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, dict(unsharded) if ctx.rank == 0 else {}, options=options)
    compare_values("loaded", whole(other.state_dict()), dict(unsharded))


@pytest.mark.ci
@distributed(4)
def test_model_from_meta_trains_alike(ctx: RankContext) -> None:
    model = TP.on_meta(subject(), ctx)
    model.to_empty(device=ctx.device_type)
    model.load_state_dict(_sharded(ctx).state_dict())
    compare_values("trained", _train(ctx, model), _train(ctx, _sharded(ctx)))


@distributed(4)
def test_parameters_unsharded_by_hand_are_dtensors_of_the_model_axis(ctx: RankContext) -> None:
    block = _sharded(ctx).blocks[0]
    expected = block.up.weight.full_tensor()
    block.unshard()
    weight = block.up.weight
    assert isinstance(weight, DTensor)
    assert weight.device_mesh == ctx.mesh(dp=2, tp=2)["tp"]
    assert torch.equal(weight.full_tensor(), expected)
    block.reshard()
    assert block.up.weight.device_mesh.mesh_dim_names == ("dp", "tp")


@pytest.mark.ci
@distributed(4)
def test_parameter_is_frozen_and_cast_between_steps(ctx: RankContext) -> None:
    model = _sharded(ctx)
    frozen = model.blocks[1].up.weight.requires_grad_(False)
    before = frozen.full_tensor()
    _train(ctx, model)
    assert torch.equal(frozen.full_tensor(), before)
    model.to(torch.float64)
    model(torch.ones(4, 16, dtype=torch.float64)).sum().backward()
    assert model.blocks[0].down.weight.grad.dtype is torch.float64
    assert frozen.grad is None


@distributed(2)
def test_gradient_whose_collective_is_pending_is_waited_for(ctx: RankContext) -> None:
    mesh = ctx.mesh_1d()
    grad = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    _torch.set_local(grad, collectives.all_reduce(torch.ones(2), "sum", (mesh, 0)))
    found = _torch.arrived_local(grad)
    assert type(found) is Tensor
    assert found.tolist() == [2.0, 2.0]
