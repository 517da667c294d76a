"""The EMA example averages what it says, and the average is the better model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from docs.examples import ema
from tests.distributed.support import sharded, step
from tests.harness.distributed import RankContext, distributed


def _whole(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().full_tensor() for parameter in model.parameters()]  # type: ignore[operator]


@distributed(2)
def test_the_average_is_that_of_the_whole_weights(ctx: RankContext) -> None:
    model = sharded(ctx)
    average = ema.ShardedEMA(model, decay=0.75)
    expected = _whole(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        step(model, seed)
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)
        expected = [torch.lerp(old, new, 0.25) for old, new in zip(expected, _whole(model), strict=True)]
    torch.testing.assert_close(_whole(average.model), expected)


@pytest.mark.long
@distributed(2)
def test_the_average_is_better_than_the_weights(ctx: RankContext) -> None:
    of_weights, of_average = ema.run()
    assert of_average < 0.9 * of_weights
