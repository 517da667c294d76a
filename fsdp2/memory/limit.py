"""Keeps the passes of a root under a limit on temporary memory: an action is performed if the ledger has room for it.

A prefetch that does not fit is skipped; the unit is gathered when it is needed. A gather that is needed makes room:
reductions in flight land, then gathers that no unit waits for yet are dropped. If there is still no room, the pass
raises. All decisions follow from plans and the order of events, never from an allocator, so all ranks agree (I14).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fsdp2.core import AfterForward, GroupState, MemoryLimitError, Unit, UnitTree, schedules
from fsdp2.memory.plan import Ledger, UnitBytes, unit_bytes

_BEGINS_BACKWARD = ("pre_backward", "join_backward")


class MemoryLimit:
    """Adapts the actions of ``tree`` in one forward and its backward, so that at most ``limit`` bytes are held.

    Raises:
        MemoryLimitError: a unit will not fit.
    """

    def __init__(self, limit: int, tree: UnitTree) -> None:
        self.limit, self._units, self._executor, self._schedule = limit, tree.units, tree.executor, tree.schedule
        ledger = self._ledger = Ledger({unit.index: unit_bytes(unit) for unit in self._units}, limit)
        for index, unit in enumerate(self._units):  # the user or an exception may have changed states
            self._check(index)
            states = {group.state for group in unit.groups}
            if GroupState.UNSHARDING in states:
                ledger.unshard(index)
            elif GroupState.UNSHARDED in states:
                ledger.wait(index)
            else:
                ledger.reshard(index, post_forward=GroupState.SHARDED_POST_FORWARD in states)

    def __call__(
        self, event: str, unit: Unit | None, actions: schedules.Actions
    ) -> Iterator[tuple[schedules.Action, int]]:
        """The actions to perform in place of ``actions``, which follow from ``event`` of ``unit``. The caller performs
        each action before it asks for the next one.

        Raises:
            MemoryLimitError: a unit does not fit.
        """
        if unit is not None and event in _BEGINS_BACKWARD:  # from here on, the memory of its gradients counts
            index, config = unit.index, unit.config
            self._measure(index)
            ways = {"gathers": config.unshard_in_backward, "reshards": config.reshard_after_backward}
            yield from self._room(index, self._ledger.to_run_backward(index, **ways))
            self._ledger.run_backward(index, **ways)
        for action, index in schedules.in_parts(actions):
            yield from self._limited(action, index)

    def _limited(self, action: schedules.Action, index: int) -> Iterator[tuple[schedules.Action, int]]:
        states = {group.state for group in self._units[index].groups}
        if action is schedules.Action.UNSHARD and states & {GroupState.SHARDED, GroupState.SHARDED_POST_FORWARD}:
            self._measure(index)
            yield from self._room(index, self._ledger.to_unshard(index))
        elif action is schedules.Action.PREFETCH:
            self._measure(index)
            nbytes = self._ledger.to_unshard(index)
            if not self._ledger.fits(nbytes):
                self._executor.tell("withhold", self._units[index], nbytes)
                return
        yield action, index
        if action is schedules.Action.UNSHARD:
            self._measure(index)
        reduces_later = (
            action is schedules.Action.REDUCE and index in self._schedule.tape.ended
        )  # there are no gradients yet
        if not reduces_later:
            self._ledger.count(action, index, self._executor.max_in_flight)

    def _room(self, index: int, nbytes: int) -> Iterator[tuple[schedules.Action, int]]:
        """Make room for ``nbytes`` more for the unit at ``index``."""
        ledger = self._ledger
        if ledger.fits(nbytes):
            return
        room = ledger.room_for(nbytes, index)
        if room is None:
            raise self._refused(index, nbytes)
        self._executor.tell("make_room", self._units[index], nbytes)
        if room.landings:
            ledger.land(room.landings)
            self._executor.land_down_to(ledger.num_reductions)
        for other in room.dropped:
            yield from self._limited(schedules.Action.RESHARD, other)

    def _check(self, index: int) -> None:
        """Refuse a unit that does not fit next to its root, in this forward or in a backward that may follow."""
        sizes, root = self._ledger.sizes[index], self._ledger.sizes[0]
        own, of_root = sizes.gather, root.unsharded if index else 0
        if torch.is_grad_enabled():
            in_backward = of_root + (root.backward(reshards=True) if index else 0)
            own, of_root = max((own, of_root), (self._in_backward(index), in_backward), key=sum)
        kept = sum(each.kept for other, each in self._ledger.sizes.items() if other not in (0, index))
        if own + of_root + kept > self.limit:
            beside = f", and the root needs {of_root} bytes beside it" if of_root else ""
            beside += f", and other units keep {kept} bytes" if kept else ""
            raise MemoryLimitError(
                f"set_temporary_memory_limit({self.limit}): unit '{self._units[index].name}' needs {own} bytes at its "
                f"peak{beside}. The parts of the unit, not all held at the same time: {_described(sizes)}. "
                f"Set a limit of at least {own + of_root + kept} bytes, or call fully_shard on smaller modules."
            )

    def _in_backward(self, index: int) -> int:
        """The most that a unit takes between the start of its backward and the start of its reduction."""
        sizes, rules = self._ledger.sizes[index], self._units[index].config
        computes = sizes.backward(reshards=True)
        if rules.after_forward is AfterForward.KEEP:  # the parameters are unsharded already
            return sizes.unsharded + computes
        return sizes.alone if rules.unshard_in_backward else computes

    def _refused(self, index: int, nbytes: int) -> MemoryLimitError:
        stays = self._ledger.stays(index)
        held = ", ".join(f"'{self._units[other].name}' {held}" for other, held in stays.items())
        return MemoryLimitError(
            f"set_temporary_memory_limit({self.limit}): unit '{self._units[index].name}' needs {nbytes} bytes more, "
            f"but {sum(stays.values())} bytes cannot be freed: {held or 'nothing'}. Set a limit of at least "
            f"{sum(stays.values()) + nbytes} bytes, or reshard units after forward."
        )

    def _measure(self, index: int) -> None:
        """Update the sizes of a unit, since its plans may be new."""
        before, self._ledger.sizes[index] = self._ledger.sizes[index], unit_bytes(self._units[index])
        if self._ledger.sizes[index] != before:
            self._check(index)


def _described(sizes: UnitBytes) -> str:
    named = {
        "unsharded parameters": sizes.unsharded,
        "staging": sizes.arriving,
        "gradients": sizes.gradients,
        "copies to reduce": sizes.copies,
    }
    return ", ".join(f"{name} {nbytes}" for name, nbytes in named.items() if nbytes)
