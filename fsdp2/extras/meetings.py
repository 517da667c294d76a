"""Where ranks wait until all of them have claimed the same. They meet in the store of the process group, which is no
collective.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Sequence

import torch.distributed as dist

from fsdp2.comm.streams import waiting
from fsdp2.extras import torch_names
from fsdp2.extras.claims import Claim
from fsdp2.extras.peers import check_connections
from fsdp2.extras.stalls import LOOK_S, differing, timeout_s_of
from fsdp2.plan.mesh import ParallelMesh
from fsdp2.types import CommunicationError, ScheduleError

_MAX_PAUSE_S, _PAUSE_PER_RANK_S = 0.05, 0.001  # so the store has to answer some 1,000 questions per second at most


class Meeting:
    """Where ``ranks``, some of those of ``mesh``, wait for each other: in the store, once per claim.

    Attributes:
        key: the same on these ranks, and that of no other meeting.
    """

    def __init__(self, mesh: ParallelMesh, identity: str, ranks: Sequence[int]) -> None:
        self.mesh, self.ranks = mesh, ranks
        self.key = f"{identity}/{zlib.crc32(repr(ranks).encode()):x}"
        self.number = 0  # how many claims the ranks have met for
        self.sent = ""  # this rank's part in the present one
        self.earlier: Sequence[str] = ()  # the keys of the last one


def await_claim(meeting: Meeting, name: str, claim: Claim) -> None:
    """Wait until all ranks of ``meeting`` have claimed the same under ``name``. If one of them goes on without, this
    rank must not communicate: messages would differ. After an interrupt, the same claim may be made again, or another.

    Raises:
        ScheduleError: other ranks wait for this one, and do something else. Names what and the ranks.
        CommunicationError: a rank is lost, or has not come within the timeout of the process group.
    """
    timeout_s, num_ranks = timeout_s_of(meeting.mesh), len(meeting.ranks)
    if timeout_s is None or num_ranks < 2:  # nobody else is there
        return
    store = dist.PrefixStore(f"fsdp2/claims/{meeting.key}", torch_names.default_store())
    digest, met_for = hashlib.sha256(json.dumps([name, claim]).encode()).hexdigest(), ""
    while met_for != digest:  # else this rank had claimed something else, and others have come for that
        counter, all_came = f"{meeting.number}/{digest}", f"{meeting.number}/all came"
        if meeting.sent != counter:
            meeting.sent = counter
            if store.add(counter, 1) == num_ranks:
                store.set(all_came, digest)
        with waiting():
            _await_all(meeting, store, all_came, timeout_s)
        met_for = store.get(all_came).decode()
        for key in meeting.earlier:  # all ranks have left that one
            store.delete_key(key)
        meeting.earlier, meeting.number = (f"{meeting.number}/{met_for}", all_came), meeting.number + 1


def _await_all(meeting: Meeting, store: dist.Store, all_came: str, timeout_s: float) -> None:
    begun = looked = time.monotonic()
    pause_s, max_pause_s = 1e-4, max(_MAX_PAUSE_S, len(meeting.ranks) * _PAUSE_PER_RANK_S)
    while not store.check([all_came]):
        if lines := differing():
            time.sleep(3 * LOOK_S)  # when this rank ends, others get an error: let them see the cause first
            raise ScheduleError("\n".join(lines))
        now = time.monotonic()
        if now > looked + LOOK_S and meeting.mesh.device.type == "cpu":  # a device's backend tells nobody
            looked = now
            for group in meeting.mesh.process_groups:
                check_connections(group)
        if now > begun + timeout_s:
            raise CommunicationError(f"no answer within {timeout_s:.0f} s")
        time.sleep(pause_s := min(2 * pause_s, max_pause_s))
