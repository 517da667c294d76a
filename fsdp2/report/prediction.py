"""Compares the prediction of a plan with measurements: the same figures of one rank's step, in the same units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepFigures:
    """One step of one rank; None means unknown.

    Attributes:
        compute_ms: forward, backward, optimizer, and what else the program computes.
        exposed_ms: the rest of the step: communication that compute does not hide.
        temporary_nbytes: unsharded parameters, and gradients being reduced, at the peak.
        allocated_nbytes: the memory of all tensors at the peak.
        reserved_nbytes: what the allocator took from the device.
    """

    step_ms: float
    compute_ms: float
    exposed_ms: float
    temporary_nbytes: int
    allocated_nbytes: int | None
    reserved_nbytes: int | None


@dataclass(frozen=True)
class Prediction:
    """``figures`` of the applied choice, and the machine they were predicted for. ``same_machine``: that machine ran;
    otherwise a ratio to the measurement means nothing."""

    choice: str
    machine: str
    num_gpus: int
    workload: str
    same_machine: bool
    figures: StepFigures


def compared(prediction: Prediction, measured: StepFigures) -> dict[str, Any]:
    """``prediction`` next to ``measured``. A ratio is None where there is none, or where machines differ."""
    rows = [
        {"figure": name, "predicted": predicted, "measured": value, "ratio": _ratio(prediction, value, predicted)}
        for (name, value), predicted in zip(vars(measured).items(), vars(prediction.figures).values(), strict=True)
    ]
    names = ("choice", "machine", "num_gpus", "workload", "same_machine")
    return {**{name: getattr(prediction, name) for name in names}, "rows": rows}


def _ratio(prediction: Prediction, measured: float | None, predicted: float | None) -> float | None:
    return measured / predicted if prediction.same_machine and measured is not None and predicted else None
