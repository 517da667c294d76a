"""State dicts of optimizers over ``FullyShardedDataParallel`` on the simulated accelerator: the values of the CPU,
whatever the order of streams, and loaded again from there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from fsdp2.fsdp1 import FullyShardedDataParallel
from tests.accelerator import device
from tests.accelerator.cases import FEW, SCHEDULES
from tests.accelerator.support import cpu_mesh, on_device
from tests.harness.distributed import RankContext


def stepped(ctx: RankContext, mesh: DeviceMesh, *, use_orig_params: bool) -> tuple[Any, torch.optim.Optimizer]:
    """A model and its optimizer after a step, so that the device still writes the states."""
    torch.manual_seed(0)
    options = {"device_mesh": mesh, "use_orig_params": use_orig_params}
    model = FullyShardedDataParallel(
        nn.Sequential(FullyShardedDataParallel(nn.Linear(64, 65), **options), nn.Linear(65, 3)), **options
    )
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(ctx.rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, foreach=False)
    model(x.to(model.compute_device)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def values(model: Any, optimizer: Any, *, is_full: bool, offload_to_cpu: bool) -> dict[str, torch.Tensor]:
    kind, configs = StateDictType.FULL_STATE_DICT, (FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu))
    if not is_full:
        kind = StateDictType.SHARDED_STATE_DICT
        configs = ShardedStateDictConfig(), ShardedOptimStateDictConfig(offload_to_cpu)
    with FullyShardedDataParallel.state_dict_type(model, kind, *configs):
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    found = {name: each["momentum_buffer"] for name, each in state.items()}
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in found.items()}


@pytest.mark.parametrize("schedule", FEW)
@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, False])
@on_device(2)
def test_states_have_the_values_of_the_cpu(
    ctx: RankContext, use_orig_params: bool, is_full: bool, schedule: str
) -> None:
    on_cpu = stepped(ctx, cpu_mesh(2), use_orig_params=use_orig_params)
    expected = values(*on_cpu, is_full=is_full, offload_to_cpu=True)
    device.schedule(**SCHEDULES[schedule])
    model, optimizer = stepped(ctx, init_device_mesh(device.DEVICE, (2,)), use_orig_params=use_orig_params)
    for offload in (False, True):
        found = values(model, optimizer, is_full=is_full, offload_to_cpu=offload)
        assert {value.device.type for value in found.values()} == {"cpu" if offload else device.DEVICE}
        for name, value in found.items():
            torch.testing.assert_close(value.cpu(), expected[name], rtol=0, atol=0)
        saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        for states in optimizer.state.values():
            states["momentum_buffer"].zero_()
        FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved, load_directly=True)
