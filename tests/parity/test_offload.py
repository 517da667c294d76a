"""Offloading to the host trains as without it, and as torch does.

The copies are made for real, from CPU memory to CPU memory: ``harness.offload`` asks for them. What only a device can
show, overlap and pinned memory, is in ``tests/gpu/test_offload.py``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.harness.compare import Cases, compare, each_compared, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, ParityModel, Transformer, Uneven
from tests.harness.offload import offload_policy, shard_offloaded
from tests.harness.runtimes import Runtime, beyond_torch, oracle, subject
from tests.harness.training import BY_TURNS, Case, Step, one_backward, shard_units_and_root, sharded

tied = partial(Transformer, tied=True)
Offloaded = partial(Case, shard=shard_offloaded)


@each_compared(2, 4, ci=("direct",))
def test_training() -> Cases:
    """With ``dim=512``, parameters travel directly: out of the copies on the device."""
    return {"tied": Offloaded(tied), "direct": Offloaded(partial(MLP, dim=512))}


def _cast_and_back(step: Step, model: ParityModel) -> list[Tensor]:
    model.to(torch.bfloat16).to(torch.float32)
    return one_backward(step, model)


@each_compared(2, 4)
def test_trains_offloaded_as_torchs() -> Cases:
    """Programs have offloading with precisions, optimizers, clipping, and with what is frozen or not used."""
    return {
        "None as policy": Case(MLP, sharded(offload_policy=None)),
        "one rank": (RankContext.mesh_of_one, Offloaded(Transformer)),
        "other units": BY_TURNS["other units"](shard_offloaded),
        "cast between steps": Offloaded(MLP, step=_cast_and_back),
    }


@each_compared(2)
def test_parameters_frozen_and_thawed_between_steps() -> Cases:
    return {"frozen by turns": BY_TURNS["frozen by turns"](shard_offloaded)}


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


# On a CPU mesh, as users ask for it


def _by_policy(runtime: Runtime, model: ParityModel, mesh: Any) -> None:
    shard_units_and_root(runtime, model, mesh, offload_policy=runtime.CPUOffloadPolicy(pin_memory=False))


@each_compared(2, ci=("Transformer",))
def test_policy_on_a_cpu_mesh_trains_as_torchs() -> Cases:
    return {model.__name__: Case(model, _by_policy) for model in (Uneven, Transformer)}


@beyond_torch("it pins memory on every mesh, and raises where there is no accelerator")
@distributed(2)
def test_default_policy_on_a_cpu_mesh_pins_nothing(ctx: RankContext) -> None:
    def shard(runtime: Runtime, model: ParityModel, mesh: Any) -> None:
        policy = runtime.CPUOffloadPolicy() if runtime is subject() else offload_policy(oracle())
        shard_units_and_root(runtime, model, mesh, offload_policy=policy)
        assert not any(p.to_local().is_pinned() for p in model.parameters() if isinstance(p, DTensor))

    compare(Case(MLP, shard=shard), ctx.mesh_1d())
