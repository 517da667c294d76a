"""``joined``: ranks with different numbers of batches train as one process does on the batches that there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import fully_shard
from tests.distributed.support import seeded
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of, one_line

NUM_BATCHES = {2: (2, 5), 4: (3, 5, 1, 0)}
WIDTH = 8
EXAMPLE = torch.zeros(4, WIDTH)


def batches_of(rank: int, world_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(NUM_BATCHES[world_size][rank])]


def network() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH), nn.Tanh()))


def sharded(mesh: DeviceMesh) -> nn.Sequential:
    model = network()
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return model


def meshes(world_size: int) -> Iterator[DeviceMesh]:
    yield init_device_mesh("cpu", (world_size,))
    if world_size == 4:
        yield init_device_mesh("cpu", (2, 2))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch.to(next(model.parameters()).device)).square().mean()


def plain_steps(world_size: int, divide: str, every: int) -> nn.Sequential:
    """The unsharded model, trained on the batches of all ranks; a step ``every`` so many iterations and at the end."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batches = [batches_of(rank, world_size) for rank in range(world_size)]
    longest = max(map(len, batches))
    for iteration in range(longest):
        active = [each[iteration] for each in batches if iteration < len(each)]
        for batch in active:
            (loss_of(model, batch) / (len(active) if divide == "active" else world_size)).backward()
        if (iteration + 1) % every == 0 or iteration + 1 == longest:
            optimizer.step()
            optimizer.zero_grad()
    return model


def assert_trained_alike(model: nn.Module, plain: nn.Module) -> None:
    """But for rounding: the sum over ranks is scaled before it is divided, and Adam divides by small numbers."""
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor().cpu(), expected.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("divide", ["active", "all"])
@pytest.mark.parametrize("has_length", [True, False])
@distributed(2, 4)
def test_ranks_with_other_numbers_of_batches_train_as_one_process(
    ctx: RankContext, has_length: bool, divide: Any, every: int
) -> None:
    plain = plain_steps(ctx.world_size, divide, every)
    mine = batches_of(ctx.rank, ctx.world_size)
    longest = max(NUM_BATCHES[ctx.world_size])
    for mesh in meshes(ctx.world_size):
        model = sharded(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        reals = []
        loop = fsdp2.joined(mine if has_length else iter(mine), model, divide=divide, example=EXAMPLE)
        for number, (batch, is_real) in enumerate(loop):
            ends_step = (number + 1) % every == 0 or number + 1 == longest
            model.set_requires_gradient_sync(ends_step)
            loss = loss_of(model, batch)
            (loss if is_real else loss * float("nan")).backward()  # whatever the loop does with such a batch
            reals.append(is_real)
            if ends_step:
                optimizer.step()
                optimizer.zero_grad()
        assert reals == [number < len(mine) for number in range(longest)]
        assert_trained_alike(model, plain)


@distributed(4)
def test_ranks_that_share_a_batch_by_tensor_parallelism_end_together(ctx: RankContext) -> None:
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = plain_steps(2, "active", every=1)
    model = parallelize_module(network(), world["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=world["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for batch, _ in fsdp2.joined(iter(batches_of(world["dp"].get_local_rank(), 2)), model):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike(model, plain)


@distributed(2, 4)
def test_an_evaluation_runs_every_batch_once(ctx: RankContext) -> None:
    model, mine = sharded(init_device_mesh("cpu", (ctx.world_size,))), batches_of(ctx.rank, ctx.world_size)
    with torch.no_grad():
        found = [(loss_of(model, batch), is_real) for batch, is_real in fsdp2.joined(mine, model, example=EXAMPLE)]
        losses = [loss for loss, is_real in found if is_real]
        plain = network()
        assert torch.equal(torch.tensor(losses), torch.tensor([loss_of(plain, batch) for batch in mine]))


@distributed(2)
def test_a_loop_that_all_ranks_leave_early_leaves_nothing_behind(ctx: RankContext) -> None:
    model = sharded(init_device_mesh("cpu", (2,)))
    for _ in range(2):
        for batch, _ in fsdp2.joined(iter(batches_of(ctx.rank, 2)), model):
            loss_of(model, batch).backward()
            break
    model.zero_grad()
    loss_of(model, EXAMPLE + 1).backward()
    plain = network()
    loss_of(plain, EXAMPLE + 1).backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad.full_tensor().cpu(), expected.grad.cpu())


@pytest.mark.parametrize(("has_length", "messages"), [(True, 1), (False, 7)])
@distributed(2)
def test_the_messages_of_a_loop_are_counted(ctx: RankContext, has_length: bool, messages: int) -> None:
    model, mine = sharded(init_device_mesh("cpu", (2,))), batches_of(ctx.rank, 2)
    with CommDebugMode() as counted:
        assert sum(1 for _ in fsdp2.joined(mine if has_length else iter(mine), model)) == 5
    assert counted.get_total_counts() == messages


@distributed(2, 4)
def test_a_rank_without_a_batch_needs_an_example(ctx: RankContext) -> None:
    model = sharded(init_device_mesh("cpu", (ctx.world_size,)))
    mine = [] if ctx.rank == 1 else [EXAMPLE]
    with pytest.raises(ValueError, match=r"joined: the ranks \[1\] of . have no batch.*pass example="):
        next(iter(fsdp2.joined(mine, model)))
    assert [is_real for _, is_real in fsdp2.joined(mine, model, example=EXAMPLE)] == [ctx.rank != 1]


@distributed(2)
def test_wrong_arguments_are_refused(ctx: RankContext) -> None:
    model = sharded(init_device_mesh("cpu", (2,)))
    assert "expected 'active' or 'all'" in one_line(error_of(lambda: fsdp2.joined([], model, divide="mean")))
    assert "expected an iterable" in one_line(error_of(lambda: fsdp2.joined(3, model)))
    assert "was not given to fully_shard" in one_line(error_of(lambda: fsdp2.joined([], nn.Linear(2, 2))))

    class TooLong(list[Tensor]):
        def __len__(self) -> int:
            return 2

    with pytest.raises(RuntimeError, match=r"ended after 1 of the 2 that len\(\) announced"):
        list(fsdp2.joined(TooLong([EXAMPLE]), model))
