"""State dicts of ``FullyShardedDataParallel`` on the simulated accelerator: the values of the same model on the CPU,
on the device or offloaded; and loaded again from there, whatever the order of streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from fsdp2.fsdp1 import FullyShardedDataParallel
from tests.accelerator import device
from tests.accelerator.cases import FEW, SCHEDULES
from tests.accelerator.support import cpu_mesh, on_device
from tests.harness.distributed import RankContext

KINDS: dict[str, tuple[StateDictType, type[StateDictConfig], bool]] = {
    "full": (StateDictType.FULL_STATE_DICT, FullStateDictConfig, True),
    "sharded tensors": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig, False),
    "DTensors": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig, True),
    "full, parameters offloaded": (StateDictType.FULL_STATE_DICT, FullStateDictConfig, True),
    "local": (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig, False),
}


def stepped(ctx: RankContext, mesh: DeviceMesh | None, seed: int = 0, **options: Any) -> FullyShardedDataParallel:
    """A model after a step, so that the device still writes the shards when the state dict is asked for."""
    torch.manual_seed(seed)
    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(64, 65), device_mesh=mesh, **options), nn.BatchNorm1d(65))
    model = FullyShardedDataParallel(model, device_mesh=mesh, **options)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(ctx.rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    model(x.to(model.compute_device)).square().mean().backward()
    optimizer.step()
    return model


def state_of(model: FullyShardedDataParallel, kind: str, **options: bool) -> dict[str, Any]:
    which, config, _ = KINDS[kind]
    with FullyShardedDataParallel.state_dict_type(model, which, config(**options)):
        return model.state_dict()


def parts(state: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's values."""
    return {
        name: value.to_local()
        if isinstance(value, DTensor)
        else torch.cat([shard.tensor.detach() for shard in value.local_shards()])
        if hasattr(value, "local_shards")
        else value
        for name, value in state.items()
    }


@pytest.mark.parametrize("schedule", FEW)
@pytest.mark.parametrize("offload_to_cpu", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@on_device(2)
def test_state_dict_has_the_values_of_the_cpu(ctx: RankContext, kind: str, offload_to_cpu: bool, schedule: str) -> None:
    which, _, has_mesh = KINDS[kind]
    on_cpu = stepped(ctx, cpu_mesh(2))
    expected = on_cpu.state_dict()
    device.schedule(**SCHEDULES[schedule])
    meshes = [init_device_mesh(device.DEVICE, (2,)) if has_mesh else None for _ in range(2)]
    options = {"cpu_offload": CPUOffload(True)} if "offloaded" in kind else {}
    model, other = (stepped(ctx, mesh, seed, **options) for seed, mesh in enumerate(meshes))
    state = state_of(model, kind, offload_to_cpu=offload_to_cpu)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()  # later steps change nothing
    found = parts(state)
    wanted = "cpu" if offload_to_cpu else device.DEVICE
    assert {value.device.type for value in found.values()} == {wanted}
    if kind != "local":
        like = expected if "full" in kind else parts(state_of(on_cpu, "DTensors"))
        for name, value in found.items():
            torch.testing.assert_close(value.cpu(), like[name], rtol=0, atol=0)
    with FullyShardedDataParallel.state_dict_type(other, which):
        other.load_state_dict(state)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value.cpu(), expected[name], rtol=0, atol=0)
