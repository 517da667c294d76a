"""The standings of ranks that have had no event for some time: how ranks show them to each other on a board, how they
differ, and how to report it.

The board lives in the store of the process group, which ends with the process that hosts it: rank 0, if ranks were
started without torchrun. Rule: a diagnosis must not fail or delay a step. So only the thread of ``stalls`` uses the
board, and a board without its store shows nothing.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fsdp2.core import DOCS
from fsdp2.extras.claims import Claim, difference, named_ranks
from fsdp2.extras.output import first_lines

ALIKE = (
    "The ranks diverged at the first difference. If they are meant to use different units or parameters, call "
    f"set_ranks_may_differ(True) on the root; what must not differ even then is in {DOCS}/advanced/ranks.md."
)
AS_MANY = (
    "All ranks must run the same roots, with as many forwards and backwards of each. If ranks have different numbers "
    "of batches, loop with: for batch, is_real in fsdp2.joined(batches, model). See "
    f"{DOCS}/advanced/ranks.md#ranks-with-different-numbers-of-batches."
)
_SLOW = (
    "A rank that is only slow will come. Otherwise let all ranks make the same calls, also those of full_tensor() and "
    "of functions that gather state dicts."
)
_MAX_LINES = 8


@dataclass(frozen=True)
class RunCounts:
    """The passes of one root that a rank has run."""

    name: str  # of the root's class
    forwards: int  # how many have begun
    backwards: int
    running: str  # "forward", "backward", or "" if none runs
    row: Sequence[int]  # the ranks that gather with this one, and therefore run the same number of forwards


@dataclass(frozen=True)
class Standing:
    """What one rank is doing, and what it has done."""

    pause: int  # the number of this pause on that rank
    waits: bool  # for others, in a collective of fsdp2
    has_ended: bool  # its process has ended, or is about to
    quiet_s: float  # how long the rank had been without an event when it first showed this pause
    place: str  # the line that its main thread runs; or, if it has ended, the exception that ended it, if any
    root: str  # the identity of the root with the last event
    ranks: Sequence[int]  # all ranks that hold a part of that root
    story: str  # the last events of that root
    claims: Mapping[str, Claim]  # the rank's last claims about that root, to be compared with other ranks
    passes: Mapping[str, RunCounts]  # the passes that the rank has run, by the identity of the root


class Board:
    """The board of all ranks that share ``store``. This process is ``rank``."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self.rank = dist.PrefixStore("fsdp2/stalls", store), rank
        self.is_gone = False  # whether the store is

    def show(self, standing: Standing | None) -> None:
        """Let other ranks see ``standing`` from now on. None means that this rank makes progress again."""
        self._do(self._store.set, str(self.rank), pickle.dumps(standing))

    def of(self, rank: int) -> Standing | None:
        """The standing of ``rank``, if that rank has shown one."""
        key = str(rank)
        shown = self._do(self._store.get, key) if self._do(self._store.check, [key]) else None
        return None if shown is None else pickle.loads(shown)

    def ask(self) -> None:
        """Ask ranks that have no events, but do not wait for other ranks either, to show their standing, too."""
        self._do(self._store.set, "asked", "")

    def stop_asking(self) -> None:
        """This rank makes progress again. Other ranks that still wait repeat their request."""
        self._do(self._store.delete_key, "asked")

    def is_asked(self) -> bool:
        """Whether a rank has asked."""
        return bool(self._do(self._store.check, ["asked"]))

    def leave(self, standing: Standing) -> None:
        """Show ``standing`` as the last one before this process ends."""
        self.show(standing)
        self._do(self._store.set, f"{self.rank} has left", "")

    def have_left(self, ranks: Sequence[int]) -> bool:
        """Whether all ``ranks`` have left. True also if the store is gone, so that this is not known."""
        return self._do(self._store.check, [f"{rank} has left" for rank in ranks]) is not False

    def _do(self, call: Callable[..., Any], *args: object) -> Any:
        if self.is_gone:  # torch logs each call that fails
            return None
        try:
            return call(*args)
        except RuntimeError:
            self.is_gone = True
            return None


