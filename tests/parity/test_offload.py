"""Offloading to the host trains as without it, and as torch does.

The copies are made for real, from CPU memory to CPU memory: ``harness.offload`` asks for them. What only a device can
show, overlap and pinned memory, is in ``tests/gpu/test_offload.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor import DTensor

from tests.harness.compare import Cases, compare, compare_values, each_compared, hsdp, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Branches, Buffers, ParityModel, PartlyUsed, Transformer, Uneven, frozen
from tests.harness.offload import offload_policy, shard_offloaded
from tests.harness.runtimes import Runtime, beyond_torch, oracle, subject
from tests.harness.selection import long
from tests.harness.training import (
    Case,
    Step,
    dtensor_adamw,
    frozen_by_turns,
    gradients_of,
    one_backward,
    other_parameters_by_turns,
    other_units_by_turns,
    sgd,
    shard_units_and_root,
    sharded,
)
from tests.parity.setups import Setup, train_steps
from tests.parity.test_mixed_precision import BF16, BFLOAT16_ARITHMETIC, FP32
from tests.parity.test_model_parallel import case as tensor_parallel_case, shard as shard_tensor_parallel

tied = functools.partial(Transformer, tied=True)
Offloaded = functools.partial(Case, shard=shard_offloaded)


@pytest.mark.parametrize("model", [Uneven, tied, functools.partial(MLP, dim=512), *long(MLP, Buffers)])
@distributed(2, 4)
def test_training(ctx: RankContext, model) -> None:
    """With ``dim=512``, parameters travel directly: out of the copies on the device."""
    compare(Case(model, shard=shard_offloaded), ctx.mesh_1d())


def _cast_and_back(step: Step, model: ParityModel) -> list[Tensor]:
    model.to(torch.bfloat16).to(torch.float32)
    return one_backward(step, model)


CI = ("reduced in bf16", "clipped to 1e6", "not foreach", "fused")


@each_compared(2, 4, ci=CI)
def test_trains_offloaded_as_torchs() -> Cases:
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
    mixed = {"param_dtype": BF16, "reduce_dtype": FP32}
    low = functools.partial(Case, Uneven, optimizer=sgd, unsharded=BFLOAT16_ARITHMETIC)
    return {
        "None as policy": Case(MLP, sharded(offload_policy=None)),
        "one rank": (RankContext.mesh_of_one, Offloaded(Transformer)),
        "reduced in fp32": low(functools.partial(shard_offloaded, policy=mixed), reduce_dtype=FP32),
        "reduced in bf16": low(functools.partial(shard_offloaded, policy={"param_dtype": BF16}), reduce_dtype=BF16),
        "clipped to 0.1": Offloaded(Transformer, clip_norm=0.1),
        "clipped to 1e6": Offloaded(Transformer, clip_norm=1e6),
        "foreach": Offloaded(MLP, optimizer=functools.partial(adamw, foreach=True)),
        "not foreach": Offloaded(MLP, optimizer=functools.partial(adamw, foreach=False)),
        "fused": Offloaded(MLP, optimizer=functools.partial(adamw, fused=True)),
        "frozen": Offloaded(frozen(MLP, "blocks.1", "entry.bias")),
        "unused units": Offloaded(Branches, step=other_units_by_turns, num_steps=4),
        "unused parameters": Offloaded(PartlyUsed, step=other_parameters_by_turns, num_steps=4),
        "cast between steps": Offloaded(MLP, step=_cast_and_back),
    }


@pytest.mark.ci
@each_compared(4, mesh=hsdp, long=("MLP",))
def test_hsdp() -> Cases:
    return {model.__name__: Offloaded(model, clip_norm=0.1) for model in (Uneven, MLP)}


@pytest.mark.ci
@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, *long({"tp": 2, "dp": 2})], ids=str)
@distributed(4)
def test_tensor_parallel(ctx: RankContext, sizes: dict[str, int]) -> None:
    def shard(runtime: Runtime, model: MLP, mesh: Any) -> None:
        shard_tensor_parallel(runtime, model, mesh, offload_policy=offload_policy(runtime))

    mesh = ctx.mesh(**sizes)
    compare(tensor_parallel_case(mesh, shard=shard), mesh)


@pytest.mark.parametrize("reshard", [2, *long(True, False)])
@pytest.mark.parametrize("model", [Uneven, *long(MLP)])
@distributed(4)
def test_reshard_after_forward(ctx: RankContext, model, reshard: bool | int) -> None:
    shard = functools.partial(shard_offloaded, reshard_after_forward=reshard)
    compare(Case(model, shard=shard), ctx.mesh_1d())


# Gradients that meet others


@pytest.mark.ci
@pytest.mark.parametrize("sync", ["last", *long("always", "partial")])
@pytest.mark.parametrize("set_to_none", [True, *long(False)])
@distributed(4)
def test_accumulation(ctx: RankContext, sync: str, set_to_none: bool) -> None:
    """Reduced gradients are added on the host; unreduced and partial ones stay where compute left them."""

    def step(step: Step, model: ParityModel) -> list[Tensor]:
        losses = []
        for micro in range(3):
            step.control(model).set_requires_gradient_sync(sync != "last" or micro == 2)
            step.control(model).set_requires_all_reduce(sync == "always" or micro == 2)
            losses.append(step.loss(model, micro))
            losses[-1].backward()
            if step.runtime is not None:
                step.note(f"gradients {micro}", gradients_of(model))
        return losses

    compare(Case(MLP, shard=shard_offloaded, step=step, set_to_none=set_to_none), ctx.mesh_2d(2, 2))


@distributed(2)
def test_parameters_frozen_and_thawed_between_steps(ctx: RankContext) -> None:
    compare(Case(MLP, shard=shard_offloaded, step=frozen_by_turns, num_steps=4), ctx.mesh_1d())


@trains_alike(2, model=MLP, shard=shard_offloaded, unsharded=None)
def test_optimizer_in_hooks_on_gradients(step: Step, model: ParityModel) -> list[Tensor]:
    """Hooks see values that have arrived, and what they write to the shards is gathered next."""

    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        step.note(f"seen {len(step.notes)}", parameter.grad.to_local())
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in model.parameters()]
    losses = []
    for micro in range(2):
        losses.append(step.loss(model, micro))
        losses[-1].backward()
    step.notes = {"seen": sorted((value.sum().item(), value) for value in step.notes.values())}
    for handle in handles:
        handle.remove()
    return losses


@distributed(2)
def test_full_state_dict_is_that_of_a_model_that_is_not_offloaded(ctx: RankContext) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = []
    for shard in (shard_offloaded, shard_units_and_root):
        model = Setup(Transformer, shard=shard).sharded(subject(), ctx)
        optimizer = dtensor_adamw(model.parameters())
        train_steps(ctx, model, optimizer, range(2))
        states.append(get_state_dict(model, optimizer, options=options))
    compare_values("state", *states)


# On a CPU mesh, as users ask for it


@pytest.mark.parametrize("model", [Uneven, Transformer])
@distributed(2)
def test_policy_on_a_cpu_mesh_trains_as_torchs(ctx: RankContext, model) -> None:
    def shard(runtime: Runtime, model: ParityModel, mesh: Any) -> None:
        shard_units_and_root(runtime, model, mesh, offload_policy=runtime.CPUOffloadPolicy(pin_memory=False))

    compare(Case(model, shard=shard), ctx.mesh_1d())


@beyond_torch("it pins memory on every mesh, and raises where there is no accelerator")
@distributed(2)
def test_default_policy_on_a_cpu_mesh_pins_nothing(ctx: RankContext) -> None:
    def shard(runtime: Runtime, model: ParityModel, mesh: Any) -> None:
        policy = runtime.CPUOffloadPolicy() if runtime is subject() else offload_policy(oracle())
        shard_units_and_root(runtime, model, mesh, offload_policy=policy)
        assert not any(p.to_local().is_pinned() for p in model.parameters() if isinstance(p, DTensor))

    compare(Case(MLP, shard=shard), ctx.mesh_1d())
