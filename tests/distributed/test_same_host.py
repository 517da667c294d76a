"""Ranks that read each other's memory: who may, what a slow, a lost or a different rank does to the others."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp2.comm.backends import PeerComm, comm_for
from fsdp2.comm.same_host import host_meeting, host_ranks, remote_memory
from fsdp2.comm.same_host.transfers import SameHostComm
from fsdp2.plan.mesh import Axis
from tests.distributed.extension_support import EVEN, Twins
from tests.distributed.support import Stack, batch, seeded, shard, step
from tests.harness.comms import RANKS_MAY_READ_EACH_OTHER, direct_from, messages_only
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import Halved
from tests.harness.messages import error_of, wrapped
from tests.harness.pool import WorkerError, WorkerPool

pytestmark = pytest.mark.skipif(not RANKS_MAY_READ_EACH_OTHER, reason="ranks may not read each other here")

CPU = torch.device("cpu")
LATE_S = 0.05


def _comm(ctx: RankContext, timeout_s: float | None = None) -> Any:
    """A comm on a process group of its own. ``timeout_s``: only for what is waited for here; gloo needs more to
    connect."""
    group = dist.new_group(timeout=timedelta(seconds=61))
    comm = comm_for(Axis(group, ctx.world_size, ctx.rank), CPU)
    if timeout_s is not None:
        assert comm._transfers.neighbours.timeout_s == 61
        comm._transfers.neighbours.timeout_s = timeout_s
    return comm


def _gathered(comm: Any) -> list[float]:
    """What every rank sends: its number."""
    size, rank = comm._transfers.neighbours.size, comm._transfers.neighbours.rank
    output = torch.zeros(size)
    for work in comm.all_gather([output], [torch.tensor([float(rank)])])():
        work.wait()
    return output.tolist()


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def _reading_late(is_late: bool, seconds: float = LATE_S) -> Iterator[None]:
    """A rank for which ``is_late`` starts reading only some time after it could."""
    reads = remote_memory._read

    def late(*args: Any) -> None:
        time.sleep(seconds)
        reads(*args)

    with _replaced(remote_memory, "_read", late if is_late else reads):
        yield


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


def _refused(*args: Any) -> None:
    raise PermissionError("as Yama does")


def _another_process(process: int, here: int, there: int, nbytes: int) -> None:
    """What has the same number in this rank's namespace, and its own memory at that address."""


def _another_network(*args: Any) -> Any:
    listener = LISTENER()
    if listener is not None:  # nobody answers at the name that is offered
        listener.close()
        listener = socket.socket(listener.family, listener.type)
        listener.bind(f"\0fsdp2-test-{os.getpid()}-{time.monotonic_ns()}")
    return listener


LISTENER = host_meeting._listener
OBSTACLES: dict[str, tuple[Any, str, Any]] = {
    "it may not": (remote_memory, "_read", _refused),
    "another process namespace": (remote_memory, "read", _another_process),
    "another network namespace": (host_meeting, "_listener", _another_network),
    "no such call": (remote_memory, "is_supported", lambda: False),
    "it is told not to": (host_meeting, "_listener", lambda: None),
}


@pytest.mark.parametrize("obstacle", list(OBSTACLES))
@distributed(2, 4)
def test_one_rank_that_cannot_read_or_be_reached_has_all_send_messages(ctx: RankContext, obstacle: str) -> None:
    with _replaced(*OBSTACLES[obstacle]) if ctx.rank == 0 else _computing(False):
        comm = _comm(ctx)
    assert isinstance(comm, PeerComm)
    output = torch.zeros(ctx.world_size)
    for work in comm.all_gather([output], [torch.tensor([float(ctx.rank)])])():
        work.wait()
    assert output.tolist() == list(range(ctx.world_size))


@distributed(2)
def test_one_rank_that_is_told_not_to_has_all_send_messages(ctx: RankContext) -> None:
    with messages_only() if ctx.rank == 1 else _computing(False):
        comm = _comm(ctx)
    assert isinstance(comm, PeerComm)


@distributed(2)
def test_other_processes_that_connect_are_turned_away(ctx: RankContext) -> None:
    """Names of sockets can be read by everybody on the host. These connect before any rank can."""
    intruders = []

    def intruded() -> Any:
        listener = LISTENER()
        for hello in (None, b"", b"hello", bytes(20)):
            intruders.append(socket.socket(listener.family, listener.type))
            intruders[-1].connect(listener.getsockname())
            if hello is not None:
                intruders[-1].send(hello)
        return listener

    with _replaced(host_meeting, "_listener", intruded):
        comm = _comm(ctx)
    assert isinstance(comm, SameHostComm)
    assert _gathered(comm) == [0.0, 1.0]
    for intruder in intruders:
        intruder.close()


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


@pytest.mark.parametrize("late_rank", [0, 1])
@distributed(2)
def test_payloads_of_hooks_are_freed_only_when_a_slow_rank_has_read_them(ctx: RankContext, late_rank: int) -> None:
    with direct_from(0), _reading_late(ctx.rank == late_rank, LATE_S / 5):
        Twins(Halved, ctx.mesh_1d(), ctx.rank, dim=EVEN).train(2)


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
    found = " ".join(message.split())
    assert (
        f"an all-gather: {sizes}{ctx.rank} does" in found or f"rank {1 - ctx.rank} of a process group of 2 has" in found
    )
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


