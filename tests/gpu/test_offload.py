"""On CUDA, offloaded: what lives on the host, in pinned memory; copies beside compute that change no value.

Steps are compared bit for bit with the same model on the device. The optimizers run on different devices, so their
arithmetic is exact: SGD with a power of two as learning rate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.tensors import BFloat16AllGatherTensor, Int8AllGatherTensor
from tests.gpu.support import BF16, Stack, batch, block_nbytes, on_gpus, run_without_syncs, sharded, traced
from tests.harness.distributed import RankContext

OFFLOADED = fsdp2.CPUOffloadPolicy()
POLICIES = {"fp32": {}, "bf16": {"mp_policy": BF16}}
MiB = 1 << 20


def _offloaded(ctx: RankContext, num_blocks: int = 4, **kwargs: Any) -> Stack:
    return sharded(ctx, num_blocks, offload_policy=OFFLOADED, **kwargs)


def _backward(model: nn.Module) -> Tensor:
    loss = model(batch()).float().square().mean()
    loss.backward()
    return loss.detach()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=2.0**-6)


def _locals(tensors: Any) -> list[Tensor]:
    return [tensor.to_local() for tensor in tensors if isinstance(tensor, DTensor)]


def _gradients(model: nn.Module) -> list[Tensor]:
    return _locals(parameter.grad for parameter in model.parameters())


def _assert_equal(offloaded: list[Tensor], kept: list[Tensor]) -> None:
    assert len(offloaded) == len(kept) > 0
    for actual, expected in zip(offloaded, kept, strict=True):
        assert actual.device.type == "cpu"
        assert torch.equal(actual, expected.cpu())


@pytest.mark.parametrize("pin_memory", [True, False])
@on_gpus
def test_shards_gradients_and_states_live_on_the_host_alone(ctx: RankContext, pin_memory: bool) -> None:
    before = torch.cuda.memory_allocated()
    model = sharded(ctx, 4, offload_policy=fsdp2.CPUOffloadPolicy(pin_memory=pin_memory))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        _backward(model)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < MiB
        for tensor in (*_locals(model.parameters()), *_gradients(model)):
            assert tensor.device.type == "cpu"
            assert tensor.is_pinned() is pin_memory
        optimizer.step()
        optimizer.zero_grad()
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert {tensor.device.type for tensor in _locals(states)} == {"cpu"}


@pytest.mark.parametrize("assign", [True, False])
@on_gpus
def test_loaded_shards_are_gathered_and_pinned(ctx: RankContext, assign: bool) -> None:
    source, model, kept = _offloaded(ctx), _offloaded(ctx), sharded(ctx, 4)
    with torch.no_grad():
        for parameter in (*source.parameters(), *kept.parameters()):
            parameter.mul_(0.5)
    _backward(model)
    state = {name: value.detach().clone() for name, value in source.state_dict().items()}
    model.zero_grad()
    model.load_state_dict(state, assign=assign)
    assert torch.equal(_backward(model), _backward(kept))
    assert all(local.is_pinned() for local in _locals(model.parameters()))


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("policy", list(POLICIES))
@on_gpus
def test_training_is_that_without_offloading(ctx: RankContext, policy: str, reshard: bool) -> None:
    """Without a pause between backward, optimizer and the next forward: a copy that nobody waits for would show."""
    options = {**POLICIES[policy], "reshard_after_forward": reshard}
    offloaded, kept = _offloaded(ctx, 8, **options), sharded(ctx, 8, **options)
    for model in (offloaded, kept):
        optimizer = _sgd(model)
        for _ in range(10):
            _backward(model)
            optimizer.step()
            optimizer.zero_grad()
        _backward(model)
    _assert_equal(_gradients(offloaded), _gradients(kept))
    _assert_equal(_locals(offloaded.parameters()), _locals(kept.parameters()))


def _evaluate(model: Stack, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def _evaluate_with_graph(model: Stack, x: Tensor) -> Tensor:
    return model(x).detach()


def _by_hand(model: Stack, x: Tensor) -> Tensor:
    for block in model:
        block.unshard()
        x = nn.functional.linear(x, block.up.weight.detach())
        block.reshard()
    return x


@pytest.mark.parametrize("run", [_evaluate, _evaluate_with_graph, _by_hand])
@on_gpus
def test_shards_may_be_written_when_a_pass_returns(ctx: RankContext, run: Callable[[Stack, Tensor], Tensor]) -> None:
    """The device has not computed yet, but the CPU has waited for the copies from the shards."""
    dim = 2048
    model, x, busy = _offloaded(ctx, 8, dim=dim), batch(dim), torch.randn(4096, 4096, device="cuda")
    shards = _locals(model.parameters())
    values = [shard.clone() for shard in shards]
    for _ in range(3):
        for _ in range(20):
            busy @ busy
        output = run(model, x)
        for shard in shards:
            shard.detach().fill_(math.nan)
        assert output.isfinite().all()
        for shard, value in zip(shards, values, strict=True):
            shard.detach().copy_(value)


@pytest.mark.parametrize("make", [BFloat16AllGatherTensor, Int8AllGatherTensor])
@on_gpus
def test_subclasses_compute_as_without_offloading(ctx: RankContext, make: Any) -> None:
    models = [sharded(ctx, 4, make=make, **options) for options in ({"offload_policy": OFFLOADED}, {})]
    for model in models:
        for _ in range(2):
            model.zero_grad()
            _backward(model)
    _assert_equal(*map(_gradients, models))
    shards = _locals(models[0].parameters())
    assert all(type(local) is make and local.device.type == "cpu" and local.is_pinned() for local in shards)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, fsdp2.clip_grad_norm_])
@on_gpus
def test_optimizers_and_clipping_work_on_the_host(ctx: RankContext, clip: Any, options: dict[str, bool]) -> None:
    """The norm is reduced over the ranks of a CUDA mesh, from the host through gloo (torch) or on the device."""
    offloaded, kept = _offloaded(ctx), sharded(ctx, 4)
    norms = []
    for model in (offloaded, kept):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, **options)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            _backward(model)
            norm = clip(model.parameters(), 0.1)
            norms.append(norm.full_tensor().cpu() if isinstance(norm, DTensor) else norm.cpu())
            optimizer.step()
    torch.testing.assert_close(norms[:3], norms[3:], rtol=1e-4, atol=1e-6)
    pairs = zip(_locals(offloaded.parameters()), _locals(kept.parameters()), strict=True)
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected.cpu(), rtol=1e-4, atol=1e-5)


@on_gpus
def test_each_gather_and_each_reduction_makes_one_copy_beside_compute(ctx: RankContext, tmp_path: Path) -> None:
    """No single copy makes the CPU wait. It waits for events, at the end of a pass."""
    num_blocks, x = 4, batch()
    model = _offloaded(ctx, num_blocks, mp_policy=BF16)

    def step() -> None:
        model.zero_grad()
        model(x).float().square().mean().backward()

    run_without_syncs(step)
    events = traced(step, tmp_path / f"trace-{ctx.rank}.json")
    copies = [event for event in events if event["cat"] == "gpu_memcpy" and event["args"]["bytes"] >= MiB]
    up = [event["args"] for event in copies if "HtoD" in event["name"]]
    down = [event["args"] for event in copies if "DtoH" in event["name"]]
    shard_nbytes = block_nbytes(itemsize=4) // ctx.world_size
    assert [args["bytes"] for args in up] == [shard_nbytes] * (2 * num_blocks)  # forward and backward gather
    assert [args["bytes"] for args in down] == [shard_nbytes] * num_blocks
    kernels = [event for event in events if event["cat"] == "kernel"]
    compute = {event["args"]["stream"] for event in kernels if re.search("gemm|cutlass|tanh|nvjet", event["name"])}
    assert compute
    assert not compute & {args["stream"] for args in (*up, *down)}
