"""Computes a step of Muon for one parameter: the momentum, the orthogonal matrices, and the values to write.

Shapes are those of this rank's shard, except in ``newton_schulz``, which gets whole matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2.core import _torch
from fsdp2.extras import torch_names
from fsdp2.optim.matrices import WholeMatrices
from fsdp2.optim.matrices.messages import Slices, local_pieces

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
        for index, matrix in enumerate(domain.plan.matrices):
            parts = found[domain.positions[matrix.tensor]]
            for piece in local_pieces(domain.plan, domain.me, index):
                slices = tuple(slice(*interval) for interval in piece.local)
                parts.append(Part(slices, matrix.rows, matrix.columns))
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

    @property
    def has_gradient(self) -> bool:
        return self.grad is not None

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
