"""Collectives that fail, and messages that are in flight when a step ends in an error or when their model goes away.

gloo's threads write into memory by its address. So memory is freed only when no message can arrive in it any more.
"""

from __future__ import annotations

import gc
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp2
from fsdp2.extras import peers
from tests.distributed.changes import assert_trains_as_stack, step_and_zero
from tests.distributed.support import Faulty, UnshardedStorages, batch, fail, seeded, shard, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import in_ci, long


def _gathering_nbytes(model: Any) -> int:
    """The memory that messages of the root's gather arrive in, or leave from."""
    gather = model._unit().groups[0].unsharded.gather
    return sum(storage.nbytes() for storage, _ in gather._memory)


def _fail(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("connection closed")


def _lack_memory(*_: object, **__: object) -> Tensor:
    return torch.empty(1 << 60)


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
    with mock.patch.object(peers._Messages, "wait", _fail):
        with pytest.raises(fsdp2.CommunicationError) as raised:
            model(batch())
        model.reset_iter_state()  # while the error, and so its traceback, still knows the messages
    assert str(raised.value).startswith("all-gather of unit '(root)' failed")
    assert _gathering_nbytes(model) > 0
    assert all(isinstance(parameter, dist.tensor.DTensor) for parameter in model.parameters())
    for messages in list(peers._in_flight):
        messages.wait()


@distributed(2)
def test_gather_that_is_lost_while_it_is_given_up_names_the_unit(ctx: RankContext) -> None:
    """The error said "connection closed", and nothing else."""
    model = sharded(ctx)
    dist.barrier()
    model.unshard(async_op=True)
    lost = r"all-gather of unit '\(root\)' failed on rank \d: connection closed"
    with mock.patch.object(peers._Messages, "wait", _fail), pytest.raises(fsdp2.CommunicationError, match=lost):
        model.reshard()
    for messages in list(peers._in_flight):
        messages.wait()


_start = peers._Messages.start


def _start_one(messages: Any, call: Any, *args: Any) -> None:
    """A connection that fails: one message is in flight then."""
    _start(messages, _fail if messages._works else call, *args)


def _interrupt_second(messages: Any, *args: Any) -> None:
    """Ctrl-C, when one message is in flight."""
    if messages._works:
        raise KeyboardInterrupt("connection closed")
    _start(messages, *args)


FAULTS = {"wait": {"wait": _fail}, "launch": {"start": _start_one}, "Ctrl-C": {"start": _interrupt_second}}


@pytest.mark.parametrize("fault", ["wait", *in_ci("launch", "Ctrl-C")])
@distributed(4)
def test_memory_stays_when_a_gather_from_the_post_forward_mesh_is_lost(ctx: RankContext, fault: str) -> None:
    """That of the shards that are sent, and the unsharded memory: the gather that was not lost has the same."""
    model = sharded(ctx, reshard_after_forward=2)
    step(model)
    loss = model(batch()).sum()
    unsharded = model._unit().groups[0].unsharded
    sent = [storage for storage, _ in unsharded.post_forward._memory]
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


@distributed(2)
def test_all_gather_that_fails_at_its_launch_names_the_unit_and_keeps_its_memory(ctx: RankContext) -> None:
    """Others of its messages might be in flight."""
    model = sharded(ctx)
    with (
        mock.patch.object(peers.PeerComm, "all_gather", return_value=_fail),
        pytest.raises(fsdp2.CommunicationError) as raised,
    ):
        model(batch())
    found = str(raised.value)
    assert found.startswith(f"all-gather of unit '(root)' failed on rank {ctx.rank}: connection closed"), found
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert model._unit().groups[0].unsharded.gather.gathered.is_lost


@distributed(2)
def test_reduction_that_is_lost_names_the_unit_and_its_last_events(ctx: RankContext) -> None:
    model = sharded(ctx)
    step(model)
    with (
        mock.patch.object(peers.PeerComm, "_reduce_one", return_value=mock.Mock(wait=_fail)),
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


@pytest.mark.parametrize("collective", ["all_gather", *long("_reduce_one")])
@distributed(2)
def test_memory_that_a_launch_lacks_is_no_lost_collective(ctx: RankContext, collective: str) -> None:
    model = sharded(ctx)
    fault = {"return_value" if collective == "all_gather" else "side_effect": _lack_memory}
    with mock.patch.object(peers.PeerComm, collective, **fault), pytest.raises(RuntimeError, match="memory") as raised:
        step(model)
    assert type(raised.value) is RuntimeError, raised.value
    model.reset_iter_state()


@distributed(2)
def test_reset_after_an_interrupt_waits_for_the_messages_that_are_left(ctx: RankContext) -> None:
    """Python raises when the wait for one message returns; others are still in flight."""
    model = sharded(ctx)
    unsharded = UnshardedStorages(model)
    step_and_zero(model)
    earlier = set(peers._in_flight)
    dist.barrier()

    def interrupted(messages: Any) -> NoReturn:
        """Python runs signal handlers when the call returns that was running."""
        messages._works.popleft().wait()
        raise KeyboardInterrupt

    with mock.patch.object(peers._Messages, "wait", interrupted), pytest.raises(KeyboardInterrupt):
        model(batch())
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
    step_and_zero(model)
    earlier = set(peers._in_flight)
    handle = next(model.blocks[2].parameters()).register_post_accumulate_grad_hook(_fail)
    with pytest.raises(RuntimeError, match="connection closed"):
        step(model)
    handle.remove()
    assert peers._in_flight > earlier
    model.reset_iter_state()
    assert peers._in_flight == earlier
    step(model)


@distributed(2)
def test_reset_brings_all_units_to_rest_though_a_reduction_is_lost(ctx: RankContext) -> None:
    model = shard(ctx, seeded(Faulty))
    unsharded = UnshardedStorages(model)
    step_and_zero(model)
    fail(model, "backward")
    lost = r"reduction of unit 'blocks\.1' failed.*connection closed"
    with mock.patch.object(peers._PeerSum, "wait", _fail), pytest.raises(fsdp2.CommunicationError, match=lost):
        model.reset_iter_state()
    assert unsharded.nbytes == 0
    for messages in list(peers._in_flight):
        messages.wait()
    model.zero_grad()
    assert_trains_as_stack(model)
