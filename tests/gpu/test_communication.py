"""Communication of the user's own on CUDA: streams of hooks, memory of the process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.support import BF16, batch, on_gpus, sharded
from tests.harness.comms import CountingAllGather, CountingReduceScatter
from tests.harness.distributed import RankContext


def _gradients(model: Any) -> list[Tensor]:
    model(batch()).square().mean().backward()
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("own_stream", [True, False])
@on_gpus
def test_hook_runs_in_order_with_the_reduction(ctx: RankContext, own_stream: bool) -> None:
    stream = torch.cuda.Stream() if own_stream else None
    seen: list[torch.cuda.Stream] = []

    def hook(reduced: Tensor) -> None:
        seen.append(torch.cuda.current_stream())
        torch.cuda._sleep(20_000_000)  # what does not wait for it reads too early
        reduced.mul_(3.0)

    expected = _gradients(sharded(ctx, 3, mp_policy=BF16))
    model = sharded(ctx, 3, mp_policy=BF16)
    for block in model:
        block.set_all_reduce_hook(hook, stream=stream)
    torch.testing.assert_close(_gradients(model), [3.0 * gradient for gradient in expected])
    assert len(seen) == 3
    if own_stream:
        assert set(seen) == {stream}


@pytest.mark.parametrize(
    "settings",
    [
        {"set_custom_all_gather": [CountingAllGather], "set_custom_reduce_scatter": [CountingReduceScatter]},
        {"set_allocate_memory_from_process_group_for_comm": [True]},
        {"set_separate_reduce_scatter_group": []},
    ],
    ids=["custom", "memory_of_the_process_group", "separate_group"],
)
@on_gpus
def test_gradients_stay_the_same(ctx: RankContext, settings: dict[str, Any]) -> None:
    expected = _gradients(sharded(ctx, 3, mp_policy=BF16))
    model = sharded(ctx, 3, mp_policy=BF16)
    for block in model:
        for name, given in settings.items():
            getattr(block, name)(*(each() if isinstance(each, type) else each for each in given))
    torch.testing.assert_close(_gradients(model), expected)
