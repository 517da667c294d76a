"""Offloading to the host trains as without it, and as torch does.

The copies are made for real, from CPU memory to CPU memory: ``harness.offload`` asks for them. What only a device can
show, overlap and pinned memory, is in ``tests/gpu/test_offload.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.harness.compare import compare, compare_values, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Branches, Buffers, ParityModel, PartlyUsed, Transformer, Uneven, freeze
from tests.harness.offload import offload_policy, shard_offloaded
from tests.harness.runtimes import Runtime, beyond_torch, oracle, subject
from tests.harness.selection import long
from tests.harness.training import (
    Case,
    Step,
    dtensor_adamw,
    frozen_by_turns,
    one_backward,
    sgd,
    shard_units_and_root,
    snapshot,
    train,
)
from tests.parity.test_mixed_precision import BF16, BFLOAT16_ARITHMETIC, FP32
from tests.parity.test_model_parallel import case as tensor_parallel_case, shard as shard_tensor_parallel

tied = functools.partial(Transformer, tied=True)


@pytest.mark.parametrize("model", [Uneven, tied, functools.partial(MLP, dim=512), *long(MLP, Buffers)])
@distributed(2, 4)
def test_training(ctx: RankContext, model) -> None:
    """With ``dim=512``, parameters travel directly: out of the copies on the device."""
    compare(Case(model, shard=shard_offloaded), ctx.mesh_1d())


@pytest.mark.parametrize("model", [MLP, Uneven])
@distributed(2)
def test_offloading_changes_no_bit(ctx: RankContext, model) -> None:
    offloaded, kept = (train(Case(model, shard), ctx.mesh_1d(), subject()) for shard in _WAYS)
    for actual, expected in zip(offloaded, kept, strict=True):
        compare_values("losses", actual.losses, expected.losses)
        compare_values("gradients", actual.gradients, expected.gradients)
        compare_values("parameters", actual.parameters, expected.parameters)


_WAYS = (shard_offloaded, shard_units_and_root)


@distributed(2)
def test_none_as_policy_offloads_nothing(ctx: RankContext) -> None:
    compare(Case(MLP, functools.partial(shard_units_and_root, offload_policy=None)), ctx.mesh_1d())


@distributed(2)
def test_one_rank_on_its_own(ctx: RankContext) -> None:
    compare(Case(Transformer, shard=shard_offloaded), ctx.mesh_of_one())


@pytest.mark.parametrize("model", [Uneven, *long(MLP)])
@distributed(4)
def test_hsdp(ctx: RankContext, model) -> None:
    compare(Case(model, shard=shard_offloaded, clip_norm=0.1), ctx.mesh_2d(2, 2))


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


@pytest.mark.parametrize("reduce_dtype", [FP32, None])
@distributed(2)
def test_mixed_precision(ctx: RankContext, reduce_dtype: torch.dtype | None) -> None:
    def shard(runtime: Runtime, model: ParityModel, mesh: Any) -> None:
        policy = runtime.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
        shard_offloaded(runtime, model, mesh, mp_policy=policy)

    case = Case(Uneven, shard, optimizer=sgd, reduce_dtype=reduce_dtype or BF16, unsharded=BFLOAT16_ARITHMETIC)
    compare(case, ctx.mesh_1d())


@pytest.mark.parametrize("clip_norm", [0.1, 1e6])
@distributed(2)
def test_clipped_gradients(ctx: RankContext, clip_norm: float) -> None:
    compare(Case(Transformer, shard=shard_offloaded, clip_norm=clip_norm), ctx.mesh_1d())


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@distributed(2)
def test_optimizers(ctx: RankContext, options: dict[str, bool]) -> None:
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, **options)
    compare(Case(MLP, shard=shard_offloaded, optimizer=optimizer), ctx.mesh_1d())


# Gradients that meet others


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
                step.note(f"gradients {micro}", [p.grad is not None and snapshot(p.grad) for p in model.parameters()])
        return losses

    compare(Case(MLP, shard=shard_offloaded, step=step, set_to_none=set_to_none), ctx.mesh_2d(2, 2))


@distributed(2)
def test_parameters_frozen_and_thawed_between_steps(ctx: RankContext) -> None:
    compare(Case(MLP, shard=shard_offloaded, step=frozen_by_turns, num_steps=4), ctx.mesh_1d())


@distributed(2)
def test_frozen_parameters_get_no_gradient(ctx: RankContext) -> None:
    def model() -> MLP:
        model = MLP()
        freeze(model, "blocks.1", "entry.bias")
        return model

    compare(Case(model, shard=shard_offloaded), ctx.mesh_1d())


@distributed(2)
def test_units_and_parameters_that_a_step_does_not_use(ctx: RankContext) -> None:
    def some_units(step: Step, model: Branches) -> list[Tensor]:
        loss = step.loss(model, active=[(0, 1, 2), (0, 2), (1,), (2, 0)][step.index])
        loss.backward()
        return [loss]

    def some_parameters(step: Step, model: PartlyUsed) -> list[Tensor]:
        loss = step.loss(model, use_side=step.index % 2 == 1)
        loss.backward()
        return [loss]

    compare(Case(Branches, shard=shard_offloaded, step=some_units, num_steps=4), ctx.mesh_1d())
    compare(Case(PartlyUsed, shard=shard_offloaded, step=some_parameters, num_steps=4), ctx.mesh_1d())


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


# State


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("passes", [0, 1])
@distributed(2)
def test_load_state_dict(ctx: RankContext, passes: int, assign: bool) -> None:
    def shard(runtime: Runtime, model: ParityModel, mesh: Any) -> None:
        shard_offloaded(runtime, model, mesh)
        for _ in range(passes):
            one_backward(Step(9, ctx.rank, runtime), model)
            model.zero_grad()
        generator = torch.Generator().manual_seed(77)
        state = {}
        for name, value in model.state_dict().items():
            assert isinstance(value, DTensor)
            full = torch.randn(value.shape, generator=generator) * 0.2
            state[name] = distribute_tensor(full, value.device_mesh, value.placements, src_data_rank=None).cpu()
        model.load_state_dict(state, assign=assign)

    compare(Case(Uneven, shard=shard, unsharded=None), ctx.mesh_1d())


@pytest.mark.parametrize("model", [MLP, Uneven, tied])
@distributed(2)
def test_meta_model_is_materialised_on_the_host(ctx: RankContext, model) -> None:
    def shard(runtime: Runtime, model: ParityModel, mesh: Any) -> None:
        source = {name: value.detach().clone() for name, value in model.named_parameters()}
        model.to("meta")
        if isinstance(model, Transformer):
            model.output.weight = model.embedding.weight  # nn.Module.to("meta") unties
        shard_offloaded(runtime, model, mesh)
        model.to_empty(device="cpu")
        for name, value in model.named_parameters():
            assert isinstance(value, DTensor)
            full = distribute_tensor(source[name], value.device_mesh, value.placements, src_data_rank=None)
            with torch.no_grad():
                value.copy_(full)

    compare(Case(model, shard=shard), ctx.mesh_1d())


@trains_alike(2, model=MLP, shard=shard_offloaded)
def test_model_to_dtype_between_steps(step: Step, model: ParityModel) -> list[Tensor]:
    model.to(torch.bfloat16).to(torch.float32)
    return one_backward(step, model)


def _trained(ctx: RankContext, shard: Callable[..., Any], seed: int, num_steps: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Transformer()
    shard(subject(), model, ctx.mesh_1d())
    optimizer = dtensor_adamw(model.parameters())
    _continue(ctx, model, optimizer, range(num_steps))
    return model, optimizer


def _continue(ctx: RankContext, model: Any, optimizer: Any, steps: range) -> list[Tensor]:
    losses = []
    for index in steps:
        losses += [loss.detach() for loss in one_backward(Step(index, ctx.rank, subject()), model)]
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(("saver", "loader"), [_WAYS, _WAYS[::-1]])
@distributed(2)
def test_distributed_checkpoint_travels_between_offloaded_and_not(
    ctx: RankContext, saver: Callable[..., Any], loader: Callable[..., Any], tmp_path: Path
) -> None:
    model, optimizer = _trained(ctx, saver, seed=0, num_steps=2)
    dcp.save(dict(zip("mo", get_state_dict(model, optimizer), strict=True)), checkpoint_id=tmp_path / "checkpoint")
    other, other_optimizer = _trained(ctx, loader, seed=1, num_steps=1)
    states = dict(zip("mo", get_state_dict(other, other_optimizer), strict=True))
    dcp.load(states, checkpoint_id=tmp_path / "checkpoint")
    set_state_dict(other, other_optimizer, model_state_dict=states["m"], optim_state_dict=states["o"])
    expected = _continue(ctx, model, optimizer, range(2, 5))
    compare_values("losses", _continue(ctx, other, other_optimizer, range(2, 5)), expected)


@distributed(2)
def test_full_state_dict_is_that_of_a_model_that_is_not_offloaded(ctx: RankContext) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    offloaded, kept = (get_state_dict(*_trained(ctx, shard, 0, 2), options=options) for shard in _WAYS)
    compare_values("state", offloaded, kept)


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
