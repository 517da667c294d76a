"""Prefetch follows the recorded order, wrong predictions are freed, and a pass cut short leaves nothing behind.

A step is written as plain lists of unit numbers. Unit 0 is the root; its forward surrounds the others. The orders of
plain steps, listed prefetches and checkpointed units are in ``tests/distributed/test_traces*.py``.
"""

from __future__ import annotations

import pytest

from fsdp2.schedule.schedule import Action, Actions, AfterForward, Schedule, UnitRules
from fsdp2.schedule.states import Pass
from tests.unit.schedule_support import backward, forward, pre_forward, prefetches, reshards, schedule_of

# Forward


def test_second_forward_prefetches_along_the_order_of_the_first() -> None:
    schedule = schedule_of()
    forward(schedule, [2, 1, 3])
    assert forward(schedule, [2, 1, 3]) == {0: [2], 2: [1], 1: [3], 3: []}


def test_unit_used_twice_prefetches_what_followed_that_use() -> None:
    schedule = schedule_of()
    forward(schedule, [1, 2, 1, 3])
    pre_forward(schedule, 0)
    found = []
    for unit in (1, 2, 1, 3):
        found.append(pre_forward(schedule, unit))
        schedule.post_forward(unit)
    assert found == [[2], [1], [3], []]


def test_forward_that_skips_a_unit_goes_on_predicting_behind_the_gap() -> None:
    schedule = schedule_of()
    forward(schedule, [1, 2, 3])
    assert forward(schedule, [2, 3]) == {0: [1], 2: [3], 3: []}


def test_unit_that_the_recorded_order_lacks_predicts_nothing() -> None:
    schedule = schedule_of()
    forward(schedule, [1, 3])
    assert forward(schedule, [1, 2, 3]) == {0: [1], 1: [3], 2: [], 3: []}


def test_new_order_is_followed_from_the_next_forward_on() -> None:
    schedule = schedule_of()
    forward(schedule, [1, 2, 3])
    forward(schedule, [3, 2, 1])
    assert forward(schedule, [3, 2, 1]) == {0: [3], 3: [2], 2: [1], 1: []}


def test_wrong_prediction_is_freed_at_the_end_of_the_forward_and_not_before() -> None:
    schedule = schedule_of()
    forward(schedule, [1, 2, 3])
    pre_forward(schedule, 0)
    assert pre_forward(schedule, 1) == [2]
    assert reshards(schedule.post_forward(1)) == [1]
    pre_forward(schedule, 3)
    assert reshards(schedule.post_forward(3)) == [3]
    assert reshards(schedule.post_forward(0)) == [2]
    pre_forward(schedule, 0)
    assert reshards(schedule.post_forward(0)) == [1]  # what this forward predicted; 2 is forgotten


def test_right_predictions_are_not_freed_a_second_time() -> None:
    schedule = schedule_of(unit1=UnitRules(after_forward=AfterForward.KEEP))
    forward(schedule, [1, 2])
    pre_forward(schedule, 0)
    for unit in (1, 2):
        pre_forward(schedule, unit)
        schedule.post_forward(unit)
    assert reshards(schedule.post_forward(0)) == []


def test_explicit_forward_prefetch_replaces_the_prediction() -> None:
    schedule = schedule_of(unit1=UnitRules(forward_prefetch=(2, 3)), unit2=UnitRules(forward_prefetch=()))
    first = forward(schedule, [1, 2, 3])
    assert first == {0: [], 1: [2, 3], 2: [], 3: []}
    assert forward(schedule, [1, 2, 3]) == {0: [1], 1: [2, 3], 2: [], 3: []}


def test_explicit_prefetch_that_was_not_used_is_freed_at_the_end_of_the_forward() -> None:
    schedule = schedule_of(unit1=UnitRules(forward_prefetch=(2, 3)))
    pre_forward(schedule, 0)
    for unit in (1, 3):
        pre_forward(schedule, unit)
        schedule.post_forward(unit)
    assert reshards(schedule.post_forward(0)) == [2]


