"""MXFP8 is gathered bit for bit as it is quantised after a gather, also where ranks share blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.tensors import MXBlocks, MXFP8AllGatherTensor, wrap_parameters
from fsdp2.tensors.mxfp8 import dequantise_mxfp8, quantise_mxfp8
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long

COLUMNS = 37


class _Seen(nn.Linear):
    """Keeps the weight that it computes with."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight.detach().clone()
        return super().forward(x)


def _expected(full: Tensor, blocks: MXBlocks, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(full, dtype=dtype)
    dequantise_mxfp8(*quantise_mxfp8(full, blocks), blocks, out=out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, *long(torch.bfloat16)])
@pytest.mark.parametrize("rows", [96, *long(64, 70, 33, 20, 1)])
@pytest.mark.parametrize("blocks", [MXBlocks.COLUMNS, *long(MXBlocks.ROWS)])
@distributed(2, 4)
def test_each_rank_computes_with_what_quantising_the_whole_weight_gives(
    ctx: RankContext, blocks: MXBlocks, rows: int, dtype: torch.dtype
) -> None:
    """With 96 rows on 2 ranks, each has 48, and they share a block; with 20 on 4 ranks, all share one."""
    torch.manual_seed(0)
    layer: Any = _Seen(COLUMNS, rows)
    with torch.no_grad():
        layer.weight.mul_(10.0 ** torch.randint(-6, 6, (rows, COLUMNS)))
    wrap_parameters(layer, lambda weight: MXFP8AllGatherTensor(weight, blocks=blocks))
    fully_shard(layer, mesh=ctx.mesh_1d(), mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(ctx.rank))
    for _ in range(3):
        full = layer.weight.full_tensor()
        full = full._data if isinstance(full, MXFP8AllGatherTensor) else full
        layer(x.to(full.device)).float().square().mean().backward()
        assert torch.equal(layer.seen, _expected(full, blocks, dtype))
        optimizer.step()
        optimizer.zero_grad()
