"""``FullyShardedDataParallel`` on the simulated accelerator: the bits of the same class on the CPU, where gloo carries
everything, whatever the order of streams; and no wait of the host."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardedStateDictConfig, ShardingStrategy, StateDictType

from docs.examples.log_weights import LogExtensions
from fsdp2.fsdp1 import FullyShardedDataParallel, set_fsdp_extensions
from tests.accelerator import device
from tests.accelerator.cases import FEW, SCHEDULES
from tests.accelerator.support import cpu_mesh, on_device
from tests.harness.distributed import RankContext
from tests.harness.selection import long

WIDTH = 128
BF16 = MixedPrecision(torch.bfloat16, torch.float32)


def wrapped(mesh: DeviceMesh, **options: object) -> FullyShardedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    options = {"device_mesh": mesh, **options}
    model = nn.Sequential(*(FullyShardedDataParallel(layer, **options) for layer in layers), nn.Linear(WIDTH, 5))
    return FullyShardedDataParallel(model, **options)


def trained(ctx: RankContext, mesh: DeviceMesh, **options: object) -> list[Tensor]:
    """Losses, and this rank's part of the parameters after three steps of two micro-batches."""
    model = wrapped(mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(ctx.rank)
    batches = torch.randn(3, 2, 4, WIDTH, generator=generator).to(mesh.device_type)
    seen = []
    for micro_batches in batches:
        device.host_syncs.clear()
        for x in micro_batches:
            loss = model(x).square().mean()
            loss.backward()
            seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        syncs = dict(Counter(device.host_syncs))
    shards = [param.to_local() if hasattr(param, "to_local") else param for param in model.parameters()]
    assert mesh.device_type == "cpu" or not syncs, syncs
    return [tensor.detach().cpu() for tensor in (*seen, *shards)]


@pytest.mark.parametrize("schedule", [FEW[0], *long(*FEW[1:])])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, *long(ShardingStrategy.SHARD_GRAD_OP)])
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@on_device(2)
def test_trains_as_on_the_cpu(ctx: RankContext, precision, strategy, use_orig_params: bool, schedule: str) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params, "mixed_precision": precision}
    expected = trained(ctx, cpu_mesh(2), **options)
    device.schedule(**SCHEDULES[schedule])
    found = trained(ctx, init_device_mesh(device.DEVICE, (2,)), **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@on_device(2)
def test_sharded_values_of_an_extension_come_to_the_host_when_asked_for(ctx: RankContext) -> None:
    set_fsdp_extensions(LogExtensions())
    try:
        model = wrapped(init_device_mesh(device.DEVICE, (2,)))
    finally:
        set_fsdp_extensions(None)
    found = {}
    for offloads in (True, False):
        config = ShardedStateDictConfig(offload_to_cpu=offloads)
        with model.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
            found[offloads] = model.state_dict()
    assert {value.to_local().device.type for value in found[True].values()} == {"cpu"}
    assert {value.to_local().device.type for value in found[False].values()} == {device.DEVICE}
