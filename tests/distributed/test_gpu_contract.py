"""What ``benchmarks/gpu_contract.py`` must not take for a defect, on a device that is made up."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_contract


class LazyDevice:
    """The host waits for it where a kernel is launched for the first time, as CUDA's lazy loading may make it do."""

    type = "cpu"

    def __init__(self, *, always_waits: bool = False) -> None:
        self._is_busy = False
        self._always_waits = always_waits
        self._loaded: set[object] = set()

    def keep_busy(self) -> None:
        self._is_busy = True

    def finish(self) -> None:
        self._is_busy = False

    def launch(self, _group: object, outputs: list[Tensor], inputs: list[Tensor], *, on_stream: bool) -> LazyDevice:
        if self._always_waits or on_stream not in self._loaded:
            self.finish()
        self._loaded.add(on_stream)
        outputs[0].copy_(inputs[0])
        return self

    def wait(self) -> None:
        """What ``launch`` returns is a work."""

    # As torch's module of a device, and as its streams and events

    Stream = current_stream = record_event = lambda self: self

    def stream(self, _: object) -> Any:
        return nullcontext()

    def wait_stream(self, _: object) -> None:
        """There is one stream."""

    def query(self) -> bool:
        return not self._is_busy


CHECKS = [gpu_contract._runs_in_the_order_of_its_stream, gpu_contract._asynchronous_makes_the_stream_wait]


def _put(device: LazyDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    for name in ("_gather", "_reduce"):
        launch = lambda *args, **kwargs: device.launch(*args, **kwargs)  # noqa: E731  # with a __name__
        monkeypatch.setattr(gpu_contract, name, launch)


@pytest.mark.parametrize("check", CHECKS)
def test_kernel_that_is_loaded_when_first_launched_is_no_failure(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LazyDevice()
    _put(device, monkeypatch)
    assert "the host went on" in check(device, None)


@pytest.mark.parametrize("check", CHECKS)
def test_launch_that_makes_the_host_wait_every_time_is_a_failure(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LazyDevice(always_waits=True)
    _put(device, monkeypatch)
    with pytest.raises(AssertionError, match="the host has waited"):
        check(device, None)
