"""What a report reads from a rank's marks: spans without gaps, collectives in flight, and who holds memory."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fsdp2.tools.report.timeline import BLOCKED, Does, Edge, Mark, Span, joined, memory, spans, transfers, with_idle
from tests.unit.report_support import ROOT, Tape, simple_step, sizes


def _spans(tape: Tape) -> list[tuple[str, str, float]]:
    found = spans(tape.marks, 0.0, tape.now, ROOT, on_device=False)
    assert found[0].start == 0.0
    assert found[-1].stop == tape.now
    assert all(a.stop == b.start for a, b in pairwise(found))
    return [(span.does.value, span.unit, round(span.stop - span.start, 6)) for span in found]


def test_compute_belongs_to_the_innermost_unit_and_waits_to_the_unit_that_is_late() -> None:
    tape = Tape().event("pre_forward").compute(0.1).event("pre_forward", "a").do("unshard", "a", takes=0.01)
    tape.do("wait", "a", takes=0.02, blocked=0.3).compute(1).event("post_forward", "a").compute(0.2)
    tape.event("post_forward").compute(0.4)
    assert _spans(tape) == [
        ("forward", ROOT, 0.1),
        ("launch", "a", 0.01),
        ("gather wait", "a", 0.3),
        ("copy", "a", 0.02),
        ("forward", "a", 1.0),
        ("forward", ROOT, 0.2),
        ("other", "", 0.4),
    ]


def test_backward_belongs_to_the_unit_whose_backward_began_last() -> None:
    tape = Tape().event("pre_backward").compute(0.1).event("pre_backward", "a").compute(1)
    tape.event("post_backward", "a").do("reduce_launch", "a", takes=0.01, inside="reduce").compute(0.2)
    tape.event("end_backward").do("reduce_finish", "a", takes=0.03, blocked=0.5, inside="land")
    assert _spans(tape) == [
        ("backward", ROOT, 0.1),
        ("backward", "a", 1.0),
        ("launch", "a", 0.01),
        ("backward", ROOT, 0.2),
        ("reduce wait", "a", 0.5),
        ("copy", "a", 0.03),
    ]


def test_a_forward_that_is_recomputed_belongs_to_backward() -> None:
    tape = Tape().event("pre_backward", "a").event("pre_forward", "b").compute(1).event("post_forward", "b").compute(2)
    assert _spans(tape) == [("backward", "b", 1.0), ("backward", "a", 2.0)]


def test_a_wait_outside_of_all_work_is_one_for_other_ranks() -> None:
    tape = Tape()
    tape.marks = [Mark(Edge.START, BLOCKED, "", 0.0), Mark(Edge.STOP, BLOCKED, "", 0.5)]
    tape.now = 0.5
    assert _spans(tape) == [("rank wait", "", 0.5)]


def _transfers(tape: Tape, *replicated: str) -> list[tuple[str, str, float, float, bool]]:
    found = transfers(tape.marks, replicated, on_device=False)
    return [(each.kind, each.unit, round(each.start, 6), round(each.stop, 6), each.early) for each in found]


def test_a_gather_is_in_flight_until_the_thread_had_waited_for_it() -> None:
    tape = Tape().do("unshard", "a", takes=0.1).do("wait", "a", takes=0.5, blocked=0.2).do("prefetch", "b", takes=0.1)
    tape.compute(1).do("wait", "b")
    assert _transfers(tape) == [("all-gather", "a", 0.0, 0.3, False), ("all-gather", "b", 0.8, 1.9, True)]


def test_an_action_that_did_nothing_starts_no_collective() -> None:
    tape = Tape().do("unshard", "a").do("reduce_launch", "a", inside="reduce").do("wait", "a")
    tape.marks = [mark for mark in tape.marks if mark.edge is not Edge.ACTION]
    assert _transfers(tape) == []


def test_a_prefetch_in_vain_ends_where_it_is_dropped() -> None:
    tape = Tape().do("prefetch", "a", takes=0.1).compute(1).do("reshard", "a", blocked=0.5)
    assert _transfers(tape) == [("all-gather", "a", 0.0, 1.6, True)]


def test_a_replicated_unit_is_reduce_scattered_and_then_all_reduced() -> None:
    tape = Tape().do("reduce_launch", "a", takes=0.1, inside="reduce").compute(1)
    tape.do("reduce_finish", "a", blocked=0.2, inside="land").compute(1)
    tape.do("reduce_land", "a", blocked=0.3, inside="land")
    assert _transfers(tape, "a") == [("reduce-scatter", "a", 0.0, 1.3, False), ("all-reduce", "a", 1.3, 2.6, False)]
    assert _transfers(tape) == [("reduce-scatter", "a", 0.0, 1.3, False)]


def test_on_a_device_collectives_have_the_times_of_their_own_streams() -> None:
    marks = [
        Mark(Edge.START, "prefetch", "a", None, 1.0),
        Mark(Edge.STOP, "prefetch", "a", None, 3.0),
        Mark(Edge.ACTION, "prefetch", "a", None, 3.0),
        Mark(Edge.START, "wait", "a", 2.0),
        Mark(Edge.STOP, "wait", "a", 3.0),
        Mark(Edge.ACTION, "wait", "a", 3.0),
        Mark(Edge.START, "reduce", "a", 5.0),
        Mark(Edge.START, "reduce_launch", "a", 5.0, 4.0),
        Mark(Edge.STOP, "reduce_launch", "a", 5.5, 7.0),
        Mark(Edge.STOP, "reduce", "a", 5.5),
        Mark(Edge.ACTION, "reduce", "a", 5.5),
        Mark(Edge.START, "reduce_finish", "a", 6.0),
        Mark(Edge.STOP, "reduce_finish", "a", 7.0),
    ]
    found = transfers(marks, (), on_device=True)
    assert [(each.kind, each.start, each.stop) for each in found] == [
        ("all-gather", 1.0, 3.0),
        ("reduce-scatter", 5.5, 7.0),  # from when compute had filled the buckets
    ]
    did = [(span.does.value, span.start, span.stop) for span in spans(marks, 0.0, 7.0, ROOT, on_device=True)]
    assert did == [
        ("other", 0.0, 2.0),
        ("gather wait", 2.0, 3.0),
        ("other", 3.0, 5.0),
        ("copy", 5.0, 5.5),
        ("other", 5.5, 6.0),
        ("reduce wait", 6.0, 7.0),
    ]


def test_memory_names_who_holds_how_much_at_the_peak() -> None:
    tape = Tape().do("unshard", "a").compute(1).do("wait", "a").do("prefetch", "b").compute(1).do("wait", "b")
    tape.event("pre_backward", "b").compute(1).do("reshard", "b").do("reduce_launch", "b", inside="reduce").compute(1)
    tape.do("reduce_land", "b", inside="land").do("reshard", "a")
    found = memory(tape.marks, sizes(["a", "b"]), 0.0, tape.now)
    assert found.owners == [
        ("a", "unsharded parameters", 1000),
        ("b", "unsharded parameters", 1000),
        ("b", "gradients and their copies", 1000),
    ]
    assert found.peak == 3000
    assert [nbytes for _, nbytes in found.points] == [1010, 1000, 2010, 2000, 3000, 2000, 1500, 1000, 0]


def test_copies_of_an_offloaded_unit_are_transfers_of_their_own() -> None:
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
    assert {each.kind: (each.start, each.stop) for each in transfers(marks, (), on_device=True)} == {
        "copy to device": (0.0, 1.0),
        "all-gather": (1.0, 3.0),
        "reduce-scatter": (5.5, 7.0),
        "copy to host": (7.0, 8.0),
    }


def test_gradients_count_once_their_unit_has_been_gathered_and_its_buckets_are_free() -> None:
    tape = Tape().event("pre_backward", "a").do("unshard", "a").do("wait", "a", blocked=1).do("prefetch", "b")
    found = memory(tape.marks, sizes(["a", "b"]), 0.0, tape.now)
    assert [nbytes for _, nbytes in found.points] == [1010, 1000, 2000, 3010]


def test_memory_goes_forward_in_time_although_streams_run_beside_each_other() -> None:
    marks = [
        Mark(Edge.ACTION, "prefetch", "a", None, 3.0),
        Mark(Edge.EVENT, "pre_backward", "b", 1.0),
        Mark(Edge.ACTION, "wait", "a", 4.0),
    ]
    found = memory(marks, sizes(["a", "b"]), 0.0, 5.0)
    assert found.points == [(3.0, 1010), (3.0, 2010), (4.0, 2000)]


def test_what_an_earlier_step_kept_is_held_when_the_next_one_begins() -> None:
    first = Tape().do("unshard", "a").do("wait", "a").compute(1)
    found = memory(first.marks, sizes(["a"]), first.now, first.now + 1)
    assert found.points == [(1.0, 1000)]


@pytest.mark.parametrize("late", [0.0, 0.003])
def test_a_whole_step_adds_up_to_its_length(late: float) -> None:
    tape = simple_step(["a", "b"], late=late)
    found = _spans(tape)
    assert sum(seconds for *_, seconds in found) == pytest.approx(tape.now)
    assert sum(seconds for does, _, seconds in found if does == "gather wait") == pytest.approx(0.002 + 2 * late)
    assert [each.unit for each in transfers(tape.marks, (), on_device=False)] == [ROOT, "a", "b", "b", "b", "a", "a"]


def _cut(*does: tuple[str, float, float]) -> list[Span]:
    return [Span(Does(kind), "a", start, stop, False) for kind, start, stop in does]


def test_compute_is_idle_between_operations_and_waits_are_not() -> None:
    step = _cut(("forward", 0, 4), ("gather wait", 4, 6), ("forward", 6, 7), ("backward", 7, 9), ("other", 9, 10))
    busy = [(-2.0, -1.0), (1.0, 2.0), (3.0, 6.5), (6.75, 8.0), (8.0, 9.0)]
    assert with_idle(step, busy) == _cut(
        ("idle", 0, 1),
        ("forward", 1, 2),
        ("idle", 2, 3),
        ("forward", 3, 4),
        ("gather wait", 4, 6),
        ("forward", 6, 6.5),
        ("idle", 6.5, 6.75),
        ("forward", 6.75, 7),
        ("backward", 7, 8),
        ("backward", 8, 9),
        ("idle", 9, 10),
    )
    assert with_idle(step[:2], []) == _cut(("idle", 0, 4), ("gather wait", 4, 6))


def test_short_gaps_between_operations_are_not_drawn() -> None:
    cut = _cut(
        ("forward", 0, 1),
        ("idle", 1, 1.1),
        ("forward", 1.1, 2),
        ("idle", 2, 3),
        ("forward", 3, 4),
        ("copy", 4, 5),
        ("idle", 5, 5.1),
        ("forward", 5.1, 6),
    )
    assert joined(cut, 0.5) == _cut(("forward", 0, 2), *[(each.does, each.start, each.stop) for each in cut[3:]])
    other_unit = [cut[0], cut[1]._replace(unit="b")]
    assert joined(other_unit, 0.5) == other_unit
