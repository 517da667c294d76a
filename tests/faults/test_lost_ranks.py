"""A rank is killed or stopped at any moment of a step: the others end with an error that says what they waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp2
from fsdp2.core import Observer
from fsdp2.optim.muon import optimizer as muon
from fsdp2.report import trace
from tests.distributed.support import Stack, batch, seeded, shard
from tests.faults.ranks import DEADLINE_S, TIMEOUT_S, Ended, World
from tests.harness.distributed import RankContext
from tests.harness.selection import long

LOST = 1  # the rank that is lost
NEVER = 10**9
FAR_AWAY_S = 10 * DEADLINE_S  # a timeout that no test reaches
_AT_ONCE = 6  # worlds that run side by side: most of the time they wait
_PARTS = 8  # of all moments; a part is one test
CLIP, STATES, END = "clip", "gather states", "end"


class _Moments(Observer):
    """Counts what it sees, and sends ``sent`` to this process at the moment number ``position``."""

    def __init__(self, position: int, sent: signal.Signals) -> None:
        self.position, self._sent = position, sent
        self.names: list[str] = []

    def note(self, moment: str) -> None:
        self.names.append(moment)
        if len(self.names) > self.position:
            os.kill(os.getpid(), self._sent)

    def on_event(self, event: str, unit: str) -> None:
        self.note(f"{event} {unit}")

    def on_action(self, action: str, unit: str, nbytes: int) -> None:
        self.note(f"{action} {unit}")

    def on_transition(self, unit: str, before: str, after: str) -> None:
        self.note(f"{unit}: {before} to {after}")


def _train(
    ctx: RankContext,
    mesh: DeviceMesh,
    position: int = NEVER,
    sent: signal.Signals = signal.SIGKILL,
    replicas: int = 1,
    others_compute_s: float = 0.0,
) -> list[str]:
    """Two steps with all that communicates; the rank ``LOST`` is lost at the moment number ``position``."""
    if replicas > 1:
        mesh = ctx.mesh_2d(replicas, ctx.world_size // replicas)
    model: Any = shard(ctx, seeded(lambda: Stack(2)), mesh=mesh)
    if ctx.rank != LOST:
        for block in model.blocks:
            block.linear.register_forward_hook(lambda *_: time.sleep(others_compute_s))
    moments = _Moments(position if ctx.rank == LOST else NEVER, sent)
    with trace.observe(model, moments):
        for _ in range(2):
            moments.note("begin")
            model(batch()).square().mean().backward()
            moments.note(CLIP)
            fsdp2.clip_grad_norm_(model.parameters(), 1.0)
            model.zero_grad()
    moments.note(STATES)
    model.entry.weight.full_tensor()
    moments.note(END)
    return moments.names


def _all_moments() -> list[str]:
    """By number. The rank that is not lost sees the same."""
    ended = World(_train, timeout_s=FAR_AWAY_S).join()
    assert [each.error for each in ended] == ["", ""]
    assert ended[0].value == ended[1].value
    return ended[0].value


def _assert_names_what_it_waited_for(ended: Ended, moment: str) -> None:
    assert ended.exit_code is not None, f"lost at '{moment}': hangs"
    assert ended.exit_code == 1, f"lost at '{moment}': exit code {ended.exit_code}"
    if moment in (STATES, END):  # full_tensor is torch's own; a rank that is slow is still in clip_grad_norm_
        assert ended.error_type in ("RuntimeError", "DistBackendError", "CommunicationError"), ended.trace
        return
    assert ended.error_type == "CommunicationError", f"lost at '{moment}': {ended.trace}"
    what, _, cause = ended.error.partition(" failed on rank 0: ")
    assert cause, ended.error
    assert what.startswith(("all-gather of unit ", "reduction of unit ", "the ", "clip_grad_norm_")), ended.error
    assert f"It was waiting for rank {LOST}. A rank that ended, or that reports no error, is lost." in ended.error
    assert "Last events on rank 0: " in ended.error


def _lose_at(positions: Sequence[int], moments: Sequence[str], sent: signal.Signals) -> None:
    is_stopped = sent == signal.SIGSTOP
    timeout_s = TIMEOUT_S if is_stopped else FAR_AWAY_S  # a killed rank is noticed without
    for first in range(0, len(positions), _AT_ONCE):
        some = positions[first : first + _AT_ONCE]
        worlds = [World(_train, timeout_s=timeout_s, position=position, sent=sent) for position in some]
        for position, world in zip(some, worlds, strict=True):
            ended = world.join(but=LOST if is_stopped else None)
            assert ended[LOST].exit_code == (None if is_stopped else -signal.SIGKILL)
            if moments[position] != END or ended[0].exit_code != 0:  # at the end, it may have all that it needs
                _assert_names_what_it_waited_for(ended[0], moments[position])


@pytest.mark.ci
def test_the_others_name_what_they_waited_for_when_a_rank_is_killed() -> None:
    """In the first forward, and in clipping."""
    moments = _all_moments()
    _lose_at([moments.index(name) for name in ("begin", CLIP)], moments, signal.SIGKILL)


@pytest.mark.parametrize("part", long(*range(_PARTS)))
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_may_be_lost_at_every_moment(sent: signal.Signals, part: int) -> None:
    moments = _all_moments()
    assert len(moments) > 90
    _lose_at(range(part, len(moments), _PARTS), moments, sent)


@pytest.mark.long
def test_a_rank_that_computes_while_another_one_dies_says_so_later() -> None:
    """Its next message finds a closed connection, when the message is sent."""
    moments = _all_moments()
    position = moments.index("pre_forward blocks.0", moments.index(CLIP))
    ended = World(_train, timeout_s=FAR_AWAY_S, position=position, others_compute_s=1.0).join()
    _assert_names_what_it_waited_for(ended[0], moments[position])


@pytest.mark.long
@pytest.mark.parametrize("moment", ["begin", "reshard blocks.1", "reduce blocks.1", CLIP])
def test_all_ranks_end_also_those_that_do_not_communicate_with_the_lost_one(moment: str) -> None:
    position = _all_moments().index(moment)
    ended = World(_train, num_ranks=4, timeout_s=FAR_AWAY_S, position=position, replicas=2).join()
    assert [each.exit_code for each in ended] == [1, -signal.SIGKILL, 1, 1]
    for each in (ended[0], ended[2], ended[3]):
        assert each.error_type == "CommunicationError", each.trace


def _step_of_muon(ctx: RankContext, mesh: DeviceMesh, dies_computing: bool) -> None:
    """The rank ``LOST`` dies as it computes a matrix, or before it sends anything."""
    params = [nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])) for _ in range(4)]
    optimizer = fsdp2.optim.Muon(params, bucket_nbytes=1)
    assert len(optimizer.plan.steps) == 2
    for param in params:
        param.grad = torch.ones_like(param)
    if ctx.rank == LOST:
        if not dies_computing:
            os.kill(os.getpid(), signal.SIGKILL)
        muon.newton_schulz = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    optimizer.step()


@pytest.mark.ci
@pytest.mark.parametrize("dies_computing", [False, True])
def test_a_step_of_muon_says_which_ranks_may_be_lost(dies_computing: bool) -> None:
    ended = World(_step_of_muon, timeout_s=FAR_AWAY_S, dies_computing=dies_computing).join()
    assert [each.exit_code for each in ended] == [1, -signal.SIGKILL]
    assert ended[0].error_type == "CommunicationError", ended[0].trace
    assert "exchange shards with the owners of matrices" in ended[0].error, ended[0].error


@pytest.mark.long
def test_python_ends_after_the_error(tmp_path: Path) -> None:
    """The interpreter joins threads and frees what hangs on them; ranks of a ``World`` skip that."""
    code = (
        "import sys; from tests.faults.ranks import run_rank\n"
        f"run_rank(int(sys.argv[1]), 2, r'file://{tmp_path / 'store'}', {FAR_AWAY_S}, ('{__name__}', '_train'),\n"
        f"         {{'position': 40}}, r'{tmp_path}/answer-' + sys.argv[1])"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(rank)]) for rank in range(2)]
    try:
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [1, -signal.SIGKILL]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _killed_while_it_answers(ctx: RankContext, mesh: DeviceMesh) -> str:
    def write_half(path: Path, data: bytes) -> int:
        with open(path, "wb") as file:
            file.write(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        return len(data)

    Path.write_bytes = write_half  # type: ignore[assignment,method-assign]  # in this rank's process only
    return "an answer"


@pytest.mark.ci
def test_half_an_answer_is_none() -> None:
    (ended,) = World(_killed_while_it_answers, num_ranks=1).join()
    assert ended.exit_code == -signal.SIGKILL
    assert ended.value is None
