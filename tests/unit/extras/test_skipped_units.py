"""Ranks that use other units gather and reduce the same, in the same order: simulated, with plain values.

Unit 0 is the root. A rank's program is the list of units that it uses, in order; each runs inside its parent.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from fsdp2.core.schedule.schedule import Action, Actions, AfterForward, Phase, Schedule, UnitRules
from fsdp2.core.schedule.states import Outcome
from fsdp2.extras import skipped_units
from fsdp2.extras.skipped_units import Event, SkippedUnits, nested

Program = Sequence[int]
FLAT = (None, 0, 0, 0, 0)


class Rank:
    """What one rank performs for the events that its programs make. Attributes: log: the collectives that it starts;
    unsharded: the units that are unsharded now; owed: units with gradients that are not reduced yet."""

    def __init__(self, parents: Sequence[int | None], rules: Sequence[UnitRules], frozen: Collection[int] = ()) -> None:
        self.schedule = Schedule(rules)
        self.skipped = SkippedUnits(parents, self.schedule.rules)
        self.log: list[str] = []
        self._parents, self.frozen = parents, frozen
        self.unsharded: set[int] = set()
        self.owed: set[int] = set()

    def forward(self, program: Program, *, grad_enabled: bool = True, without_gradient: Collection[int] = ()) -> object:
        """One forward over ``program``. ``without_gradient``: units whose output needs none. Returns what ranks have
        to compare."""
        self.skipped.begin_forward(program[0], grad_enabled=grad_enabled)
        self._events = nested(program, self._parents)
        for unit, begins in self._events:
            if begins:
                self._join_forward(self.skipped.forward.begin(unit))
                self._do(self.schedule.pre_forward(unit, grad_enabled=grad_enabled))
            else:
                leads_to = Outcome.NOTHING if unit in without_gradient else Outcome.BACKWARD
                self._join_forward(self.skipped.forward.end(unit, leads_to))
                self._do(self.schedule.post_forward(unit))
        return self.skipped.end_forward(self._trainable)

    def let_all_use(self, unit: int) -> None:
        """From now on, either all ranks use ``unit``, or none."""
        self.schedule.rules[unit] = replace(self.schedule.rules[unit], ranks_may_differ=False)

    def agree(self, used: Sequence[object]) -> None:
        self.schedule.tape.expected = self.skipped.agree(used, self._trainable)  # type: ignore[arg-type]

    def backward(self, *, unreached: Collection[int] = (), unreported: Collection[int] = ()) -> None:
        """Back through the last forward. ``unreached``: units that no gradient reaches; ``unreported``: whose end
        nobody reports, because their inputs need no gradient."""
        self.skipped.begin_backward()
        for unit, begins in reversed(self._events):
            if unit in unreached:
                continue
            if not begins:
                self.begin_backward_of(unit)
            elif unit not in unreported:
                self.end_backward_of(unit)
        self.end_backward()

    def begin_step(self, program: Program, num_forwards: int, num_ranks: int = 1) -> None:
        """Forwards over ``program``, as all ranks run them, up to the backward."""
        self.log.clear()
        for _ in range(num_forwards):
            used = self.forward(program)
            if used is not None:
                self.agree([used] * num_ranks)
        self.skipped.begin_backward()

    def begin_backward_of(self, unit: int) -> None:
        if self.schedule.passes.phases[unit] is not Phase.BACKWARD:
            self._join_backward(self.skipped.backward.begin(unit))
            self._do(self.schedule.pre_backward(unit))

    def end_backward_of(self, unit: int) -> None:
        self._join_backward(self.skipped.backward.end(unit))
        self.owed.add(unit)
        if unit not in self.skipped.backward.ended:
            self._do(self.schedule.post_backward(unit, is_last_use=self.skipped.backward.is_last_use))

    def end_backward(self) -> None:
        self._join_backward(self.skipped.backward.finish(is_last=True, ends_open=True))
        self._do(self.schedule.end_backward(self.skipped.backward.ended))

    @property
    def _trainable(self) -> set[int]:
        return {unit for unit in range(len(self._parents)) if unit not in self.frozen}

    @property
    def is_at_rest(self) -> bool:
        return set(self.schedule.passes.phases) == {Phase.IDLE} and not self.unsharded and not self.owed

    def _join_forward(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.begins:
                self._do(self.schedule.pre_forward(event.unit, grad_enabled=True))
            else:
                self._do(self.schedule.post_forward(event.unit))

    def _join_backward(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.begins:
                self._do(self.schedule.post_backward(event.unit, is_last_use=event.is_last_use))
            else:
                self._do(self.schedule.pre_backward(event.unit))

    def _do(self, actions: Actions) -> None:
        for action, unit in actions:
            if action in (Action.USE, Action.PREFETCH) and unit not in self.unsharded:
                self.unsharded.add(unit)
                self.log.append(f"all-gather {unit}")
            elif action is Action.RESHARD:
                self.unsharded.discard(unit)
            elif action in (Action.REDUCE, Action.REDUCE_JOINTLY):
                if (action is Action.REDUCE_JOINTLY or unit in self.owed) and unit not in self.frozen:
                    self.log.append(f"reduce {unit}")
                self.owed.discard(unit)


def ranks_of(parents: Sequence[int | None] = FLAT, num_ranks: int = 2, frozen: Collection[int] = ()) -> list[Rank]:
    root = UnitRules(after_forward=AfterForward.KEEP, ranks_may_differ=True)
    rules = [root, *[UnitRules(ranks_may_differ=True)] * (len(parents) - 1)]
    return [Rank(parents, rules, frozen) for _ in range(num_ranks)]


def step(
    ranks: Sequence[Rank],
    *programs: Program,
    without_gradient: Collection[int] = (),
    backwards: Sequence[dict[str, list[int]]] = (),
) -> list[str]:
    """Forward and backward of every rank over its own program. Returns the collectives, the same on all ranks."""
    for rank in ranks:
        rank.log.clear()
    passes = zip(ranks, programs, strict=True)
    used = [rank.forward(program, without_gradient=without_gradient) for rank, program in passes]
    assert used.count(None) in (0, len(used))
    if used[0] is not None:
        for rank in ranks:
            rank.agree(used)
    for rank, how in zip(ranks, [*backwards, *[{}] * len(ranks)], strict=False):
        unreached = [*without_gradient, *how.get("unreached", ())]
        rank.backward(unreached=unreached, unreported=how.get("unreported", ()))
    first, *others = [rank.log for rank in ranks]
    for other in others:
        assert other == first
    assert all(rank.is_at_rest for rank in ranks)
    return list(first)


def test_ranks_that_skip_other_units_start_the_same_collectives_from_the_first_step_on() -> None:
    twice = [f"{what} {unit}" for unit in (1, 2, 3, 4) for what in ("all-gather", "all-gather", "reduce")]
    ranks = ranks_of()
    for _ in range(3):
        assert sorted(step(ranks, [0, 1, 3, 4], [0, 2, 3])) == sorted(["all-gather 0", *twice, "reduce 0"])


def test_no_rank_that_uses_all_units_does_more_than_without_others() -> None:
    ranks = ranks_of()
    alone = ranks_of(num_ranks=1)
    for unit in range(5):
        alone[0].let_all_use(unit)
    for _ in range(3):
        program = [0, 1, 2, 3, 4]
        assert step(ranks, program, program) == step(alone, program)


def test_first_forward_takes_another_order_than_registration_and_later_ones_may_skip() -> None:
    """A unit that an order of its own left out keeps its place behind its sibling."""
    ranks = ranks_of()
    order = [0, 4, 2, 3, 1]
    step(ranks, order, order)
    found = step(ranks, order, order)
    for _ in range(2):
        assert sorted(step(ranks, [0, 4, 3], [0, 2, 1])) == sorted(found)
    ranks = ranks_of()
    step(ranks, [0, 4, 2], [0, 4, 2])
    step(ranks, [0, 4, 3], [0, 1, 2])


def test_end_that_is_reported_late_changes_nothing() -> None:
    """The unit was ended when the one before it began."""
    (rank,) = ranks_of(num_ranks=1)
    step([rank], [0, 1, 2, 3, 4])
    rank.forward([0, 1, 2, 3, 4])
    rank.skipped.begin_backward()
    backward = rank.skipped.backward
    assert [backward.begin(unit) for unit in (0, 4)] == [(), ()]
    assert backward.begin(3) == [Event(4, begins=True)]
    assert backward.end(4) == ()
    assert backward.ended == {4}


def test_frozen_units_that_no_gradient_reaches_are_not_gathered_in_backward() -> None:
    """But for 2, which is prefetched: it ran before 3."""
    ranks = ranks_of(frozen=(1, 2))
    for _ in range(2):
        log = step(ranks, [0, 1, 2, 3, 4], [0, 2, 3, 4], without_gradient=(1, 2))
        assert (log.count("all-gather 1"), log.count("all-gather 2"), log.count("all-gather 3")) == (1, 2, 2)


def test_ranks_compare_again_when_other_units_are_trained() -> None:
    ranks = ranks_of(frozen=(1, 2))
    for _ in range(2):
        step(ranks, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], without_gradient=(1, 2))
    for rank in ranks:
        rank.frozen = ()
    assert step(ranks, [0, 1, 3, 4], [0, 2, 3, 4])[-3:] == ["reduce 2", "reduce 1", "reduce 0"]


def test_ranks_compare_once_per_choice_of_frozen_units_and_forget_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that are frozen by turns cost no message in a steady step."""
    ranks = ranks_of()

    def compares(*frozen: int) -> bool:
        for rank in ranks:
            rank.frozen = frozen
            rank.log.clear()
        used = [rank.forward([0, 1, 2, 3, 4]) for rank in ranks]
        for rank in ranks:
            if used[0] is not None:
                rank.agree(used)
            rank.backward(unreached=frozen)
        assert ranks[0].log == ranks[1].log
        return used[0] is not None

    logs = []
    for turn in range(3):
        for frozen in [(1, 2), (3, 4), ()]:
            assert compares(*frozen) is (turn == 0)
            logs.append(list(ranks[0].log))
    assert logs[3:6] == logs[6:]
    monkeypatch.setattr(skipped_units, "MAX_ORDERS", 2)
    ranks = ranks_of()
    assert [compares(unit) for unit in (1, 2, 1, 3, 1, 3)] == [True, True, False, True, True, False]


