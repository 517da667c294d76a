"""``FullyShardedDataParallel`` on the simulated accelerator: the bits of the same class on the CPU, where gloo carries
everything, whatever the order of streams; no wait of the host; state dicts on the device and offloaded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardedStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.tensor import DTensor

from docs.examples.log_weights import LogExtensions
from fsdp2.fsdp1 import FullyShardedDataParallel, set_fsdp_extensions
from tests.accelerator import device
from tests.accelerator.cases import FEW, SCHEDULES
from tests.accelerator.support import cpu_mesh, on_device
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext
from tests.harness.selection import long

WIDTH = 128
BF16 = MixedPrecision(torch.bfloat16, torch.float32)


def on_sim() -> DeviceMesh:
    return init_device_mesh(device.DEVICE, (2,))


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
    assert mesh.device_type == "cpu" or not syncs, syncs
    return [part_of(tensor).detach().cpu() for tensor in (*seen, *model.parameters())]


@pytest.mark.parametrize("schedule", [FEW[0], *long(*FEW[1:])])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, *long(ShardingStrategy.SHARD_GRAD_OP)])
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@on_device(2)
def test_trains_as_on_the_cpu(ctx: RankContext, precision, strategy, use_orig_params: bool, schedule: str) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params, "mixed_precision": precision}
    expected = trained(ctx, cpu_mesh(2), **options)
    device.schedule(**SCHEDULES[schedule])
    compare_values("trained", trained(ctx, on_sim(), **options), expected)


@pytest.mark.parametrize("use_orig_params", [False, *long(True)])
@on_device(2)
def test_shards_wait_on_the_host_between_two_phases(ctx: RankContext, use_orig_params: bool) -> None:
    """By the private names of torch's class, as clients of reinforcement learning do."""
    model, optimizer = stepped(ctx, on_sim(), use_orig_params=use_orig_params)
    other, expected = stepped(ctx, on_sim(), use_orig_params=use_orig_params)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(ctx.rank)).to(device.DEVICE)
    with torch.no_grad():
        model(x)
    for handle in model._all_handles:
        flat, memory = handle.flat_param, handle._unit.groups[0].shards.flats
        values = flat.detach().cpu()
        grad = flat.grad.cpu()
        handle.flat_param_to(torch.device("cpu"), non_blocking=True)
        assert handle.flat_param is flat
        assert flat.device.type == "cpu"
        assert torch.equal(flat, values)
        assert torch.equal(flat.grad, grad)
        assert all(each.untyped_storage().nbytes() == 0 for each in memory.values())
    with pytest.raises(ValueError, match="on cpu"):
        model(x)
    for handle in model._all_handles:
        handle.flat_param_to(torch.device(device.DEVICE))
        assert handle.flat_param.device.type == device.DEVICE
    for each, steps in ((model, optimizer), (other, expected)):
        steps.step()
        steps.zero_grad()
        each(x).square().mean().backward()
        steps.step()
    compare_values("trained", *([part_of(p).detach().cpu() for p in each.parameters()] for each in (model, other)))


# State dicts

KINDS: dict[str, tuple[StateDictType, type[fsdp.StateDictConfig], bool]] = {
    "full": (StateDictType.FULL_STATE_DICT, fsdp.FullStateDictConfig, True),
    "sharded tensors": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig, False),
    "DTensors": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig, True),
    "full, parameters offloaded": (StateDictType.FULL_STATE_DICT, fsdp.FullStateDictConfig, True),
    "local": (StateDictType.LOCAL_STATE_DICT, fsdp.LocalStateDictConfig, False),
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
    options = {"cpu_offload": fsdp.CPUOffload(True)} if "offloaded" in kind else {}
    model, other = (stepped(ctx, on_sim() if has_mesh else None, seed, **options)[0] for seed in range(2))
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
    of_optimizer = (fsdp.FullOptimStateDictConfig if is_full else fsdp.ShardedOptimStateDictConfig)(offload_to_cpu)
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
    model, optimizer = stepped(ctx, on_sim(), use_orig_params=use_orig_params)
    for offload in (False, True):
        check(momenta(model, optimizer, is_full=is_full, offload_to_cpu=offload), expected, offload)
        saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        for states in optimizer.state.values():
            states["momentum_buffer"].zero_()
        FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved, load_directly=True)


@on_device(2)
def test_sharded_values_of_an_extension_come_to_the_host_when_asked_for(ctx: RankContext) -> None:
    set_fsdp_extensions(LogExtensions())
    try:
        model = wrapped(on_sim())
    finally:
        set_fsdp_extensions(None)
    for offloads, where in ((True, "cpu"), (False, device.DEVICE)):
        config = ShardedStateDictConfig(offload_to_cpu=offloads)
        with model.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
            assert {value.to_local().device.type for value in model.state_dict().values()} == {where}
