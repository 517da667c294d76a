"""Tokens per second, and MFU."""

from __future__ import annotations

from dataclasses import replace

from fsdp2.planner.machines import MACHINES
from fsdp2.report.figures import Work, speed


def test_mfu_is_the_share_of_the_peak_of_all_ranks() -> None:
    machine = replace(MACHINES["H100"], bf16_flops=10e12)
    found = speed([Work(1000, 2e12), Work(3000, 4e12)], 0.5, machine, "X")
    assert (found["tokens"], found["tokens_per_s"], found["tokens_per_s_per_rank"]) == (4000, 8000.0, 4000.0)
    assert (found["mfu"], found["no_mfu"]) == (6e12 / 0.5 / 2 / 10e12, None)
    assert speed([Work(1000), Work()], 0.5, None, "X")["tokens_per_s"] is None  # one rank did not say
    assert speed([Work(1000), Work()], 0.5, None, "X")["no_mfu"] == "flops_per_rank was not given"
    assert speed([Work(tokens=4096, flops=2e13)], 0.5, None, "X")["no_mfu"] == "the peak of X is not known"
