"""``load_state_dict`` cuts shards out of whole tensors, also where the root is still unsharded after an evaluation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.distributed.changes import whole
from tests.distributed.support import seeded, shard_each
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import Halved
from tests.harness.messages import error_of, one_line
from tests.harness.selection import long

Load = Callable[[nn.Module, dict[str, Tensor]], None]


class Layers(nn.Module):
    """Sizes that 4 ranks do not divide, a scalar, and vectors that are shorter than the world."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.exit, self.norm = nn.Linear(10, 38), nn.Linear(38, 10), nn.LayerNorm(10)
        self.scale, self.one = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(1))
        self.two = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.exit(self.entry(x))) * self.scale + self.one + self.two.sum()


def _sharded(kind: str, world_size: int) -> Layers:
    model = seeded(Layers)
    if kind != "tp":
        sizes = (2, world_size // 2) if kind == "hsdp" else (world_size,)
        return shard_each(model.entry, model, mesh=init_device_mesh("cpu", sizes))
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"entry": ColwiseParallel(), "exit": RowwiseParallel()})
    return shard_each(model.entry, model, mesh=mesh["dp"])


def _by_module(model: nn.Module, state: dict[str, Tensor]) -> None:
    model.load_state_dict(state)


def _by_torch(model: nn.Module, state: dict[str, Tensor]) -> None:
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


def _from_rank_0(model: nn.Module, state: dict[str, Tensor]) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "tp"])
@pytest.mark.parametrize("load", [_by_module, _from_rank_0, *long(_by_torch)])
@pytest.mark.parametrize("has_run", [True, *long(False)])
@distributed(2, 4, 3)
def test_whole_tensors_are_loaded_into_shards(ctx: RankContext, kind: str, load: Load, has_run: bool) -> None:
    if kind != "fsdp" and ctx.world_size % 2:
        return
    if kind == "tp" and load is not _by_module:
        return  # torch's functions cannot cut a dim unevenly twice
    model, plain, x = _sharded(kind, ctx.world_size), seeded(Layers, 1), torch.ones(3, 10)
    if has_run:
        model(x.to(next(model.parameters()).device))  # the root stays unsharded
    load(model, {name: value.double() for name, value in plain.state_dict().items()})
    compare_values("loaded", whole(model), whole(plain))
    output = model(x.to(next(model.parameters()).device))
    torch.testing.assert_close(output.cpu(), plain(x.to(plain.scale.device)).cpu())


@distributed(2)
def test_whole_tensors_are_not_cut_for_subclasses(ctx: RankContext) -> None:
    model = seeded(Layers)
    model.exit.weight = nn.Parameter(Halved(model.exit.weight.detach()))
    shard_each(model.entry, model, mesh=ctx.mesh_1d())
    before, state = whole(model.entry), seeded(Layers, 1).state_dict()
    error = one_line(error_of(lambda: model.load_state_dict(state)))
    assert "found plain tensors for 'exit.weight', expected" in error
    compare_values("kept", whole(model.entry), before)


@distributed(2)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(ctx: RankContext) -> None:
    model = seeded(Layers)
    shard_each(model.entry, model, mesh=ctx.mesh_1d())
    state = seeded(Layers, 1).state_dict() | {"exit.weight": torch.ones(3, 3)}
    expected = f"the shape in current model is {model.exit.weight.shape}"
    error = one_line(error_of(lambda: model.load_state_dict(state)))
    assert "size mismatch for exit.weight: copying a param with shape torch.Size([3, 3])" in error
    assert expected in error


@distributed(4)
def test_an_unsharded_parameter_on_model_axes_is_not_loaded_into_its_shards(ctx: RankContext) -> None:
    """torch writes what rank 0 sends into the unsharded DTensors, whose memory resharding frees."""
    model, state = _sharded("tp", ctx.world_size), seeded(Layers, 1).state_dict()
    model(torch.ones(3, 10))
    assert "Call model.reshard() before the function" in one_line(error_of(lambda: _from_rank_0(model, dict(state))))
    model.reshard()
    _from_rank_0(model, state)
    compare_values("loaded", whole(model), whole(seeded(Layers, 1)))
