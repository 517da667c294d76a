"""When ranks part, the collective that nobody joins fails after the timeout, and every rank says what it did last."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.comm.backends import PeerComm
from tests.distributed.support import Stack, batch, seeded, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import Heard
from tests.harness.pool import WorkerPool
from tests.harness.selection import long

TIMEOUT_S = 4  # gloo takes that long at most to connect, too


class Parting(Stack):
    """Rank 1 leaves a block out, which it may not."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.entry(x))
        if dist.get_rank() == 0:
            x = self.blocks[1](x)
        return self.exit(self.blocks[2](x))


def _part(ctx: RankContext) -> tuple[str, list[str]]:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    mesh = DeviceMesh.from_group(group, "cpu")
    model = seeded(Parting)
    for block in model.blocks:
        fsdp2.fully_shard(block, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    with Heard() as heard, pytest.raises(fsdp2.CommunicationError) as raised:
        model(batch())
    assert raised.value.__cause__ is not None
    return str(raised.value), heard.messages


class _Lost:
    """A collective that fails."""

    def wait(self) -> None:
        raise RuntimeError("connection closed")


@distributed(2)
def test_reduction_that_is_lost_names_the_unit_and_its_last_events(ctx: RankContext) -> None:
    model = sharded(ctx)
    step(model)
    with (
        mock.patch.object(PeerComm, "reduce_scatter", return_value=[_Lost()]),
        pytest.raises(fsdp2.CommunicationError) as raised,
    ):
        step(model)
    found = str(raised.value)
    assert found.startswith(f"reduction of unit 'blocks.2' failed on rank {ctx.rank}: connection closed"), found
    assert found.endswith(
        "pre_backward blocks.2, post_backward blocks.2, pre_backward blocks.1, post_backward blocks.1.\n"
        "Compare the last events of all ranks: the ranks diverged at the first difference."
    )
    model.reset_iter_state()


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    raise RuntimeError("connection closed")


def _lack_memory(*args: object, **kwargs: object) -> Tensor:
    return torch.empty(1 << 60)


@distributed(2)
def test_all_gather_that_cannot_be_launched_names_the_unit_and_keeps_its_memory(ctx: RankContext) -> None:
    model = sharded(ctx)
    with (
        mock.patch.object(PeerComm, "all_gather", return_value=_refuse),
        pytest.raises(fsdp2.CommunicationError) as raised,
    ):
        model(batch())
    found = str(raised.value)
    assert found.startswith(f"all-gather of unit '(root)' failed on rank {ctx.rank}: connection closed"), found
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert model._unit().groups[0].unsharded.gather.gathered.is_lost  # others of its messages might be in flight


@pytest.mark.parametrize("collective", ["all_gather", *long("reduce_scatter")])
@distributed(2)
def test_memory_that_a_launch_lacks_is_no_lost_collective(ctx: RankContext, collective: str) -> None:
    model = sharded(ctx)
    fault = {"return_value" if collective == "all_gather" else "side_effect": _lack_memory}
    with mock.patch.object(PeerComm, collective, **fault), pytest.raises(RuntimeError, match="memory") as raised:
        step(model)
    assert type(raised.value) is RuntimeError, raised.value
    model.reset_iter_state()


@pytest.mark.long
def test_every_rank_names_the_unit_and_its_last_events() -> None:
    """In the error after the timeout, and before it in what is said of a stall."""
    pool = WorkerPool(2)  # of its own: what is lost does not come back
    try:
        answers = pool.run(_part)
    finally:
        pool.close(kill=True)
    for rank, ((message, told), missing) in enumerate(zip(answers, ("blocks.1", "blocks.2"), strict=True)):
        assert re.match(rf"all-gather of unit '{missing}' failed on rank {rank}: \S", message), message
        *_, story, _ = message.splitlines()
        events = f"pre_forward (root), pre_forward blocks.0, post_forward blocks.0, pre_forward {missing}."
        assert story == f"Last events on rank {rank}: {events}", message
        assert len(told) == 1
        first, *lines = told[0].splitlines()
        cause = "All ranks wait for each other, because they use other units:"
        assert re.match(rf"rank {rank}: no progress for [12] s. {cause}", first), first
        assert lines[rank - 2] == story
        assert lines[:2] == [
            "  unit 'blocks.1' ran on rank 0, not on rank 1",
            "  unit 'blocks.2' ran on rank 1, not on rank 0",
        ]
