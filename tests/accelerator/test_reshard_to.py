"""``reshard_to`` on the simulated accelerator: the exchange is ordered between the step before and the gather after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import CPUOffloadPolicy, OffloadPolicy, fully_shard, reshard_to
from tests.accelerator import device
from tests.accelerator.support import on_device
from tests.harness.distributed import RankContext
from tests.harness.models import MLP
from tests.harness.selection import long

_MOVES: list[Any] = [[0], [[0], [1]], [0, 1]]


def _run(ctx: RankContext, kind: str, policy: OffloadPolicy, start: list[int], *, moves: bool) -> list[Tensor]:
    """The losses of a step before each move, and of one behind the last. Every rank computes the same: on one rank or
    two, the mean is that of equal gradients. ``start``: the ranks of the first mesh."""
    torch.manual_seed(0)
    model = MLP().to(kind)
    for unit in (*model.units(), model):
        fully_shard(unit, mesh=DeviceMesh(kind, start), offload_policy=policy)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for seed, ranks in enumerate([*_MOVES, None]):
        if model.exit.weight.device_mesh.get_coordinate() is not None:
            (x,) = model.batch(torch.Generator().manual_seed(seed))
            loss = model(x.to(kind)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if ranks is not None and moves:
            reshard_to(model, optimizer, DeviceMesh(kind, ranks))
    return [loss.cpu() for loss in losses]


@pytest.mark.ci
@pytest.mark.parametrize("policy", [OffloadPolicy(), *long(CPUOffloadPolicy())], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("start", [[0, 1], [0]], ids=["both ranks", "one rank"])
@on_device(2)
def test_moved_model_trains_as_one_that_stays(ctx: RankContext, start: list[int], policy: OffloadPolicy) -> None:
    expected = _run(ctx, device.DEVICE, policy, [0, 1], moves=False)
    device.schedule(late=["all-gather", "all-to-all"])
    found = _run(ctx, device.DEVICE, policy, start, moves=True)
    stays = [0, 1, 2, 3]
    if ctx.rank == 1:  # it was not in the second mesh
        stays = [0, 2, 3] if start == [0, 1] else [2, 3]
    for mine, other in zip(found, [expected[index] for index in stays], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=0.0)