def test_unit_used_again_is_left_to_the_program() -> None:
    ranks = ranks_of()
    once = step(ranks, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    again = [0, 1, 2, 1, 2, 3, 4]
    assert len(step(ranks, again, again)) > len(once)
    step(ranks, [0, 1, 2, 1, 2, 3], [0, 1, 2, 1, 2, 4])


def test_skipped_unit_whose_child_runs_outside_it_ends_all_the_same() -> None:
    skipped = SkippedUnits((None, 0, 1, 0), [UnitRules(ranks_may_differ=True)] * 4)
    skipped.begin_forward(0, grad_enabled=True)
    assert skipped.forward.begin(0) == ()
    assert skipped.forward.begin(2) == [Event(1, begins=True, is_used=False)]
    assert skipped.forward.end(2, Outcome.BACKWARD) == ()
    assert skipped.forward.begin(3) == [Event(1, begins=False, is_used=False)]


def test_units_that_ranks_skip_alike_or_unshard_by_hand_are_left_out() -> None:
    ranks = ranks_of()
    for rank in ranks:
        rank.skipped.by_hand.add(2)
        rank.forward([0, 1, 3, 4])
    assert "all-gather 2" not in ranks[0].log
    ranks = ranks_of()
    for rank in ranks:
        rank.let_all_use(2)
    for _ in range(2):
        found = step(ranks, [0, 1, 3], [0, 4])
        assert "all-gather 2" not in found
        assert "all-gather 3" in found
    assert "all-gather 2" in step(ranks, [0, 2], [0, 2, 3])


def test_a_pass_of_an_inner_root_joins_what_is_inside_it_only() -> None:
    parents = (None, 0, 1, 1, 0, 4)
    ranks = ranks_of(parents)
    assert "all-gather 4" not in step(ranks, [1, 2], [1, 3])
    step(ranks, [0, 1, 2, 4], [0, 4, 5])


def test_exception_forgets_the_pass() -> None:
    ranks = ranks_of()
    program = [0, 1, 2, 3, 4]
    step(ranks, program, program)
    for rank in ranks:
        rank.forward(program)
        rank.skipped.reset()
        rank.schedule.reset()
        rank.unsharded.clear()
    assert step(ranks, [0, 1, 2, 4], [0, 3])


@pytest.mark.parametrize("seed", range(300))
def test_any_ranks_start_the_same_collectives(seed: int) -> None:
    """Random trees of units and orders of modules; each of three ranks uses some units, gradients reach some of those,
    and some of their ends are not reported."""
    chance = random.Random(seed)
    parents = _tree(chance.randint(2, 9), chance)
    ranks = ranks_of(parents, 3)
    order = _walk(0, parents, chance)
    if order != sorted(order):  # the first forward has to show it
        step(ranks, *[order] * 3)
    for _ in range(4):
        programs = [_some(order, parents, chance) for _ in ranks]
        step(ranks, *programs, backwards=[_some_backward(program, parents, chance) for program in programs])


@pytest.mark.parametrize("seed", range(300))
def test_units_that_return_the_same_tensor_are_unsharded_until_their_backward_ends(seed: int) -> None:
    """Random trees: some units have no parameters of their own, some return what their last unit has returned, and the
    gradient of that tensor begins the backward of the inner unit first. Inputs of the first units need no gradient, and
    some units are not used."""
    chance = random.Random(seed)
    parents = _tree(chance.randint(2, 9), chance)
    order = [unit for unit in _walk(0, parents, chance) if unit in parents or chance.random() < 0.8]
    empty = {unit for unit in order if unit in parents and chance.random() < 0.6}
    backward, unreported = _with_shared_outputs(nested(order, parents), chance), set(order[: chance.randint(1, 3)])
    num_forwards, logs = chance.randint(1, 3), []
    for others_may_skip in (False, True):
        (rank,) = ranks_of(parents, num_ranks=1)
        for unit in order if not others_may_skip else empty:
            rank.let_all_use(unit)
        logs += [_step_of_several(rank, order, backward, unreported, num_forwards) for _ in range(3)]
    for unit in set(order) - empty:
        alone, _, *others = (log.count(f"all-gather {unit}") for log in logs[2:])
        # Units whose end nobody reports are reduced, and gathered again, for each forward.
        assert max(others) <= max(alone, 2 * num_forwards)


def test_a_unit_whose_inputs_need_no_gradient_is_reduced_once_for_several_forwards() -> None:
    """Nobody reports the end of its backward: it ends with the whole backward, like that of the root."""
    (rank,) = ranks_of(num_ranks=1)
    order = [0, 1, 2, 3, 4]
    backward = list(reversed(nested(order, FLAT)))
    for _ in range(2):
        log = _step_of_several(rank, order, backward, unreported=(0, 1), num_forwards=3)
    assert (log.count("all-gather 1"), log.count("all-gather 2")) == (3 + 1, 3 + 3)
    assert (log.count("reduce 1"), log.count("reduce 2")) == (1, 1)


@pytest.mark.parametrize("seed", range(300))
def test_units_that_all_ranks_use_several_times_are_reduced_once_and_alike(seed: int) -> None:
    """Random chains with a repeated part, in one forward or several. In one, gradients reach other uses on each rank:
    what they reach on some rank is gathered on all, and each unit is reduced once, behind its last gradient."""
    chance = random.Random(seed)
    units = list(range(1, chance.randint(3, 6)))
    part = [unit for unit in units if chance.random() < 0.6]
    program = [*units, *part * chance.randint(1, 3)]
    num_forwards = chance.choice([1, 1, 2, 3])
    ranks = ranks_of((None, *[0] * len(units)), num_ranks=2)
    for index in range(3):
        for rank in ranks:
            rank.begin_step([0, *program], num_forwards, num_ranks=2)
            seen: set[int] = set()
            for unit in list(reversed(program)) * num_forwards:
                rank.begin_backward_of(0)
                if unit not in seen or num_forwards > 1 or chance.random() < 0.6:  # all ranks reach each unit
                    rank.begin_backward_of(unit)
                    rank.end_backward_of(unit)
                seen.add(unit)
            rank.end_backward()
            assert rank.is_at_rest
        assert ranks[0].log == ranks[1].log
        if index or num_forwards == 1:  # then ranks know through how many forwards a backward passes
            assert [ranks[0].log.count(f"reduce {unit}") for unit in units] == [1] * len(units)


def _with_shared_outputs(forward: Sequence[tuple[int, bool]], chance: random.Random) -> Sequence[tuple[int, bool]]:
    """The events of the backward of ``forward``: where units end together, some of them return the same tensor."""
    backward: list[tuple[int, bool]] = []
    same: list[tuple[int, bool]] = []  # in the order of their hooks
    for event in reversed(forward):
        if same and (event[1] or chance.random() < 0.4):
            backward, same = backward + same, []
        if event[1]:
            backward.append(event)
        else:
            same.insert(0, event)
    return backward


def _step_of_several(
    rank: Rank, order: Program, backward: Sequence[tuple[int, bool]], unreported: Collection[int], num_forwards: int
) -> list[str]:
    rank.begin_step(order, num_forwards)
    for unit, begins in backward * num_forwards:
        if not begins:
            rank.begin_backward_of(unit)
        elif unit not in unreported:
            assert unit in rank.unsharded
            rank.end_backward_of(unit)
    rank.end_backward()
    assert rank.is_at_rest
    return list(rank.log)


def _tree(num_units: int, chance: random.Random) -> list[int | None]:
    """Parents, in the order of registration."""
    parents: list[int | None] = [None]
    around = [0]
    for unit in range(1, num_units):
        del around[chance.randint(1, len(around)) :]
        parents.append(around[-1])
        around.append(unit)
    return parents


def _walk(unit: int, parents: Sequence[int | None], chance: random.Random) -> list[int]:
    """The order of a forward that takes children in an order of its own."""
    children = [child for child, parent in enumerate(parents) if parent == unit]
    if chance.random() < 0.5:
        chance.shuffle(children)
    return [unit, *(each for child in children for each in _walk(child, parents, chance))]


def _some(order: Program, parents: Sequence[int | None], chance: random.Random) -> list[int]:
    used: list[int] = []
    for unit in order:
        if parents[unit] is None or (parents[unit] in used and chance.random() < 0.6):
            used.append(unit)
    return used


def _some_backward(program: Program, parents: Sequence[int | None], chance: random.Random) -> dict[str, list[int]]:
    leaves = [unit for unit in program[1:] if unit not in parents]
    return {
        "unreached": [unit for unit in leaves if chance.random() < 0.3],
        "unreported": [unit for unit in program if chance.random() < 0.3],
    }
