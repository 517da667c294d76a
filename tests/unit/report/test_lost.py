"""Compute and lost time are the whole step."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp2.report.lost import Lost
from tests.unit.report.test_files import CASES


@pytest.mark.parametrize("data", CASES.values(), ids=CASES.keys())
def test_compute_and_lost_time_are_the_whole_step(data: dict[str, Any]) -> None:
    lost = data["lost"]
    assert lost["compute_ms"] + lost["lost_ms"] == pytest.approx(lost["step_ms"], abs=0.01)
    assert sum(each["lost_ms"] for each in lost["kinds"]) == pytest.approx(lost["lost_ms"], abs=0.01)
    assert {each["kind"] for each in lost["kinds"]} <= {kind.value for kind in Lost}
    assert sum(each["gain_ms"] for each in data["findings"]) == pytest.approx(lost["explained_ms"], abs=0.01)
    assert lost["explained_ms"] <= lost["lost_ms"] + 0.01
