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
    """``figures`` of the choice that was applied, and what they were predicted for."""

    choice: str
    machine: str
    num_gpus: int
    workload: str
    figures: StepFigures


def compared(prediction: Prediction, measured: StepFigures) -> dict[str, Any]:
    """``prediction`` beside what was ``measured``."""
    predicted = vars(prediction.figures)
    rows = [{"figure": name, "predicted": predicted[name], "measured": value} for name, value in vars(measured).items()]
    described = {name: getattr(prediction, name) for name in ("choice", "machine", "num_gpus", "workload")}
    return {**described, "rows": rows}
