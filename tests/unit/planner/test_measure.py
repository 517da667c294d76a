"""Measurements of collectives. What the command ``measure`` prints and writes is in ``test_command_line.py``."""

from __future__ import annotations

import time

import pytest
import torch

from fsdp2.planner import measure


def test_load_that_comes_and_goes_is_not_taken_for_a_cost_of_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds * (1 if now < 8 else 10)  # another process starts then

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    extra = measure._extra_seconds(lambda: work(1.5), lambda: work(1), torch.device("cpu"))
    assert extra == pytest.approx(0.5)
