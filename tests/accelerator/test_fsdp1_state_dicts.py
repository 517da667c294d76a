"""State dicts of ``FullyShardedDataParallel`` and of its optimizers on the simulated accelerator: the values of the
same model on the CPU, on the device or offloaded; and loaded again from there, whatever the order of streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
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


def stepped(ctx: RankContext, mesh: DeviceMesh | None, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    """A model and its optimizer after a step, so that the device still writes shards and states when asked for them."""
    torch.manual_seed(seed)
    inner = FullyShardedDataParallel(nn.Linear(64, 65), device_mesh=mesh, **options)
    model = FullyShardedDataParallel(nn.Sequential(inner, nn.BatchNorm1d(65)), device_mesh=mesh, **options)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(ctx.rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, foreach=False)
    model(x.to(model.compute_device)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: FullyShardedDataParallel, kind: str, **options: bool) -> dict[str, Any]:
    which, config, _ = KINDS[kind]
    with FullyShardedDataParallel.state_dict_type(model, which, config(**options)):
        return model.state_dict()


def part_of(value: Any) -> Tensor:
    """What this rank has of it."""
    if isinstance(value, DTensor):
        return value.to_local()
    return torch.cat([s.tensor.detach() for s in value.local_shards()]) if hasattr(value, "local_shards") else value


def check(found: dict[str, Tensor], expected: dict[str, Any], is_on_cpu: bool) -> None:
    assert {value.device.type for value in found.values()} == {"cpu" if is_on_cpu else device.DEVICE}
    for name in expected:
        torch.testing.assert_close(found[name].cpu(), part_of(expected[name]), rtol=0, atol=0)


@pytest.mark.parametrize("schedule", FEW)
@pytest.mark.parametrize("offload_to_cpu", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@on_device(2)
def test_state_dict_has_the_values_of_the_cpu(ctx: RankContext, kind: str, offload_to_cpu: bool, schedule: str) -> None:
    which, _, has_mesh = KINDS[kind]
    on_cpu, _ = stepped(ctx, cpu_mesh(2))
    expected = on_cpu.state_dict()
    device.schedule(**SCHEDULES[schedule])
    meshes = [init_device_mesh(device.DEVICE, (2,)) if has_mesh else None for _ in range(2)]
    options = {"cpu_offload": CPUOffload(True)} if "offloaded" in kind else {}
    model, other = (stepped(ctx, mesh, seed, **options)[0] for seed, mesh in enumerate(meshes))
    state = state_of(model, kind, offload_to_cpu=offload_to_cpu)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()  # later steps change nothing
    like = {} if kind == "local" else expected if "full" in kind else state_of(on_cpu, "DTensors")
    check({name: part_of(value) for name, value in state.items()}, like, offload_to_cpu)
    with FullyShardedDataParallel.state_dict_type(other, which):
        other.load_state_dict(state)
    check({name: value.cpu() for name, value in other.state_dict().items()}, expected, is_on_cpu=True)


def momenta(model: Any, optimizer: Any, *, is_full: bool, offload_to_cpu: bool) -> dict[str, Tensor]:
    which, config, _ = KINDS["full" if is_full else "DTensors"]
    of_optimizer = (FullOptimStateDictConfig if is_full else ShardedOptimStateDictConfig)(offload_to_cpu)
    with FullyShardedDataParallel.state_dict_type(model, which, config(), of_optimizer):
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    return {name: part_of(each["momentum_buffer"]) for name, each in state.items()}


@pytest.mark.parametrize("schedule", FEW)
@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, False])
@on_device(2)
def test_states_of_optimizers_have_the_values_of_the_cpu(
    ctx: RankContext, use_orig_params: bool, is_full: bool, schedule: str
) -> None:
    on_cpu = stepped(ctx, cpu_mesh(2), use_orig_params=use_orig_params)
    expected = momenta(*on_cpu, is_full=is_full, offload_to_cpu=True)
    assert expected
    device.schedule(**SCHEDULES[schedule])
    model, optimizer = stepped(ctx, init_device_mesh(device.DEVICE, (2,)), use_orig_params=use_orig_params)
    for offload in (False, True):
        check(momenta(model, optimizer, is_full=is_full, offload_to_cpu=offload), expected, offload)
        saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        for states in optimizer.state.values():
            states["momentum_buffer"].zero_()
        FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved, load_directly=True)