@distributed(2)
def test_rank_that_was_given_up_on_is_told_why(ctx: RankContext) -> None:
    """What rank 0 has offered may be anything by the time that rank 1 gets there."""
    comm = _comm(ctx, timeout_s=0.2)
    output, mine = torch.zeros(2), torch.ones(1)
    launch = comm.all_gather([output], [mine])
    if ctx.rank == 0:
        error_of(launch()[0].wait)
        mine.fill_(-1.0)
    dist.barrier()
    if ctx.rank == 1:
        message = error_of(lambda: [work.wait() for work in launch()])
        why = "an all-gather is not complete after 0.2 s: ranks [1] of this process group have not started it."
        assert " ".join(message.split()) == f"NeighbourError: rank 0 of a process group of 2 has given up: {why}"
    dist.barrier()


@distributed(2)
def test_what_is_read_while_a_rank_gives_up_is_not_believed(ctx: RankContext) -> None:
    """Rank 1 has begun to read when rank 0 gives up, and then reads what rank 0 has written since."""
    comm = _comm(ctx, timeout_s=61 if ctx.rank else 10 * LATE_S)
    mine, reads, store = torch.ones(1), remote_memory._read, dist.distributed_c10d._get_default_store()
    has_begun = []

    def interrupted(*args: Any) -> None:
        has_begun.append(args)
        store.wait(["rank 0 has given up"])
        reads(*args)

    with _replaced(remote_memory, "_read", interrupted if ctx.rank == 1 else reads):
        (work,) = comm.all_gather([torch.zeros(2)], [mine])()
        message = " ".join(error_of(work.wait).split())
    if ctx.rank == 0:
        mine.fill_(-1.0)
        store.set("rank 0 has given up", "")
        assert "ranks [1] of this process group have not" in message
    dist.barrier()
    if ctx.rank == 1:
        assert has_begun
        assert "rank 0 of a process group of 2 has given up" in message
    dist.barrier()


@distributed(4)
def test_rank_that_has_finished_may_leave_while_others_still_read_each_other(ctx: RankContext) -> None:
    """Rank 1 reads the others late, and rank 0, which it reads first, has gone by then."""
    comm = _comm(ctx)
    output = torch.zeros(4)
    launch = comm.all_gather([output], [torch.tensor([float(ctx.rank)])])
    (work,) = launch()
    neighbours = work._transfers.neighbours
    reads = neighbours.read

    def read(rank: int, *args: Any) -> None:
        time.sleep(LATE_S if rank else 0)
        reads(rank, *args)

    with _replaced(neighbours, "read", read if ctx.rank == 1 else reads):
        work.wait()
        if ctx.rank == 0:
            for line in neighbours._sockets.values():
                line.shutdown(socket.SHUT_RDWR)
        dist.barrier()
    assert output.tolist() == [0.0, 1.0, 2.0, 3.0]
    if ctx.rank != 0:  # whoever gave up first tells the others why
        message = " ".join(error_of(lambda: [work.wait() for work in launch()]).split())
        assert "lost rank 0 of a process group of 4" in message
    dist.barrier()


class _Dying(Stack):
    """Rank 1 is killed between two blocks of a forward, while a gather is in flight."""

    is_dying = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.entry(x))
        if self.is_dying:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.exit(self.blocks[2](self.blocks[1](x)))


def _die(ctx: RankContext) -> None:
    model = shard(ctx, seeded(_Dying))
    step(model)
    model.is_dying = ctx.rank == 1
    for _ in range(2):
        step(model)


def test_rank_that_is_killed_in_a_pass_is_named_by_the_others() -> None:
    pool = WorkerPool(2)
    try:
        with pytest.raises(WorkerError) as raised:
            pool.run(_die)
    finally:
        pool.close(kill=True)
    assert "NeighbourError: lost rank 1 of a process group of 2 (process " in str(raised.value)
    assert "died with exit code -9" in str(raised.value)


@distributed(4)
def test_rows_and_columns_of_a_mesh_read_each_other_at_once(ctx: RankContext) -> None:
    """Two process groups per rank, whose transfers overlap; each rank waits for them in an order of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    groups = [mesh.get_group(name) for name in ("row", "column")]
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    comms = [comm_for(Axis(group, 2, group.rank()), CPU) for group in groups]
    outputs = [torch.zeros(2) for _ in comms]
    launches = [
        comm.all_gather([output], [torch.tensor([float(ctx.rank)])])
        for comm, output in zip(comms, outputs, strict=True)
    ]
    for _ in range(3):
        works = [work for launch in launches for work in launch()]
        for work in works if ctx.rank % 3 else works[::-1]:
            work.wait()
        assert [output.tolist() for output in outputs] == ranks
        for output in outputs:
            output.zero_()


@distributed(2)
def test_sockets_are_closed_with_the_process_group(ctx: RankContext) -> None:
    model = shard(ctx, seeded(Stack))
    step(model)
    watched = host_ranks._service_of(os.getpid())._actions
    before = len(watched)
    for _ in range(3):  # the next group gets the same file descriptors
        group = dist.new_group()
        comm = comm_for(Axis(group, 2, ctx.rank), CPU)
        assert len(watched) == before + 1
        assert _gathered(comm) == [0.0, 1.0]
        dist.barrier(group)
        dist.destroy_process_group(group)
        del group, comm
        gc.collect()
        assert len(watched) == before
    step(model)


@distributed(2)
def test_child_that_is_forked_leaves_the_connections_of_its_parent_alone(ctx: RankContext) -> None:
    """Even if it collects what belongs to them."""
    comm = _comm(ctx)
    neighbours = comm._transfers.neighbours
    if (child := os.fork()) == 0:
        host_ranks._close(neighbours.service, neighbours._sockets)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(3):
        assert _gathered(comm) == [0.0, 1.0]
