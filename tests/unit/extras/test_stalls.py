"""What a rank says when nothing goes on, and when: to whom it is clear what is wrong, and who can only doubt."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from fsdp2.core.types import CommunicationError
from fsdp2.extras import stalls
from fsdp2.extras.claims import Claim
from fsdp2.extras.stalls import StallWatch
from fsdp2.extras.standings import Board, RunCounts
from tests.harness.golden import texts_beside
from tests.harness.messages import Heard

RANKS = (0, 1)


class _Root:
    """The face of a root that is looked at. ``store``: of all ranks; ``ran``: forwards and backwards, and what runs."""

    is_running = True

    def __init__(
        self,
        store: dist.Store,
        rank: int = 0,
        story: str = "",
        identity: str = "7/0",
        ran: tuple[int, int, str] = (1, 0, "forward"),
        timeout_s: float = 100,
        runs_ahead: bool = False,
        ranks: Sequence[int] = RANKS,
        **claims: Claim,
    ) -> None:
        self.board, self.told, self.identity, self.ran = Board(store, rank), story, identity, ran
        self.timeout_s, self.runs_ahead, self.claimed, self.all = timeout_s, runs_ahead, claims, ranks
        self.last_event, self.waits = object(), True

    def story(self) -> str:
        return self.told

    def ranks(self) -> Sequence[int]:
        return self.all

    def claims(self) -> dict[str, Claim]:
        return self.claimed

    def is_idle(self) -> bool:
        return not self.waits

    def passes(self) -> RunCounts:
        return RunCounts("Stack", *self.ran, row=self.all)

    def goes_on(self) -> None:
        self.last_event = object()


def _watched(*roots: Any) -> StallWatch:
    watch = StallWatch()
    for root in roots:
        watch.add(root)
    watch.look(now=0)
    return watch


def _said(watch: StallWatch, *times: float) -> list[str]:
    """What is logged at ``times``."""
    return [said.text for now in times if (said := watch.look(now)) is not None]


def _beside(mine: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[list[_Root], list[StallWatch]]:
    """Roots of rank 0 and of rank 1, which share a store, and their watches."""
    store = dist.HashStore()
    roots = [_Root(store, rank, **given) for rank, given in enumerate((mine, other))]
    return roots, [_watched(root) for root in roots]


# What is certain. Ranks compare at 5 s, and believe what they see twice


FLAGS = {"entry": True, "gain": True}, {"entry": True, "gain": False}
ALIKE: dict[str, Any] = {"gradients": {"x": True}}
CERTAIN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "flags": (
        {"story": "pre_forward a", "requires_grad": FLAGS[0]},
        {"story": "post_forward b", "requires_grad": FLAGS[1]},
    ),
    "diverged": ({"story": "pre_forward a", **ALIKE}, {"story": "pre_forward b", **ALIKE}),
    "more forwards": ({"ran": (4, 1, "forward")}, {"ran": (3, 2, "backward")}),
    "a backward left out": ({"ran": (3, 3, "backward")}, {"ran": (3, 2, "")}),
    "another root": ({"ran": (2, 1, "forward")}, {"identity": "7/1", "ran": (1, 0, "forward")}),
}


@pytest.mark.parametrize("case", CERTAIN)
def test_ranks_that_wait_for_each_other_are_told_what_differs(case: str) -> None:
    _, (mine, other) = _beside(*CERTAIN[case])
    assert [watch.look(now) for now in (4, 5) for watch in (mine, other)] == [None] * 4
    assert mine.look(now=6) is None  # the other rank has just shown where it stands
    (said,) = _said(mine, 7, 8, 30, 60)
    texts_beside(__file__).check(case, said, among=GOLDEN)
    assert bool(mine.differing) is (case != "diverged")


@pytest.mark.parametrize(("case", "is_told"), [("flags", True), ("diverged", False), ("more forwards", False)])
def test_a_device_that_computes_for_long_is_told_only_of_what_ranks_have_claimed(case: str, is_told: bool) -> None:
    mine, other = ({**given, "runs_ahead": True} for given in CERTAIN[case])
    _, watches = _beside(mine, other)
    assert any(_said(watch, now) for now in (5, 6, 7) for watch in watches) is is_told


def test_a_pass_that_has_come_further_is_no_difference() -> None:
    _, (mine, other) = _beside({"ran": (3, 3, "backward")}, {"ran": (3, 2, "forward")})
    (said,) = (said for now in (5, 6, 7) for watch in (mine, other) for said in _said(watch, now) if watch is mine)
    assert "different numbers" not in said


def test_nothing_is_compared_with_a_rank_that_goes_on() -> None:
    roots, (mine, other) = _beside({"gradients": {"x": True}}, {"gradients": {"x": False}})
    for now in range(5, 20):  # the other rank shows where it stands, and goes on, again and again
        assert other.look(now) is None
        assert mine.look(now) is None
        roots[1].goes_on()


def test_a_chain_of_ranks_that_ends_at_one_that_computes_is_no_deadlock() -> None:
    store = dist.HashStore()
    roots = [_Root(store, 0), _Root(store, 1, identity="7/1", ranks=(1, 2)), _Root(store, 2, ranks=(1, 2))]
    watches = [_watched(root) for root in roots]
    roots[2].waits = False
    assert [_said(watch, now) for now in (5, 6, 7, 8) for watch in watches] == [[]] * 12
    roots[2].waits = True
    assert sum(len(_said(watch, now)) for now in (9, 10, 11) for watch in watches) == 3


@pytest.mark.parametrize("ran", [(2, 2, ""), (1, 1, "")])
def test_a_rank_that_has_ended_early_is_told_at_once(ran: tuple[int, int, str]) -> None:
    roots, (mine, other) = _beside({"ran": (2, 1, "forward")}, {"ran": ran})
    roots[1].waits = False
    other.end()
    other.run()
    said = _said(mine, 5, 6, 7)
    if ran == (2, 2, ""):  # it may have all that it needs, and this rank too
        assert not said
    else:
        texts_beside(__file__).check("ended", said[0], among=GOLDEN)


# What may be slow


@mock.patch.object(stalls, "_place", mock.Mock(return_value="dist.barrier() in evaluate (train.py:42)"))
def test_a_rank_that_does_something_else_is_warned_of_and_hears_of_it_itself() -> None:
    roots, (mine, other) = _beside({"ran": (12, 11, "forward")}, {"ran": (11, 11, "")})
    roots[1].waits = False
    assert other.look(now=4) is None
    for now in range(5, 20):
        assert [mine.look(now), other.look(now)] == [None, None]
    (said,) = _said(mine, 20, 21, 22)
    texts_beside(__file__).check("slow", said, among=GOLDEN)
    assert len(_said(other, 20, 21, 22)) == 1
    ((level, late),) = (said for now in (23, 49, 50, 60) if (said := mine.look(now)) is not None)
    assert (level, "The backend gives up after 100 s." in late) == (logging.ERROR, True)
    roots[0].goes_on()  # and again from there
    assert _said(mine, 70, 89, 90, 91) == [mock.ANY]


@pytest.mark.parametrize(("runs_ahead", "first_level"), [(False, logging.WARNING), (True, logging.ERROR)])
def test_a_rank_that_shows_nothing_is_warned_of_early_on_the_cpu_only(runs_ahead: bool, first_level: int) -> None:
    """A device may compute for long, and another rank go on a moment before."""
    root = _Root(dist.HashStore(), runs_ahead=runs_ahead)
    watch = _watched(root)
    level, said = next(said for now in range(5, 60) if (said := watch.look(now)) is not None)
    assert level == first_level
    assert "  rank 1: no answer: " in said


def test_ranks_of_a_large_world_read_less_often() -> None:
    root = _Root(dist.HashStore(), ranks=tuple(range(1000)))
    watch = _watched(root)
    with mock.patch.object(Board, "of", return_value=None) as read:
        for now in range(5, 45):
            watch.look(now)
    assert read.call_count == 2 * 999


def test_nobody_is_asked_while_events_come_and_ranks_that_wait_for_nobody_ask_nothing() -> None:
    store = mock.Mock(wraps=dist.HashStore())
    with mock.patch.object(dist, "PrefixStore", lambda prefix, given: given):
        root = _Root(store)
        watch = _watched(root)
        for now in range(1, 30):
            root.goes_on()
            watch.look(now)
        assert store.mock_calls == []
        root.waits = False
        for now in range(30, 60):
            watch.look(now)
        assert {call[0] for call in store.mock_calls} == {"check"}


@pytest.mark.parametrize("waits", [False, True])
def test_a_store_that_is_gone_says_nothing_and_is_not_asked_again(waits: bool) -> None:
    def fail(*_: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    store = mock.Mock(set=mock.Mock(side_effect=fail), check=mock.Mock(side_effect=fail))
    with mock.patch.object(dist, "PrefixStore", lambda prefix, given: given):
        root = _Root(store)
        watch = _watched(root)
        root.waits = waits
        assert len(_said(watch, *range(1, 60))) == 2 * waits
        watch.end()
        watch.run()
    assert len(store.mock_calls) == 1


# The thread


def test_thread_ends_with_the_roots() -> None:
    root = _Root(dist.HashStore(), timeout_s=0.4)
    watch = _watched(root)
    thread = threading.Thread(target=watch.run, daemon=True)
    thread.start()
    thread.join(timeout=0.1)
    assert thread.is_alive()
    del root
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert not watch.add(_Root(dist.HashStore()))  # nobody would look at it


def test_a_thread_that_has_failed_is_replaced() -> None:
    root = _Root(dist.HashStore())
    watch = _watched(root)
    watch.end()
    with mock.patch.object(StallWatch, "_leave", side_effect=KeyError), pytest.raises(KeyError):
        watch.run()
    assert not watch.add(root)


def test_an_error_of_a_collective_says_which_rank_has_ended() -> None:
    _, (mine, other) = _beside({"ran": (2, 1, "forward")}, {"ran": (1, 1, "")})
    other.end()
    other.run()
    with ThreadPoolExecutor() as pool:
        runs = pool.submit(mine.run)
        explained = mine.explain()
        mine.end()
        runs.result()
    assert explained.startswith("\nrank 1 has ended:\n"), explained


def test_a_rank_that_ends_by_an_error_of_a_collective_says_which_rank_had_ended_before() -> None:
    """With replicas, the error is that of an all-reduce, and does not say it."""
    roots, (mine, other) = _beside({"ran": (2, 1, "forward")}, {"ran": (1, 1, "")})
    with mock.patch.object(sys, "last_value", ValueError("a bad batch\nof 3"), create=True):
        other.end()
        other.run()
    with Heard() as heard, mock.patch.object(sys, "last_value", CommunicationError("closed"), create=True):
        mine.end()
        mine.run()
    (said,) = heard.messages
    assert "  rank 1: ended by ValueError: a bad batch, after 1 forward and 1 backward of Stack\n" in said
    assert said.endswith("See what rank 1 reported.")
    last = roots[1].board.of(0)
    assert last is not None
    assert (last.has_ended, last.place) == (True, "CommunicationError: closed")


GOLDEN = [*CERTAIN, "ended", "slow"]
