"""What a report knows: the records of all ranks, combined; in ``golden/data.txt``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp2.memory.plan import Held
from fsdp2.report.data import RankRecord, report_data
from fsdp2.report.operators import Operation, busy, operators
from fsdp2.report.timeline import COMPUTING, LOSS, OPTIMIZER, OPTIMIZER_END, phases
from tests.harness.golden import texts_beside
from tests.unit.report.examples import PREDICTED, PREDICTION, data_of, example_data
from tests.unit.report.support import ROOT, Tape, empty_step, info, rank_step, record, simple_step

TEXTS = texts_beside(__file__)


def test_data_of_two_ranks() -> None:
    """A unit has the most of all ranks, and is exposed by the least; the second rank is 1 ms later. A finding rests on
    the shortest wait of all ranks. Of collectives: kind, unit, how much later which rank starts, and each start."""
    data = example_data()
    said = [json.dumps(each) for key in ("units", "rank_totals", "findings") for each in data[key]]
    collectives = data["collectives"]
    said += [*map(json.dumps, collectives["rows"]), f"the first difference: {collectives['first_difference']}"]
    TEXTS.check("data of two ranks", "\n".join([*said, json.dumps(data["memory"][0])]))


@pytest.mark.parametrize(("first_use", "named"), [(False, []), (True, ["late rank"])])
def test_a_late_rank_is_the_slowest_in_every_step_but_the_first(first_use: bool, named: list[str]) -> None:
    computes = [[0.010, *[0.020] * 5], [0.030, *[0.010] * 5]]
    records = []
    for rank, seconds in enumerate(computes):
        steps = [rank_step(simple_step(["a"], late=0.05 - 2 * each, compute=each), ["a"]) for each in seconds]
        records.append(RankRecord(rank, "host", 0.0, first_use, steps))
    data = report_data("Model", "cpu", [info(ROOT), info("a")], records)
    assert [each["rule"] for each in data["findings"] if each["rule"] == "late rank"] == named


@pytest.mark.parametrize(("action", "proposed"), [("unshard", ["a"]), ("prefetch", [])])
def test_a_gather_that_starts_when_compute_needs_it_should_be_prefetched(action: str, proposed: list[str]) -> None:
    tape = Tape().event("pre_forward").do("unshard", takes=0.001).do("wait").compute(0.010)
    tape.event("pre_forward", "a").do(action, "a").do("wait", "a", blocked=0.004).compute(0.010)
    data = report_data("Model", "cpu", [info(ROOT), info("a")], [record(tape, ["a"])])
    assert [name for each in data["findings"] if each["rule"] == "prefetch" for name in each["units"]] == proposed


@pytest.mark.parametrize(("is_first_use", "expected"), [(False, 0), (True, 2)])
def test_the_typical_step_is_the_median_and_not_the_first_one_of_a_model(is_first_use: bool, expected: int) -> None:
    one = RankRecord(0, "host", 0.0, is_first_use, [empty_step(seconds) for seconds in (3.0, 9.0, 1.0)])
    assert report_data("Model", "cpu", [info(ROOT)], [one])["step"] == expected


@pytest.mark.parametrize(("host", "skew", "expected"), [("host", 0.0, [0, 0]), ("other", 700.0, [700_000_000, 0])])
def test_clocks_of_two_hosts_are_aligned_and_those_of_one_are_not(host: str, skew: float, expected: list[int]) -> None:
    steps = record(simple_step(["a"]), ["a"]).steps
    records = [RankRecord(0, "host", 100.0, False, steps), RankRecord(1, host, 100.0 + skew, False, steps)]
    assert [each["start_us"] for each in report_data("M", "cpu", [info(ROOT)], records)["timelines"]] == expected


def test_the_first_collective_that_is_not_the_same_on_all_ranks_is_named() -> None:
    records = [record(simple_step(units), units, rank) for rank, units in enumerate((["a", "b"], ["a", "c"]))]
    collectives = report_data("Model", "cpu", [info(name) for name in (ROOT, "a", "b", "c")], records)["collectives"]
    assert len(collectives["rows"]) == 2
    named = {"0": "all-gather b", "1": "all-gather c"}
    assert collectives["first_difference"] == {"position": 2, "by_rank": named}


def test_what_was_predicted_stands_beside_what_the_longest_and_the_fullest_rank_measured() -> None:
    data = example_data(prediction=PREDICTION)
    assert (data["prediction"]["choice"], data["prediction"]["num_gpus"]) == ("FSDP, reshard", 8)
    rows = {row["figure"]: (row["predicted"], row["measured"]) for row in data["prediction"]["rows"]}
    assert {figure: predicted for figure, (predicted, _) in rows.items()} == vars(PREDICTED)
    last = data["rank_totals"][1]  # waits longer for each gather
    assert rows["step_ms"][1] == data["steps_ms"][0]
    assert rows["compute_ms"][1] == pytest.approx(last["forward_ms"] + last["backward_ms"] + last["other_ms"])
    assert rows["exposed_ms"][1] == pytest.approx(rows["step_ms"][1] - rows["compute_ms"][1])
    assert rows["temporary_nbytes"][1] == data["memory"][0]["temporary_nbytes"]
    assert rows["allocated_nbytes"][1] is None  # the CPU does not say
    ratios = {row["figure"]: row["ratio"] for row in data["prediction"]["rows"]}
    assert ratios["step_ms"] == rows["step_ms"][1] / 100.0
    assert ratios["allocated_nbytes"] is None
    elsewhere = example_data(prediction=replace(PREDICTION, same_machine=False))["prediction"]
    assert [row["ratio"] for row in elsewhere["rows"]] == [None] * 6
    assert example_data()["prediction"] is None


def test_compute_rows_have_all_compute_of_a_rank_and_each_span_is_in_one() -> None:
    tape = Tape().event("pre_forward").module("forward", "lm_head").compute(2).module("forward_end", "lm_head")
    tape.compute(1).event("post_forward").compute(3).event("pre_backward").module("backward", "lm_head").compute(4)
    data = data_of(tape.event("end_backward").compute(5))
    rows = [f"{row['name']}: {[row[f'{does.value}_ms'] for does in COMPUTING]}" for row in data["compute"]]
    rows += [f"a span of {data['places'][place]}" for *_, place in data["timelines"][0]["spans"]]
    TEXTS.check("compute", "\n".join(rows))


def test_of_many_times_those_at_which_most_was_held_are_drawn() -> None:
    tape = Tape()
    for i in range(10_000):
        tape.holds(Held.SAVED, 10 * i if i != 7_777 else 10**6, "a").compute(0.001)
    (memory,) = data_of(tape, "a")["memory"]
    (series,) = memory["series"]
    assert 1_000 < len(memory["times_us"]) == len(series["nbytes"]) <= 2_001
    assert memory["times_us"] == sorted(memory["times_us"])
    assert max(series["nbytes"]) == memory["peak_nbytes"] == 10**6


def test_phases_hold_their_waits_and_operations_belong_to_what_computes() -> None:
    tape = Tape().compute(1).event("pre_forward").do("unshard", takes=1).do("wait", blocked=1).compute(2)
    tape.event("post_forward").compute(3).event("pre_backward").compute(4).event("end_backward")
    tape.do("reduce_finish", blocked=1, inside="land").event(OPTIMIZER).compute(5).event(OPTIMIZER_END).compute(1)
    step = rank_step(tape, [])
    assert phases(step.spans) == [("forward", 1, 5), ("backward", 8, 13), (OPTIMIZER, 13, 18)]
    ran = [Operation(at, at + 0.5, 0.25, "mm") for at in (2.2, 3, 4, 6, 9, 10, 12.2, 14)]  # two of them in waits
    step = replace(step, operators=operators(step.spans, ran))
    data = report_data("Model", "cpu", [info(ROOT)], [RankRecord(0, "host", 0.0, False, [step])])
    assert {data["places"][place]: (name, *row) for name, place, *row in data["operators"]["rows"]} == {
        ROOT: ("mm", 4, 500_000, 500_000, 0),
        LOSS: ("mm", 1, 0, 0, 250_000),
        OPTIMIZER: ("mm", 1, 0, 0, 250_000),
    }
    assert busy([*ran, Operation(14.5, 15, 0, "mm")])[-2:] == [(12.2, 12.7), (14, 15)]


def test_each_field_of_the_data_is_on_the_page_about_reports() -> None:
    page = (Path(__file__).parents[3] / "docs/debugging.md").read_text()
    data = example_data(prediction=PREDICTION)
    fields = {*data, *data["units"][0], *data["timelines"][0], *data["memory"][0]} - {"name"}
    assert sorted(field for field in fields if f"`{field}`" not in page) == []
