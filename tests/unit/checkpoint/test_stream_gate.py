"""What a rank of a stream says when it leaves, and what it cleans up, is for ranks that are still there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import torch.distributed as dist

from fsdp2.checkpoint import stream_gate
from fsdp2.checkpoint.stream_gate import Gate, Leaving
from fsdp2.extras import torch_names

_T = TypeVar("_T")


class _Reads:
    """A store: ``between`` happens after the first read of what it was asked for."""

    def __init__(self, store: Any, between: Callable[[], object]) -> None:
        self._store, self._between = store, [between]

    def check(self, keys: list[str]) -> bool:
        return self._then(self._store.check(keys))

    def add(self, key: str, amount: int) -> int:
        return self._then(self._store.add(key, amount))

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def _then(self, found: _T) -> _T:
        while self._between:
            self._between.pop()()
        return found


def _gate(store: dist.Store, rank: int) -> Gate:
    """That of ``rank``, of two ranks, of which rank 1 alone receives."""
    with (
        mock.patch.object(torch_names, "default_store", return_value=store),
        mock.patch.object(dist, "get_rank", return_value=rank),
        mock.patch.object(stream_gate, "_numbers", {}),
    ):
        return Gate((0, 1), (1,), "stream")


def test_a_rank_takes_part_in_the_step_that_the_receiver_asked_for_before_it_left() -> None:
    """The receiver has begun to gather, so it would wait for ever."""
    store = dist.HashStore()
    sender, receiver = _gate(store, 0), _gate(store, 1)

    def ask_and_leave() -> None:
        receiver.ask(0)
        receiver.leave(Leaving.STOPPED, "after 1 of 2 buckets")

    with (
        mock.patch.object(stream_gate, "_limit_s", return_value=60.0),
        mock.patch.object(sender, "_store", _Reads(sender._store, ask_and_leave)),
    ):
        assert sender.ask(0)
        assert not sender.ask(1)


def test_a_stream_ends_although_the_rank_that_hosts_the_store_has_ended_before() -> None:
    gate = _gate(dist.HashStore(), 1)
    gone = mock.Mock(side_effect=dist.DistNetworkError("Connection reset by peer"))
    with mock.patch.object(gate, "_store", mock.Mock(add=gone, compare_set=gone)):
        gate.leave(Leaving.LEFT, "after 1 of 2 buckets")
        gate.close()
    assert gone.call_count == 2
