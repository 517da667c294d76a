"""Tokens per second, and the share of the device's peak that the model's arithmetic reaches (MFU). Plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Peak:
    """The peak compute rate of one device. ``name`` names the device and the dtype."""

    name: str
    flops: float


@dataclass(frozen=True)
class Work:
    """The work of one rank in a step, as given by the user; None means unknown."""

    tokens: int | None = None
    flops: float | None = None


NOT_SAID = Work()


def speed(works: Sequence[Work], step_s: float, peak: Peak | None, device: str) -> dict[str, Any]:
    """The speed of a step of ``step_s`` seconds on ranks with these ``works``. ``no_mfu`` says why there is no MFU."""
    tokens = [work.tokens for work in works if work.tokens is not None]
    flops = [work.flops for work in works if work.flops is not None]
    known = bool(step_s) and len(tokens) == len(works)
    rate = sum(tokens) / step_s if known else None
    no_mfu = None
    if len(flops) < len(works) or not step_s:
        no_mfu = "flops_per_rank was not given"
    elif peak is None:
        no_mfu = f"the peak of {device} is not known"
    mfu = None if no_mfu is not None or peak is None else sum(flops) / step_s / (len(works) * peak.flops)
    return {
        "tokens": sum(tokens) if known else None,
        "tokens_per_s": rate,
        "tokens_per_s_per_rank": None if rate is None else rate / len(works),
        "flops": sum(flops) if len(flops) == len(works) else None,
        "mfu": mfu,
        "peak": None if mfu is None or peak is None else f"{peak.name}, {peak.flops / 1e12:.0f} TFLOP/s",
        "no_mfu": no_mfu,
    }
