"""What waits for what on an accelerator, recorded by stand-ins for streams: no device is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp2 import _torch
from fsdp2.comm import backends
from fsdp2.comm.backends import CollectiveComm, OneByOneComm, comm_for
from fsdp2.comm.streams import AcceleratorStreams, ComputeStreamGathers, Streams, streams_for
from fsdp2.extras.peers import PeerComm
from fsdp2.group.all_gather import allocate, release
from fsdp2.plan.mesh import Axis


def test_gather_stream_waits_once_for_compute_before_the_memory_of_one_release_is_freed() -> None:
    storages = [(torch.UntypedStorage(0), 64) for _ in range(2)]
    sizes = []  # at each wait
    waits = mock.Mock(side_effect=lambda: sizes.append([storage.nbytes() for storage, _ in storages]))
    allocate(storages)
    release(storages, mock.Mock(spec=Streams, runs_ahead=True, gather_after_compute=waits))
    assert sizes == [[64, 64]]
    assert [storage.nbytes() for storage, _ in storages] == [0, 0]


# AcceleratorStreams on a device module that only takes notes


class FakeStream:
    def __init__(self, module: FakeDeviceModule, name: str) -> None:
        self._module, self._name = module, name

    def wait_event(self, event: str) -> None:
        self._module.log.append(f"{self._name} waits for {event}")

    def wait_stream(self, other: FakeStream) -> None:
        self._module.log.append(f"{self._name} waits for {other._name}")

    def __str__(self) -> str:
        return self._name


class FakeDeviceModule:
    """``torch.cuda`` as far as streams go."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.priorities: list[int] = []
        self._current = FakeStream(self, "compute")

    def Stream(self, device: torch.device, priority: int) -> FakeStream:  # noqa: N802  # torch's name
        self.priorities.append(priority)
        return FakeStream(self, f"side {len(self.priorities)}")

    def current_stream(self) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before


@pytest.fixture
def device_module(monkeypatch: pytest.MonkeyPatch) -> FakeDeviceModule:
    module = FakeDeviceModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_gathers_and_reductions_run_on_streams_of_their_own_and_wait_for_an_event_of_the_user(
    device_module: FakeDeviceModule,
) -> None:
    streams = AcceleratorStreams(torch.device("cuda", 0))
    with streams.on_gather:
        gather = str(device_module.current_stream())
    with streams.on_reduce:
        reduce = str(device_module.current_stream())
    assert len({gather, reduce, "compute"}) == 3
    assert str(device_module.current_stream()) == "compute"
    assert all(priority < 0 for priority in device_module.priorities)
    device_module.log.clear()
    streams.gather_after("the optimizer's event")  # type: ignore[arg-type]
    assert device_module.log == [f"{gather} waits for the optimizer's event"]


def test_without_a_gather_stream_gathers_run_where_compute_does(device_module: FakeDeviceModule) -> None:
    shared = AcceleratorStreams(torch.device("cuda", 0))
    streams = ComputeStreamGathers(shared)
    with streams.on_gather:
        assert str(device_module.current_stream()) == "compute"
    streams.gather_after_compute()
    assert device_module.log == []
    with shared.on_reduce:
        reduce = str(device_module.current_stream())
    with streams.on_reduce:
        assert str(device_module.current_stream()) == reduce
    assert len(device_module.priorities) == 2  # it made no stream of its own
    streams = streams_for(torch.device("cpu"))  # all models on the CPU share these, which record nothing
    assert streams is streams_for(torch.device("cpu")) is streams.gathering_on_compute
    assert streams.record() is None


# What collectives leave to be waited for


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
    assert list(comm.reduce_scatter(tensors, tensors)) == []
    assert _asynchronous(asked) == [False, False]
    assert work is None or work.wait.call_count == 2  # the stream waits, once for each collective


def test_collectives_beside_a_stream_are_waited_for_where_their_data_is_needed() -> None:
    comm, asked = _comm(work := mock.Mock(), on_stream=False)
    assert list(comm.all_gather([torch.zeros(2)], [torch.zeros(2)])()) == [work]
    assert list(comm.reduce_scatter([torch.zeros(2)], [torch.zeros(2)])) == [work]
    assert (_asynchronous(asked), work.wait.call_count) == ([True, True], 0)


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [("gloo", "cpu", PeerComm), ("gloo", "cuda", OneByOneComm), ("nccl", "cuda", CollectiveComm)],
)
def test_comm_follows_from_backend_and_device(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str, expected: type
) -> None:
    monkeypatch.setattr(backends, "streams_for", lambda device: Streams())
    monkeypatch.setattr(_torch, "backend_name", lambda group, device: backend)
    group = mock.Mock(group_name="group", **{"rank.return_value": 0, "size.return_value": 2})
    monkeypatch.setattr(backends.dist, "get_process_group_ranks", lambda group: [0, 1])
    assert type(comm_for(Axis(group, 2, 0), torch.device(device))) is expected
