"""Keeps autograd from reading unsharded parameters whose memory is gone.

Autograd compares the version that a tensor had in forward with the one that it has when backward reads it. While the
memory of unsharded parameters is freed, they have another version. So a backward that comes upon them unprepared
raises; it would read address 0 on the CPU, and whatever lies there by now on an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fsdp2 import _torch


class FreedGuard:
    """Of unsharded parameters that are readable now."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._tensors = tuple(tensor for param in params for tensor in _torch.versioned(param))
        self._versions = tuple(_torch.versions_of(self._tensors))

    def close(self) -> None:
        """Their memory is being freed."""
        torch.autograd.graph.increment_version(self._tensors)

    def open(self) -> None:
        """They hold again what autograd has saved."""
        _torch.set_versions(self._tensors, self._versions)
