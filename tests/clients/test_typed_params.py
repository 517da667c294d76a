"""Plain parameters with types of spmd_types, without a client: values, the type checker, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2 import DataParallelMeshDims, fully_shard
from tests.distributed.support import seeded
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of
from tests.harness.pool import shared_pool
from tests.parity.setups import model_parallel_mesh

spmd = pytest.importorskip("spmd_types")
typecheck = pytest.importorskip("spmd_types.checker").typecheck

DIM, HIDDEN = 8, 12
DIMS = DataParallelMeshDims(shard="dp")


class Mlp(nn.Module):
    """Tensor parallelism cuts ``up`` by columns and ``down`` by rows; ``scale`` is whole on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(HIDDEN, DIM, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(DIM, HIDDEN, dtype=torch.float64))
        self.scale = nn.Parameter(torch.randn(DIM, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale) @ self.up.t() @ self.down.t()


class TypedMlp(Mlp):
    """This rank's part of an ``Mlp``. The input varies over ranks of ``dp``, and is the same on those of ``tp``."""

    def __init__(self, whole: Mlp, mesh: DeviceMesh, scale: Any) -> None:
        nn.Module.__init__(self)
        self.tp, size, rank = mesh.get_group("tp"), mesh["tp"].size(), mesh["tp"].get_local_rank()
        self.up = nn.Parameter(whole.up.detach().chunk(size, 0)[rank].clone())
        self.down = nn.Parameter(whole.down.detach().chunk(size, 1)[rank].clone())
        self.scale = nn.Parameter(whole.scale.detach().clone())
        for parameter, of_tp in ((self.up, spmd.S(0)), (self.down, spmd.S(1)), (self.scale, scale)):
            spmd.assert_type(parameter, {mesh.get_group("dp"): spmd.R, mesh.get_group("tp"): of_tp})

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        if spmd.is_type_checking():
            assert spmd.get_axis_local_type(self.up, self.tp) is spmd.V
        if spmd.get_axis_local_type(self.scale, self.tp) is spmd.I:
            scaled = spmd.convert(scaled, self.tp, src=spmd.I, dst=spmd.R)
        return spmd.all_reduce(scaled @ self.up.t() @ self.down.t(), self.tp, src=spmd.P, dst=spmd.I)


def _rows(rank: int) -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _input(mesh: DeviceMesh, of_tp: Any) -> Tensor:
    x = _rows(mesh["dp"].get_local_rank())
    return spmd.assert_type(x, {mesh.get_group("dp"): spmd.S(0), mesh.get_group("tp"): of_tp})


@pytest.mark.parametrize("scale", ["R", "I"])
@distributed(4)
def test_gradients_are_those_of_the_whole_model_with_types_checked(ctx: RankContext, scale: str) -> None:
    """A gradient of R is a sum that is pending on its axis, and one of I is whole on each rank."""
    mesh, of_scale = model_parallel_mesh(ctx), getattr(spmd, scale)
    whole = seeded(Mlp)
    model = fully_shard(TypedMlp(whole, mesh, of_scale), mesh=mesh, dp_mesh_dims=DIMS)
    given = _input(mesh, of_scale)
    for _ in range(2):
        with spmd.set_current_mesh(mesh), typecheck(local=False):
            output = model(given)
            with spmd.no_typecheck():
                output.square().sum().backward()
    for rank in range(ctx.world_size // 2):
        whole(_rows(rank)).square().sum().backward()
    for name, parameter in model.named_parameters():
        expected = getattr(whole, name).grad * 2 / (ctx.world_size // 2)
        torch.testing.assert_close(parameter.grad.full_tensor(), expected, msg=lambda m, name=name: f"{name}: {m}")


@distributed(4)
def test_a_checkpoint_of_typed_parameters_is_that_of_the_whole_model(ctx: RankContext, tmp_path: Path) -> None:
    mesh = model_parallel_mesh(ctx)
    typed = fully_shard(TypedMlp(seeded(Mlp), mesh, spmd.I), mesh=mesh, dp_mesh_dims=DIMS)
    dcp.save(typed.state_dict(), checkpoint_id=tmp_path)
    plain = Mlp()
    dcp.load(plain.state_dict(), checkpoint_id=tmp_path)
    other = fully_shard(TypedMlp(Mlp(), mesh, spmd.I), mesh=mesh, dp_mesh_dims=DIMS)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state)
    with fsdp2.unsharded(other):
        assert spmd.get_axis_local_type(other.up, mesh.get_group("tp")) is spmd.V
        assert torch.equal(other.down, TypedMlp(seeded(Mlp), mesh, spmd.I).down)
    for name, expected in seeded(Mlp).named_parameters():
        assert torch.equal(getattr(plain, name), expected)


# What is refused


RIGHT = {"dp": spmd.R, "tp": spmd.I}
# The types of a weight; "on one rank": those on the last rank only.
CASES: dict[str, dict[str, Any]] = {
    "cut on a data-parallel axis": {"dp": spmd.S(0), "tp": spmd.I},
    "a pending sum": {"dp": spmd.R, "tp": spmd.P},
    "varies along no dim": {"dp": spmd.R, "tp": spmd.V},
    "no type on a model axis": {"dp": spmd.R},
    "an axis that is not in the mesh": {"tp": spmd.I},
    "not all axes, and no current mesh": {"tp": spmd.I},
    "no dp_mesh_dims": RIGHT,
    "refused on one rank": {"dp": spmd.V, "tp": spmd.I},
    "other types on one rank": {"dp": spmd.R, "tp": spmd.R},
}
OPTIONS: dict[str, Callable[[DeviceMesh], dict[str, Any]]] = {
    "an axis that is not in the mesh": lambda mesh: {"mesh": mesh["dp"], "dp_mesh_dims": DIMS},
    "no dp_mesh_dims": lambda mesh: {"mesh": mesh["dp"]},
}


def _refusal(ctx: RankContext, case: str) -> str:
    mesh, model = model_parallel_mesh(ctx), nn.Sequential()
    model.inner = nn.Linear(DIM, DIM, bias=False)
    types = RIGHT if "on one rank" in case and ctx.rank < ctx.world_size - 1 else CASES[case]
    spmd.assert_type(model.inner.weight, {mesh.get_group(name): each for name, each in types.items()})
    options = OPTIONS.get(case, lambda mesh: {"mesh": mesh, "dp_mesh_dims": DIMS})(mesh)
    before = copy.copy(model.inner.weight.__dict__)
    error = error_of(lambda: fully_shard(model, **options))
    assert type(model) is nn.Sequential
    assert type(model.inner.weight) is nn.Parameter
    assert model.inner.weight.__dict__ == before
    return error


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_refuse_types_that_do_not_fit(case: str) -> None:
    said = shared_pool(4).run(_refusal, case=case)
    texts_beside(__file__).check(case, "\n\n".join(dict.fromkeys(said)))
    assert all(text.startswith("ValueError") for text in said)
