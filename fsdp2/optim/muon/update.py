"""Computes a step of Muon for one parameter: the momentum, the orthogonal matrices, and the values to write.

A step may begin during backward (``EarlyRun``): the first buckets are sent as soon as their gradients are ready. Shapes
are those of this rank's shard, except in ``newton_schulz``, which gets whole matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2.core import _torch
from fsdp2.extras import torch_names
from fsdp2.optim.matrices import WholeMatrices
from fsdp2.optim.matrices.messages import Slices, slices_of
from fsdp2.optim.matrices.run import MOST_IN_FLIGHT, OnBatch, Run

Coefficients = tuple[float, float, float]

BUFFER = "momentum_buffer"


class Part(NamedTuple):
    """Entries of this rank's shard that belong to matrices of one shape; ``slices`` is None for all of them."""

    slices: Slices | None
    rows: int
    columns: int


def parts_of(plan: WholeMatrices, num_params: int) -> list[list[Part]]:
    """The parts of matrices that this rank has, by position of their parameter."""
    found: list[list[Part]] = [[] for _ in range(num_params)]
    for domain in plan.domains:
        for matrix in domain.plan.matrices:
            placed = domain.plan.tensors[matrix.tensor].placed
            for piece in placed.pieces(domain.me, matrix.box):
                found[matrix.tensor].append(Part(slices_of(piece.local), matrix.rows, matrix.columns))
    return [[Part(None, *parts[0][1:])] if len({part[1:] for part in parts}) == 1 else parts for parts in found]


@dataclass
class Entry:
    """One parameter in one step."""

    param: Tensor
    group: dict[str, Any]
    states: dict[Tensor, Any]

    def __post_init__(self) -> None:
        self.local = _torch.local_of(self.param).detach()
        grad = self.param.grad
        (self.grad,) = torch_names.locals_placed_like([self.param], [grad])
        if grad is not None and self.grad is None:
            placements = grad.placements if isinstance(grad, DTensor) else "of a plain tensor"
            raise ValueError(
                f"Muon: the gradient of a parameter of shape {tuple(self.param.shape)} has placements {placements}, "
                f"expected those of the parameter: {cast(DTensor, self.param).placements}."
            )
        buffer = self.states[self.param].get(BUFFER) if self.param in self.states else None
        self.buffer = None if buffer is None else _torch.local_of(buffer)

    def update(self, slices: Slices) -> Tensor:
        """Compute the values to orthogonalise from the momentum after this step. Writes nothing."""
        momentum, nesterov = self.group["momentum"], self.group["nesterov"]
        if self.grad is None:
            like = self.local if self.buffer is None else self.buffer
            whole = torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)
        else:
            whole = self.grad
        grad = whole[slices]
        buffer = torch.zeros_like(grad) if self.buffer is None else self.buffer[slices]
        buffer = buffer.lerp(grad, 1 - momentum)
        return grad.lerp(buffer, momentum) if nesterov else buffer

    def write(self, result: Tensor, parts: Sequence[Part]) -> None:
        """Step the parameter. ``parts`` has the parts of each of its matrices, if their shapes differ."""
        lr = float(self.group["lr"])
        self.local.mul_(1 - lr * self.group["weight_decay"])
        result = result.to(self.local.device)
        for part in parts:
            ratio = adjusted_ratio(self.group["adjust_lr_fn"], part.rows, part.columns)
            if part.slices is None:
                self.local.add_(result, alpha=-lr * ratio)
            else:
                self.local[part.slices].add_(result[part.slices], alpha=-lr * ratio)

    def keep_momentum(self) -> None:
        """Write the momentum."""
        if self.buffer is None:
            dtype = self.param.grad_dtype or self.local.dtype if self.grad is None else self.grad.dtype
            self.buffer = torch.zeros_like(self.local, dtype=dtype)
            (made,) = _torch.dtensors_like([self.param], [self.buffer])
            self.states[self.param][BUFFER] = made
        grad = torch.zeros_like(self.buffer) if self.grad is None else self.grad
        self.buffer.lerp_(grad, 1 - self.group["momentum"])


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


def newton_schulz(batch: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    """Orthogonalise each matrix of ``batch`` ``[n, rows, columns]``, or ``[rows, columns]``, by ``steps`` iterations
    x <- a x + (b G + c G G) x with G = x x^T, which bring the singular values near 1. In the batch's dtype."""
    a, b, c = coefficients
    is_tall = batch.size(-2) > batch.size(-1)
    x = batch.mT if is_tall else batch
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = _added(x, _added(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _added(to: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    """``beta * to + alpha * left @ right``."""
    product = torch.addmm if to.dim() == 2 else torch.baddbmm
    return product(to, left, right, beta=beta, alpha=alpha)


def adjusted_ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """The learning rate of a matrix, divided by that of its param group."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
