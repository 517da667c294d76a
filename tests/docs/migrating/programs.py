"""Small programs that tests of the migration page run beside the old library."""

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
from tests.harness.distributed import RankContext
from tests.harness.models import MLP

BOTH = (fsdp2, theirs)


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


def batch(ctx: RankContext, index: int = 0) -> Tensor:
    """This rank's inputs."""
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * index + ctx.rank))


def backward(ctx: RankContext, module: nn.Module, index: int = 0) -> Tensor:
    """One forward and backward; the loss."""
    loss = module(batch(ctx, index)).float().square().mean()
    loss.backward()
    return loss.detach()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


Step = Callable[[RankContext, Any, int], Tensor]


def train(
    ctx: RankContext,
    module: nn.Module,
    step: Step = backward,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
) -> list[Tensor]:
    """The losses of three steps: what the first ones leave in gradients and parameters is in the later ones."""
    optimizer = make_optimizer(module.parameters())
    losses = []
    for index in range(3):
        losses.append(step(ctx, module, index))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def gradients(module: nn.Module) -> list[Tensor | None]:
    """All gradients, whole."""
    found = [parameter.grad for parameter in module.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found]


close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6)
"""For what divides or sums elsewhere than fsdp2 does: nested lists and dicts of tensors."""


def raises(error: type[BaseException], call: Callable[[], Any]) -> BaseException:
    """What ``call`` raises, which is an ``error`` and no subclass."""
    with pytest.raises(error) as raised:
        call()
    assert raised.type is error, raised.type
    return raised.value
