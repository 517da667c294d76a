"""What ``print(report)`` shows, in ``golden/report_text.txt``; and tokens per second, and MFU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdp2.planner.machines import MACHINES
from fsdp2.report.data import RankRecord, report_data
from fsdp2.report.figures import Prediction, StepFigures, Work, speed
from fsdp2.report.files import text_of
from fsdp2.report.lost import Lost
from fsdp2.report.memory import SAVED
from fsdp2.report.timeline import COMPUTING
from tests.harness.golden import texts_beside
from tests.harness.messages import wrapped
from tests.unit.report_support import ROOT, Tape, empty_step, info, record, simple_step

TEXTS = texts_beside(__file__)
UNITS = ["a", "b", "c"]
WORK = Work(tokens=4096, flops=2e13)
PREDICTION = Prediction(
    "FSDP", "H100", 8, "tokens", same_machine=False, figures=StepFigures(100.0, 90.0, 10.0, 5000, None, None)
)


def _records(work: Work = WORK, ranks: int = 2) -> list[RankRecord]:
    found = [record(simple_step(UNITS, late=0.003 + 0.001 * rank), UNITS, rank) for rank in range(ranks)]
    return [replace(each, work=work) for each in found]


def _data(records: list[RankRecord], **options: Any) -> dict[str, Any]:
    return report_data("Model", "cpu (gloo)", [info(name) for name in (ROOT, *UNITS)], records, **options)


CASES: dict[str, dict[str, Any]] = {
    "two ranks, with tokens and FLOPs": _data(_records(), machine=MACHINES["H100"]),
    "on a device whose peak is not known": _data(_records()),
    "a prediction for another machine": _data(_records(Work()), prediction=PREDICTION),
    "a step that loses nothing": _data([RankRecord(0, "host", 0.0, False, [empty_step(1.0)], knows_activations=False)]),
}


@pytest.mark.parametrize("case", CASES)
def test_text_accounts_for_the_step(case: str) -> None:
    TEXTS.check(case, wrapped(text_of(CASES[case])), among=[*CASES, "compute"])


@pytest.mark.parametrize("data", CASES.values(), ids=CASES.keys())
def test_compute_and_lost_time_are_the_whole_step(data: dict[str, Any]) -> None:
    lost = data["lost"]
    assert lost["compute_ms"] + lost["lost_ms"] == pytest.approx(lost["step_ms"], abs=0.01)
    assert sum(each["lost_ms"] for each in lost["kinds"]) == pytest.approx(lost["lost_ms"], abs=0.01)
    assert {each["kind"] for each in lost["kinds"]} <= {kind.value for kind in Lost}
    assert sum(each["gain_ms"] for each in data["findings"]) == pytest.approx(lost["explained_ms"], abs=0.01)
    assert lost["explained_ms"] <= lost["lost_ms"] + 0.01


def test_compute_rows_have_all_compute_of_a_rank_and_each_span_is_in_one() -> None:
    tape = Tape().event("pre_forward").module("forward", "lm_head").compute(2).module("forward_end", "lm_head")
    tape.compute(1).event("post_forward").compute(3).event("pre_backward").module("backward", "lm_head").compute(4)
    data = _data([record(tape.event("end_backward").compute(5), UNITS)])
    rows = [f"{row['name']}: {[row[f'{does.value}_ms'] for does in COMPUTING]}" for row in data["compute"]]
    rows += [f"a span of {data['places'][place]}" for *_, place in data["timelines"][0]["spans"]]
    TEXTS.check("compute", "\n".join(rows))


def test_of_many_times_those_at_which_most_was_held_are_drawn() -> None:
    tape = Tape()
    for i in range(10_000):
        tape.holds(SAVED, 10 * i if i != 7_777 else 10**6, "a").compute(0.001)
    memory = _data([record(tape, UNITS)])["memory"]
    (series,) = memory["series"]
    assert 1_000 < len(memory["times_us"]) == len(series["nbytes"]) <= 2_001
    assert memory["times_us"] == sorted(memory["times_us"])
    assert max(series["nbytes"]) == memory["peak_nbytes"] == 10**6


def test_mfu_is_the_share_of_the_peak_of_all_ranks() -> None:
    machine = replace(MACHINES["H100"], bf16_flops=10e12)
    found = speed([Work(1000, 2e12), Work(3000, 4e12)], 0.5, machine, "X")
    assert (found["tokens"], found["tokens_per_s"], found["tokens_per_s_per_rank"]) == (4000, 8000.0, 4000.0)
    assert (found["mfu"], found["no_mfu"]) == (6e12 / 0.5 / 2 / 10e12, None)
    assert speed([Work(1000), Work()], 0.5, None, "X")["tokens_per_s"] is None  # one rank did not say
    assert speed([Work(1000), Work()], 0.5, None, "X")["no_mfu"] == "flops_per_rank was not given"
    assert speed([WORK], 0.5, None, "X")["no_mfu"] == "the peak of X is not known"
