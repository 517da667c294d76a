"""What all groups on one device share, whatever root they are under: the streams and the memory behind them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from fsdp2.comm.memory import Memory
from fsdp2.comm.streams import AcceleratorStreams, ComputeStreamGathers, Streams, streams_for


@dataclass(frozen=True)
class Services:
    """Streams and memory of one device."""

    streams: Streams
    memory: Memory

    def flush(self) -> None:
        """Give back what was released."""
        with self.streams.on_gather():
            self.memory.flush()


@cache
def services_for(device: torch.device) -> Services:
    """The services on ``device``; the same for all models of the process, so that their gathers queue behind each
    other and freed memory serves any of them."""
    streams = streams_for(device)
    return Services(streams, Memory(device, streams))


@cache
def compute_stream_services(device: torch.device) -> Services:
    """Those of groups that gather on the compute stream: memory belongs to a stream, so theirs is apart. On the CPU,
    which has no streams, the same as all others use."""
    shared = services_for(device)
    if not isinstance(shared.streams, AcceleratorStreams):
        return shared
    streams = ComputeStreamGathers(shared.streams)
    return Services(streams, Memory(device, streams))
