"""CPU offload: where a group's shards live, and the copies before a gather and after a reduction.

Before a gather, the flat shard buffers are copied to the device (H2D); after a reduction, the flat gradient buffer is
copied to the host (D2H). No code in between knows about the copies. They run on the stream that enqueued them, so the
CPU may use the host memory only after it has waited for them (I12), which the callers do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fsdp2.core.comm.streams import Activity, Streams, observed
from fsdp2.core.types import CPUOffloadPolicy, OffloadPolicy

HOST = torch.device("cpu")


@dataclass(frozen=True)
class StagedOffloadPolicy(CPUOffloadPolicy):
    """Also copies on a CPU mesh, where shards are already on the host, to test the copies without a device."""


@dataclass(frozen=True)
class Home:
    """Where the shards of a group and their gradients live.

    Attributes:
        device: the device of shards and gradients, and therefore of optimizer states.
        is_staged: whether compute needs copies of them: shards are copied to the mesh's device before they are
            gathered, and gradients are copied from there after they have been reduced.
        pin_memory: whether their memory is pinned, so that the CPU does not block while it is copied.
    """

    device: torch.device
    is_staged: bool = False
    pin_memory: bool = False


def home_for(policy: OffloadPolicy, device: torch.device) -> Home:
    """Where the shards live that are used by compute on ``device``. No other code decides this."""
    if not isinstance(policy, CPUOffloadPolicy):
        return Home(device)
    is_elsewhere = device.type != HOST.type
    is_staged = is_elsewhere or isinstance(policy, StagedOffloadPolicy)
    return Home(HOST, is_staged, pin_memory=policy.pin_memory and is_elsewhere)


class FlatStage:
    """Copies of a group's flat shard buffers on the device that gathers them. Their memory is allocated when the gather
    is issued, and freed when it arrives.

    Attributes:
        flats: the copies, by dtype.
        storages: the storages of the copies, empty at first, and the number of bytes that each needs.
    """

    def __init__(self, host: Mapping[torch.dtype, torch.Tensor], device: torch.device, streams: Streams) -> None:
        self._host, self._streams = list(host.values()), streams
        self.flats = {dtype: torch.empty_like(flat, device=device) for dtype, flat in host.items()}
        self.storages = [(flat.untyped_storage(), flat.untyped_storage().nbytes()) for flat in self.flats.values()]
        for storage, _ in self.storages:
            storage.resize_(0)
        self._copied: torch.Event | None = None

    def fetch(self) -> None:
        """Fill ``flats``, which have memory by now, with one copy per dtype on the current stream."""
        with observed(Activity.COPY_TO_DEVICE):
            for flat, host in zip(self.flats.values(), self._host, strict=True):
                flat.copy_(host, non_blocking=True)
        self._copied = self._streams.record()

    def wait(self) -> None:
        """Make the CPU wait until the copies enqueued up to the last ``fetch`` no longer read the shards."""
        event, self._copied = self._copied, None
        self._streams.wait_on_cpu(event)


class HostCopies:
    """Copies of tensors on their way to the host.

    Attributes:
        tensors: the copies; their values are valid after ``wait``.
    """

    def __init__(self, sources: Sequence[torch.Tensor], home: Home, streams: Streams) -> None:
        with observed(Activity.COPY_TO_HOST):
            self.tensors = [_copied_to(home, source) for source in sources]
        self._streams = streams
        self._copied = streams.record()

    def wait(self) -> None:
        """Make the CPU wait for the values."""
        self._streams.wait_on_cpu(self._copied)


def _copied_to(home: Home, source: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(source.shape, dtype=source.dtype, device=home.device, pin_memory=home.pin_memory)
    return copy.copy_(source, non_blocking=True)
