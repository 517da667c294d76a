"""``tests/parity`` on the simulated accelerator."""

from __future__ import annotations

from tests.accelerator.other_suites import suite_on_device

globals().update(suite_on_device("parity"))
