"""What a pass holds beyond the shards, in bytes from plans: whether more fits under a limit, and what has to go.

Pure: units are numbers, sizes are integers that are the same on all ranks, and so is every decision. Nothing is read
from an allocator. What counts: unsharded parameters and the staging memory of their gathers, shards on the post-forward
mesh, the gradients of units whose backward runs, and what reductions in flight read and write. What does not: shards
and their gradients, activations, and gradients that the user keeps unreduced.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from fsdp2.schedule.rank_skipping import nested
from fsdp2.schedule.schedule import Action, Actions, Schedule


@dataclass(frozen=True)
class UnitBytes:
    """What one unit takes, in bytes.

    Attributes:
        unsharded: its unsharded parameters.
        arriving: what its gather takes beside them, until they are usable.
        resting: its shards on the post-forward mesh.
        gradients: what autograd makes in its backward.
        copies: what a reduction makes of them: buckets, casts, and room to receive.
        early: of these copies, what is made while the parameters are still there.
        sent: of gradients and copies, what is held while the reduction is in flight.
    """

    unsharded: int = 0
    arriving: int = 0
    resting: int = 0
    gradients: int = 0
    copies: int = 0
    early: int = 0
    sent: int = 0

    def __add__(self, other: UnitBytes) -> UnitBytes:
        return UnitBytes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def gather(self) -> int:
        """The parameters while they are on their way."""
        return self.unsharded + self.arriving

    def backward(self, *, reshards: bool) -> int:
        """What backward adds to the unsharded parameters, up to the start of the reduction; ``reshards``: they are
        freed before that makes its copies, but for early ones."""
        return self.gradients + max(self.copies - (self.unsharded if reshards else 0), self.early)

    @property
    def alone(self) -> int:
        """What a step of this unit alone takes."""
        return max(self.gather, self.unsharded + self.backward(reshards=True))


@dataclass(frozen=True)
class Room:
    """How room is made: ``landings`` of the oldest reductions, then gathers in flight of ``dropped`` units."""

    landings: int = 0
    dropped: tuple[int, ...] = ()


class Ledger:
    """Who holds how much. Each method is told what happens, or asked before it does.

    Attributes:
        sizes: of each unit; replaced by the owner when plans are compiled anew.
        limit: how much may be held.
        held: how much is.
        peak: how much was, at most.
    """

    def __init__(self, sizes: Sequence[UnitBytes], limit: float = math.inf) -> None:
        self.sizes = list(sizes)
        self.limit = limit
        self.held = 0
        self.peak = 0
        self._params = [0] * len(self.sizes)
        self._unsharded: set[int] = set()  # or on the way there
        self._arriving: dict[int, None] = {}  # oldest first
        self._backwards = [0] * len(self.sizes)
        self._reductions: deque[int] = deque()

    @property
    def num_reductions(self) -> int:
        """How many reductions are in flight, as far as all ranks agree: some may have landed earlier on this one."""
        return len(self._reductions)

    # Questions

    def to_unshard(self, unit: int) -> int:
        """What gathering ``unit`` adds."""
        return 0 if unit in self._unsharded else self.sizes[unit].gather

    def to_run_backward(self, unit: int, *, gathers: bool, reshards: bool) -> int:
        """What the backward of ``unit`` adds: its parameters, if it ``gathers`` them, and then its gradients."""
        sizes = self.sizes[unit]
        params = sizes.unsharded if gathers or unit in self._unsharded else self._params[unit]
        at_most = max(self._params[unit] + self.to_unshard(unit) * gathers, params + sizes.backward(reshards=reshards))
        return max(at_most - self._params[unit] - self._backwards[unit], 0)

    def fits(self, nbytes: int) -> bool:
        return self.held + nbytes <= self.limit

    def stays(self, unit: int) -> dict[int, int]:
        """Who holds how much that would not go for ``unit``."""
        params = [0 if i in self._arriving and i != unit else n for i, n in enumerate(self._params)]
        held = [a + b for a, b in zip(params, self._backwards, strict=True)]
        return {i: n for i, n in enumerate(held) if n}

    def room_for(self, nbytes: int, unit: int) -> Room | None:
        """What has to go so that ``unit`` can take ``nbytes`` more; None if all that can go is not enough."""
        missing = self.held + nbytes - self.limit
        landings = 0
        while missing > 0 and landings < len(self._reductions):
            missing -= self._reductions[landings]
            landings += 1
        dropped = []
        for other in reversed(self._arriving):  # the latest was predicted to be needed last
            if missing > 0 and other != unit:
                missing -= self._params[other]
                dropped.append(other)
        return None if missing > 0 else Room(landings, tuple(dropped))

    # Events

    def unshard(self, unit: int) -> None:
        self._set_params(unit, self._params[unit] + self.to_unshard(unit))
        if unit not in self._unsharded:
            self._arriving[unit] = None
            self._unsharded.add(unit)

    def wait(self, unit: int) -> None:
        self._arriving.pop(unit, None)
        self._unsharded.add(unit)
        self._set_params(unit, self.sizes[unit].unsharded)

    def reshard(self, unit: int, leaves: int = 0) -> None:
        """``leaves``: bytes that stay, of resting shards or of memory that the user wants kept."""
        self._arriving.pop(unit, None)
        self._unsharded.discard(unit)
        self._set_params(unit, leaves)

    def run_backward(self, unit: int, *, gathers: bool, reshards: bool) -> None:
        if gathers or unit in self._unsharded:
            self.unshard(unit)
            self.wait(unit)
        self._set_backward(unit, self.sizes[unit].backward(reshards=reshards))

    def keep(self, unit: int) -> None:
        """Its gradients stay with the user's consent, unreduced."""
        self._set_backward(unit, 0)

    def reduce(self, unit: int, max_in_flight: int) -> None:
        """Its reduction starts, behind the landing of those that are too many."""
        while len(self._reductions) >= max_in_flight:
            self.land(1)
        self._set_backward(unit, 0)
        self._reductions.append(self.sizes[unit].sent)
        self._add(self.sizes[unit].sent)

    def land(self, count: int | None = None) -> None:
        """The oldest ``count`` reductions land, or all."""
        for _ in range(len(self._reductions) if count is None else count):
            self._add(-self._reductions.popleft())

    def _set_params(self, unit: int, nbytes: int) -> None:
        self._add(nbytes - self._params[unit])
        self._params[unit] = nbytes

    def _set_backward(self, unit: int, nbytes: int) -> None:
        self._add(nbytes - self._backwards[unit])
        self._backwards[unit] = nbytes

    def _add(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)


