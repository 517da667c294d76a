"""What all groups under one root share: the streams and the memory behind them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsdp2.buffers import Memory
from fsdp2.streams import Streams, streams_for


@dataclass(frozen=True)
class Services:
    """Streams and memory of one device, for one root."""

    streams: Streams
    memory: Memory


def services_for(device: torch.device) -> Services:
    """New services on ``device``."""
    streams = streams_for(device)
    return Services(streams, Memory(device, streams))
