"""``copy.deepcopy`` of sharded models: the copy trains like the original and has nothing of it but the values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp2.core.comm.offload import StagedOffloadPolicy
from fsdp2.report import trace
from fsdp2.tensors import BFloat16AllGatherTensor, wrap_parameters
from tests.distributed.changes import whole
from tests.distributed.support import Stack, batch, seeded, shard, shard_each, shard_units, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of
from tests.harness.models import MLP, Transformer
from tests.harness.selection import long
from tests.parity.setups import train_steps


def _wire(ctx: RankContext) -> Any:
    model = Transformer()
    wrap_parameters(model, BFloat16AllGatherTensor)
    return shard_units(model, mesh=ctx.mesh_1d())


def _several_modules(ctx: RankContext) -> Any:
    """A unit of two modules, one of which is tied; lists of what to prefetch."""
    model = Transformer(tied=True)
    shard_each(*model.blocks, [model.embedding, model.norm, model.output], model, mesh=ctx.mesh_1d())
    model.embedding.set_modules_to_forward_prefetch([model.blocks[1], model.blocks[0]])
    return model


def _without_division(ctx: RankContext) -> Any:
    model = shard_units(MLP(), mesh=ctx.mesh_1d())
    for unit in (*model.blocks, model):
        unit.set_gradient_divide_factor(1.0)
    return model


SETUPS: dict[str, Callable[[RankContext], Any]] = {
    "bf16, resting": lambda ctx: shard_units(
        MLP(),
        mesh=ctx.mesh_1d(),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        reshard_after_forward=2,
    ),
    "HSDP": lambda ctx: shard_units(MLP(), mesh=ctx.mesh_2d(2, ctx.world_size // 2)),
    "several modules": _several_modules,
    "options": _without_division,
    "wire format": _wire,
    "offloaded": lambda ctx: shard_units(MLP(), mesh=ctx.mesh_1d(), offload_policy=StagedOffloadPolicy()),
}
SHORT = ("bf16, resting", "several modules", "options", "wire format")


def _values(model: nn.Module) -> list[Tensor]:
    return list(whole(model).values())


@pytest.mark.parametrize("setup", [*SHORT, *long(*[setup for setup in SETUPS if setup not in SHORT])])
@distributed(2, 4)
def test_copy_and_original_train_alike_and_apart(ctx: RankContext, setup: str) -> None:
    model = seeded(lambda: SETUPS[setup](ctx))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_steps(ctx, model, optimizer, [0])
    copied, optimizer_of_copy = copy.deepcopy((model, optimizer))
    assert type(copied) is type(model)
    before, start = _values(model), [p.to_local().data_ptr() for p in model.parameters()]
    assert all(map(torch.equal, _values(copied), before))
    losses = train_steps(ctx, copied, optimizer_of_copy, (1, 2))
    assert all(map(torch.equal, _values(model), before))
    assert losses == train_steps(ctx, model, optimizer, (1, 2))
    assert all(map(torch.equal, _values(copied), _values(model)))
    assert [p.to_local().data_ptr() for p in model.parameters()] == start
    assert not {address for address in start if address} & {p.to_local().data_ptr() for p in copied.parameters()}


class _Hooked(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_forward_hook(_Hooked.count)

    def count(self, *_: Any) -> None:
        self.calls += 1

    def first(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.entry(x))


@distributed(2)
def test_hooks_methods_and_buffers_of_the_copy_are_its_own(ctx: RankContext) -> None:
    model = shard(ctx, seeded(_Hooked))
    fsdp2.register_fsdp_forward_method(model, "first")
    copied = copy.deepcopy(model)
    with trace.record(model) as of_original, trace.record(copied) as of_copy:
        step(copied)
        assert (copied.calls.item(), model.calls.item()) == (1, 0)
        copied.first(batch())
        copied.state_dict()
        assert of_original.entries == []
        seen = len(of_copy.entries)
        model.first(batch())
        step(model)
        assert len(of_copy.entries) == seen
    again = copy.deepcopy(copied)  # unsharded after the method's forward, and has trained
    assert torch.equal(step(again), step(seeded(Stack)))
    del model, copied
    assert torch.equal(step(again), step(seeded(Stack)))


@distributed(2)
def test_an_optimizer_that_is_copied_ahead_of_its_model_steps_the_copy(ctx: RankContext) -> None:
    model = sharded(ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model)
    optimizer.step()
    model.zero_grad()  # as in torch, deepcopy refuses gradients that share memory, and an optimizer copies them
    optimizer_of_copy, copied = copy.deepcopy((optimizer, model))
    for each, stepped in ((model, optimizer), (copied, optimizer_of_copy)):
        step(each, seed=1)
        stepped.step()
    assert all(map(torch.equal, _values(copied), _values(model)))


class _Singular(nn.Linear):
    def __deepcopy__(self, memo: Any) -> nn.Module:
        raise NotImplementedError


@distributed(2)
def test_a_module_with_its_own_way_of_copying_is_copied_by_its_attributes(ctx: RankContext) -> None:
    """Parametrized modules have one, and refuse to tell their state."""
    model = seeded(lambda: nn.Sequential(weight_norm(nn.Linear(32, 32)), _Singular(32, 32)))
    shard_each(*model, model, mesh=ctx.mesh_1d())
    step(model)
    copied = copy.deepcopy(model)
    assert torch.equal(step(copied), step(model))
    assert not {id(parameter) for parameter in model.parameters()} & {id(p) for p in copied.parameters()}


@distributed(2)
def test_copy_of_one_unit_alone(ctx: RankContext) -> None:
    model = sharded(ctx)
    expected = step(model)
    block = copy.deepcopy(model.blocks[1])
    assert isinstance(block, fsdp2.FSDPModule)
    torch.testing.assert_close(block(batch()), seeded(Stack).blocks[1](batch()))
    with torch.no_grad():
        block.linear.weight.zero_()
    assert torch.equal(step(model), expected)


@golden_on_ranks()
def test_copy_in_the_middle_of_a_pass_is_refused(ctx: RankContext) -> str:
    model, found = sharded(ctx), []
    handle = model.blocks[1].register_forward_hook(lambda *_: found.append(error_of(lambda: copy.deepcopy(model))))
    expected = step(model)
    handle.remove()
    with fsdp2.unsharded(model):
        found.append(error_of(lambda: copy.deepcopy(model)).partition("Last")[0])
    assert torch.equal(step(copy.deepcopy(model)), expected)
    return "\n".join(found)


@distributed(2)
def test_averaged_model_of_torch_averages_the_shards(ctx: RankContext) -> None:
    model = sharded(ctx, offload_policy=CPUOffloadPolicy())
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected: list[Tensor] = []
    for seed in range(3):
        step(model, seed)
        optimizer.step()
        averaged.update_parameters(model)
        new = _values(model)
        expected = [torch.lerp(after, before, 0.75) for before, after in zip(expected or new, new, strict=True)]
    torch.testing.assert_close(_values(averaged), expected)
    with torch.no_grad():
        assert averaged(batch()).shape == batch().shape
