"""What a report reads from a rank's marks: spans without gaps, collectives in flight, and who holds memory.

It is in ``golden/timeline.txt``, for each tape of marks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise

import pytest

from fsdp2.memory.plan import Held
from fsdp2.report.memory import ALLOCATED, memory
from fsdp2.report.timeline import BLOCKED, Does, Edge, Mark, Span, joined, spans, transfers, with_idle
from tests.harness.golden import texts_beside
from tests.unit.report.support import Tape, sizes

TEXTS = texts_beside(__file__)


def compute_belongs_to_the_innermost_unit_and_waits_to_the_unit_that_is_late() -> Tape:
    tape = Tape().event("pre_forward").compute(0.1).event("pre_forward", "a").do("unshard", "a", takes=0.01)
    tape.do("wait", "a", takes=0.02, blocked=0.3).compute(1).event("post_forward", "a").compute(0.2)
    return tape.event("post_forward").compute(0.4)


def backward_belongs_to_the_unit_whose_backward_began_last() -> Tape:
    tape = Tape().event("pre_backward").compute(0.1).event("pre_backward", "a").compute(1)
    tape.event("post_backward", "a").do("reduce_launch", "a", takes=0.01, inside="reduce").compute(0.2)
    return tape.event("end_backward").do("reduce_finish", "a", takes=0.03, blocked=0.5, inside="land")


def a_forward_that_is_recomputed_belongs_to_backward() -> Tape:
    tape = Tape().event("pre_backward", "a").event("pre_forward", "b").compute(1)
    return tape.event("post_forward", "b").compute(2)


def backward_of_the_head_is_not_the_roots_whose_output_is_the_same_tensor() -> Tape:
    tape = Tape().event("pre_backward", "head").event("pre_backward").compute(1).event("post_backward", "head")
    return tape.compute(0.1).event("pre_backward", "a").compute(2).event("end_backward").compute(0.2)


def modules_around_units_have_names_and_one_that_never_ends_is_over_when_another_begins() -> Tape:
    tape = Tape().event("pre_forward").module("forward", "embed").compute(1).module("forward_end", "embed")
    tape.event("pre_forward", "a").compute(1).event("post_forward", "a").module("forward", "head").compute(1)
    tape.module("forward_end", "head").event("post_forward").compute(0.5).module("backward", "head")
    tape.event("pre_backward").module("backward", "head").compute(2).module("backward_end", "head").compute(0.1)
    tape.event("pre_backward", "a").compute(2).event("post_backward", "a").compute(0.1).module("backward", "embed")
    tape.compute(1).event("pre_backward", "late.tower").compute(1).event("post_backward", "late.tower").compute(0.1)
    return tape.event("end_backward").compute(0.3)


def waits_inside_an_optimizer_are_its_own() -> Tape:
    tape = Tape().module("optimizer", unit="").compute(1)
    tape.marks += [Mark(Edge.START, BLOCKED, "", 1.0), Mark(Edge.STOP, BLOCKED, "", 1.5)]
    return tape.compute(0.5).compute(1).module("optimizer_end", unit="").compute(1)


def a_forward_that_raised_inside_another_is_over_with_it() -> Tape:
    tape = Tape().event("pre_forward", "a").event("pre_forward", "b").compute(1).event("post_forward", "a")
    return tape.compute(1).event("pre_forward", "a").compute(1)


def memory_of_the_program_is_what_it_said_last() -> Tape:
    tape = (
        Tape()
        .holds(Held.SHARDS, 500, "a")
        .do("unshard", "a")
        .compute(1)
        .holds(Held.SAVED, 64, "a")
        .holds(Held.SAVED, 32, "b")
    )
    return tape.compute(1).holds(Held.SAVED, 0, "a").holds(Held.OPTIMIZER_STATES, 900)


def what_an_allocator_says_beyond_all_that_is_known_is_not_told_apart() -> Tape:
    tape = Tape().holds(Held.SHARDS, 500, "a").holds(ALLOCATED, 550).compute(1).do("unshard", "a").compute(1)
    tape.holds(ALLOCATED, 3000).event("pre_backward", "a").compute(1).holds(ALLOCATED, 2500).do("reshard", "a")
    return tape.compute(1).holds(ALLOCATED, 400)


def a_wait_outside_of_all_work_is_one_for_other_ranks() -> Tape:
    return Tape.of([Mark(Edge.START, BLOCKED, "", 0.0), Mark(Edge.STOP, BLOCKED, "", 0.5)], 0.5)


def a_gather_is_in_flight_until_the_thread_had_waited_for_it() -> Tape:
    tape = Tape().do("unshard", "a", takes=0.1).do("wait", "a", takes=0.5, blocked=0.2).do("prefetch", "b", takes=0.1)
    return tape.compute(1).do("wait", "b")


def an_action_that_did_nothing_starts_no_collective() -> Tape:
    tape = Tape().do("unshard", "a").do("reduce_launch", "a", inside="reduce").do("wait", "a")
    return Tape.of([mark for mark in tape.marks if mark.edge is not Edge.ACTION], 0.0)


def a_prefetch_in_vain_ends_where_it_is_dropped() -> Tape:
    return Tape().do("prefetch", "a", takes=0.1).compute(1).do("reshard", "a", blocked=0.5)


def a_unit_that_is_not_replicated_is_reduce_scattered(unit: str = "a") -> Tape:
    tape = Tape().do("reduce_launch", unit, takes=0.1, inside="reduce").compute(1)
    tape.do("reduce_finish", unit, blocked=0.2, inside="land").compute(1)
    return tape.do("reduce_land", unit, blocked=0.3, inside="land")


def a_replicated_unit_is_reduce_scattered_and_then_all_reduced() -> Tape:
    return a_unit_that_is_not_replicated_is_reduce_scattered("r")


def memory_names_who_holds_how_much_at_the_peak() -> Tape:
    tape = Tape().do("unshard", "a").compute(1).do("wait", "a").do("prefetch", "b").compute(1).do("wait", "b")
    tape.event("pre_backward", "b").compute(1).do("reshard", "b").do("reduce_launch", "b", inside="reduce").compute(1)
    return tape.do("reduce_land", "b", inside="land").do("reshard", "a")


def gradients_count_once_their_unit_has_been_gathered_and_its_buckets_are_free() -> Tape:
    return Tape().event("pre_backward", "a").do("unshard", "a").do("wait", "a", blocked=1).do("prefetch", "b")


def a_unit_of_two_groups_has_the_bytes_of_one_reduction() -> Tape:
    tape = Tape().event("pre_backward", "a").compute(1).do("reduce_launch", "a", inside="reduce").compute(1)
    tape.do("reduce_launch", "a", inside="reduce").compute(1)
    return tape.do("reduce_land", "a", inside="land").do("reduce_land", "a", inside="land")


def memory_goes_forward_in_time_although_streams_run_beside_each_other() -> Tape:
    gathered = Mark(Edge.ACTION, "prefetch", "a", None, 3.0), Mark(Edge.EVENT, "pre_backward", "b", 1.0)
    return Tape.of([*gathered, Mark(Edge.ACTION, "wait", "a", 4.0)], 5.0, on_device=True)


def on_a_device_collectives_have_the_times_of_their_own_streams() -> Tape:
    marks = [
        Mark(Edge.START, "prefetch", "a", None, 1.0),
        Mark(Edge.STOP, "prefetch", "a", None, 3.0),
        Mark(Edge.ACTION, "prefetch", "a", None, 3.0),
        Mark(Edge.START, "wait", "a", 2.0),
        Mark(Edge.STOP, "wait", "a", 3.0),
        Mark(Edge.ACTION, "wait", "a", 3.0),
        Mark(Edge.START, "reduce", "a", 5.0),
        Mark(Edge.START, "reduce_launch", "a", 5.0, 4.0),
        Mark(Edge.STOP, "reduce_launch", "a", 5.5, 7.0),  # it begins when compute has filled the buckets
        Mark(Edge.STOP, "reduce", "a", 5.5),
        Mark(Edge.ACTION, "reduce", "a", 5.5),
        Mark(Edge.START, "reduce_finish", "a", 6.0),
        Mark(Edge.STOP, "reduce_finish", "a", 7.0),
    ]
    return Tape.of(marks, 7.0, on_device=True)


def copies_of_an_offloaded_unit_are_transfers_of_their_own() -> Tape:
    marks = [
        Mark(Edge.START, "unshard", "a", None, 0.0),
        Mark(Edge.START, "copy to device", "a", None, 0.0),
        Mark(Edge.STOP, "copy to device", "a", None, 1.0),
        Mark(Edge.STOP, "unshard", "a", None, 3.0),
        Mark(Edge.ACTION, "unshard", "a", None, 3.0),
        Mark(Edge.ACTION, "wait", "a", 3.0),
        Mark(Edge.START, "reduce", "a", 5.0),
        Mark(Edge.START, "reduce_launch", "a", 5.0, 5.0),
        Mark(Edge.START, "copy to host", "a", None, 7.0),
        Mark(Edge.STOP, "copy to host", "a", None, 8.0),
        Mark(Edge.STOP, "reduce_launch", "a", 5.5, 8.0),
        Mark(Edge.ACTION, "reduce", "a", 5.5),
        Mark(Edge.START, "reduce_finish", "a", 9.0),
        Mark(Edge.STOP, "reduce_finish", "a", 9.0),
    ]
    return Tape.of(marks, 9.0, on_device=True)


def a_step_on_the_host_runs_beside_what_the_thread_does() -> Tape:
    marks = [
        Mark(Edge.EVENT, "pre_backward", "b", 0.0),
        Mark(Edge.START, "reduce", "a", 1.0),
        Mark(Edge.START, "reduce_launch", "a", 1.0),
        Mark(Edge.START, "step on host", "b", None, 0.5),
        Mark(Edge.STOP, "step on host", "b", None, 1.5),
        Mark(Edge.STOP, "reduce_launch", "a", 2.0),
        Mark(Edge.STOP, "reduce", "a", 2.0),
        Mark(Edge.ACTION, "reduce", "a", 2.0),
        Mark(Edge.START, "reduce_finish", "a", 3.0),
        Mark(Edge.STOP, "reduce_finish", "a", 4.0),
    ]
    return Tape.of(marks, 5.0, on_device=False)


TAPES = [each for each in list(globals().values()) if inspect.isfunction(each) and each.__module__ == __name__]


def _spans(tape: Tape) -> list[Span]:
    found = spans(tape.marks, 0.0, tape.now, on_device=tape.on_device)
    assert all(a.stop == b.start for a, b in pairwise(found))
    assert not found or (found[0].start, found[-1].stop) == (0.0, tape.now)
    return found


@pytest.mark.parametrize("make", TAPES, ids=lambda make: make.__name__)
def test_tape_is_read(make: Callable[[], Tape]) -> None:
    tape = make()
    travels = transfers(tape.marks, ["r"], on_device=tape.on_device)
    held = memory(tape.marks, sizes(["a", "b", "r"]), 0.0, tape.now)
    said = [f"{each.does.value} {each.module or each.unit} {each.start:g} to {each.stop:g}" for each in _spans(tape)]
    said += [f"- {each.kind} {each.unit} {each.start:g} to {each.stop:g}, early: {each.early}" for each in travels]
    totals = [sum(values) for values in zip(*held.series.values(), strict=True)]
    said += [f"bytes at {time:g}: {nbytes}" for time, nbytes in zip(held.times, totals, strict=False)]
    said += [f"- {nbytes} of {unit}: {what}" for unit, what, nbytes in held.owners]
    assert held.peak == sum(nbytes for *_, nbytes in held.owners)
    TEXTS.check(make.__name__, "\n".join(said), among=[each.__name__ for each in TAPES])


def _cut(*does: tuple[str, float, float]) -> list[Span]:
    return [Span(Does(kind), "a", start, stop, False) for kind, start, stop in does]


def test_compute_is_idle_between_operations_and_waits_are_not() -> None:
    step = _cut(("forward", 0, 4), ("gather wait", 4, 6), ("forward", 6, 7), ("backward", 7, 9), ("other", 9, 10))
    busy = [(-2.0, -1.0), (1.0, 2.0), (3.0, 6.5), (6.75, 8.0), (8.0, 9.0)]
    found = _cut(("idle", 0, 1), ("forward", 1, 2), ("idle", 2, 3), ("forward", 3, 4), ("gather wait", 4, 6))
    found += _cut(("forward", 6, 6.5), ("idle", 6.5, 6.75), ("forward", 6.75, 7))
    found += _cut(("backward", 7, 8), ("backward", 8, 9), ("idle", 9, 10))
    assert with_idle(step, busy) == found
    assert with_idle(step[:2], []) == _cut(("idle", 0, 4), ("gather wait", 4, 6))


def test_short_gaps_between_operations_are_not_drawn() -> None:
    cut = _cut(("forward", 0, 1), ("idle", 1, 1.1), ("forward", 1.1, 2))
    rest = _cut(("idle", 2, 3), ("forward", 3, 4), ("copy", 4, 5), ("idle", 5, 5.1), ("forward", 5.1, 6))
    assert joined(cut + rest, 0.5) == [*_cut(("forward", 0, 2)), *rest]
    other_unit = [cut[0], cut[1]._replace(unit="b")]
    assert joined(other_unit, 0.5) == other_unit
