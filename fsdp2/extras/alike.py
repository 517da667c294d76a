"""Checks that all ranks do the same, as torch expects: the same model, flags, units and gradients.

Models are compared once, by small all-reduces on each mesh (``rank_checks``). After that, a rank compares each pass
with its own previous one. If something has changed, the rank *claims* what it does, and waits in the store until all
ranks that communicate with it have claimed the same (``claims``, ``meetings``). So a step that repeats the previous one
sends nothing, and reads nothing from the device.

A claim concerns the groups of one mesh and is compared on the ranks of that mesh only. The units that a forward uses
are claimed among the ranks that gather together; replicas run their forwards independently until a backward begins.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain

import torch.distributed as dist

from fsdp2.core import ParallelMesh, ParamGroup, TreeChecks, Unit, UnitTree
from fsdp2.extras import torch_names
from fsdp2.extras.claims import FLAGS, GRADIENTS, UNFINISHED, UNITS, Claim
from fsdp2.extras.meetings import Meeting, await_claim
from fsdp2.extras.rank_checks import agree, by_mesh, check_agreement, compare_on
from fsdp2.extras.stalls import timeout_s_of, watch_for_stalls
from fsdp2.extras.standings import Board, RunCounts

_next_number: defaultdict[int, int] = defaultdict(int)  # of a scope, by its ranks


class _Scope:
    """The groups of a root on one mesh, and the ranks that must treat them in the same way."""

    def __init__(self, mesh: ParallelMesh, groups: Sequence[ParamGroup], units: Sequence[Unit], identity: str) -> None:
        self.groups, self.is_replicated = groups, mesh.replicate.size > 1
        self._names = {index: unit.name for index, unit in enumerate(units) if any(g in groups for g in unit.groups)}
        everyone = tuple(rank for row in mesh.ranks for rank in row)
        row = next((tuple(row) for row in mesh.ranks if dist.get_rank() in row), ())
        self.everyone = Meeting(mesh, identity, everyone)  # of all ranks of the mesh, which reduce together
        # Of the ranks on this shard axis, which gather together.
        self.gathering = self.everyone if row == everyone else Meeting(mesh, identity, row)
        self.used: list[bytes] = []  # for each group, which parameters had gradients in the last step

    def named(self, units: Iterable[int]) -> list[str]:
        """The names of those ``units`` that have groups here."""
        return [self._names[index] for index in units if index in self._names]

    def trainable(self) -> dict[str, bool]:
        """Whether each parameter that was used required a gradient at that time. Other threads may call this."""
        flags = [(group.params, group.unsharded.requires_grad) for group in self.groups]
        return {param.full_name: flag for params, its in flags for param, flag in zip(params, its, strict=False)}


class Alike(TreeChecks):
    """The checks of one root, which ``stalls`` watches.

    Attributes:
        identity: tells roots apart. It is the same on all ranks once they have compared their models.
        board: of the ranks that share a store. Only the root keeps it: a store that outlives the model would interfere
            with the next process group.
        timeout_s: after how many seconds the backend gives up.
    """

    board: Board
    timeout_s: float

    def __init__(self, tree: UnitTree) -> None:
        self._tree = tree
        self._agreed: Sequence[tuple[Unit, Sequence[ParamGroup]]] = ()  # the units that the ranks have compared
        self._scopes: Sequence[_Scope] = ()
        self._has_new_flags = False
        self._claims: dict[str, Claim] = {}  # the last claims of this rank, by name
        self._orders: dict[int, Sequence[int]] = {}  # maps an outermost unit to the units of its last forward
        self._expected: Sequence[int] = ()  # the units that the last backward was to reach
        self._is_comparing = self._is_claiming = False
        self._num_forwards = self.num_backwards = 0
        self.identity = f"{zlib.crc32(repr(tree.root.mesh.ranks).encode()):x}/new"
        timeout_s = timeout_s_of(tree.root.mesh)
        if timeout_s is not None:
            store = torch_names.default_store()
            self.board, self.timeout_s = Board(store, dist.get_rank()), timeout_s
            watch_for_stalls(self, store)

    # What happens

    def begin_pass(self) -> None:
        """If the units are new, compare them before ranks wait for each other."""
        self._num_forwards += 1
        tree = self._tree
        units = [(unit, unit.groups) for unit in tree.units]  # a tie may have moved a parameter to another group
        if units == self._agreed:
            return
        groups = [group for unit in tree.units for group in unit.groups]
        shared = [group for group in groups if group.mesh.data_parallel_size > 1]
        self._is_comparing = True
        try:
            agree(tree, "the comparison of the models", partial(check_agreement, tree.class_name, tree.units))
            self._scopes = [self._scope(mesh, its) for mesh, its in by_mesh(shared)]
        finally:
            self._is_comparing = False
        self._agreed = units
        for group in groups:
            group.take_flags()
        self._has_new_flags, self._orders, self._expected = False, {}, ()
        self._claims = {_named(FLAGS, scope.everyone): scope.trainable() for scope in self._scopes}

    def _scope(self, mesh: ParallelMesh, groups: Sequence[ParamGroup]) -> _Scope:
        """The ranks agree on the scope's number, since some may have had more roots than others in earlier worlds."""
        ranks = zlib.crc32(repr(mesh.ranks).encode())
        found = agree(self._tree, "the comparison of the models", partial(compare_on, mesh, _next_number[ranks]))
        number = max(found)
        _next_number[ranks] = number + 1
        self.identity = f"{ranks:x}/{number}"  # the largest mesh comes last, and its identity stays
        return _Scope(mesh, groups, self._tree.units, self.identity)

    def note_flags(self) -> None:
        self._has_new_flags = True

    def agree_on_flags(self) -> None:
        """If the flags are not those that the ranks have agreed on, wait until all ranks have set the same flags. A
        forward without gradients between two changes needs no agreement."""
        if self._has_new_flags:
            for scope in self._scopes:
                self._claim(scope.everyone, FLAGS, scope.trainable())
            self._has_new_flags = False

    def end_forward(self, unit: Unit) -> None:
        """If this root's forward used different units than last time, agree on them with the other ranks."""
        schedule = self._tree.schedule
        units = schedule.tape.expected
        if schedule.tape.records:  # else no backward follows, which would depend on flags
            self.agree_on_flags()
        if units != self._orders.get(unit.index):
            for scope in self._scopes:
                self._claim(scope.gathering, f"{UNITS} of {unit.name}", scope.named(units))
            self._orders[unit.index] = units

    def begin_backward(self) -> None:
        """If the backward may reach other units than the last one, agree on these units with the replicas."""
        self.num_backwards += 1
        units = list(dict.fromkeys(self._tree.schedule.tape.ended))
        if units != self._expected:
            for scope in self._scopes:
                if scope.is_replicated:
                    self._claim(scope.everyone, f"{UNITS} before backward", scope.named(units))
            self._expected = units

    def end_step(self) -> None:
        """If other parameters have gradients than in the last step, agree on them with the other ranks."""
        used = dict.fromkeys(chain.from_iterable([scope.groups for scope in self._scopes]), b"")  # some may have left
        used |= {group: group.gradients.take_used() for unit in self._tree.units for group in unit.groups}
        for scope in self._scopes:
            its = [used[group] for group in scope.groups]
            if its != scope.used and any(its):  # else gradients are kept for a later step
                claim: dict[str, bool] = {}
                for group in scope.groups:
                    claim.update(_described(group, used[group]))
                self._claim(scope.everyone, GRADIENTS, claim)
                scope.used = its

    def _claim(self, meeting: Meeting, what: str, claim: Claim) -> None:
        """If the claim differs from this rank's last one, wait until all ranks of ``meeting`` have claimed the same."""
        name, before = _named(what, meeting), self._claims
        if claim != before.get(name):
            self._claims = {**before, name: claim}  # other threads may read the old ones
            self._is_claiming = True
            try:
                agree(self._tree, f"the comparison of {what}", partial(await_claim, meeting, name, claim))
            except BaseException:
                self._claims = before  # so the next pass claims again
                raise
            finally:
                self._is_claiming = False

    # What other threads may ask for

    @property
    def last_event(self) -> object:
        """A different one for each event; None before the first."""
        return self._tree.executor.last_event

    @property
    def is_running(self) -> bool:
        """Whether a forward or backward runs, or waits at its end for other ranks."""
        passes = self._tree.passes
        return self._is_comparing or self._is_claiming or (bool(passes.running) and not passes.root_raised)

    @property
    def runs_ahead(self) -> bool:
        """See ``Streams``: ranks that wait for a busy device may all make progress yet."""
        return self._tree.executor.streams.runs_ahead

    def is_idle(self) -> bool:
        """Whether the device is idle."""
        return self._tree.executor.streams.is_idle()

    def passes(self) -> RunCounts:
        running = "forward" if self._is_comparing else self._tree.passes.running
        row = sorted({rank for scope in self._scopes for rank in scope.gathering.ranks}) or self.ranks()
        return RunCounts(self._tree.class_name, self._num_forwards, self.num_backwards, running, row)

    def story(self) -> str:
        """The last events."""
        return self._tree.executor.story()

    def ranks(self) -> list[int]:
        """All ranks that hold a part of the model."""
        groups = [group for unit in self._tree.units for group in unit.groups]
        return sorted({rank for group in groups for row in group.mesh.ranks for rank in row})

    def claims(self) -> dict[str, Claim]:
        """What this rank does now, for comparison with other ranks."""
        schedule, claims = self._tree.schedule, dict(self._claims)
        for scope in self._scopes:
            claims[_named(FLAGS, scope.everyone)] = scope.trainable()
            if (running := schedule.passes.root) is not None:
                name = _named(f"{UNITS} of {self._tree.units[running].name}", scope.gathering)
                claims[name] = [*scope.named(schedule.tape.began), UNFINISHED]
        return claims


def _named(what: str, meeting: Meeting) -> str:
    return f"{what} @ {meeting.key}"


def _described(group: ParamGroup, used: bytes) -> dict[str, bool]:
    """Maps names of trainable parameters to whether each had a gradient. ``used`` is the result of ``take_used``."""
    found, trainable = {}, group.gradients.trainable
    for position, has_gradient in enumerate(used or bytes(len(group.params))):
        number, index = divmod(position, len(group.params))
        if has_gradient or index in trainable:
            behind = f" in reduction {number + 1}" if number else ""
            found[f"{group.params[index].full_name}{behind}"] = bool(has_gradient)
    return found
