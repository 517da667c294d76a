"""What ``print(report)`` shows, in ``golden/text.txt``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdp2.report.data import RankRecord, report_data
from fsdp2.report.prediction import Prediction, StepFigures
from fsdp2.report.speed import Peak, Work
from fsdp2.report.text import text_of
from tests.harness.golden import texts_beside
from tests.harness.messages import wrapped
from tests.unit.report.support import ROOT, empty_step, info, record, simple_step

TEXTS = texts_beside(__file__)
UNITS = ["a", "b", "c"]
PEAK = Peak("the bf16 peak of H100", 989e12)
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
    "two ranks, with tokens and FLOPs": _data(_records(), peak=PEAK),
    "on a device whose peak is not known": _data(_records()),
    "a prediction for another machine": _data(_records(Work()), prediction=PREDICTION),
    "a step that loses nothing": _data([RankRecord(0, "host", 0.0, False, [empty_step(1.0)], knows_activations=False)]),
}


@pytest.mark.parametrize("case", CASES)
def test_text_accounts_for_the_step(case: str) -> None:
    TEXTS.check(case, wrapped(text_of(CASES[case])), among=CASES)
