"""Whether more fits under a limit, what goes first, and what a step takes: plain numbers, no tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp2.schedule.schedule import AfterForward, Schedule, UnitRules
from fsdp2.tools.memory_plan import Ledger, Room, UnitBytes, simulate

ROOT = UnitBytes(unsharded=10, gradients=10, copies=1, sent=11)
UNIT = UnitBytes(unsharded=100, arriving=5, post_forward=20, gradients=100, copies=7, sent=107)


def _ledger(limit: float, num_units: int = 4) -> Ledger:
    return Ledger([ROOT] + [UNIT] * (num_units - 1), limit)


def test_staging_is_held_until_the_parameters_have_arrived() -> None:
    ledger = _ledger(105)
    assert ledger.to_unshard(1) == 105
    assert ledger.fits(105)
    ledger.unshard(1)
    assert (ledger.held, ledger.to_unshard(1)) == (105, 0)
    ledger.unshard(1)  # again: nothing happens
    ledger.wait(1)
    assert ledger.held == 100
    ledger.reshard(1)
    assert (ledger.held, ledger.peak) == (0, 105)


def test_resting_shards_are_held_beside_the_gather_that_replaces_them() -> None:
    ledger = _ledger(1000)
    ledger.wait(1)
    ledger.reshard(1, post_forward=True)
    assert ledger.held == 20
    ledger.unshard(1)
    assert ledger.held == 125
    ledger.wait(1)
    assert ledger.held == 100


def test_kept_storage_is_held_before_between_and_in_gathers() -> None:
    ledger = Ledger([ROOT, replace(UNIT, kept=100)], 1000)
    assert (ledger.held, ledger.to_unshard(1)) == (100, 5)
    ledger.unshard(1)
    assert ledger.held == 105
    assert ledger.stays(0) == {1: 100}
    ledger.limit = 105
    assert ledger.room_for(5, 0) == Room(dropped=(1,))
    assert ledger.room_for(6, 0) is None
    ledger.wait(1)
    ledger.reshard(1, post_forward=True)
    assert ledger.held == 120
    ledger.run_backward(1, gathers=True, reshards=True)
    assert ledger.held == 100 + 100 + 7  # the copies find no freed memory
    ledger.reshard(1)
    ledger.reduce(1, 1)
    assert (ledger.held, ledger.peak) == (207, 207)


@pytest.mark.parametrize(("reshards", "copies", "expected"), [(True, 7, 100), (True, 130, 130), (False, 7, 107)])
def test_backward_holds_gradients_and_what_copies_take_beyond_the_freed_parameters(
    reshards: bool, copies: int, expected: int
) -> None:
    sizes = replace(UNIT, copies=copies)
    assert sizes.backward(reshards=reshards) == expected
    ledger = Ledger([sizes])
    assert ledger.to_run_backward(0, gathers=True, reshards=reshards) == 100 + expected
    ledger.run_backward(0, gathers=True, reshards=reshards)
    assert ledger.held == 100 + expected
    assert ledger.to_run_backward(0, gathers=True, reshards=reshards) == 0


def test_reductions_land_before_gathers_are_dropped_the_oldest_first() -> None:
    ledger = _ledger(400)
    ledger.reduce(1, 2)
    ledger.reduce(2, 2)
    ledger.unshard(3)
    assert ledger.held == 107 + 107 + 105
    assert ledger.room_for(81, 0) == Room()
    assert ledger.room_for(82, 0) == Room(landings=1)
    assert ledger.room_for(189, 0) == Room(landings=2)
    assert ledger.room_for(296, 0) == Room(landings=2, dropped=(3,))
    assert ledger.room_for(401, 0) is None
    assert ledger.room_for(296, 3) is None  # a unit does not make room for itself
    assert ledger.stays(0) == {}
    assert ledger.stays(3) == {3: 105}


def test_a_reduction_lands_when_there_would_be_too_many() -> None:
    ledger = _ledger(1000)
    for unit in (3, 2, 1):
        ledger.run_backward(unit, gathers=True, reshards=True)
        ledger.reshard(unit)
        ledger.reduce(unit, 2)
    assert (ledger.num_reductions, ledger.held) == (2, 214)
    ledger.land()
    assert (ledger.num_reductions, ledger.held) == (0, 0)


def test_gradients_kept_unreduced_are_the_users() -> None:
    ledger = _ledger(1000)
    ledger.run_backward(1, gathers=True, reshards=True)
    ledger.keep(1)
    ledger.reshard(1)
    assert ledger.held == 0


def _peak(*, overlaps: bool, kept: bool = False) -> int:
    """Of a step over a root and three units in it."""
    own = UnitRules(after_forward=AfterForward.KEEP) if kept else UnitRules()
    if not overlaps:
        own = replace(own, forward_prefetch=(), backward_prefetch=())
    root = replace(own, after_forward=AfterForward.KEEP)
    schedule, order, parents = Schedule([root, own, own, own]), range(4), [None, 0, 0, 0]
    simulate(schedule, order, parents, _ledger(0), overlaps=overlaps)
    ledger = _ledger(0)
    simulate(schedule, order, parents, ledger, overlaps=overlaps)
    assert ledger.held == 0
    return ledger.peak


def test_a_step_holds_two_units_and_a_reduction_in_flight_beside_the_root() -> None:
    root = 10 + 10
    assert _peak(overlaps=True) == root + (100 + 100) + 105 + 107


def test_a_step_without_overlap_holds_one_unit_beside_the_root() -> None:
    root = 10 + 10
    assert _peak(overlaps=False) == root + 100 + 100


def test_kept_units_are_held_until_their_own_backward_has_run() -> None:
    root = 10 + 10
    assert _peak(overlaps=True, kept=True) == root + 2 * 100 + 100 + 107
