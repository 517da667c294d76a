"""What waits for what on an accelerator, on simulated streams: no device is needed."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fsdp2.core.comm.streams import AcceleratorStreams, ComputeStreamGathers, streams_for
from tests.harness.races import SimulatedDevice, SimulatedEvent, SimulatedStream


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """What ``AcceleratorStreams`` find, and ask for streams."""
    device = SimulatedDevice()
    monkeypatch.setattr(device, "Stream", mock.Mock(side_effect=device.Stream))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    return device


def test_gathers_and_reductions_run_on_their_own_streams_and_wait_for_the_users_event(device: SimulatedDevice) -> None:
    compute = device.current_stream()
    streams = AcceleratorStreams(torch.device("cuda", 0))
    with streams.on_gather:
        gather = device.current_stream()
    with streams.on_reduce:
        reduce = device.current_stream()
    assert len({gather, reduce, compute}) == 3
    assert device.current_stream() is compute
    assert all(asked.kwargs["priority"] < 0 for asked in device.Stream.call_args_list)  # type: ignore[attr-defined]
    event, compute.clock = SimulatedEvent(device, {"optimizer": 7}), {compute.name: 1}
    streams.gather_after(event)  # type: ignore[arg-type]
    assert (gather.clock, reduce.clock) == ({"optimizer": 7}, {})


def test_without_a_gather_stream_compute_gathers(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, shared = device.current_stream(), AcceleratorStreams(torch.device("cuda", 0))
    streams = ComputeStreamGathers(shared)
    with streams.on_gather:
        assert device.current_stream() is compute
    monkeypatch.setattr(SimulatedStream, "wait_stream", waits := mock.Mock())
    streams.gather_after_compute()
    assert not waits.called
    with shared.on_reduce:
        reduce = device.current_stream()
    with streams.on_reduce:
        assert device.current_stream() is reduce
    assert device.Stream.call_count == 2  # type: ignore[attr-defined]  # it made no stream of its own
    streams = streams_for(torch.device("cpu"))  # all models on the CPU share these, which record nothing
    assert streams is streams_for(torch.device("cpu")) is streams.gathering_on_compute
    assert streams.record() is None
