"""When ranks part, the collective that nobody joins fails after the timeout, and every rank says what it did last."""

from __future__ import annotations

import logging
import re
import threading
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.stalls import StallWatch
from tests.distributed.support import Stack, batch, seeded
from tests.harness.comms import messages_only
from tests.harness.distributed import RankContext
from tests.harness.pool import WorkerPool

TIMEOUT_S = 4  # gloo takes that long at most to connect, too


class Parting(Stack):
    """Rank 1 leaves a block out, which it may not."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.entry(x))
        if dist.get_rank() == 0:
            x = self.blocks[1](x)
        return self.exit(self.blocks[2](x))


def _part(ctx: RankContext, sends_messages: bool) -> str:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    mesh = DeviceMesh.from_group(group, "cpu")
    model = seeded(Parting)
    with messages_only() if sends_messages else nullcontext():
        for block in model.blocks:
            fsdp2.fully_shard(block, mesh=mesh)
        fsdp2.fully_shard(model, mesh=mesh).set_ranks_may_skip(False)
    with pytest.raises(fsdp2.CommunicationError) as raised:
        model(batch())
    assert raised.value.__cause__ is not None
    return str(raised.value)


@pytest.mark.parametrize("sends_messages", [False, True])
def test_every_rank_names_the_unit_and_its_last_events(sends_messages: bool) -> None:
    pool = WorkerPool(2)  # of its own: what is lost does not come back
    try:
        messages = pool.run(_part, sends_messages=sends_messages)
    finally:
        pool.close(kill=True)
    for rank, (message, missing) in enumerate(zip(messages, ("blocks.1", "blocks.2"), strict=True)):
        assert re.match(rf"all-gather of unit '{missing}' failed on rank {rank}: \S", message), message
        _, story = message.split("\nLast events there: ")
        assert story == (f"pre_forward (root), pre_forward blocks.0, post_forward blocks.0, pre_forward {missing}."), (
            message
        )


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _stall(ctx: RankContext) -> tuple[str, list[str]]:
    """As if the device had the collective, and this thread waited for the device. Unlike there, the wait ends."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    model = seeded(Parting)
    for unit in (*model.blocks, model):
        fsdp2.fully_shard(unit, mesh=DeviceMesh.from_group(group, "cpu"))
    model.set_ranks_may_skip(False)
    stalls, heard = StallWatch(ctx.rank, lambda: False, TIMEOUT_S), _Heard()
    stalls.add(model._unit().context.performer)
    logging.getLogger("fsdp2").addHandler(heard)
    threading.Thread(target=stalls.run, daemon=True).start()
    with pytest.raises(fsdp2.CommunicationError) as raised:
        model(batch())
    return str(raised.value), list(heard.messages)


def test_a_stall_is_told_before_the_timeout_with_the_same_events() -> None:
    pool = WorkerPool(2)
    try:
        answers = pool.run(_stall)
    finally:
        pool.close(kill=True)
    for rank, (error, messages) in enumerate(answers):
        assert len(messages) == 1
        assert re.match(rf"rank {rank}: nothing has happened for [23] s", messages[0]), messages
        assert messages[0].splitlines()[1] == error.splitlines()[-1]
