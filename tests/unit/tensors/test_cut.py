"""Shards of tensor subclasses in pinned memory. Here is none, so copies stand in for it.

The words of refusals are in ``golden/cut.txt``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2.core.comm.offload import HOST, Home
from fsdp2.tensors.cut import pinned
from tests.harness.extensions import Halved
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of

TEXTS = texts_beside(__file__)
STAGED = Home(HOST, is_staged=True)
PINNED = Home(HOST, is_staged=True, pin_memory=True)


class _Pinned(Halved):
    """Notes that it was pinned."""

    is_pinned_copy = False

    def pin_memory(self, device: Any = None) -> Tensor:  # type: ignore[override]
        made = type(self)(self.plain.clone())
        made.is_pinned_copy = True
        return made


class _LosesItsClass(Halved):
    def pin_memory(self, device: Any = None) -> Tensor:  # type: ignore[override]
        return self.plain.clone()


class _RaisesWhenPinned(Halved):
    def pin_memory(self, device: Any = None) -> Tensor:  # type: ignore[override]
        raise NotImplementedError("aten._pin_memory.default")


REFUSED: dict[str, Callable[[], object]] = {
    "loses its class": lambda: pinned("blocks.0.weight", _LosesItsClass(torch.ones(2)), PINNED),
    "raises when pinned": lambda: pinned("blocks.0.weight", _RaisesWhenPinned(torch.ones(2)), PINNED),
}


@pytest.mark.parametrize("case", REFUSED)
def test_shard_is_refused(case: str) -> None:
    TEXTS.check(case, error_of(REFUSED[case]), among=REFUSED)


def test_shard_is_pinned_where_that_is_asked_for() -> None:
    shard, plain = _Pinned(torch.ones(2)), torch.ones(2)
    found = pinned("weight", shard, PINNED)
    assert isinstance(found, _Pinned)
    assert found.is_pinned_copy
    assert pinned("weight", shard, STAGED) is shard
    assert pinned("weight", plain, PINNED) is plain
