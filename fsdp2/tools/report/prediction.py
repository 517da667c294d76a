"""What a plan predicted, beside what happened: the same figures of one rank's step, in the same units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepFigures:
    """One step of one rank; None is not known.

    Attributes:
        compute_ms: forward, backward, optimizer, and what else the program computes.
        exposed_ms: the rest of the step: communication that compute does not hide.
        temporary_nbytes: unsharded parameters, and gradients on their way, at the peak.
        allocated_nbytes: all that tensors took at the peak.
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
    """``figures`` of the choice that was applied, and what they were predicted for. ``same_machine``: that is what ran;
    else a ratio to what was measured says nothing."""

    choice: str
    machine: str
    num_gpus: int
    workload: str
    same_machine: bool
    figures: StepFigures


def compared(prediction: Prediction, measured: StepFigures) -> dict[str, Any]:
    """``prediction`` beside what was ``measured``. A ratio is None where there is none, or where machines differ."""
    rows = [
        {"figure": name, "predicted": predicted, "measured": value, "ratio": _ratio(prediction, value, predicted)}
        for (name, value), predicted in zip(vars(measured).items(), vars(prediction.figures).values(), strict=True)
    ]
    names = ("choice", "machine", "num_gpus", "workload", "same_machine")
    return {**{name: getattr(prediction, name) for name in names}, "rows": rows}


def _ratio(prediction: Prediction, measured: float | None, predicted: float | None) -> float | None:
    return measured / predicted if prediction.same_machine and measured is not None and predicted else None
