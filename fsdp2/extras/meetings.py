"""Meetings at which ranks wait until all of them have claimed the same. They use the store of the process group, not a
collective.

Rule: once all ranks have come, this rank no longer needs the store, since the process that hosts it may end then.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
import zlib
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from fsdp2.core import CommunicationError, ParallelMesh, ScheduleError, comms
from fsdp2.extras import torch_names
from fsdp2.extras.claims import Claim
from fsdp2.extras.peers import check_connections
from fsdp2.extras.stalls import LOOK_S, differing, timeout_s_of

_MAX_PAUSE_S, _PAUSE_PER_RANK_S = 0.05, 0.001  # so the store has to answer some 1,000 questions per second at most
_PREFIX = "fsdp2/claims"
_MET = "/met"  # suffix of a key that exists once all ranks have claimed the same


# The ranks, the key and the last keys in the store of each meeting whose model is gone, on the first of its ranks.
_gone: list[tuple[frozenset[int], str, list[str]]] = []


class Meeting:
    """A place in the store where ``ranks``, some of those of ``mesh``, wait for each other once per claim. Its ``key``
    is the same on all these ranks, and different from that of any other meeting."""

    def __init__(self, mesh: ParallelMesh, identity: str, ranks: Sequence[int]) -> None:
        self.mesh, self.ranks = mesh, ranks
        self.key = f"{identity}/{zlib.crc32(repr(ranks).encode()):x}"
        self.number = 0  # how many claims have been agreed on here
        self.sent: list[str] = []  # digests of this rank's current claims; several if it was interrupted
        self.earlier: list[str] = []  # the keys of the last claim
        if dist.get_rank() in ranks[:1]:
            weakref.finalize(self, _gone.append, (frozenset(ranks), self.key, self.earlier)).atexit = False


def await_claim(meeting: Meeting, name: str, claim: Claim) -> None:
    """Wait until all ranks of ``meeting`` have claimed the same under ``name``. If one of them proceeds without, this
    rank must not communicate: messages would differ. After an interrupt, the same claim or another one may be made.

    Raises:
        ScheduleError: other ranks wait for this one, but do something else. Names the difference and the ranks.
        CommunicationError: a rank is lost, or has not come within the timeout of the process group.
    """
    timeout_s = timeout_s_of(meeting.mesh)
    if timeout_s is None or len(meeting.ranks) < 2:  # there are no other ranks
        return
    store = dist.PrefixStore(f"{_PREFIX}/{meeting.key}", torch_names.default_store())
    digest, met_for = hashlib.sha256(json.dumps([name, claim]).encode()).hexdigest(), ""
    while met_for != digest:  # else the ranks agreed on an earlier claim of this rank, which was interrupted
        if digest not in meeting.sent:
            meeting.sent.append(digest)
            comms.launched(_come, meeting, store, digest)
        with comms.waiting():
            met_for = comms.launched(_await_all, meeting, store, timeout_s)
        meeting.earlier[:] = [f"{meeting.number}/{each}{end}" for each in meeting.sent for end in ("", _MET)]
        meeting.number, meeting.sent = meeting.number + 1, []
        _forget_gone(meeting.ranks)


def _forget_gone(ranks: Sequence[int]) -> None:
    """Delete what models that are gone have left in the store. All of ``ranks`` have come to a later claim, so none of
    them still waits for one of these models."""
    for each in [each for each in _gone if each[0].issubset(ranks)]:
        _gone.remove(each)
        _, key, names = each
        _delete(dist.PrefixStore(f"{_PREFIX}/{key}", torch_names.default_store()), names)


def _delete(store: dist.Store, keys: Sequence[str]) -> None:
    with suppress(RuntimeError):  # not all stores can delete keys, and this one may have gone
        for key in keys:
            store.delete_key(key)


def _come(meeting: Meeting, store: dist.Store, digest: str) -> None:
    """Claim. The last rank to come cleans up first and then notifies the others, since these may end afterwards."""
    key = f"{meeting.number}/{digest}"
    if store.add(key, 1) == len(meeting.ranks):
        _delete(store, meeting.earlier)  # all ranks are done with the previous claim
        store.set(key + _MET, "")


def _await_all(meeting: Meeting, store: dist.Store, timeout_s: float) -> str:
    """Wait until all ranks have made the same claim. Returns its digest."""
    begun = looked = time.monotonic()
    pause_s, max_pause_s = 1e-4, max(_MAX_PAUSE_S, len(meeting.ranks) * _PAUSE_PER_RANK_S)
    while True:
        for digest in meeting.sent:
            if store.check([f"{meeting.number}/{digest}{_MET}"]):
                return digest
        if lines := differing():
            time.sleep(3 * LOOK_S)  # when this rank ends, others get an error: let them see the cause first
            raise ScheduleError("\n".join(lines))
        now = time.monotonic()
        if now > looked + LOOK_S and meeting.mesh.device.type == "cpu":  # device backends do not report it
            looked = now
            for group in meeting.mesh.process_groups:
                check_connections(group)
        if now > begun + timeout_s:
            raise CommunicationError(f"no answer within {timeout_s:.0f} s")
        time.sleep(pause_s := min(2 * pause_s, max_pause_s))
