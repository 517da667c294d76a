"""A backward that needs parameters which fsdp2 did not gather raises, and does not read freed memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import fully_shard
from tests.harness.distributed import RankContext, distributed


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.scale * x
        return self.linear(self.kept)


@distributed(2)
def test_a_loss_on_an_operation_of_a_unit_alone_raises_and_with_the_output_works(ctx: RankContext) -> None:
    torch.manual_seed(0)
    scaled = _Scaled()
    model = nn.Sequential(nn.Linear(16, 16), scaled)
    fully_shard(scaled, mesh=ctx.mesh_1d())
    fully_shard(model, mesh=ctx.mesh_1d())
    x = torch.randn(4, 16)
    model(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scaled.kept.square().mean().backward()
    model.reset_iter_state()
    output = model(x)
    (scaled.kept.square().mean() + 0 * output.sum()).backward()
    assert isinstance(scaled.scale.grad, DTensor)
