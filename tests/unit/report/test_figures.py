"""Tokens per second, MFU, and how many digits of a time are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp2.planner.machines import MACHINES
from fsdp2.report.figures import Work, digits_of, ms_text, speed


def test_mfu_is_the_share_of_the_peak_of_all_ranks() -> None:
    machine = replace(MACHINES["H100"], bf16_flops=10e12)
    found = speed([Work(1000, 2e12), Work(3000, 4e12)], 0.5, machine, "X")
    assert (found["tokens"], found["tokens_per_s"], found["tokens_per_s_per_rank"]) == (4000, 8000.0, 4000.0)
    assert (found["mfu"], found["no_mfu"]) == (6e12 / 0.5 / 2 / 10e12, None)
    assert speed([Work(1000), Work()], 0.5, None, "X")["tokens_per_s"] is None  # one rank did not say
    assert speed([Work(1000), Work()], 0.5, None, "X")["no_mfu"] == "flops_per_rank was not given"
    assert speed([Work(tokens=4096, flops=2e13)], 0.5, None, "X")["no_mfu"] == "the peak of X is not known"


@pytest.mark.parametrize(
    ("steps_ms", "expected"),
    [
        ([1204.4], "1200 ms, 6.60 ms, 0.044 ms"),  # one step does not tell
        ([1200.0, 1204.4, 1209.0], "1204 ms, 6.604 ms, 0.044 ms"),  # no finer than the clock
        ([1150.0, 1204.4, 1220.0], "1200 ms, 6.60 ms, 0.044 ms"),
        ([800.0, 1204.4, 1600.0], "1200 ms, 6.6 ms, 0.044 ms"),
    ],
)
def test_times_have_as_many_digits_as_steps_agree_on(steps_ms: list[float], expected: str) -> None:
    assert ", ".join(ms_text(each, digits_of(steps_ms)) for each in (1204.4, 6.604, 0.0441)) == expected
    assert ms_text(0.0, digits_of(steps_ms)) == ms_text(0.0004, 4) == "0 ms"
