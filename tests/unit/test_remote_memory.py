"""Reading another process, tried on this one: the kernel makes no difference between them."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import pytest
import torch

from fsdp2.comm.same_host import remote_memory
from fsdp2.comm.same_host.remote_memory import Spans

pytestmark = pytest.mark.skipif(not remote_memory.is_supported(), reason="this system cannot read other processes")


def _copy(sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Read spans of ``sizes``, which lie behind each other with gaps of a byte; returns what was there and what is
    here."""
    starts = [sum(sizes[:i]) + i for i in range(len(sizes))]
    there = torch.randint(1, 256, (sum(sizes) + len(sizes),), dtype=torch.uint8)
    here = torch.zeros_like(there)
    addresses = [[tensor.data_ptr() + start for start in starts] for tensor in (here, there)]
    Spans(sizes).read(os.getpid(), *addresses)
    there[[start + size for start, size in zip(starts, sizes, strict=True)]] = 0  # the gaps
    return there, here


@pytest.mark.parametrize(
    "sizes",
    [[5], [], [0, 3, 0], [0, 0], list(range(1, 40)), [3] * 2500],
    ids=["one", "none", "some empty", "all empty", "many", "more than one call takes"],
)
def test_spans_are_copied_and_nothing_else(sizes: list[int]) -> None:
    there, here = _copy(sizes)
    assert torch.equal(here, there)


@pytest.mark.parametrize("sizes", [[1000], [1, 100, 0, 250], [64, 64, 1]])
def test_spans_larger_than_one_call_takes_are_copied_in_pieces(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_memory, "_MAX_NBYTES", 64)
    there, here = _copy(sizes)
    assert torch.equal(here, there)


def test_memory_that_is_not_there_is_an_error() -> None:
    here = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(OSError, match="reading 8 bytes of process") as raised:
        remote_memory.read(os.getpid(), here.data_ptr(), 4096, 8)
    assert raised.value.errno == errno.EFAULT


def test_reading_on_where_memory_ends_is_an_error() -> None:
    here, there = torch.zeros(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)
    with pytest.raises(OSError, match="Bad address"):
        Spans([8, 8]).read(os.getpid(), [here.data_ptr(), here.data_ptr() + 8], [there.data_ptr(), 4096])


def test_a_process_that_is_gone_is_an_error() -> None:
    child = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(child, 0)
    here = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(OSError, match="No such process"):
        remote_memory.read(child, here.data_ptr(), here.data_ptr(), 8)
