"""What a unit of a model computes and holds: parameters, floating-point operations, bytes moved, activations.

A unit is what one ``fully_shard`` call makes. Sizes and operations are those of one GPU and one step.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from enum import Enum

import torch


class Checkpointing(Enum):
    """Which activations are recomputed in backward. ``SELECTIVE`` keeps attention and every second matrix product, as
    torchtitan does. No choice gathers parameters again: a block that recomputes has been gathered for backward."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True)
class Param:
    """``dtype`` is that of the shard, which the optimizer updates."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    trainable: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole parameter."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Work:
    """The work of one pass.

    Attributes:
        linear: floating-point operations of products with two-dimensional weights, which may run in fp8.
        other: those of all other products, including attention.
        moved_nbytes: bytes that all other kernels read and write if each operation is a kernel.
        fused_nbytes: the same if all operations between two products are one kernel, as with ``torch.compile``.
        operand_numel: elements of the operands of ``linear``, which fp8 has to convert.
    """

    linear: float = 0.0
    other: float = 0.0
    moved_nbytes: float = 0.0
    fused_nbytes: float = 0.0
    operand_numel: float = 0.0

    def __add__(self, more: Work) -> Work:
        return Work(*(a + b for a, b in zip(astuple(self), astuple(more), strict=True)))


@dataclass(frozen=True)
class UnitWork:
    """One call of a unit.

    Attributes:
        backward: includes recomputation.
        saved_nbytes: stay from its forward to its backward, which does not read ``unread_nbytes`` of them.
        working_nbytes: come on top while its backward runs, gradients included.
        sent_s: seconds that other communication, such as tensor parallelism, adds to forward and to backward.
        is_block: whether it may send and compute in fp8.
        left_nbytes: stay until the step ends, as in a cache.
        has_backward: whether autograd goes through it.
        hands_on: whether its input gets a gradient.
    """

    name: str
    params: tuple[Param, ...]
    forward: Work
    backward: Work
    saved_nbytes: float
    working_nbytes: float
    unread_nbytes: float = 0.0
    sent_s: tuple[float, float] = (0.0, 0.0)
    is_block: bool = False
    left_nbytes: float = 0.0
    has_backward: bool = True
    hands_on: bool = True
