"""Rules of single units, the order of reductions, and backwards that the user finalizes."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2.schedule.schedule import Action, Schedule, UnitRules
from tests.unit.schedule_support import backward, forward, pre_forward, prefetches, schedule_of, text

# Rules for single units


def test_unit_that_backward_does_not_read_is_neither_gathered_nor_prefetched_but_reduced() -> None:
    schedule = schedule_of(unit1=UnitRules(unshard_in_backward=False))
    forward(schedule, [1, 2, 3])
    assert prefetches(schedule.pre_backward(0)) == [3]
    assert prefetches(schedule.pre_backward(3)) == [2]
    schedule.post_backward(3)
    assert text(schedule.pre_backward(2)) == "use 2"
    schedule.post_backward(2)
    assert text(schedule.pre_backward(1)) == ""
    assert text(schedule.post_backward(1)) == "reshard 1, reduce 1"


def test_listed_prefetch_of_a_unit_that_backward_does_not_read_is_left_out() -> None:
    schedule = schedule_of(unit1=UnitRules(unshard_in_backward=False), unit3=UnitRules(backward_prefetch=(2, 1)))
    forward(schedule, [1, 2, 3])
    assert prefetches(schedule.pre_backward(3)) == [2]


def test_unit_that_backward_does_not_read_prefetches_what_comes_after_it() -> None:
    schedule = schedule_of(unit3=UnitRules(unshard_in_backward=False))
    forward(schedule, [1, 2, 3])
    assert text(schedule.pre_backward(0)) == "use 0"
    assert text(schedule.pre_backward(3)) == "prefetch 2"


def test_recomputed_forward_gathers_even_what_backward_does_not_read() -> None:
    schedule = schedule_of(unit1=UnitRules(unshard_in_backward=False))
    forward(schedule, [1])
    schedule.pre_backward(1)
    assert text(schedule.pre_forward(1, in_backward=True, grad_enabled=True)) == "use 1"


def test_unit_of_several_modules_stays_unsharded_after_a_forward_on_its_own_only() -> None:
    schedule = schedule_of(unit1=UnitRules(keeps_alone=True))
    pre_forward(schedule, 1)
    assert text(schedule.post_forward(1)) == ""
    pre_forward(schedule, 0)
    pre_forward(schedule, 1)
    assert text(schedule.post_forward(1)) == "reshard 1"


def test_unit_without_sync_keeps_its_gradients_while_others_reduce() -> None:
    schedule = schedule_of(unit1=UnitRules(reduces=False))
    forward(schedule, [1, 2])
    schedule.pre_backward(2)
    assert text(schedule.post_backward(2)) == "reshard 2, reduce 2"
    schedule.pre_backward(1)
    assert text(schedule.post_backward(1)) == "reshard 1, keep 1"


def test_reductions_in_flight_land_in_the_last_backward_only() -> None:
    schedule = schedule_of(2)
    for is_last in (False, True):
        schedule.is_last_backward = is_last
        forward(schedule, [1])
        schedule.pre_backward(1)
        schedule.post_backward(1)
        assert ((Action.LAND, 0) in schedule.end_backward()) is is_last


# The order of reductions


def _reduced(schedule: Schedule, order: Sequence[int]) -> list[int]:
    """The reductions of one backward over ``order``, as they start."""
    found: list[tuple[Action, int]] = []
    for unit in order:
        schedule.pre_backward(unit)
        found += schedule.post_backward(unit)
    found += schedule.end_backward()
    return [unit for action, unit in found if action is Action.REDUCE]


def test_reductions_follow_the_backward() -> None:
    schedule = schedule_of()
    forward(schedule, [1, 2, 3])
    assert _reduced(schedule, [1, 3]) == [1, 3, 2, 0]


# Backwards that the user finalizes


def _by_hand(**rules: UnitRules) -> Schedule:
    schedule = schedule_of(**rules)
    schedule.finalizes_by_hand = True
    return schedule


def test_what_a_backward_left_is_reduced_when_the_user_finalizes() -> None:
    schedule = _by_hand()
    forward(schedule, [1, 2, 3])
    assert _reduced(schedule, [3, 1]) == [3, 1]
    assert text(schedule.finalize()) == "reshard 3, reshard 2, reduce 2, reshard 1, reshard 0, reduce 0"
    assert text(schedule.finalize()) == "reshard 3, reshard 2, reshard 1, reshard 0"


def test_backward_to_be_finalized_lands_nothing_and_keeps_the_order_for_the_next() -> None:
    schedule = _by_hand()
    forward(schedule, [1, 2, 3])
    forward(schedule, [1, 2, 3])
    for before in ([0], []):  # the root's end of the first forward comes before the second
        assert backward(schedule, [3, 2, 1]) == {0: [3], 3: [2], 2: [1], 1: before}
        assert schedule.awaits_finalization
    schedule.finalize()
    assert not schedule.awaits_finalization
    assert backward(schedule, [3, 2, 1]) == {0: [], 3: [], 2: [], 1: []}


def test_backwards_without_sync_are_reduced_once_by_finalization_with_sync() -> None:
    schedule = _by_hand()
    for reduces in (False, False):
        schedule.rules = [UnitRules(reduces=reduces)] * 4
        forward(schedule, [1, 2, 3])
        assert _reduced(schedule, [3, 2, 1]) == []
    schedule.rules = [UnitRules()] * 4
    assert [unit for action, unit in schedule.finalize() if action is Action.REDUCE] == [3, 2, 1, 0]


def test_finalization_without_sync_leaves_gradients_for_the_next_one() -> None:
    schedule = _by_hand(unit1=UnitRules(reduces=False))
    forward(schedule, [1, 2, 3])
    _reduced(schedule, [3, 2, 1])
    assert (Action.KEEP, 1) in schedule.finalize()
    schedule.rules[1] = UnitRules()
    assert text(schedule.finalize()) == "reshard 3, reshard 2, reshard 1, reduce 1, reshard 0"


def test_backward_that_was_cut_short_ends_the_wait_for_finalization_and_a_forward_does_not() -> None:
    schedule = _by_hand()
    forward(schedule, [1, 2, 3])
    backward(schedule, [3, 2, 1])
    schedule.pre_forward(0, in_backward=False, grad_enabled=True)
    schedule.reset()
    assert schedule.awaits_finalization
    schedule.pre_backward(0)
    schedule.reset()
    assert not schedule.awaits_finalization
