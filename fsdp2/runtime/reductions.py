"""The reductions of one root that have started and not landed, oldest first.

How many may be in flight is the user's choice between memory and overlap: each holds the gradients that it reads. The
gradients of one group land in the order in which they were reduced.
"""

from __future__ import annotations

from fsdp2.group.gradients import Unused
from fsdp2.group.group import ParamGroup
from fsdp2.group.reduce_scatter import PendingReduce
from fsdp2.types import CommunicationError


class Reductions:
    """See the module's text.

    Attributes:
        max_in_flight: how many reductions may be in flight, counting the one that starts.
    """

    def __init__(self) -> None:
        self.max_in_flight = 1
        self._pending: list[tuple[ParamGroup, PendingReduce]] = []
        self._last: PendingReduce | None = None  # that was finished, and that the current stream has not waited for

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, group: ParamGroup, unused: Unused) -> bool:
        """Start reducing ``group``, when there is room. Returns whether anything was started."""
        self.make_room(group)
        has_started = self._add(group, group.reduce(unused))
        if group.gradients.has_latecomers:
            group.gradients.has_latecomers = False
            self.make_room(group)
            self._add(group, group.reduce(unused))
        return has_started

    def begin(self, group: ParamGroup) -> bool:
        """Start reducing the early gradients of ``group``, when there is room. Returns whether anything was started."""
        self.make_room()
        return self._add(group, group.begin_reduce())

    def start_partial(self, group: ParamGroup) -> None:
        """Carry on what ``group`` has reduced over the shard axis only."""
        if group.mesh.replicate.size > 1:
            self.make_room(group)
            self._add(group, group.reduce_partial())

    def make_room(self, group: ParamGroup | None = None) -> None:
        """Land the oldest until one more may start, and until none of ``group`` is in flight."""
        pending = self._pending
        while pending and (len(pending) >= self.max_in_flight or any(other is group for other, _ in pending)):
            self._finish(*pending.pop(0))

    def land(self) -> None:
        """Land everything."""
        pending, self._pending = self._pending, []  # should landing raise, the rest is not landed later, by surprise
        for group, reduction in pending:
            self._finish(group, reduction)
        self._wait_for_last()

    def land_down_to(self, count: int) -> None:
        """Land the oldest until no more than ``count`` are in flight."""
        while len(self._pending) > count:
            self._finish(*self._pending.pop(0))

    def drop(self) -> None:
        """Wait for everything, and land nothing."""
        pending, self._pending = self._pending, []
        for _, reduction in pending:
            reduction.drop()
        self._wait_for_last()

    def _wait_for_last(self) -> None:
        """It stands for all before it: they land in one order."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def _finish(self, group: ParamGroup, reduction: PendingReduce) -> None:
        self._last = reduction
        try:
            reduction.finish()
        except CommunicationError as error:
            raise group.lost("reduction", error) from error.__cause__
        if group.gradients.has_run_hooks:  # one may have stepped an optimizer, and let go of its gradient
            group.gradients.free_unused()

    def _add(self, group: ParamGroup, reduction: PendingReduce | None) -> bool:
        if reduction is not None:
            self._pending.append((group, reduction))
        return reduction is not None
