"""What holds memory in a step: see ``test_timeline.py``, too."""

from __future__ import annotations

from fsdp2.report.memory import memory
from tests.unit.report.support import Tape, sizes


def test_what_an_earlier_step_kept_is_held_when_the_next_one_begins() -> None:
    first = Tape().do("unshard", "a").do("wait", "a").compute(1)
    found = memory(first.marks, sizes(["a"]), first.now, first.now + 1)
    assert (found.times, found.series) == ([1.0], {"unsharded parameters": [1000]})
