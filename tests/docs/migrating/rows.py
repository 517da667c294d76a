"""The rows of the migration page's tables as tests, and what trying a row takes.

``Rows`` maps the first cell of each row of one table to the function that tries it, on every rank of a pool. A row
runs the old program, where the old library is installed, and the new one, and compares; or it looks for the effect
that the page claims.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.tools import trace
from tests.docs.markdown import ROOT, table
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext
from tests.harness.models import MLP
from tests.harness.pool import shared_pool

PAGE = ROOT / "docs" / "migrating.md"

Body = Callable[[RankContext], None]


class Rows(dict[str, tuple[Body, int]]):
    """The tests of the table under one heading of the page; used as a decorator with a row's first cell.

    ``omits_some``: the page says what holds for the rows that it leaves out. Those are tried, too.
    """

    def __init__(self, title: str, *, omits_some: bool = False) -> None:
        super().__init__()
        self.title, self.omits_some = title, omits_some

    def __call__(self, cell: str, *, world_size: int = 2) -> Callable[[Body], Body]:
        def add(body: Body) -> Body:
            assert cell not in self, f"{cell} is tried twice"
            self[cell] = (body, world_size)
            return body

        return add

    def run(self, cell: str) -> None:
        body, world_size = self[cell]
        shared_pool(world_size).run(body)

    def check(self) -> None:
        """Every row is tried, and every function tries a row, or what the page says of those that it leaves out."""
        on_page = [cells[0] for cells in table(PAGE, self.title)]
        assert len(on_page) == len(set(on_page))
        assert set(on_page) <= set(self)
        assert self.omits_some or set(on_page) == set(self)


# Small programs


def model(num_blocks: int = 2) -> MLP:
    """The same on every rank."""
    torch.manual_seed(0)
    return MLP(num_blocks)


def wrap(package: Any, mesh: DeviceMesh | None, whole: MLP | None = None, **options: Any) -> Any:
    """A model whose blocks, then itself, were given to ``package.fully_shard``."""
    whole = whole or model()
    for block in whole.blocks:
        package.fully_shard(block, mesh=mesh, **options)
    package.fully_shard(whole, mesh=mesh, **options)
    return whole


def by_fsdp2(ctx: RankContext, whole: MLP | None = None, **options: Any) -> Any:
    """The same with fsdp2, on all ranks."""
    return wrap(fsdp2, ctx.mesh_1d(), whole, **options)


def batch(ctx: RankContext, index: int = 0) -> Tensor:
    """This rank's inputs."""
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * index + ctx.rank))


def forward(ctx: RankContext, module: nn.Module, index: int = 0) -> Tensor:
    return module(batch(ctx, index)).float().square().mean()


def backward(ctx: RankContext, module: nn.Module, index: int = 0) -> Tensor:
    """One forward and backward; the loss."""
    loss = forward(ctx, module, index)
    loss.backward()
    return loss.detach()


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-3)


Step = Callable[[RankContext, nn.Module, int], Tensor]


def train(
    ctx: RankContext,
    module: nn.Module,
    step: Step = backward,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> list[Any]:
    """The losses of two steps, the last gradients and the last parameters, whole."""
    optimizer = make_optimizer(module)
    losses, last = [], {}
    for index in range(2):
        losses.append(step(ctx, module, index))
        last = gradients(module)
        optimizer.step()
        optimizer.zero_grad()
    return [losses, last, parameters(module)]


def unsharded(ctx: RankContext, step: Step = backward) -> list[Any]:
    """The same of the model as it is, with gradients averaged over all ranks."""

    def step_and_average(ctx: RankContext, module: nn.Module, index: int) -> Tensor:
        loss = step(ctx, module, index)
        for parameter in module.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= ctx.world_size
        return loss

    return train(ctx, model(), step_and_average)


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else whole(parameter.grad) for name, parameter in module.named_parameters()
    }


# Comparisons


def same(program: Callable[[Any], Any]) -> Any:
    """``program(package)`` returns the same for torch's package and for fsdp2, tensors bit for bit; what it returns."""
    ours, expected = program(fsdp2), program(theirs)
    compare_values("fsdp2 and torch", ours, expected)
    return ours


def same_training(ctx: RankContext, wrapped: Callable[[Any], nn.Module], step: Step = backward) -> None:
    """The model that ``wrapped(package)`` makes trains the same with both."""
    same(lambda package: train(ctx, wrapped(package), step))


close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6)
"""For what divides or sums elsewhere than fsdp2 does: nested lists and dicts of tensors."""


def raises(error: type[BaseException], call: Callable[[], Any]) -> BaseException:
    """What ``call`` raises, which is an ``error`` and no subclass."""
    with pytest.raises(error) as raised:
        call()
    assert raised.type is error, raised.type
    return raised.value


# What the runtime did


def actions(module: nn.Module, program: Callable[[], Any]) -> list[str]:
    """The actions while ``program`` runs: ``["unshard blocks.0", ...]``."""
    with trace.record(module) as recorded:
        program()
    return recorded.actions()


def gathers(module: nn.Module, program: Callable[[], Any]) -> list[str]:
    """The units that are gathered while ``program`` runs, in order."""
    return [unit for action, unit in (entry.split() for entry in actions(module, program)) if action in STARTS]


STARTS = {"unshard", "prefetch"}
