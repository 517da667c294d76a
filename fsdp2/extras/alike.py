"""Makes sure that all ranks do alike, as torch expects: the same model, flags, units and gradients.

Models are compared once, by one small all-reduce per mesh (``rank_checks``). Later a rank compares what it does with
its own last pass. Where that has changed, it *claims* what it does, and waits in the store until all ranks have claimed
the same (``claims``, ``stalls``). So a step that is like the last one sends nothing, and reads nothing from the device.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from fsdp2.extras.claims import FLAGS, GRADIENTS, UNFINISHED, UNITS, Claim
from fsdp2.extras.rank_checks import check_agreement, compare
from fsdp2.extras.stalls import await_claim, watch_for_stalls
from fsdp2.runtime.root import RankChecks, Root, register_rank_checks
from fsdp2.runtime.unit import Unit

_next_number: defaultdict[int, int] = defaultdict(int)  # of a root that runs for the first time, by its ranks


class Alike(RankChecks):
    """The checks of one root.

    Attributes:
        identity: tells roots apart. The same on all ranks, once these have compared their models.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._agreed: Sequence[Unit] = ()  # the units that the ranks have compared
        self._has_new_flags = False
        self._claims: dict[str, Claim] = {}  # what this rank did last, of what all ranks must do alike
        self._orders: dict[tuple[int, bool], Sequence[int]] = {}  # the units of the last forward of each kind
        self._used: list[bytes] = []  # which parameters had gradients in the last step
        self.identity = f"new/{id(self):x}"
        watch_for_stalls(self, root.executor.streams, root.unit.mesh)

    # What happens

    def begin_pass(self) -> None:
        """If the units are new, compare them before ranks wait for each other.

        Raises:
            ScheduleError: they differ.
        """
        root = self._root
        if root.units != self._agreed:
            root.agree("the comparison of the models", partial(check_agreement, root.class_name, root.units))
            if not self._agreed and len(self.ranks()) > 1:
                self._agree_on_identity()
            self._agreed = list(root.units)
            root.take_flags()
            self._has_new_flags, self._claims = False, {FLAGS: self._trainable()}

    def _agree_on_identity(self) -> None:
        """Some ranks may have run more roots before than others, in worlds that are gone."""
        root, ranks = self._root, zlib.crc32(repr(self.ranks()).encode())
        number = max(root.agree("the comparison of the models", partial(compare, root.units, _next_number[ranks])))
        self.identity = f"{ranks:x}/{number}"
        _next_number[ranks] = number + 1

    def note_flags(self) -> None:
        self._has_new_flags = True

    def agree_on_flags(self) -> None:
        """If the flags are not those that the ranks have agreed on, wait until all ranks have set them alike. A forward
        without gradients between two changes needs no agreement.

        Raises:
            ScheduleError: another rank has not.
        """
        if self._has_new_flags:
            flags = self._trainable()
            if flags != self._claims.get(FLAGS):
                self._claim(FLAGS, flags)
            self._has_new_flags = False

    def end_forward(self, unit: Unit) -> None:
        """Others of its kind have used the same units, or all ranks say that they have used these."""
        schedule = self._root.schedule
        units, kind = schedule.last_order, (unit.index, schedule.records_uses)
        if schedule.records_uses:  # else no backward follows, which would depend on flags
            self.agree_on_flags()
        if units != self._orders.get(kind):
            self._orders[kind] = units
            self._claim(*self._used_units(unit.index, units))

    def end_step(self) -> None:
        """The parameters that have gradients had some in the last step, too; or all ranks say that these have."""
        groups = [group for unit in self._root.units for group in unit.groups if group.mesh.data_parallel_size > 1]
        used = [group.gradients.take_used() for group in groups]
        if used != self._used and any(used):  # else gradients are kept for a later step
            self._used = used
            claim: dict[str, bool] = {}
            for group, its in zip(groups, used, strict=True):
                claim.update(group.gradients.described(its))
            self._claim(GRADIENTS, claim)

    def _claim(self, name: str, claim: Claim) -> None:
        """This rank has changed what it does. Wait until all ranks have done the same."""
        self._claims = {**self._claims, name: claim}  # other threads may read the old ones
        root = self._root
        root.agree(f"the comparison of {name}", partial(await_claim, self, root.unit.mesh, name, claim))

    # What other threads ask for

    @property
    def last_event(self) -> object:
        """As of the root."""
        return self._root.last_event

    @property
    def is_running(self) -> bool:
        """As of the root."""
        return self._root.is_running

    def story(self) -> str:
        """As of the root."""
        return self._root.story()

    def ranks(self) -> list[int]:
        """All ranks that hold a part of the model."""
        groups = [group for unit in self._root.units for group in unit.groups]
        return sorted({rank for group in groups for row in group.mesh.ranks for rank in row})

    def claims(self) -> dict[str, Claim]:
        """What this rank does, of what all ranks must do alike."""
        schedule, claims = self._root.schedule, {**self._claims, FLAGS: self._trainable()}
        if (running := schedule.forward_root) is not None:
            name, units = self._used_units(running, schedule.order)
            claims[name] = [*units, UNFINISHED]
        return claims

    def _trainable(self) -> dict[str, bool]:
        """Of each parameter that was used, whether it required a gradient then."""
        groups = [group for unit in self._root.units for group in unit.groups]
        flags = [(group.params, group.unsharded.requires_grad) for group in groups]
        return {param.full_name: flag for params, its in flags for param, flag in zip(params, its, strict=False)}

    def _used_units(self, outermost: int, units: Sequence[int]) -> tuple[str, list[str]]:
        """What this rank claims of a forward of the unit ``outermost``, which has used ``units``."""
        root = self._root
        used = [root.units[index] for index in units]
        names = [unit.name for unit in used if any(group.mesh.data_parallel_size > 1 for group in unit.groups)]
        gradients = "with" if root.schedule.records_uses else "without"
        return f"{UNITS} of {root.units[outermost].name}, {gradients} gradients", names


def register() -> None:
    """Let every root check that ranks do alike."""
    register_rank_checks(Alike)
