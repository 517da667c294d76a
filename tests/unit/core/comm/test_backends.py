"""Which calls a comm makes, who waits for them, and which comm belongs to a backend and a device."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from fsdp2.core import _torch
from fsdp2.core.comm import backends
from fsdp2.core.comm.backends import CollectiveComm, OneByOneComm, comm_for
from fsdp2.core.comm.streams import Streams
from fsdp2.core.plan.mesh import Axis
from fsdp2.extras.peers import PeerComm


def _comm(work: Any, *, on_stream: bool) -> tuple[CollectiveComm, Any]:
    """On a group that answers every collective with ``work``: None is what NCCL's answers on a stream. And what was
    called."""
    asked = mock.Mock(return_value=work)
    names = ("all_gather_single", "reduce_scatter_single")
    group = mock.Mock(**{name + kind: asked for name in names for kind in ("", "_coalesced")})
    return CollectiveComm(group, on_stream=on_stream), asked


def _asynchronous(asked: Any) -> list[bool]:
    return [call.args[2].asyncOp for call in asked.call_args_list]


@pytest.mark.parametrize("num_tensors", [1, 2])
@pytest.mark.parametrize("returns_work", [False, True], ids=["NCCL", "other backends"])
def test_collectives_on_a_stream_leave_nothing_to_the_cpu(returns_work: bool, num_tensors: int) -> None:
    work = mock.Mock() if returns_work else None
    comm, asked = _comm(work, on_stream=True)
    tensors = [torch.zeros(2)] * num_tensors
    assert list(comm.all_gather(tensors, tensors)()) == []
    assert list(comm.reduce_scatter()(tensors, tensors)) == []
    assert _asynchronous(asked) == [False, False]
    assert work is None or work.wait.call_count == 2  # the stream waits, once for each collective


def test_collectives_beside_a_stream_are_waited_for_where_their_data_is_needed() -> None:
    comm, asked = _comm(work := mock.Mock(), on_stream=False)
    assert list(comm.all_gather([torch.zeros(2)], [torch.zeros(2)])()) == [work]
    assert list(comm.reduce_scatter()([torch.zeros(2)], [torch.zeros(2)])) == [work]
    assert (_asynchronous(asked), work.wait.call_count) == ([True, True], 0)


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [("gloo", "cpu", PeerComm), ("gloo", "cuda", OneByOneComm), ("nccl", "cuda", CollectiveComm)],
)
def test_comm_of_backend_and_device(monkeypatch: pytest.MonkeyPatch, backend: str, device: str, expected: type) -> None:
    monkeypatch.setattr(backends, "streams_for", lambda device: Streams())
    monkeypatch.setattr(_torch, "backend_name", lambda group, device: backend)
    group = mock.Mock(group_name="group", **{"rank.return_value": 0, "size.return_value": 2})
    monkeypatch.setattr(backends.dist, "get_process_group_ranks", lambda group: [0, 1])
    assert type(comm_for(Axis(group, 2, 0), torch.device(device))) is expected