def test_prefetching_a_unit_that_is_in_its_forward_does_not_free_it() -> None:
    schedule = schedule_of(unit1=UnitRules(forward_prefetch=(0,)))
    pre_forward(schedule, 0)
    pre_forward(schedule, 1)
    schedule.post_forward(1)
    assert reshards(schedule.post_forward(0)) == []


# Backward


def test_backward_of_a_unit_used_twice_prefetches_what_ran_before_each_use() -> None:
    schedule = schedule_of()
    forward(schedule, [1, 2, 1, 3])
    schedule.pre_backward(0)
    found = []
    for unit in (3, 1, 2, 1):
        found.append(prefetches(schedule.pre_backward(unit)))
        schedule.post_backward(unit)
    assert found == [[1], [2], [1], []]


def test_forward_without_grad_is_no_part_of_the_backward() -> None:
    schedule = schedule_of()
    forward(schedule, [1, 2, 3])
    forward(schedule, [3, 1], grad_enabled=False)
    assert backward(schedule, [3, 2, 1]) == {0: [3], 3: [2], 2: [1], 1: []}


def test_uses_are_forgotten_at_the_end_of_the_last_backward() -> None:
    schedule = schedule_of()
    forward(schedule, [1, 2, 3])
    backward(schedule, [3, 2, 1])
    assert backward(schedule, [3, 2, 1]) == {0: [], 3: [], 2: [], 1: []}


def test_uses_stay_while_more_backwards_are_to_come() -> None:
    schedule = schedule_of()
    forward(schedule, [1, 2])
    forward(schedule, [3])
    schedule.is_last_backward = False
    backward(schedule, [3])
    assert backward(schedule, [2, 1]) == {0: [2], 2: [1], 1: []}
    schedule.is_last_backward = True
    backward(schedule, [])
    assert backward(schedule, [2, 1]) == {0: [], 2: [], 1: []}


def test_wrong_prediction_in_backward_is_freed_at_its_end() -> None:
    """Unit 1 runs before and after unit 2, the first time detached: unit 2 predicts a backward that never comes."""
    schedule = schedule_of()
    forward(schedule, [1, 2, 1])
    actions = [*schedule.pre_backward(0)]
    for unit in (1, 2):
        actions += schedule.pre_backward(unit)
        actions += schedule.post_backward(unit)
    assert actions[-3:] == [(Action.PREFETCH, 1), (Action.RESHARD, 2), (Action.REDUCE, 2)]
    actions += schedule.end_backward()
    gathered: set[int] = set()
    for action, unit in actions:
        if action in (Action.USE, Action.PREFETCH):
            gathered.add(unit)
        elif action is Action.RESHARD:
            gathered.discard(unit)
    assert gathered == set()


# The end of a backward


def test_units_without_a_post_backward_are_resharded_and_reduced_at_the_end_innermost_first() -> None:
    schedule = schedule_of()
    forward(schedule, [1, 2, 3])
    for unit in (0, 3, 2, 1):
        schedule.pre_backward(unit)
    schedule.post_backward(3)
    schedule.post_backward(2)
    assert schedule.end_backward() == [
        (Action.RESHARD, 1),
        (Action.REDUCE, 1),
        (Action.RESHARD, 0),
        (Action.REDUCE, 0),
        (Action.LAND, 0),
    ]


def test_units_that_took_no_part_in_the_backward_are_reduced_too() -> None:
    """Other ranks may have used them, and all ranks issue the same collectives."""
    schedule = schedule_of()
    forward(schedule, [1])
    schedule.pre_backward(0)
    schedule.pre_backward(1)
    schedule.post_backward(1)
    assert {unit for action, unit in schedule.end_backward() if action is Action.REDUCE} == {0, 2, 3}


