"""Messages that are in flight when a step ends in an error, or when their model goes away.

gloo's threads write into memory by its address. So memory is freed only when no message can arrive in it any more.
"""

from __future__ import annotations

import gc
import signal
from types import FrameType
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp2
from fsdp2.extras import peers
from tests.distributed.support import InjectedError, UnshardedStorages, batch, sharded, step
from tests.harness.comms import CountingAllGather
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import in_ci


def _gathering_nbytes(model: Any) -> int:
    """The memory that messages of the root's gather arrive in, or leave from."""
    gather = model._unit().groups[0].unsharded.gather
    return sum(storage.nbytes() for storage, _ in gather._at_issue)


def _fail_to_wait(messages: Any) -> NoReturn:
    raise RuntimeError("connection closed")


@distributed(2)
def test_training_leaves_no_message_behind(ctx: RankContext) -> None:
    """What is in flight is kept alive until somebody waits for it."""
    earlier = set(peers._in_flight)
    model = sharded(ctx)
    for seed in range(3):
        step(model, seed)
        with torch.no_grad():
            model(batch())
    model.reshard()  # the root rests unsharded
    model.unshard(async_op=True)
    assert peers._in_flight > earlier
    model.reshard()
    assert peers._in_flight == earlier


@distributed(2)
def test_memory_stays_when_a_gather_is_lost(ctx: RankContext) -> None:
    """One message has failed, so nobody waits for the others; they may still arrive."""
    model = sharded(ctx)
    step(model)
    assert _gathering_nbytes(model) == 0
    dist.barrier()
    with mock.patch.object(peers._Messages, "wait", _fail_to_wait):
        with pytest.raises(fsdp2.CommunicationError) as raised:
            model(batch())
        model.reset_iter_state()  # while the error, and so its traceback, still knows the messages
    assert str(raised.value).startswith("all-gather of unit '(root)' failed")
    assert _gathering_nbytes(model) > 0
    assert all(isinstance(parameter, dist.tensor.DTensor) for parameter in model.parameters())
    for messages in list(peers._in_flight):
        messages.wait()


_start = peers._Messages.start


def _start_one(messages: Any, call: Any, *args: Any) -> None:
    """A connection that fails: one message is in flight then."""

    def fail(*args: Any) -> NoReturn:
        raise RuntimeError("connection closed")

    _start(messages, fail if messages._works else call, *args)


def _interrupt_second(messages: Any, *args: Any) -> None:
    """Ctrl-C, when one message is in flight."""
    if messages._works:
        raise KeyboardInterrupt("connection closed")
    _start(messages, *args)


FAULTS = {"wait": {"wait": _fail_to_wait}, "launch": {"start": _start_one}, "Ctrl-C": {"start": _interrupt_second}}


@pytest.mark.parametrize("fault", ["wait", *in_ci("launch", "Ctrl-C")])
@distributed(4)
def test_memory_stays_when_a_gather_from_the_post_forward_mesh_is_lost(ctx: RankContext, fault: str) -> None:
    """That of the shards that are sent, and the unsharded memory: the gather that was not lost has the same."""
    model = sharded(ctx, reshard_after_forward=2)
    step(model)
    loss = model(batch()).sum()
    unsharded = model._unit().groups[0].unsharded
    sent = [flat.untyped_storage() for flat in unsharded.post_forward._flats.values()]
    dist.barrier()
    with mock.patch.multiple(peers._Messages, **FAULTS[fault]):
        with pytest.raises((fsdp2.CommunicationError, KeyboardInterrupt), match="connection closed"):
            loss.backward()
        model.reset_iter_state()
    assert all(storage.nbytes() > 0 for storage in sent)
    assert unsharded.gather.gathered.is_lost
    if fault == "wait":
        for messages in list(peers._in_flight):
            messages.wait()


class _Broken(CountingAllGather):
    """Starts one message, and then fails, as a backend does that loses a connection at a launch."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        super().__call__(*args, **kwargs)
        raise RuntimeError("connection closed")


@distributed(2)
def test_memory_stays_when_a_collective_fails_at_its_launch(ctx: RankContext) -> None:
    model = sharded(ctx)
    step(model)
    model.set_custom_all_gather(_Broken())
    with pytest.raises(fsdp2.CommunicationError, match="connection closed"):
        model(batch())
    assert model._unit().groups[0].unsharded.gather.gathered.is_lost


class _Interrupted(BaseException):
    """What the signal raises, as Ctrl-C raises ``KeyboardInterrupt``."""


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise _Interrupted


@distributed(2)
def test_reset_after_an_interrupt_waits_for_the_messages_that_are_left(ctx: RankContext) -> None:
    """Python raises when the wait for one message returns; others are still in flight."""
    model = sharded(ctx)
    unsharded = UnshardedStorages(model)
    step(model)
    model.zero_grad()
    earlier = set(peers._in_flight)
    dist.barrier()
    before = signal.signal(signal.SIGALRM, _interrupt)
    waits: list[int] = []
    original = peers._Messages.wait

    def wait(messages: Any) -> None:
        """Python runs signal handlers when the call returns that was running."""
        waits.append(len(messages._works))
        if len(waits) == 1:
            messages._works.popleft().wait()
            signal.raise_signal(signal.SIGALRM)
        original(messages)

    with mock.patch.object(peers._Messages, "wait", wait), pytest.raises(_Interrupted):
        model(batch())
    signal.signal(signal.SIGALRM, before)
    assert peers._in_flight > earlier
    model.reset_iter_state()
    assert peers._in_flight == earlier
    assert unsharded.nbytes == 0
    step(model)


@pytest.mark.ci
@distributed(2)
def test_ranks_go_on_when_a_model_is_collected_whose_gather_is_in_flight(ctx: RankContext) -> None:
    """The other rank's message arrives later. Without its memory, it would block all that comes after it."""
    model = sharded(ctx)
    step(model)
    if ctx.rank == 1:
        dist.barrier()
    model.unshard(async_op=True)
    del model
    gc.collect()
    if ctx.rank == 0:
        dist.barrier()
    step(sharded(ctx))


@distributed(4)
def test_reset_waits_for_a_reduction_that_started_before_a_hook_raised(ctx: RankContext) -> None:
    """On HSDP, gradients of one block land, and its hooks run, when the reduction of the next one has been launched."""
    model = sharded(ctx, mesh=ctx.mesh_2d(2, 2))
    step(model)
    model.zero_grad()

    def fail(parameter: Tensor) -> None:
        raise InjectedError

    earlier = set(peers._in_flight)
    handle = next(model.blocks[2].parameters()).register_post_accumulate_grad_hook(fail)
    with pytest.raises(InjectedError):
        step(model)
    handle.remove()
    assert peers._in_flight > earlier
    model.reset_iter_state()
    assert peers._in_flight == earlier
    step(model)
