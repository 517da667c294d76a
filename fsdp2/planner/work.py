"""What a unit of a model computes and holds: parameters, floating-point operations, bytes moved, activations.

A unit is what one ``fully_shard`` call makes. Sizes and operations are those of one GPU and one step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

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


class Product(NamedTuple):
    """A product of ``m x k`` and ``k x n`` matrices. ``times``: how many there are; below 1, this GPU's part of it.
    ``by_weight``: one of them is a two-dimensional weight, so it may run in fp8."""

    m: float
    n: float
    k: float
    times: float = 1.0
    by_weight: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.times

    @property
    def operand_numel(self) -> float:
        return (self.m + self.n) * self.k * self.times


class Attention(NamedTuple):
    """A fused attention kernel. ``length``: the number of keys. ``keys_nbytes``: bytes of keys and values."""

    flops: float
    length: float
    keys_nbytes: float = 0.0
    is_backward: bool = False


@dataclass(frozen=True)
class Work:
    """The work of one pass.

    Attributes:
        products: all products of matrices.
        attention: all fused attention.
        moved_nbytes: bytes that all other kernels read and write if each operation is a kernel.
        fused_nbytes: the same if all operations between two products are one kernel, as with ``torch.compile``.
        num_others: how many other kernels there are if each operation is one.
    """

    products: tuple[Product, ...] = ()
    attention: tuple[Attention, ...] = ()
    moved_nbytes: float = 0.0
    fused_nbytes: float = 0.0
    num_others: int = 0

    def __add__(self, more: Work) -> Work:
        return Work(
            self.products + more.products,
            self.attention + more.attention,
            self.moved_nbytes + more.moved_nbytes,
            self.fused_nbytes + more.fused_nbytes,
            self.num_others + more.num_others,
        )

    def divided(self, num_gpus: int) -> Work:
        """The part of each of ``num_gpus`` that share this work."""
        return Work(
            tuple(each._replace(times=each.times / num_gpus) for each in self.products),
            tuple(each._replace(flops=each.flops / num_gpus) for each in self.attention),
            self.moved_nbytes / num_gpus,
            self.fused_nbytes / num_gpus,
            self.num_others,
        )

    def num_kernels(self, *, is_fused: bool) -> int:
        """``is_fused``: one kernel follows each product, instead of :attr:`num_others` in all."""
        num_products = len(self.products) + len(self.attention)
        return num_products + (num_products if is_fused else self.num_others)

    @property
    def linear(self) -> float:
        """Floating-point operations of products by weights."""
        return sum(each.flops for each in self.products if each.by_weight)

    @property
    def other(self) -> float:
        """Those of all other products, including attention."""
        others = sum(each.flops for each in self.products if not each.by_weight)
        return others + sum(each.flops for each in self.attention)


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
        given_nbytes: bytes of its inputs that need a gradient.
        scores_nbytes: of what it saves without checkpointing, the scores of attention that is not fused.
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
    given_nbytes: float = 0.0
    scores_nbytes: float = 0.0
