"""What a step is measured by: the figures that a plan predicts, tokens per second, MFU, and how many digits of a time
are known. Plain values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdp2.planner.machine import Machine


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
    found, rows = asdict(prediction), []
    for name, predicted in found.pop("figures").items():
        value = getattr(measured, name)
        has_ratio = prediction.same_machine and value is not None and predicted
        ratio = value / predicted if has_ratio else None
        rows.append({"figure": name, "predicted": predicted, "measured": value, "ratio": ratio})
    return {**found, "rows": rows}


@dataclass(frozen=True)
class Work:
    """The work of one rank in a step, as given by the user; None means unknown."""

    tokens: int | None = None
    flops: float | None = None


def speed(works: Sequence[Work], step_s: float, machine: Machine | None, device: str) -> dict[str, Any]:
    """The speed of a step of ``step_s`` seconds on ranks with these ``works``. ``no_mfu`` says why there is no MFU.
    MFU is the share of the device's peak that the model's arithmetic reaches."""
    tokens = _sum([work.tokens for work in works]) if step_s else None
    flops = _sum([work.flops for work in works])
    rate = None if tokens is None else tokens / step_s
    mfu = peak = no_mfu = None
    if flops is None or not step_s:
        no_mfu = "flops_per_rank was not given"
    elif machine is None:
        no_mfu = f"the peak of {device} is not known"
    else:
        mfu = flops / step_s / (len(works) * machine.bf16_flops)
        peak = f"the bf16 peak of {machine.device}, {machine.bf16_flops / 1e12:.0f} TFLOP/s"
    return {
        "tokens": tokens,
        "tokens_per_s": rate,
        "tokens_per_s_per_rank": None if rate is None else rate / len(works),
        "flops": flops,
        "mfu": mfu,
        "peak": peak,
        "no_mfu": no_mfu,
    }


def _sum(values: Sequence[float | None]) -> float | None:
    """The sum of ``values``; None if one is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def spread_of(steps_ms: Sequence[float]) -> float:
    """The difference between the longest and the shortest step, as a share of the median; 0 if there is only one."""
    median = statistics.median(steps_ms)
    return (max(steps_ms) - min(steps_ms)) / median if median else 0.0


def digits_of(steps_ms: Sequence[float]) -> int:
    """How many digits of a time are known: 4 if steps vary by less than 1%, 3 by less than 10%, else 2. A single step
    does not tell; its times have 3."""
    spread = spread_of(steps_ms)
    if len(steps_ms) > 1 and spread < 0.01:
        return 4
    return 3 if spread < 0.1 else 2


def ms_text(ms: float, digits: int) -> str:
    """``ms`` with as many ``digits`` as are known, but no finer than a microsecond, which is what reports keep."""
    if abs(ms) < 0.0005:
        return "0 ms"
    decimals = min(digits - 1 - math.floor(math.log10(abs(ms))), 3)
    return f"{round(ms, decimals):.{max(decimals, 0)}f} ms"
