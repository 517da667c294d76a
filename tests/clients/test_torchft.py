"""torchft: replica groups that come and go, whose ranks hold shards. ``tests/faults/replicas.py`` kills them; here are
two of its kills, for both ways to take the mean over groups."""

from __future__ import annotations

import pytest

from tests.faults.replicas import killed, summary
from tests.harness.selection import long


# The quorum beside training is torchft's default; there, its thread makes state dicts in the middle of passes.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", long("mesh, async", "hook, sync"))
def test_a_group_that_was_killed_comes_back_with_the_state_of_the_others(case: str) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed: pip install -e '.[clients]'")
    way, quorum = case.split(", ")
    campaign = killed("fsdp2", way, quorum, seed=5, num_kills=2)
    found = summary(campaign)
    assert found["holds"], (campaign.kills, found)
    assert len(campaign.kills) >= 2