def simulate(
    schedule: Schedule, order: Sequence[int], parents: Sequence[int | None], ledger: Ledger, *, overlaps: bool
) -> None:
    """Run a forward and a backward over the units in ``order``, from the root on, each inside its parent's forward, and
    have ``ledger`` count. If the step ``overlaps``, a reduction stays in flight until the next one starts."""
    events = nested(order, parents)
    for unit, is_start in events:
        if is_start:
            _replay(schedule.pre_forward(unit, in_backward=False, grad_enabled=True), schedule, ledger)
        else:
            _replay(schedule.post_forward(unit), schedule, ledger)
    for unit, is_start in reversed(events):
        if is_start:
            if unit != order[0]:  # the root's own backward ends with all of it
                _replay(schedule.post_backward(unit), schedule, ledger)
            continue
        rules = schedule.rules[unit]
        actions = schedule.pre_backward(unit)
        if not overlaps:
            ledger.land()
        ledger.run_backward(unit, gathers=rules.unshard_in_backward, reshards=rules.reshard_after_backward)
        _replay(actions, schedule, ledger)
    _replay(schedule.end_backward(), schedule, ledger)


def _replay(actions: Actions, schedule: Schedule, ledger: Ledger) -> None:
    for action, unit in actions:
        if action in (Action.UNSHARD, Action.PREFETCH):
            ledger.unshard(unit)
        elif action is Action.WAIT:
            ledger.wait(unit)
        elif action is Action.RESHARD:
            ledger.reshard(unit)
        elif action is Action.RESHARD_POST_FORWARD:
            ledger.reshard(unit, ledger.sizes[unit].resting)
        elif action in (Action.REDUCE, Action.REDUCE_JOINTLY):
            ledger.reduce(unit, 1)
        elif action is Action.KEEP:
            ledger.keep(unit)
        else:
            ledger.land()
