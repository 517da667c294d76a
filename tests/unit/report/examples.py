"""Data of two ranks whose steps did not run, and a prediction."""

from __future__ import annotations

from typing import Any

from fsdp2.report.data import report_data
from fsdp2.report.figures import Prediction, StepFigures
from tests.unit.report.support import ROOT, Tape, info, record, simple_step

UNITS = ["blocks.0", "blocks.1", "</script><b>odd"]
PREDICTED = StepFigures(100.0, 90.0, 10.0, 5000, 2**31, 2**32)
PREDICTION = Prediction("FSDP, reshard", "H100", 8, "2 x 128 tokens", same_machine=True, figures=PREDICTED)


def example_data(units: list[str] = UNITS, ranks: int = 2, prediction: Prediction | None = None) -> dict[str, Any]:
    records = [record(simple_step(units, late=0.003 + 0.001 * rank), units, rank) for rank in range(ranks)]
    infos = [info(name, 6000 if name == "blocks.1" else 1000) for name in [ROOT, *units]]
    return report_data("Model", "cpu (gloo)", infos, records, prediction)


def data_of(tape: Tape, *units: str) -> dict[str, Any]:
    return report_data("Model", "cpu", [info(name) for name in (ROOT, *units)], [record(tape, units)])
