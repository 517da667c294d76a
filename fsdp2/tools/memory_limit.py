"""Keeps the passes of a root under a limit on temporary memory: performs an action if the ledger has room for it.

A prefetch that does not fit is skipped; the unit is gathered when it is needed. A needed gather makes room: reductions
in flight land, then gathers that no unit waits for yet are dropped. If there is still no room, the pass raises. All
decisions follow from plans and the order of events, never from an allocator, so all ranks decide the same (I14).
"""

from __future__ import annotations

from functools import partial

import torch

from fsdp2.runtime.executor import Programs
from fsdp2.runtime.root import Root
from fsdp2.schedule.schedule import Action, AfterForward, in_parts
from fsdp2.schedule.states import GroupState
from fsdp2.tools.memory_plan import Ledger, UnitBytes, unit_bytes
from fsdp2.types import MemoryLimitError


class MemoryLimit:
    """Filters the actions of ``root`` so that at most ``limit`` bytes are held.

    Attributes:
        programs: for each action on a unit, the function that performs the action under the limit.
    """

    def __init__(self, limit: int, root: Root) -> None:
        self.limit, self._units, self._executor, self._schedule = limit, root.units, root.executor, root.schedule
        self._ledger = Ledger([UnitBytes()] * len(root.units), limit)
        self.programs: Programs = {each: partial(self._perform, *each) for each in root.executor.programs}

    def begin_forward(self) -> None:
        """A pass begins: set the ledger to the current states, which the user or an exception may have changed.

        Raises:
            MemoryLimitError: a unit will not fit.
        """
        ledger = self._ledger = Ledger([unit_bytes(unit) for unit in self._units], self.limit)
        for index, unit in enumerate(self._units):
            self._check(index)
            states = {group.state for group in unit.groups}
            if GroupState.UNSHARDING in states:
                ledger.unshard(index)
            elif GroupState.UNSHARDED in states:
                ledger.wait(index)
            else:
                ledger.reshard(index, post_forward=GroupState.SHARDED_POST_FORWARD in states)

    def begin_backward(self, unit: int) -> None:
        """The backward of ``unit`` begins: from here on, count the memory of its gradients.

        Raises:
            MemoryLimitError: the unit does not fit.
        """
        rules = self._units[unit].config
        self._measure(unit)
        ways = {"gathers": rules.unshard_in_backward, "reshards": rules.reshard_after_backward}
        self._make_room(unit, self._ledger.to_run_backward(unit, **ways))
        self._ledger.run_backward(unit, **ways)

    def _perform(self, action: Action, index: int) -> None:
        if action is Action.USE:
            for part in in_parts(((action, index),)):
                self._perform(*part)
            return
        states = {group.state for group in self._units[index].groups}
        if action is Action.UNSHARD and states & {GroupState.SHARDED, GroupState.SHARDED_POST_FORWARD}:
            self._measure(index)
            self._make_room(index, self._ledger.to_unshard(index))
        elif action is Action.PREFETCH:
            self._measure(index)
            nbytes = self._ledger.to_unshard(index)
            if not self._ledger.fits(nbytes):
                self._executor.tell("withhold", self._units[index], nbytes)
                return
        self._executor.programs[action, index]()
        if action is Action.UNSHARD:
            self._measure(index)
        if action is not Action.REDUCE or not self._schedule.expects(index):  # else there is nothing to reduce yet
            self._ledger.count(action, index, self._executor.max_in_flight)

    def _make_room(self, index: int, nbytes: int) -> None:
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
            self._perform(Action.RESHARD, other)

    def _check(self, index: int) -> None:
        """Refuse a unit that does not fit next to its root, in this forward or in a backward that may follow."""
        sizes, root = self._ledger.sizes[index], self._ledger.sizes[0]
        own, of_root = sizes.gather, root.unsharded if index else 0
        if torch.is_grad_enabled():
            in_backward = of_root + (root.backward(reshards=True) if index else 0)
            own, of_root = max((own, of_root), (self._in_backward(index), in_backward), key=sum)
        kept = sum(each.kept for other, each in enumerate(self._ledger.sizes) if other not in (0, index))
        if own + of_root + kept > self.limit:
            beside = f", and the root needs {of_root} bytes beside it" if of_root else ""
            beside += f", and other units keep {kept} bytes" if kept else ""
            raise MemoryLimitError(
                f"set_temporary_memory_limit({self.limit}): unit '{self._units[index].name}' needs {own} bytes at its "
                f"peak{beside}. The parts of the unit, not all held at the same time: {_described(sizes)}. "
                f"Set a limit of at least {own + of_root + kept} bytes, or call fully_shard on smaller modules."
            )

    def _in_backward(self, index: int) -> int:
        """What a unit takes at most from the start of its backward to the start of its reduction."""
        sizes, rules = self._ledger.sizes[index], self._units[index].config
        computes = sizes.backward(reshards=True)
        if rules.after_forward is AfterForward.KEEP:  # it is there already
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
        """Update the sizes of a unit: its plans may be new."""
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
