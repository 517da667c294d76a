"""What a rank says when nothing goes on: once per stall, after half of the timeout, if the device has work left."""

from __future__ import annotations

import threading
from typing import Any

from fsdp2.runtime.rank_checks import StallWatch


class _Root:
    """The face of a performer that is looked at."""

    def __init__(self, story: str) -> None:
        self.told, self.last_event = story, object()

    def story(self) -> str:
        return self.told

    def goes_on(self) -> None:
        self.last_event = object()


def _watched(*roots: Any, is_idle: bool = False, timeout_s: float = 100) -> StallWatch:
    stalls = StallWatch(3, lambda: is_idle, timeout_s)
    for root in roots:
        stalls.add(root)
    stalls.look(now=0)
    return stalls


def test_message_has_the_last_events_of_all_roots() -> None:
    roots = _Root("pre_forward (root)"), _Root("pre_backward blocks.1")
    message = _watched(*roots).look(now=50)
    assert message is not None
    first, *stories, last = message.splitlines()
    assert sorted(stories) == [f"Last events on rank 3: {root.told}." for root in roots[::-1]]
    assert first == (
        "rank 3: no progress for 50 s. A collective waits for other ranks. The timeout of the backend is 100 s."
    )
    assert last == "Compare the last events of all ranks: the ranks diverged at the first difference."


def test_nothing_is_said_before_half_of_the_timeout() -> None:
    root = _Root("")
    assert _watched(root).look(now=49) is None


def test_nothing_is_said_of_a_device_that_has_done_everything() -> None:
    root = _Root("")
    assert _watched(root, is_idle=True).look(now=99) is None


def test_every_event_of_any_root_starts_anew() -> None:
    roots = _Root(""), _Root("")
    stalls = _watched(*roots)
    roots[1].goes_on()
    assert stalls.look(now=60) is None
    assert stalls.look(now=109) is None
    assert stalls.look(now=110) is not None


def test_a_stall_is_told_once_and_the_next_one_again() -> None:
    root = _Root("")
    stalls = _watched(root)
    assert [stalls.look(now) is not None for now in (50, 60, 90)] == [True, False, False]
    root.goes_on()
    assert [stalls.look(now) is not None for now in (100, 149, 150)] == [False, False, True]


def test_thread_ends_with_the_roots() -> None:
    root = _Root("")
    stalls = _watched(root, timeout_s=0.4)
    thread = threading.Thread(target=stalls.run, daemon=True)
    thread.start()
    thread.join(timeout=0.1)
    assert thread.is_alive()
    del root
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert not stalls.add(_Root(""))  # nobody would look at it
