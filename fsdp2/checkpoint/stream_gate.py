"""Decides when a stream may continue: no rank begins to gather before the receiving ranks have asked for it.

Ranks communicate through the store of the process group, without collectives: a rank that waits here keeps no device
and no connection busy, whatever the caller on another rank does meanwhile. Rule: each rank asks for step 0, 1, and so
on, and no rank asks for a step before the previous one was open. So one counter is enough.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum

import torch
import torch.distributed as dist

from fsdp2.core import CommunicationError, comms
from fsdp2.extras import torch_names

_PAUSE_S, _MAX_PAUSE_S, _PAUSE_PER_RANK_S = 1e-4, 0.01, 1e-4  # so the store gets at most 10,000 requests per second
_PLAN, _JOINED, _ASKED, _LEFT, _CLOSED = "plan", "joined", "asked", "left", "closed"

_numbers: dict[tuple[int, ...], itertools.count[int]] = {}  # by ranks, which all begin the same streams in one order


class Leaving(Enum):
    """Why a rank leaves a stream before its end."""

    STOPPED = "stopped"  # on purpose, so all ranks end without an error
    LEFT = "left"  # the caller has left the loop
    RAISED = "raised"


class Gate:
    """The steps of one stream. Create it on all ``ranks`` in the same order, and ``close`` it.

    Args:
        ranks: the global ranks that take part. A rank alone needs no process group.
        askers: those ranks whose requests open a step.
        caller: the beginning of error messages.
    """

    def __init__(self, ranks: Sequence[int], askers: Sequence[int], caller: str) -> None:
        self._ranks, self._caller = tuple(ranks), caller
        is_alone = len(ranks) == 1
        self._rank, store = (ranks[0], dist.HashStore()) if is_alone else (dist.get_rank(), torch_names.default_store())
        self._num_askers, self._asks = len(askers), self._rank in askers
        number = next(_numbers.setdefault(self._ranks, itertools.count()))
        digest = hashlib.sha256(repr(self._ranks).encode()).hexdigest()[:16]
        self._store = dist.PrefixStore(f"fsdp2/streams/{digest}/{number}", store)

    def join(self, plan: str) -> None:
        """Wait until all ranks have joined with the same ``plan``.

        Raises:
            ValueError: another rank has a different plan. It is a ``RuntimeError`` if another rank has detected that.
        """
        mine = hashlib.sha256(plan.encode()).hexdigest()
        found = comms.launched(self._store.compare_set, _PLAN, "", f"{self._rank} {mine}")
        first, theirs = found.decode().split(" ")
        if theirs != mine:
            raise ValueError(
                f"{self._caller}: rank {self._rank} would stream other tensors than rank {first}, or other buckets. "
                "Build the same model on all ranks, and pass the same arguments."
            )
        comms.launched(self._store.add, _JOINED, 1)
        self._await(_JOINED, len(self._ranks))

    def ask(self, step: int) -> bool:
        """Ask for ``step`` if this rank is an asker, then wait until all askers have asked for it. Returns False if one
        of them has stopped the stream.

        Raises:
            RuntimeError: a rank has left the loop, or raised.
            CommunicationError: the askers have not asked within the timeout of the process group, or are lost.
        """
        if self._asks:
            comms.launched(self._store.add, _ASKED, 1)
        return self._await(_ASKED, (step + 1) * self._num_askers)

    def leave(self, why: Leaving, text: str) -> None:
        """Tell the other ranks that this one has left. The first reason counts."""
        said = json.dumps([self._rank, why.value, text])
        with suppress(RuntimeError):  # the store is gone with the process that hosts it; no rank can be told
            self._store.compare_set(_LEFT, "", said)

    def close(self) -> None:
        """End this rank's part. The last rank cleans up, unless the store is gone, whose host may end first."""
        with suppress(RuntimeError):
            if self._store.add(_CLOSED, 1) == len(self._ranks):
                for key in (_PLAN, _JOINED, _ASKED, _LEFT, _CLOSED):
                    self._store.delete_key(key)

    def _await(self, counter: str, count: int) -> bool:
        until = time.monotonic() + _limit_s()
        pause_s, max_pause_s = _PAUSE_S, max(_MAX_PAUSE_S, len(self._ranks) * _PAUSE_PER_RANK_S)
        while True:
            # Read first: a rank may ask for this step, and then leave.
            has_left = comms.launched(self._store.check, [_LEFT])
            if comms.launched(self._store.add, counter, 0) >= count:
                return True
            if has_left:
                return self._ended(self._store.get(_LEFT))
            if time.monotonic() > until:
                raise CommunicationError(
                    f"{self._caller}: rank {self._rank} has waited for the ranks that receive for longer than the "
                    "timeout of the process group. Let all ranks iterate to the end, in a for loop."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, max_pause_s)

    def _ended(self, said: bytes) -> bool:
        rank, why, text = json.loads(said)
        if Leaving(why) is Leaving.STOPPED:
            return False
        if Leaving(why) is Leaving.LEFT:
            raise RuntimeError(
                f"{self._caller}: rank {rank} left the loop {text}, by break or by an error of its own, so rank "
                f"{self._rank} gets no more. To end the loops of all ranks, call stop() of the stream."
            )
        raise RuntimeError(f"{self._caller}: nothing more is gathered, because rank {rank} raised {text}")


def _limit_s() -> float:
    """The number of seconds after which a collective of all ranks would time out."""
    devices = (torch.device("cpu"), torch.accelerator.current_accelerator())
    found = [torch_names.timeout_of(dist.group.WORLD, each) for each in devices if each is not None]  # type: ignore[arg-type]
    return next((each.total_seconds() for each in found if each is not None), math.inf)


def refuse(ranks: Sequence[int], caller: str, error: Exception) -> None:
    """Make the other ``ranks``, which wait for a stream that this rank cannot begin, raise, too."""
    gate = Gate(ranks, (), caller)
    gate.leave(Leaving.RAISED, f"{type(error).__name__}: {error}")
    gate.close()
