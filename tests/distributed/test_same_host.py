"""Ranks that read each other's memory: who may, what a slow, a lost or a different rank does to the others."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import host_ranks, remote_memory
from fsdp2.comm import PeerComm, comm_for
from fsdp2.mesh import Axis
from fsdp2.same_host import SameHostComm
from tests.distributed.support import Stack, batch, seeded, shard, step
from tests.harness.comms import RANKS_MAY_READ_EACH_OTHER, messages_only
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of, wrapped
from tests.harness.pool import WorkerError, WorkerPool

pytestmark = pytest.mark.skipif(not RANKS_MAY_READ_EACH_OTHER, reason="ranks may not read each other here")

CPU = torch.device("cpu")
LATE_S = 0.05


def _comm(ctx: RankContext, timeout_s: float = 60) -> Any:
    """A comm on a process group of its own."""
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    return comm_for(Axis(group, ctx.world_size, ctx.rank), CPU)


@contextmanager
def _reading_late(is_late: bool) -> Iterator[None]:
    """A rank for which ``is_late`` starts reading only some time after it could."""
    reads = remote_memory._read

    def late(*args: Any) -> None:
        time.sleep(LATE_S)
        reads(*args)

    if is_late:
        remote_memory._read = late
    try:
        yield
    finally:
        remote_memory._read = reads


@contextmanager
def _computing(is_computing: bool) -> Iterator[None]:
    """A rank for which ``is_computing`` keeps its main thread busy afterwards, for longer than the others take."""
    yield
    if is_computing:
        time.sleep(10 * LATE_S)


# Whether ranks may


@distributed(2, 4)
def test_ranks_of_one_host_read_each_other(ctx: RankContext) -> None:
    assert isinstance(comm_for(Axis(ctx.mesh_1d().get_group(), ctx.world_size, ctx.rank), CPU), SameHostComm)


@distributed(2, 4)
def test_one_rank_that_may_not_read_has_all_send_messages(ctx: RankContext) -> None:
    read = remote_memory._read

    def refused(*args: Any) -> None:
        raise PermissionError("as Yama does")

    remote_memory._read = refused if ctx.rank == 1 else read
    try:
        comm = _comm(ctx)
    finally:
        remote_memory._read = read
    assert isinstance(comm, PeerComm)


@distributed(2)
def test_one_rank_that_is_told_not_to_has_all_send_messages(ctx: RankContext) -> None:
    with messages_only() if ctx.rank == 1 else _computing(False):
        comm = _comm(ctx)
    assert isinstance(comm, PeerComm)


@distributed(2)
def test_other_processes_that_connect_are_turned_away(ctx: RankContext) -> None:
    """Names of sockets can be read by everybody on the host."""
    accept = host_ranks._accept

    def intruded(listener: Any, *args: Any) -> None:
        for hello in (b"", b"hello", bytes(20)):
            with host_ranks.socket.socket(listener.family, listener.type) as intruder:
                intruder.connect(listener.getsockname())
                intruder.send(hello)
                # In front of the ranks that have connected already there is nobody else to be.
                accept(listener, *args) if hello == bytes(20) else None

    host_ranks._accept = intruded
    try:
        comm = _comm(ctx)
    finally:
        host_ranks._accept = accept
    output = torch.zeros(2)
    for work in comm.all_gather([output], [torch.tensor([float(ctx.rank)])])():
        work.wait()
    assert output.tolist() == [0.0, 1.0]


# What is read stays as it is


@distributed(2, 4)
def test_what_was_sent_may_be_written_when_wait_returns(ctx: RankContext) -> None:
    """Even if another rank reads late."""
    comm, size = _comm(ctx), ctx.world_size
    mine, gathered, values = torch.full((4,), float(ctx.rank)), torch.zeros(4 * size), torch.ones(4 * size)
    reduced = torch.zeros(4)
    gather = comm.all_gather([gathered], [mine])
    with _reading_late(ctx.rank == 1):
        for work in [*gather(), *comm.reduce_scatter([reduced], [values])]:
            work.wait()
        mine.fill_(-1.0)
        values.fill_(-1.0)
        dist.barrier()
    assert gathered.view(size, 4)[:, 0].tolist() == list(range(size))
    assert reduced.tolist() == [float(size)] * 4


@distributed(2)
def test_memory_that_the_caller_forgets_is_kept_for_others_to_read(ctx: RankContext) -> None:
    comm = _comm(ctx)
    outputs = [torch.zeros(200_000), torch.zeros(100_000)]
    works = [*comm.all_gather([outputs[0]], [torch.full((100_000,), float(ctx.rank))])()]
    works += comm.reduce_scatter([outputs[1]], [torch.ones(200_000)])
    if ctx.rank == 0:
        works.clear()
        gc.collect()
        rubbish = [torch.full((100_000,), -1.0) for _ in range(8)]  # would take the place
    dist.barrier()
    for work in works:
        work.wait()
    if ctx.rank == 1:
        assert outputs[0].view(2, -1)[:, [0, -1]].tolist() == [[0.0, 0.0], [1.0, 1.0]]
        assert outputs[1].unique().tolist() == [2.0]
    else:
        assert len(rubbish) == 8
    dist.barrier()


@pytest.mark.parametrize("late_rank", [0, 1])
@distributed(2)
def test_parameters_may_be_written_right_after_a_pass(ctx: RankContext, late_rank: int) -> None:
    """By an optimizer after backward, and by hand after a forward without one, while another rank still reads."""
    model, reference = shard(ctx, seeded(Stack)), seeded(Stack)
    with _reading_late(ctx.rank == late_rank):
        found, expected = _write_after_passes(model), _write_after_passes(reference)
        assert torch.allclose(found, expected, atol=1e-6)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(parameter.full_tensor(), other, atol=1e-6)


def _write_after_passes(model: Any) -> torch.Tensor:
    """The last output."""
    for seed in range(2):
        step(model, seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
            output = model(batch(seed))
            getattr(model, "reshard", lambda: None)()  # the root stays unsharded
            for parameter in model.parameters():
                parameter *= 1.01
    return output


# Ranks that do other things


@distributed(2, 4)
def test_wait_needs_other_ranks_to_launch_but_not_to_wait(ctx: RankContext) -> None:
    """Rank 0 waits for its transfers, then for a barrier; the others the other way round."""
    comm = _comm(ctx)
    gathered, reduced = torch.zeros(ctx.world_size), torch.zeros(1)
    works = [*comm.all_gather([gathered], [torch.ones(1)])()]
    works += comm.reduce_scatter([reduced], [torch.ones(ctx.world_size)])
    if ctx.rank != 0:
        dist.barrier()
    for work in works:
        work.wait()
    if ctx.rank == 0:
        dist.barrier()
    assert gathered.sum() == reduced == ctx.world_size


@distributed(2)
def test_thousands_of_launches_fit_between_two_waits(ctx: RankContext) -> None:
    """More tokens than a socket holds."""
    comm = _comm(ctx)
    output = torch.zeros(2)
    launch = comm.all_gather([output], [torch.tensor([float(ctx.rank + 1)])])
    works = [work for _ in range(3000) for work in launch()]
    for work in works:
        work.wait()
    assert output.tolist() == [1.0, 2.0]


@distributed(2)
def test_ranks_that_send_different_sizes_are_told_so(ctx: RankContext) -> None:
    comm = _comm(ctx)
    mine = torch.zeros(3 + ctx.rank)
    (work,) = comm.all_gather([torch.zeros(2 * mine.numel())], [mine])()
    message = error_of(work.wait)
    nbytes = mine.nbytes, 7 * 4 - mine.nbytes
    sizes = f"rank {1 - ctx.rank} of the process group sends {nbytes[1]} bytes, expected {nbytes[0]}, as rank "
    assert f"an all-gather: {sizes}{ctx.rank} does" in " ".join(message.split())
    assert error_of(comm.all_gather([torch.zeros(2)], [torch.zeros(1)])) == message
    dist.barrier()


@distributed(2)
def test_rank_that_launches_nothing_is_named_after_the_timeout(ctx: RankContext) -> None:
    comm = _comm(ctx, timeout_s=0.2)
    if ctx.rank == 0:
        (work,) = comm.reduce_scatter([torch.zeros(1)], [torch.ones(2)])
        message = "a reduce-scatter is not complete after 0.2 s: ranks [1] of this process group have not started it."
        assert error_of(work.wait) == wrapped(f"NeighbourError: {message}")
    dist.barrier()


def _die(ctx: RankContext) -> None:
    model = shard(ctx, seeded(Stack))
    step(model)
    if ctx.rank == 1:
        os._exit(7)
    step(model)


def test_rank_that_dies_is_named_by_the_others() -> None:
    pool = WorkerPool(2)
    try:
        with pytest.raises(WorkerError) as raised:
            pool.run(_die)
    finally:
        pool.close(kill=True)
    assert "NeighbourError: lost rank 1 of a process group of 2 (process " in str(raised.value)
    assert "died with exit code 7" in str(raised.value)


@distributed(2)
def test_sockets_are_closed_with_the_process_group(ctx: RankContext) -> None:
    def num_sockets() -> int:
        gc.collect()
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(fd)]
        return sum(link.startswith("socket:") for link in links)

    model = shard(ctx, seeded(Stack))
    step(model)
    before = len(host_ranks._service_of(os.getpid())._actions)
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    comm = comm_for(Axis(group, 2, ctx.rank), CPU)
    assert len(host_ranks._service_of(os.getpid())._actions) == before + 1
    dist.barrier(group)
    dist.destroy_process_group(group)
    del group, mesh, comm
    gc.collect()
    assert len(host_ranks._service_of(os.getpid())._actions) == before
