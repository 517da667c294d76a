"""Says why nothing goes on: what this rank did last, and in what the ranks differ.

A thread looks at the last event of every root. If this rank waits for collectives and no event comes, the thread writes
to the store of the process group what the rank did and what it claims, and reads what other ranks have written there.
If all of them wait, they wait for each other: one rank's program differs. The store is no collective, so this works
where collectives are stuck. Nobody writes or reads it while events come.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Protocol

import torch.distributed as dist

from fsdp2.comm.streams import Streams
from fsdp2.extras import torch_names
from fsdp2.extras.claims import Claim, difference
from fsdp2.plan.mesh import ParallelMesh

LOOK_S = 1.0
_UNTIL_COMPARED_S = 5.0
_UNTIL_TOLD = 0.5  # part of the timeout: the collective that hangs may have started long before the last event
_ADVICE = (
    "The ranks diverged at the first difference. If they are meant to use different units or parameters, call "
    "set_ranks_may_differ(True) on the root; what must not differ even then is in docs/advanced/ranks.md."
)

_log = logging.getLogger("fsdp2")


class Watched(Protocol):
    """A root, as far as other threads may ask it.

    Attributes:
        identity: tells roots apart, and is the same on all ranks.
        last_event: a different object for each event; None before the first.
        is_running: whether a forward or backward runs.
    """

    @property
    def identity(self) -> str: ...
    @property
    def last_event(self) -> object: ...
    @property
    def is_running(self) -> bool: ...
    def story(self) -> str: ...
    def claims(self) -> Mapping[str, Claim]: ...
    def ranks(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Standing:
    """Where a rank stands that waits. ``stall``: the number of the stall on that rank. ``root``: the identity of
    the root. ``story``: the last events. ``claims``: what it did last, by what all ranks must do alike."""

    stall: int
    root: str
    story: str
    claims: Mapping[str, Claim]


class Board:
    """Where ranks that wait show where they stand."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = dist.PrefixStore("fsdp2/stalls", store), rank

    def show(self, standing: Standing | None) -> None:
        """Other ranks see ``standing`` from now on; None: this rank goes on."""
        self._store.set(str(self._rank), "" if standing is None else json.dumps(asdict(standing)))

    def of(self, rank: int) -> Standing | None:
        """Where ``rank`` stands, if it waits."""
        key = str(rank)
        text = self._store.get(key) if self._store.check([key]) else b""
        return Standing(**json.loads(text)) if text else None