@dataclass(frozen=True)
class View:
    """What one rank sees when it has had no event for some time."""

    rank: int  # the rank that looks
    quiet_s: Mapping[int, float]  # how long each rank has been without an event; for other ranks, at least that long
    # Of this rank, and of those that it waits for, directly or indirectly. None: the rank shows nothing.
    standings: Mapping[int, Standing | None]

    @property
    def known(self) -> dict[int, Standing]:
        """The standings of the ranks that show one."""
        return {rank: each for rank, each in self.standings.items() if each is not None}

    def is_uneven(self, *, runs_ahead: bool) -> bool:
        """Whether ranks wait for others that do something else. ``runs_ahead``: ranks also wait for their busy devices,
        and a rank that shows nothing may have made progress a moment ago."""
        waiting = [each for each in self.known.values() if each.waits]
        seen = self.known if runs_ahead else self.standings
        return bool(waiting) and (len(waiting) < len(seen) or bool(are_behind(self.known)))

    def head(self) -> str:
        """The beginning of a message."""
        return f"rank {self.rank}: no progress for {self.quiet_s[self.rank]:.0f} s"

    def lines(self) -> list[str]:
        """A line for each rank, or for several ranks with the same text: what it does, and which passes it has run of
        the roots in which ranks wait."""
        known = self.known
        roots = dict.fromkeys(each.root for each in known.values() if each.waits)
        roots = roots or dict.fromkeys(each.root for each in known.values())
        names = {root: passes.name for each in known.values() for root, passes in each.passes.items()}
        same = Counter(names.values())
        names = {
            root: name if same[name] == 1 else f"{name} (number {root.rpartition('/')[2]})"
            for root, name in names.items()
        }
        ranks_of: dict[str, list[int]] = {}
        for rank, standing in self.standings.items():
            line = "no answer: its model goes on, has not run yet, or the rank is lost"
            if standing is not None:
                own_first = sorted(roots, key=lambda root: root != standing.root)
                done = [_counted(standing.passes.get(root), names[root]) for root in own_first]
                line = ", ".join([_state(standing, self.quiet_s[rank]), *done])
                if standing.place and not standing.has_ended:
                    line += f"; it runs {standing.place}"
            ranks_of.setdefault(line, []).append(rank)
        lines = [f"  {named_ranks(ranks)}: {line}" for line, ranks in ranks_of.items()]
        return first_lines(lines, _MAX_LINES, "  and {} more")


def are_behind(standings: Mapping[int, Standing]) -> list[int]:
    """The ranks that have run fewer forwards of a root than some rank that gathers with them; or fewer backwards than
    some rank, although no pass of the root runs on them."""
    found = [(rank, root, its) for rank, each in standings.items() for root, its in each.passes.items()]
    forwards, backwards = Counter[tuple[str, tuple[int, ...]]](), Counter[str]()
    for _, root, its in found:
        row = root, tuple(its.row)
        forwards[row] = max(forwards[row], its.forwards)
        backwards[root] = max(backwards[root], its.backwards)
    return sorted(
        {
            rank
            for rank, root, its in found
            if its.forwards < forwards[root, tuple(its.row)] or (its.backwards < backwards[root] and not its.running)
        }
    )


def verdict(view: View, *, is_same: bool, runs_ahead: bool) -> tuple[str, Sequence[str]] | None:
    """What blocks ranks for certain, if ranks have ended early, or if all ranks wait for each other: the message to
    log, and the lines of an error, without any if it is not known how the ranks differ. ``is_same``: they also waited
    at the last look. ``runs_ahead``: ranks that wait for a busy device may all make progress yet."""
    known, behind = view.known, are_behind(view.known)
    raised = [rank for rank, its in known.items() if its.has_ended and its.place]
    early = [rank for rank, its in known.items() if its.has_ended and (its.place or rank in behind)]
    stories = [f"Last events on rank {rank}: {its.story}." for rank, its in known.items() if its.waits]
    head = f"{view.head()}. All ranks wait for each other"
    if early:
        head, advice = view.head(), f"See what {named_ranks(early)} reported." if raised == early else AS_MANY
        lines = [f"{named_ranks(early)} {'has' if len(early) == 1 else 'have'} ended:", *view.lines(), advice]
    elif not is_same or len(known) < len(view.standings) or not all(its.waits for its in known.values()):
        return None
    elif found := difference({rank: its.claims for rank, its in known.items()}):
        lines = list(found)
    elif runs_ahead:
        return None
    elif behind:
        lines = [f"{_fewer(behind)}:", *view.lines(), AS_MANY]
    elif len({its.root for its in known.values()}) > 1:
        lines = ["ranks run different roots:", *view.lines(), AS_MANY]
    else:
        return "\n".join([f"{head}:", *view.lines(), *stories, ALIKE]), ()
    return "\n".join([f"{head}, because {lines[0]}", *lines[1:], *stories]), lines


def doubt(view: View, *more: str) -> str:
    """The message about ranks that may still come. ``more``: lines about this rank."""
    behind = are_behind(view.known)
    advice = f"{_fewer(behind).capitalize()}. {AS_MANY}" if behind else ALIKE if more else ""
    return "\n".join([f"{view.head()}:", *view.lines(), *more, f"{_SLOW} {advice}".rstrip()])


def _fewer(ranks: Sequence[int]) -> str:
    return (
        f"{named_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} run fewer forwards or backwards than other ranks"
    )


def _state(standing: Standing, quiet_s: float) -> str:
    if standing.has_ended:
        return f"ended by {standing.place}" if standing.place else "ended"
    return "waiting for other ranks" if standing.waits else f"no event for {quiet_s:.0f} s"


def _counted(passes: RunCounts | None, name: str) -> str:
    if passes is None:
        return f"no forward of {name}"
    forwards, backwards = _number(passes.forwards, "forward"), _number(passes.backwards, "backward")
    if passes.running == "forward":
        return f"in forward {passes.forwards} of {name}, after {backwards}"
    if passes.running == "backward":
        return f"in backward {passes.backwards} of {name}, after {forwards}"
    return f"after {forwards} and {backwards} of {name}"


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
