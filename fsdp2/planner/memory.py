"""Bytes that a rank holds in addition to its shards and their optimizer state, counted as they come and go."""

from __future__ import annotations

from enum import Enum


class Held(Enum):
    """The purpose for which memory is held."""

    __hash__ = object.__hash__

    GROUPS = "groups"
    GRADIENTS = "gradients in flight"
    REDUCED = "gradients"
    ACTIVATIONS = "activations"


class Memory:
    """Bytes held now, and at the peak."""

    def __init__(self) -> None:
        self.now = dict.fromkeys(Held, 0.0)
        self.peak = dict(self.now)

    def add(self, held: Held, nbytes: float) -> None:
        """Add ``nbytes``; negative ones are freed."""
        self.now[held] += nbytes
        if sum(self.now.values()) > sum(self.peak.values()):
            self.peak = dict(self.now)

    def touch(self, held: Held, nbytes: float) -> None:
        """Hold ``nbytes`` for a moment."""
        self.add(held, nbytes)
        self.add(held, -nbytes)
