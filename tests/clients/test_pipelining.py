"""``torch.distributed.pipelining``: 2 pipeline ranks x 2 data-parallel ranks, each stage sharded over the latter.

A stage reduces its gradients once per step, whatever the number of micro-batches. So reductions are counted, by unit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import fsdp2
from tests.clients.compare import client, whole
from tests.harness.comms import CountingReduceScatter
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import Block

DIM, NUM_MICRO, NUM_STEPS = 8, 4, 2
OF_ONE_STAGE = ("ScheduleGPipe", "Schedule1F1B")  # others give two stages to each rank
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")  # the first rank has the first stage and the last
SPLITS_BACKWARD = ("ScheduleInterleavedZeroBubble", *V_SHAPED)
SCHEDULES = (*OF_ONE_STAGE, "ScheduleInterleaved1F1B", "ScheduleLoopedBFS", *SPLITS_BACKWARD)
SHARE = 1 / NUM_MICRO
PRELOAD = ("torch.distributed.pipelining", "torch._dynamo")
on_four_ranks = client(num_ranks=4, preload=PRELOAD)


def parts(num_stages: int) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(Block(DIM), nn.Linear(DIM, DIM)) for _ in range(num_stages)]


def batch(step: int, dp_rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    inputs, target = torch.randn(2, 2 * NUM_MICRO, DIM, generator=generator)
    return inputs, target


def numbers_of_stages(schedule: str, pp_rank: int) -> tuple[int, list[int]]:
    """How many stages there are, and which this rank has."""
    if schedule in OF_ONE_STAGE:
        return 2, [pp_rank]
    return 4, [pp_rank, 3 - pp_rank if schedule in V_SHAPED else pp_rank + 2]


def reference(num_stages: int) -> list[dict[str, Tensor]]:
    """The gradients of each step of the unsharded model on the data of all ranks."""
    model = nn.Sequential(*parts(num_stages))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(NUM_STEPS):
        for dp_rank in range(2):
            inputs, target = batch(step, dp_rank)
            (F.mse_loss(model(inputs), target) / 2).backward()
        found.append({name: whole(param.grad) for name, param in model.named_parameters() if param.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return found


def train(
    schedule: str, mesh: DeviceMesh, *, reshard_after_forward: bool, is_by_hand: bool = False, **settings: Any
) -> dict[str, list[Any]]:
    """Losses, gradients and the number of reductions of each unit, of each step.

    ``is_by_hand``: pipelining does not know that stages are sharded, and the user says when to reduce. ``settings``: of
    the schedule.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, schedules

    fully_shard = fsdp2.fully_shard if is_by_hand else fully_shard
    pp, dp = mesh["pp"], mesh["dp"]
    num_stages, numbers = numbers_of_stages(schedule, pp.get_local_rank())
    everything = parts(num_stages)
    mine = {number: everything[number] for number in numbers}
    counters = {}
    for number, part in mine.items():
        for name, unit in ((f"{number}.0", part[0]), (str(number), part)):
            fully_shard(unit, mesh=dp, reshard_after_forward=reshard_after_forward)
            counters[name] = CountingReduceScatter()
            unit.set_custom_reduce_scatter(counters[name])  # type: ignore[operator]
    where = {"device": torch.device("cpu"), "group": pp.get_group()}
    stages = [PipelineStage(part, number, num_stages, **where) for number, part in mine.items()]
    runner = getattr(schedules, schedule)(
        stages[0] if schedule in OF_ONE_STAGE else stages,
        NUM_MICRO,
        loss_fn=(lambda out, target: F.mse_loss(out, target) * SHARE) if is_by_hand else F.mse_loss,
        scale_grads=not is_by_hand,  # the schedule would scale gradients before they are reduced
        **settings,
    )
    optimizer = torch.optim.SGD([param for part in mine.values() for param in part.parameters()], lr=0.1)
    seen: dict[str, list[Any]] = {"losses": [], "gradients": [], "reductions": []}
    for step in range(NUM_STEPS):
        inputs, target = batch(step, dp.get_local_rank())
        losses: list[Tensor] = []
        if is_by_hand:
            reduce_gradients(mine.values(), now=False)
        has_first, has_last = 0 in mine, num_stages - 1 in mine
        runner.step(*([inputs] if has_first else []), **({"target": target, "losses": losses} if has_last else {}))
        if is_by_hand:
            reduce_gradients(mine.values(), now=True)
        seen["losses"].append([loss.detach() for loss in losses])
        seen["reductions"].append({name: len(counter.take()) for name, counter in counters.items()})
        named = [(f"{number}.{name}", each) for number, part in mine.items() for name, each in part.named_parameters()]
        seen["gradients"].append({name: whole(each.grad) for name, each in named if each.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    check_gradients(seen["gradients"], reference(num_stages), numbers)
    return seen


def check_gradients(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]], numbers: list[int]) -> None:
    for step, (gradients, all_of_step) in enumerate(zip(found, expected, strict=True)):
        mine = {name: grad for name, grad in all_of_step.items() if int(name.split(".")[0]) in numbers}
        assert gradients.keys() == mine.keys()
        for name, grad in mine.items():
            torch.testing.assert_close(gradients[name], grad, rtol=1e-4, atol=1e-6, msg=f"step {step}: {name}")


