"""Diagnoses hangs: what each rank did last, how often it has run which model, and how the ranks differ.

A thread looks at the last event of every root. If this rank waits for collectives and no event comes, the thread shows
the rank's standing on the ``Board``, asks other ranks to do the same, and reads what they show. A rank that has no
events, but does not wait for other ranks either, answers, too. There are two cases:

- All ranks wait for each other, or one of them has ended. Then their programs differ, which is an error.
- Some rank does something else, and may come later. After a while, a warning reports the standing of all ranks.

The board uses no collective, so this works while collectives are stuck. It is not touched while events come.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from fsdp2.core import CommunicationError, ParallelMesh
from fsdp2.extras import torch_names
from fsdp2.extras.standings import Board, Standing, View, doubt, verdict

if TYPE_CHECKING:
    from fsdp2.extras.alike import Alike

LOOK_S = 1.0
_UNTIL_COMPARED_S = 5.0
_UNTIL_WARNED_S = 20.0
_UNTIL_TOLD = 0.5  # fraction of the timeout: the hanging collective may have started long before the last event
_UNTIL_EXPLAINED_S = 2.0  # a rank closes its connections a little before it reports that it ends
_READ_S = 2e-5  # times ranks squared, so that the store has to answer some 100,000 requests per second at most
_LINGER_S = 10.0  # gives ranks that wait the time to compare
_STORE_IS_GONE = (
    "The store of the process group is gone, so the process that hosts it has ended: rank 0, if ranks were started "
    "without torchrun."
)
_COLLECTIVE = (  # functions that are easily called on one rank only
    *("full_tensor", "state_dict", "get_state_dict", "get_model_state_dict", "get_optimizer_state_dict"),
    *("set_state_dict", "set_model_state_dict", "set_optimizer_state_dict"),
)
_FSDP2, _TORCH, _PYTHON = Path(__file__).parents[1], Path(torch.__file__).parent, Path(os.__file__).parent

_log = logging.getLogger("fsdp2")


class Said(NamedTuple):
    """What to log, and at which level."""

    level: int
    text: str


@dataclass
class _Pause:
    """The time from one event to the next."""

    number: int  # tells pauses of this rank apart
    root: Callable[[], Alike | None]  # the root of the event, while it lives
    since: float
    shown: Standing | None = None  # what this rank has shown
    # For each other rank, its last standing, and when this rank first saw the pause of that standing.
    seen: dict[int, tuple[Standing, float]] = field(default_factory=dict)
    did: dict[int, tuple[int, bool]] = field(default_factory=dict)  # what the ranks did at the last read
    next_read: float = 0.0  # the earliest time at which this rank reads again what others show
    has_warned: bool = False
    has_told: bool = False
    differing: Sequence[str] = ()  # how ranks differ for certain, as the lines of an error
    explained: str | None = None  # the explanation that was given for a failed collective


class StallWatch:
    """Watches all roots of this process, since their collectives queue behind each other.

    On the CPU, a collective that times out raises where the runtime waits for it. On an accelerator, the runtime raises
    nothing: the CPU waits for the device elsewhere, until the watchdog of the backend (NCCL) ends the process.

    If it ``lingers``, this process hosts the store, and ends only after the other ranks, or after a while: they may
    still read from the store that all ranks agree, or what this rank's standing is.
    """

    def __init__(self, *, lingers: bool = False) -> None:
        self._lingers = lingers
        self._lock = threading.Lock()
        self._roots: weakref.WeakSet[Alike] = weakref.WeakSet()
        self._has_ended = False
        self._questions: queue.SimpleQueue[Future[str] | None] = queue.SimpleQueue()  # None: Python ends
        self._seen: weakref.WeakKeyDictionary[Alike, object] = weakref.WeakKeyDictionary()  # the last events
        self._pause = _Pause(0, lambda: None, 0.0)

    @property
    def differing(self) -> Sequence[str]:
        """How ranks differ for certain, as the lines of an error; empty if this is not known."""
        return self._pause.differing

    def add(self, root: Alike) -> bool:
        """Watch ``root``, too. False if ``run`` has ended or is about to end, so that ``root`` would not be watched."""
        with self._lock:
            if not self._has_ended:
                self._roots.add(root)
            return not self._has_ended

    def look(self, now: float) -> Said | None:
        """What to log at time ``now`` (in seconds), if anything. Each message is logged only once in a pause."""
        self._note_events(now)
        pause, root = self._pause, self._pause.root()
        if root is None:
            return None
        quiet_s, until_warned_s = now - pause.since, min(_UNTIL_WARNED_S, root.timeout_s / 4)
        if quiet_s < min(_UNTIL_COMPARED_S, root.timeout_s / 8) or pause.has_told:
            return None
        if root.is_idle() and pause.shown is None and not root.board.is_asked():
            return None
        mine = self._show(root, quiet_s)
        if now < pause.next_read or (not mine.waits and quiet_s < until_warned_s):
            return None
        view = self._view(root.board, mine, now)
        pause.next_read = now + _READ_S * len(view.standings) ** 2
        if mine.waits:
            did = {rank: (its.pause, its.waits) for rank, its in view.known.items()}
            is_same, pause.did = did == pause.did, did
            found = verdict(view, is_same=is_same, runs_ahead=root.runs_ahead)
            if found is not None:
                pause.has_told, (text, pause.differing) = True, found
                return Said(logging.ERROR, text)
            if quiet_s >= _UNTIL_TOLD * root.timeout_s:
                pause.has_told = True
                stories = [f"Last events on rank {root.board.rank}: {each.story()}." for each in self._alive()]
                return Said(logging.ERROR, doubt(view, *stories, f"The backend gives up after {root.timeout_s:.0f} s."))
        if pause.has_warned or quiet_s < until_warned_s or not view.is_uneven(runs_ahead=root.runs_ahead):
            return None
        pause.has_warned = True
        return Said(logging.WARNING, doubt(view))

    def _alive(self) -> list[Alike]:
        with self._lock:
            return list(self._roots)

    def _note_events(self, now: float) -> None:
        """If there are new events, end the pause and begin another one."""
        roots, seen = self._alive(), self._seen
        changed = [root for root in roots if seen.get(root, root) is not root.last_event]
        if not changed and len(roots) == len(seen):
            return
        self._seen = weakref.WeakKeyDictionary({root: root.last_event for root in roots})
        before = self._pause
        latest = weakref.ref(max(changed, key=lambda root: root.is_running)) if changed else before.root
        self._pause = _Pause(before.number + 1, latest, now)
        if before.shown is not None and (root := before.root()) is not None:
            root.board.show(None)
            if before.shown.waits:
                root.board.stop_asking()

    def _standing(self, root: Alike, quiet_s: float, place: str, *, waits: bool, has_ended: bool) -> Standing:
        return Standing(
            pause=self._pause.number,
            waits=waits,
            has_ended=has_ended,
            quiet_s=quiet_s,
            place=place,
            root=root.identity,
            ranks=root.ranks(),
            story=root.story(),
            claims=root.claims(),
            passes={each.identity: each.passes() for each in [*self._alive(), root]},
        )

    def _show(self, root: Alike, quiet_s: float) -> Standing:
        """Show the standing of this rank. If it waits, ask others to do the same."""
        shown, waits = self._pause.shown, not root.is_idle()
        first_quiet_s = quiet_s if shown is None else shown.quiet_s
        mine = self._standing(root, first_quiet_s, "" if waits else _place(), waits=waits, has_ended=False)
        if mine != shown:
            root.board.show(mine)
            self._pause.shown = mine
        if waits:
            root.board.ask()
        return mine

    def _view(self, board: Board, mine: Standing, now: float) -> View:
        """The standings of this rank and of each rank that it waits for."""
        pause = self._pause
        found: dict[int, Standing | None] = {board.rank: mine}
        quiet_s = {board.rank: now - pause.since}
        awaited = list(mine.ranks)
        for rank in awaited:
            if rank in found:
                continue
            before, since = pause.seen.get(rank, (None, now))
            its = found[rank] = before if before is not None and before.has_ended else board.of(rank)
            if its is None:
                continue
            if before is None or before.pause != its.pause:
                since = now
            pause.seen[rank] = its, since
            quiet_s[rank] = its.quiet_s + now - since  # at least: clocks of ranks differ
            if its.waits:
                awaited += its.ranks
        return View(board.rank, quiet_s, dict(sorted(found.items())))

    # The thread

    def run(self) -> None:
        """Watch until there are no more roots, or until ``end`` is called: then Python ends."""
        try:
            while self._goes_on():
                try:
                    pause_s = min([LOOK_S, *(root.timeout_s / 40 for root in self._alive())])
                    question = self._questions.get(timeout=pause_s)
                except queue.Empty:
                    self._look_and_log()
                    continue
                if question is None:
                    self._leave()
                    break
                question.set_result(self._explain())
        finally:
            with self._lock:
                self._has_ended = True

    def _look_and_log(self) -> None:
        with suppress(RuntimeError):  # the main thread runs meanwhile, and changes what is read here
            said = self.look(time.monotonic())
            if said is not None:
                _log.log(said.level, said.text)

    def end(self) -> None:
        """Stop watching, since Python ends."""
        self._questions.put(None)

    def explain(self) -> str:
        """After a collective has failed: what is known about ranks that have ended, in lines for an error. Waits a
        short time for the thread that calls ``run``."""
        question: Future[str] = Future()
        self._questions.put(question)
        with suppress(TimeoutError):
            return question.result(2 * _UNTIL_EXPLAINED_S)
        return ""

    def _goes_on(self) -> bool:
        with self._lock:
            self._has_ended = not self._roots
            return not self._has_ended

    def _explain(self) -> str:
        now = begun = time.monotonic()
        self._note_events(now)
        pause, root = self._pause, self._pause.root()
        if root is None:
            return ""
        if pause.explained is None:
            mine = self._standing(root, 0.0, "", waits=True, has_ended=False)
            while True:
                view = self._view(root.board, mine, now)
                found = verdict(view, is_same=False, runs_ahead=True)
                if found is not None or root.board.is_gone or now > begun + _UNTIL_EXPLAINED_S:
                    break
                time.sleep(0.1)
                now = time.monotonic()
            pause.explained = ""
            if found is not None:
                pause.explained = "\n" + "\n".join(found[1])
            elif root.board.is_gone:
                pause.explained = "\n" + "\n".join([_STORE_IS_GONE, *view.lines()])
        return pause.explained

    def _leave(self) -> None:
        """This process ends. Show what it has run, and the exception that ended it, so that other ranks need not wait.
        If that is an error of a collective without an explanation, log which ranks have ended."""
        root = self._pause.root() or next(iter(self._alive()), None)
        if root is None:
            return
        error = getattr(sys, "last_value", None)
        if isinstance(error, CommunicationError) and self._pause.explained is None and (known := self._explain()):
            _log.error(f"rank {root.board.rank} ends, since a collective has failed.{known}")
        board, others = root.board, [rank for rank in root.ranks() if rank != root.board.rank]
        board.leave(self._standing(root, 0.0, _described(error), waits=False, has_ended=True))
        until = time.monotonic() + _LINGER_S
        while self._lingers and self._pause.explained is None and not board.have_left(others):
            if time.monotonic() > until:
                return
            time.sleep(0.05)


_running: list[tuple[StallWatch, threading.Thread]] = []  # at most one


def watch_for_stalls(root: Alike, store: dist.Store) -> None:
    """Let a thread of this process watch ``root`` from now on. The thread ends with the process, or with its roots.
    ``store`` is the store of the ranks."""
    if _running and _running[0][0].add(root):
        return
    watch = StallWatch(lingers=torch_names.is_hosted_here(store))
    watch.add(root)
    thread = threading.Thread(target=watch.run, name="fsdp2-stalls", daemon=True)
    _running[:] = [(watch, thread)]
    thread.start()
    _end_with_python()


def differing() -> Sequence[str]:
    """How ranks differ for certain, as the lines of an error; empty if this is not known."""
    return _running[0][0].differing if _running else ()


def last_words() -> str:
    """After a collective has failed: what is known about ranks that have ended, as more lines for the error."""
    return next((watch.explain() for watch, thread in _running if thread.is_alive()), "")


def timeout_s_of(mesh: ParallelMesh) -> float | None:
    """After how many seconds a collective on ``mesh`` fails; None if the mesh has no other ranks."""
    groups = mesh.process_groups
    timeout = torch_names.timeout_of(groups[0], mesh.device) if groups else None
    return None if timeout is None else timeout.total_seconds()


@cache
def _end_with_python() -> None:
    """End the thread before Python ends, or before the end of a child process that a library has started as a rank. A
    thread that is inside the store at that time would abort the process."""

    def end() -> None:
        for watch, thread in _running:
            watch.end()
            thread.join(_LINGER_S + 5.0)

    Finalize(None, end, exitpriority=0)


# What the process is doing


def _described(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0][:100]


def _place() -> str:
    """The line of the user's program or of another library that the main thread is running."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    collective = ""  # the outermost that the line has called
    for its in stack:
        if not _is_internal(its.filename):
            line = f"{its.line or 'a line'} in {its.name} ({os.path.basename(its.filename)}:{its.lineno})"
            return f"{line}, and all ranks must call {collective} together" if collective else line
        collective = its.name if its.name in _COLLECTIVE else collective
    return ""


def _is_internal(path: str) -> bool:
    """Whether a file belongs to fsdp2, torch or Python."""
    return path.startswith((f"{_FSDP2}/", f"{_TORCH}/", "<")) or (
        path.startswith(f"{_PYTHON}/") and "site-packages" not in path
    )