class StallWatch:
    """Watches all roots on one device, since their collectives queue behind each other.

    On the CPU, a collective that times out raises where the runtime waits for it. On an accelerator, the runtime raises
    nothing: the CPU waits for the device elsewhere, until the watchdog of the backend (NCCL) ends the process.

    Args:
        rank: this process.
        is_idle: whether all collectives that were enqueued are done.
        timeout_s: after how many seconds the backend gives up.
        board: where ranks that wait show where they stand; None compares nothing.
        runs_ahead: see ``Streams``. Ranks that wait for a busy device may all go on.
    """

    def __init__(
        self,
        rank: int,
        is_idle: Callable[[], bool],
        timeout_s: float,
        board: Board | None = None,
        *,
        runs_ahead: bool = True,
    ) -> None:
        self._rank, self._is_idle, self._timeout_s, self._board = rank, is_idle, timeout_s, board
        self._runs_ahead = runs_ahead
        self._look_s, self._until_compared_s = min(LOOK_S, timeout_s / 40), min(_UNTIL_COMPARED_S, timeout_s / 8)
        self._lock = threading.Lock()
        self._roots: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._has_ended = False
        self._ends = threading.Event()
        self._seen: dict[str, object] = {}  # the last event of each root, by the root's identity
        self._latest = ""  # the identity of the root that had an event last
        self._since = 0.0
        self._num_stalls = 0
        self._shown: Standing | None = None
        self._others: list[Standing | None] = []  # where other ranks stood at the last look
        self._has_told = False
        self.differing: Sequence[str] = ()  # what holds the ranks up, in this stall

    def add(self, root: Watched) -> bool:
        """Watch ``root``, too. False if ``run`` has ended, or is about to: then nobody would look."""
        with self._lock:
            if not self._has_ended:
                self._roots.add(root)
            return not self._has_ended

    def look(self, now: float) -> str | None:
        """The message to log at time ``now`` (in seconds), once per stall; else None."""
        with self._lock:
            roots = list(self._roots)
        changed = [root for root in roots if self._seen.get(root.identity, root) is not root.last_event]
        if changed or len(roots) != len(self._seen):
            self._seen = {root.identity: root.last_event for root in roots}
            if changed:
                self._latest = max(changed, key=lambda root: root.is_running).identity
            self._since, self._has_told, self._others, self.differing = now, False, [], ()
            if self._shown is not None and self._board is not None:
                self._shown = None
                self._board.show(None)
        waited_s = now - self._since
        if self._has_told or waited_s < self._until_compared_s or self._is_idle():
            return None
        told = [root for root in roots if root.last_event is not None]
        latest = next((root for root in told if root.identity == self._latest), None)
        message = None if latest is None or self._board is None else self._compared(latest, waited_s)
        if message is None and waited_s >= _UNTIL_TOLD * self._timeout_s:
            message = self._alone(told, waited_s)
        self._has_told = message is not None
        return message

    def _compared(self, root: Watched, waited_s: float) -> str | None:
        """What to say if all ranks of ``root`` wait: they do if they stood at the same place at the last look, too."""
        assert self._board is not None
        if self._shown is None:
            self._num_stalls += 1
            self._shown = Standing(self._num_stalls, root.identity, root.story(), root.claims())
            self._board.show(self._shown)
        ranks = root.ranks()
        others = [self._shown if rank == self._rank else self._board.of(rank) for rank in ranks]
        before, self._others = self._others, others
        if others != before or any(each is None or each.root != root.identity for each in others):
            return None
        standings = {rank: each for rank, each in zip(ranks, others, strict=True) if each is not None}
        found = difference({rank: each.claims for rank, each in standings.items()})
        if found is None and self._runs_ahead:  # a device may compute for long
            return None
        head = f"rank {self._rank}: no progress for {waited_s:.0f} s. All ranks wait for each other"
        stories = [f"Last events on rank {rank}: {each.story}." for rank, each in standings.items()]
        if found is not None:
            self.differing = found.lines
            return "\n".join([f"{head}, because {found.why}:", *found.lines[1:], *stories])
        return "\n".join([f"{head}.", *stories, _ADVICE])

    def _alone(self, roots: Iterable[Watched], waited_s: float) -> str:
        stories = "".join(f"Last events on rank {self._rank}: {root.story()}.\n" for root in roots)
        return (
            f"rank {self._rank}: no progress for {waited_s:.0f} s. A collective waits for other ranks. The timeout of "
            f"the backend is {self._timeout_s:.0f} s.\n{stories}"
            f"Compare the last events of all ranks. {_ADVICE}"
        )

    def run(self) -> None:
        """Look until there are no more roots, or until ``end``."""
        while self._goes_on():
            if self._ends.wait(self._look_s):
                return
            try:
                message = self.look(time.monotonic())
            except RuntimeError:  # the store is gone: so is the process that has it, or the process group
                self._has_ended = True
                return
            if message is not None:
                _log.error(message)

    def end(self) -> None:
        """Look no more: Python ends."""
        self._ends.set()

    def _goes_on(self) -> bool:
        with self._lock:
            self._has_ended = not self._roots
            return not self._has_ended


_watches: dict[object, tuple[StallWatch, threading.Thread]] = {}


def differing() -> Sequence[str]:
    """What holds the ranks up at present, as the lines of an error; empty if nothing does, or nobody knows."""
    return next((stalls.differing for stalls, _ in _watches.values() if stalls.differing), ())


def watch_for_stalls(root: Watched, streams: Streams, mesh: ParallelMesh) -> None:
    """Let a thread of this process watch ``root`` from now on, if ``mesh`` has other ranks. The thread ends with the
    process, or with its roots."""
    timeout_s = timeout_s_of(mesh)
    if timeout_s is None:
        return
    stalls, _ = _watches.get((streams, timeout_s), (None, None))
    if stalls is None or not stalls.add(root):
        board = Board(torch_names.default_store(), dist.get_rank())
        stalls = StallWatch(dist.get_rank(), streams.is_idle, timeout_s, board, runs_ahead=streams.runs_ahead)
        stalls.add(root)
        thread = threading.Thread(target=stalls.run, name="fsdp2-stalls", daemon=True)
        _watches[streams, timeout_s] = stalls, thread
        thread.start()
        _end_with_python()


def timeout_s_of(mesh: ParallelMesh) -> float | None:
    """After how many seconds a collective on ``mesh`` fails; None if the mesh has no other ranks."""
    groups = mesh.process_groups
    timeout = torch_names.timeout_of(groups[0], mesh.device) if groups else None
    return None if timeout is None else timeout.total_seconds()


@cache
def _end_with_python() -> None:
    """End the threads before Python ends: a thread that is inside the store then would abort the process."""

    def end() -> None:
        for stalls, thread in _watches.values():
            stalls.end()
            thread.join(5.0)

    atexit.register(end)
