"""Parameters of every shape, dtype and memory layout train as in the unsharded model: scalars, uneven along any dim,
with empty shards, not contiguous, integers. And on a shard axis of one rank, nothing is gathered or copied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp2
from tests.distributed.support import DIM, batch, seeded, shard_each
from tests.harness.distributed import RankContext, distributed


class _Block(nn.Module):
    """Scalars, dims that nothing divides, a transposed weight, frozen integers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.narrow = nn.Parameter(torch.randn(5, 3))
        self.wide = nn.Parameter(torch.randn(7, 3).t())
        self.cube = nn.Parameter(torch.randn(7, 1, 5))
        self.codes = nn.Parameter(torch.randint(0, 16, (5, 5), dtype=torch.uint8), requires_grad=False)
        self.steps = nn.Parameter(torch.tensor(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.narrow @ self.wide * self.scale) @ self.cube.sum(1)
        return x @ (self.codes.to(x.dtype) - 7.5) / (10.0 * self.steps)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x * self.temperature.to(x.dtype)


def _last_dim(parameter: nn.Parameter) -> Shard | None:
    return Shard(parameter.dim() - 1) if parameter.dim() else None


def _whole_vectors(parameter: nn.Parameter) -> Replicate | None:
    return Replicate() if parameter.dim() == 1 else None


def _sharded(mesh: DeviceMesh, place: Any = None, **options: Any) -> Any:
    model = seeded(_Model)
    return shard_each(*model.blocks, model, mesh=mesh, shard_placement_fn=place, **options)


SETUPS: dict[str, Callable[[RankContext], Any]] = {
    "dim 0": lambda ctx: _sharded(ctx.mesh_1d()),
    "last dim": lambda ctx: _sharded(ctx.mesh_1d(), _last_dim),
    "last dim, resting on 2": lambda ctx: _sharded(ctx.mesh_1d(), _last_dim, reshard_after_forward=2),
    "HSDP": lambda ctx: _sharded(ctx.mesh_2d(2, ctx.world_size // 2), _last_dim),
    "vectors whole": lambda ctx: _sharded(ctx.mesh_1d(), _whole_vectors, reshard_after_forward=2),
    "HSDP, vectors whole": lambda ctx: _sharded(ctx.mesh_2d(2, ctx.world_size // 2), _whole_vectors),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "one by one": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=False),
    "flat": lambda parameters: fsdp2.optim.flatten_optimizer(torch.optim.AdamW(parameters, lr=0.01)),
}


def _step(model: Any, optimizer: torch.optim.Optimizer, seeds: list[int]) -> None:
    """The average loss over the batches of ``seeds``."""
    optimizer.zero_grad()
    for seed in seeds:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        (model(x).square().mean() / len(seeds)).backward()
    fsdp2.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()


@pytest.mark.ci
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("setup", SETUPS)
@distributed(4)
def test_they_train_as_in_the_unsharded_model(ctx: RankContext, setup: str, optimizer: str) -> None:
    model, reference = SETUPS[setup](ctx), seeded(_Model)
    ours, theirs = OPTIMIZERS[optimizer](model.parameters()), torch.optim.AdamW(reference.parameters(), lr=0.01)
    if optimizer == "one by one":
        theirs = OPTIMIZERS[optimizer](reference.parameters())
    for index in range(2):
        seeds = [10 * index + rank for rank in range(ctx.world_size)]
        _step(model, ours, seeds[ctx.rank : ctx.rank + 1])
        _step(reference, theirs, seeds)
    for name, expected in reference.named_parameters():
        parameter = model.get_parameter(name)
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), expected, rtol=1e-4, atol=1e-5)
        assert parameter.to_local().is_contiguous()
        if expected.dim() == 0 or ("vectors whole" in setup and expected.dim() == 1):
            assert not any(placement.is_shard() for placement in parameter.placements)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(torch.ones(1, 5)), model(torch.ones(1, 5)))


@distributed(2)
def test_scalars_are_loaded_and_accumulate_without_communication(ctx: RankContext) -> None:
    model, reference = _sharded(ctx.mesh_1d()), seeded(_Model)
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    state = {name: distribute_tensor(value.detach(), p.device_mesh, p.placements) for (name, p), value in pairs}
    model.load_state_dict(state, assign=True)
    x = torch.ones(2, 5)
    with fsdp2.no_sync(model):
        model(x).sum().backward()
    assert model.temperature.grad is None
    model(x).sum().backward()
    reference(x).sum().backward()
    found, expected = model.temperature.grad.full_tensor(), 2 * reference.temperature.grad
    # A float64 scalar, but computed with in float32: CPUs round that in ways of their own.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with fsdp2.unsharded(model), torch.no_grad():
        model.temperature.fill_(3.0)
    assert model.temperature.full_tensor() == 3


@pytest.mark.parametrize("axes", [(1, 1), (2, 1)])
@distributed(2)
def test_on_a_shard_axis_of_one_parameters_are_views_of_the_shards(ctx: RankContext, axes: tuple[int, int]) -> None:
    """No collective gathers them, and no copy."""
    model = _sharded(ctx.mesh_of_one() if axes == (1, 1) else ctx.mesh_2d(*axes))
    shards = [parameter.to_local().data_ptr() for parameter in model.parameters()]
    for unit in (model, *model.blocks):
        unit.unshard()
    assert [parameter.data_ptr() for parameter in model.parameters()] == shards
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


class _Table(nn.Linear):
    def forward(self) -> Tensor:  # type: ignore[override]
        return self.weight


class _ReadsTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = _Table(DIM, 4, bias=False)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.table()]
        return x @ self.seen[0].T


@distributed(2)
def test_parameter_that_its_unit_returns_keeps_one_hook(ctx: RankContext) -> None:
    """Each forward added one, for ever."""
    model, reference = seeded(_ReadsTable), seeded(_ReadsTable)
    fsdp2.fully_shard(model.table, mesh=ctx.mesh_1d(), reshard_after_forward=False)
    fsdp2.fully_shard(model, mesh=ctx.mesh_1d())
    for number in range(3):
        for each in (model, reference):
            each.zero_grad()
            each(batch(number)).square().mean().backward()
        grad: Any = model.table.weight.grad
        assert torch.equal(grad.full_tensor(), reference.table.weight.grad)  # type: ignore[arg-type]
        assert len(model.seen[0]._backward_hooks or {}) <= 1
