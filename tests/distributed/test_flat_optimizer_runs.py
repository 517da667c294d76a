"""Which tensors a flattened optimizer steps: a few long ones, on the memory of parameters and states."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.group.shards import flat_buffers
from tests.distributed.flat_optimizer_support import seen_steps, sharded
from tests.distributed.support import Stack, seeded, shard, step as stack_step
from tests.harness.comms import direct_from
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import DIM, MLP, Uneven


@distributed(2)
def test_a_group_is_stepped_as_one_tensor(ctx: RankContext) -> None:
    model = shard(ctx, seeded(Stack))
    optimizer = seen_steps(model)
    stack_step(model)
    optimizer.step()
    block = (32 * 32 + 32) // 2
    assert sorted(optimizer.numels) == [block, block, block, 2 * block]
    states = [optimizer.state[param]["sum"] for param in model.blocks[0].parameters()]
    for param, entry in optimizer.state.items():
        assert torch.equal(entry["sum"].to_local(), param.grad.to_local())
    assert [type(state) for state in states] == [DTensor, DTensor]
    assert states[0].to_local().data_ptr() + states[0].to_local().nbytes == states[1].to_local().data_ptr()


@distributed(2)
def test_gradients_in_new_memory_are_stepped_where_they_are(ctx: RankContext) -> None:
    """Somebody holds them, so they are other tensors in every step."""
    model = shard(ctx, seeded(Stack))
    optimizer = seen_steps(model)
    held: list[DTensor] = []
    memory: list[list[int]] = []
    for _ in range(3):
        optimizer.zero_grad()
        stack_step(model)
        held += [param.grad for param in model.parameters()]
        optimizer.step()
        mine = {param.grad.to_local().data_ptr() for param in model.parameters()}
        assert len(optimizer.numels) == 4
        assert set(optimizer.grad_addresses) <= mine  # not copied
        memory.append([entry["sum"].to_local().data_ptr() for entry in optimizer.state.values()])
    assert len({grad.to_local().data_ptr() for grad in held}) == len(held)
    assert memory[0] == memory[1] == memory[2]


@distributed(2)
def test_runs_follow_the_gradients_there_are(ctx: RankContext) -> None:
    """One run per group; parts of it around a missing gradient; one again when it is there. States are not copied."""
    model = sharded(ctx, MLP, lambda runtime, model, mesh: runtime.fully_shard(model, mesh=mesh))
    optimizer = seen_steps(model)
    parameters = list(model.parameters())
    whole = sum(param.to_local().numel() for param in parameters)
    missing = model.blocks[1].up.weight
    sums = {param: torch.zeros_like(param) for param in parameters}

    def numels_of_step(change: Callable[[], object] = lambda: None) -> list[int]:
        model(torch.ones(2, DIM)).sum().backward()
        change()
        optimizer.step()
        for param in parameters:
            if param.grad is not None:
                sums[param] += param.grad
            assert torch.equal(optimizer.state[param]["sum"].to_local(), sums[param].to_local())
        optimizer.zero_grad()
        return optimizer.numels

    assert numels_of_step() == [whole]
    memory = [optimizer.state[param]["sum"].to_local().data_ptr() for param in parameters]
    parts = numels_of_step(lambda: setattr(missing, "grad", None))
    assert (len(parts), sum(parts)) == (2, whole - missing.to_local().numel())
    assert numels_of_step() == [whole]
    assert numels_of_step(lambda: setattr(missing, "grad", missing.grad * 2)) == [whole]
    assert [optimizer.state[param]["sum"].to_local().data_ptr() for param in parameters] == memory
    optimizer.state.clear()
    for value in sums.values():
        value.zero_()
    assert numels_of_step() == [whole]


@distributed(2)
def test_large_gradients_that_lie_apart_are_not_copied(ctx: RankContext) -> None:
    with direct_from(512 * 1024):  # the biases lie between the weights
        model = fsdp2.fully_shard(
            seeded(lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))), mesh=ctx.mesh_1d()
        )
    optimizer = seen_steps(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert sorted(optimizer.numels) == 3 * [128] + 3 * [256 * 128]


@distributed(4)
def test_padding_between_shards_stays_zero(ctx: RankContext) -> None:
    before = {id(flat) for flat in flat_buffers()}
    with direct_from(16):
        model = sharded(ctx, Uneven)
        optimizer = seen_steps(model)
        for _ in range(2):
            model.loss(model(torch.ones(2, 5)), ()).backward()
            optimizer.step()
    flats = [flat for flat in flat_buffers() if id(flat) not in before]
    assert sum(flat.numel() for flat in flats) > sum(param.to_local().numel() for param in model.parameters())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert not any(flat.any() for flat in flats)