def test_the_end_lands_once_and_last_and_returns_to_idle() -> None:
    schedule = schedule_of()
    forward(schedule, [1, 2, 3])
    schedule.pre_backward(0)
    assert schedule.passes.in_backward
    actions = [action for action, _ in schedule.end_backward()]
    assert actions.count(Action.LAND) == 1
    assert actions[-1] is Action.LAND
    assert not schedule.passes.in_backward
    assert schedule.passes.running is Pass.IDLE


# Activation checkpointing


def _recompute(schedule: Schedule, unit: int) -> Actions:
    return schedule.pre_forward(unit, in_backward=True, grad_enabled=True)


def test_recompute_inside_a_unit_gathers_and_does_not_reshard_before_the_backward_that_follows() -> None:
    """A checkpoint over units 2 and 3 inside unit 1: they run forward again in its backward, then backward."""
    schedule = schedule_of()
    forward(schedule, [1, 2, 3])
    schedule.pre_backward(0)
    schedule.pre_backward(1)
    for unit in (2, 3):
        assert _recompute(schedule, unit) == ((Action.USE, unit),)
        assert schedule.passes.running is Pass.RECOMPUTE
        assert schedule.post_forward(unit) == ()
        assert schedule.passes.running is Pass.BACKWARD
    assert prefetches(schedule.pre_backward(3)) == [2]
    assert reshards(schedule.post_backward(3)) == [3]


def test_recompute_leaves_the_recorded_orders_alone() -> None:
    schedule = schedule_of()
    forward(schedule, [1, 2, 3])
    schedule.pre_backward(0)
    for unit in (3, 2, 1):
        _recompute(schedule, unit)
        schedule.post_forward(unit)
        assert prefetches(schedule.pre_backward(unit)) == ([unit - 1] if unit > 1 else [])
        schedule.post_backward(unit)
    schedule.end_backward()
    assert forward(schedule, [1, 2, 3]) == {0: [1], 1: [2], 2: [3], 3: []}


# Exceptions


def test_backward_that_raised_leaves_nothing_behind_a_reset() -> None:
    schedule = schedule_of()
    forward(schedule, [1, 2, 3])
    schedule.pre_backward(0)
    schedule.pre_backward(3)  # raises here
    schedule.reset()
    assert forward(schedule, [1, 2, 3]) == {0: [1], 1: [2], 2: [3], 3: []}
    assert not schedule.passes.in_backward
    assert backward(schedule, [3, 2, 1]) == {0: [3], 3: [2], 2: [1], 1: []}


def test_reset_returns_to_idle_and_keeps_the_order_of_the_last_complete_forward() -> None:
    schedule = schedule_of()
    forward(schedule, [1, 2, 3])
    pre_forward(schedule, 0)
    pre_forward(schedule, 3)
    schedule.reset()
    assert schedule.passes.running is Pass.IDLE
    assert schedule.passes.root is None
    assert forward(schedule, [1, 2, 3]) == {0: [1], 1: [2], 2: [3], 3: []}


def test_predictions_of_a_forward_that_raised_do_not_reach_the_next_one() -> None:
    schedule = schedule_of()
    forward(schedule, [1, 2, 3])
    pre_forward(schedule, 0)
    pre_forward(schedule, 2)  # predicts 3, then raises
    schedule.reset()
    pre_forward(schedule, 0)  # predicts 1
    assert reshards(schedule.post_forward(0)) == [1]


@pytest.mark.parametrize("finalizes_by_hand", [False, True])
def test_units_are_reduced_last_in_one_step_only(finalizes_by_hand: bool) -> None:
    schedule = schedule_of()
    schedule.finalizes_by_hand = finalizes_by_hand
    schedule.reduced_last.add(2)
    schedule.end_backward()
    if finalizes_by_hand:
        assert schedule.reduced_last == {2}
        schedule.finalize()
    assert schedule.reduced_last == set()
