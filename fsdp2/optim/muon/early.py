"""A step of Muon that begins during backward: the first buckets are sent as soon as their gradients are ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fsdp2.optim.matrices import WholeMatrices
from fsdp2.optim.matrices.messages import Slices
from fsdp2.optim.matrices.run import MOST_IN_FLIGHT, OnBatch, Run
from fsdp2.optim.muon.update import Entry


class EarlyRun:
    """A run that begins during backward. ``entry_of`` makes the entry of a parameter whose gradient is ready."""

    def __init__(self, plan: WholeMatrices, fn: OnBatch, entry_of: Callable[[int], Entry]) -> None:
        self._entries: dict[int, Entry] = {}
        self._sent: dict[int, tuple[Tensor | None, int]] = {}  # gradients, with their versions
        self._entry_of, self._landed = entry_of, set[int]()
        self._awaited = [plan.positions_in(number) for number in range(min(MOST_IN_FLIGHT, len(plan.steps)))]
        self.run = Run(plan, fn, self._update)

    def _update(self, position: int, slices: Slices) -> Tensor:
        return self._entry_at(position).update(slices)

    def _entry_at(self, position: int) -> Entry:
        if position not in self._entries:
            entry = self._entries[position] = self._entry_of(position)
            self._sent[position] = entry.grad, 0 if entry.grad is None else entry.grad._version
        return self._entries[position]

    @torch.no_grad()
    def land(self, position: int) -> None:
        """Record that the gradient at ``position`` is ready, and send all buckets whose gradients are complete."""
        self._landed.add(position)
        while self.run.num_sent < len(self._awaited) and self._awaited[self.run.num_sent] <= self._landed:
            try:
                for each in self._awaited[self.run.num_sent]:
                    self._entry_at(each)
            except ValueError as error:  # perhaps on this rank only: ``step`` raises on all
                self.run.fail(error)
            self.run.send()

    def check(self, entries: Sequence[Entry]) -> None:
        """Check that gradients are still those that were sent.

        Raises:
            ValueError: a gradient has changed.
        """
        for position, (grad, version) in self._sent.items():
            found = entries[position].grad
            if found is not grad or (grad is not None and grad._version != version):
                raise ValueError(
                    "Muon: gradients have changed between overlap_backward() and step(), but some of them are on their "
                    "way. Clip or change gradients without overlap_backward()."
                )
