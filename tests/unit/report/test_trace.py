"""What a trace shows."""

from __future__ import annotations

from fsdp2.report.trace import Trace
from tests.harness.golden import Check


def test_trace_lays_actions_out_under_their_event(golden: Check) -> None:
    recorded = Trace()
    recorded.on_event("pre_forward", "blocks.0")
    recorded.on_action("unshard", "blocks.0", 4096)
    recorded.on_action("reduce", "blocks.0", 0)
    golden(str(recorded))
    assert recorded.actions() == ["unshard blocks.0", "reduce blocks.0"]
    recorded.clear()
    assert str(recorded) == ""
