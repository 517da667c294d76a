"""Computes a step of Muon for one parameter: the momentum, the orthogonal matrices, and the values to write.

A step (``MatrixStep``) may begin during backward: the first buckets are sent as soon as their gradients are ready.
Shapes are those of this rank's shard, except in ``newton_schulz``, which gets whole matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
            for piece in matrix.placed.pieces(domain.me, matrix.box):
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
        self._version = 0 if self.grad is None else self.grad._version
        buffer = self.states[self.param].get(BUFFER) if self.param in self.states else None
        self.buffer = None if buffer is None else _torch.local_of(buffer)

    def check(self) -> None:
        """Raise a ValueError if the gradient has changed since the entry was made."""
        (found,) = torch_names.locals_placed_like([self.param], [self.param.grad])
        if found is not self.grad or (found is not None and found._version != self._version):
            raise ValueError(
                "Muon: gradients have changed between overlap_backward() and step(), but some of them are on their "
                "way. Clip or change gradients without overlap_backward()."
            )

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


class MatrixStep(Run):
    """The step of the parameters of a plan: ``params`` with their param groups, and ``parts`` of matrices by parameter.

    It may begin during backward: buckets are sent as soon as their gradients ``land``.
    """

    def __init__(
        self,
        plan: WholeMatrices,
        fn: OnBatch,
        params: Sequence[tuple[Tensor, dict[str, Any]]],
        parts: Sequence[Sequence[Part]],
        states: dict[Tensor, Any],
    ) -> None:
        super().__init__(plan, fn, lambda position, slices: self._entry(position).update(slices))
        self._params, self._parts, self._states = params, parts, states
        self._entries: dict[int, Entry] = {}
        self._landed: set[int] = set()
        self._earlier: set[int] = set()
        self._awaited = [plan.positions_in(number) for number in range(min(MOST_IN_FLIGHT, len(plan.steps)))]

    def _entry(self, position: int) -> Entry:
        if position not in self._entries:
            self._entries[position] = Entry(*self._params[position], self._states)
        return self._entries[position]

    def await_earlier(self, params: Iterable[Tensor]) -> None:
        """Gradients of an earlier backward are on their way to ``params``: the first ones that land are not the last
        ones."""
        waiting = set(map(id, params))
        self._earlier = {position for position, (param, _) in enumerate(self._params) if id(param) in waiting}

    @torch.no_grad()
    def land(self, position: int) -> None:
        """Record that a gradient has landed at ``position``, and send all buckets whose gradients are complete."""
        if position in self._earlier:
            self._earlier.remove(position)
            return
        self._landed.add(position)
        while self.num_sent < len(self._awaited) and self._awaited[self.num_sent] <= self._landed:
            try:
                for each in self._awaited[self.num_sent]:
                    self._entry(each)
            except ValueError as error:  # perhaps on this rank only: ``step`` raises on all
                self.fail(error)
            self.send()

    def step(self) -> None:
        """Send what has not been sent, and compute all matrices. Then write parameters and momentum."""
        have_grads = [False] * len(self._params)
        try:
            for entry in self._entries.values():  # whose gradients may be on their way
                entry.check()
            have_grads = [self._entry(position).grad is not None for position in range(len(self._params))]
        except ValueError as error:  # perhaps on this rank only
            self.fail(error)
        results, are_stepped = self.finish(have_grads)
        for position, is_stepped in enumerate(are_stepped):
            if is_stepped:
                entry = self._entries[position]
                entry.write(results[position], self._parts[position])
                entry.keep_momentum()


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
