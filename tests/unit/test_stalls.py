"""What a rank says when nothing goes on: once per stall, after half of the timeout, if the device has work left.
And how ranks that claim different things are told apart."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch.distributed as dist
from expecttest import assert_expected_inline

from fsdp2.extras.claims import Claim, difference
from fsdp2.extras.stalls import Board, StallWatch
from tests.harness.golden import texts_beside


class _Root:
    """The face of a root that is looked at."""

    is_running = True

    def __init__(self, story: str, identity: str = "0", **claims: Claim) -> None:
        self.told, self.last_event = story, object()
        self.identity, self.claimed = identity, claims

    def story(self) -> str:
        return self.told

    def ranks(self) -> list[int]:
        return [0, 1]

    def claims(self) -> dict[str, Claim]:
        return self.claimed

    def goes_on(self) -> None:
        self.last_event = object()


def _watched(*roots: Any, is_idle: bool = False, timeout_s: float = 100) -> StallWatch:
    stalls = StallWatch(3, lambda: is_idle, timeout_s)
    for root in roots:
        stalls.add(root)
    stalls.look(now=0)
    return stalls


def test_message_has_the_last_events_of_all_roots() -> None:
    roots = _Root("pre_forward (root)"), _Root("pre_backward blocks.1", identity="1")
    first, *stories, last = str(_watched(*roots).look(now=50)).splitlines()
    assert sorted(stories) == [f"Last events on rank 3: {root.told}." for root in roots[::-1]]
    assert first == (
        "rank 3: no progress for 50 s. A collective waits for other ranks. The timeout of the backend is 100 s."
    )
    assert last == (
        "Compare the last events of all ranks. The ranks diverged at the first difference. If they are meant to use "
        "different units or parameters, call set_ranks_may_differ(True) on the root; what must not differ even then is "
        "in docs/advanced/ranks.md."
    )


def test_a_stall_is_told_once_after_half_of_the_timeout_and_every_event_of_any_root_starts_anew() -> None:
    roots = _Root(""), _Root("", identity="1")
    stalls = _watched(*roots)
    assert [stalls.look(now) is not None for now in (49, 50, 60, 90)] == [False, True, False, False]
    for root, began in zip(roots, (100, 200), strict=True):
        root.goes_on()
        looks = [stalls.look(now) is not None for now in (began, began + 49, began + 50)]
        assert looks == [False, False, True]
    assert _watched(*roots, is_idle=True).look(now=99) is None  # the device has done everything


def _beside(mine: _Root, other: _Root, *, runs_ahead: bool = False) -> tuple[StallWatch, StallWatch]:
    """Watches of rank 0 and rank 1, which share a store. They compare at 5 s, and believe what they see twice."""
    store = dist.HashStore()
    watches = []
    for rank, root in enumerate((mine, other)):
        watches.append(StallWatch(rank, lambda: False, 1000, Board(store, rank), runs_ahead=runs_ahead))
        watches[-1].add(root)  # type: ignore[arg-type]
        watches[-1].look(now=0)
    return watches[0], watches[1]


def test_flags_that_differ_are_named_when_all_ranks_wait() -> None:
    flags = {"entry": True, "gain": True}, {"entry": True, "gain": False}
    roots = _Root("pre_forward a", requires_grad=flags[0]), _Root("post_forward b", requires_grad=flags[1])
    mine, other = _beside(*roots)
    assert [watch.look(now) for now in (4, 5) for watch in (mine, other)] == [None] * 4
    assert mine.look(now=6) is None  # the other rank has just shown where it stands
    assert_expected_inline(
        str(mine.look(now=7)),
        """\
rank 0: no progress for 7 s. All ranks wait for each other, because requires_grad differs:
  parameter 'gain' requires a gradient on rank 0, not on rank 1
Call requires_grad_() alike on all ranks, before the same forward or backward.
Last events on rank 0: pre_forward a.
Last events on rank 1: post_forward b.""",
    )
    assert mine.look(now=8) is None


def test_ranks_that_diverged_for_another_reason_are_told_on_the_cpu_only() -> None:
    for runs_ahead in (False, True):
        roots = _Root("pre_forward a", gradients={"x": True}), _Root("pre_forward b", gradients={"x": True})
        mine, other = _beside(*roots, runs_ahead=runs_ahead)
        found = [watch.look(now) for now in (5, 6, 7) for watch in (mine, other)]
        said = "rank 0: no progress for 7 s. All ranks wait for each other.\nLast events on rank 0: pre_forward a."
        assert any(found) is not runs_ahead
        assert runs_ahead or str(found[4]).startswith(said)


def test_nothing_is_compared_with_a_rank_that_goes_on_or_with_another_root() -> None:
    roots = _Root("", gradients={"x": True}), _Root("", gradients={"x": False})
    mine, other = _beside(*roots)
    assert other.look(now=5) is None
    for now in range(6, 20):  # the other rank shows where it stands, and goes on, again and again
        roots[1].goes_on()
        assert other.look(now) is None
        assert mine.look(now) is None
    mine, other = _beside(roots[0], _Root("", identity="1", gradients={"x": False}))  # nor with another root
    assert [watch.look(now) for now in (5, 6, 7, 8) for watch in (mine, other)] == [None] * 8


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


UNITS = "units of (root), with gradients"
CLAIMS: dict[str, Mapping[int, Mapping[str, Claim]]] = {
    "units that ran on some ranks": {
        0: {UNITS: ["(root)", "a", "b"]},
        1: {UNITS: ["(root)", "b"]},
        2: {UNITS: ["(root)", "b", "c"]},
    },
    "another order": {0: {UNITS: ["(root)", "a", "b", "a"]}, 1: {UNITS: ["(root)", "b", "a"]}},
    "as far as a forward has come": {0: {UNITS: ["(root)", "b"]}, 1: {UNITS: ["(root)", "a", "..."]}},
    "gradients, of which only the first are named": {
        rank: {"gradients": {f"w{index}": rank == 0 for index in range(6)}} for rank in range(2)
    },
    "flags, before what follows from them": {
        rank: {UNITS: [str(rank)], "requires_grad": {"w": rank == 0}} for rank in range(2)
    },
    "alike": {0: {UNITS: ["a"]}, 1: {UNITS: ["a"]}},
    "so far alike": {0: {UNITS: ["a", "b"]}, 1: {UNITS: ["a", "..."]}},
    "nothing claimed": {0: {UNITS: ["a"]}, 1: {}},
    "another forward": {0: {"units of a, with gradients": ["a"]}, 1: {"units of b, with gradients": ["b"]}},
    "not used yet": {0: {"requires_grad": {"a": True, "b": False}}, 1: {"requires_grad": {"a": True}}},
}


@pytest.mark.parametrize("case", CLAIMS)
def test_what_differs_is_named(case: str) -> None:
    found = difference(CLAIMS[case])
    said = "no difference" if found is None else "\n".join([found.why, *found.lines])
    texts_beside(__file__).check(case, said, among=CLAIMS)