def reduce_gradients(stages: Any, now: bool) -> None:
    for stage in stages:
        stage.set_manual_backward_finalization(True)
        stage.set_requires_gradient_sync(now)
        stage.set_reshard_after_backward(now)
        if now:
            stage.finalize_backward()


def train_once(schedule: str, **settings: Any) -> dict[str, list[Any]]:
    """Each unit reduces once in the second step. The first one also finds out shapes, by a backward without gradients
    of parameters: fsdp2 reduces zeros there."""
    dist.init_process_group("gloo")
    seen = train(schedule, init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")), **settings)
    assert set(seen["reductions"][1].values()) == {1}, seen["reductions"]
    return {**seen, "reductions": seen["reductions"][1:]}


@pytest.mark.parametrize(
    ("schedule", "reshard_after_forward"),
    [(name, False) for name in SCHEDULES]
    + [pytest.param(name, True, marks=pytest.mark.long) for name in SCHEDULES if name not in SPLITS_BACKWARD],
)
@on_four_ranks
def test_each_schedule_reduces_once_per_step(
    rank: int, folder: Path, schedule: str, reshard_after_forward: bool
) -> Any:
    return train_once(schedule, reshard_after_forward=reshard_after_forward)


@pytest.mark.skipif(torch.__version__ < "2.15.0.dev0", reason="schedules defer waits for reductions since torch 2.15")
@on_four_ranks
def test_a_schedule_that_waits_for_reductions_later_reduces_once_per_step(rank: int, folder: Path) -> Any:
    return train_once("ScheduleInterleaved1F1B", reshard_after_forward=False, defer_reduce_grad_wait=True)


@pytest.mark.parametrize("schedule", SPLITS_BACKWARD)
@client(num_ranks=4, preload=PRELOAD, fails=("in check_gradients", "finds shards, and these gradients are lost"))
def test_gradients_that_a_split_backward_would_lose_are_an_error(rank: int, folder: Path, schedule: str) -> None:
    """With torch's runtime, there is none: only this test notices."""
    train_once(schedule, reshard_after_forward=True)


@pytest.mark.parametrize(
    ("schedule", "reshards"), [(name, False) for name in SCHEDULES] + [("ScheduleInterleaved1F1B", True)]
)
@distributed(4)
def test_without_install_stages_reduce_once_by_hand(ctx: RankContext, schedule: str, reshards: bool) -> None:
    seen = train(schedule, ctx.mesh(pp=2, dp=2), reshard_after_forward=reshards, is_by_hand=True)
    assert set(seen["reductions"][1].values()) == {1}, seen["reductions"]
